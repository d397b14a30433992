# SPDX-License-Identifier: Apache-2.0
"""Host processes on one machine: symmetric memory in shared files, for groups without a GPU.

Contract: the multi-process code path (agreement, mapping, killed and stopped peers) runs on any machine
with a CPU process group such as gloo. Files live in /dev/shm where there is one and are unlinked as soon
as every rank has mapped them, so a killed process leaves nothing behind.

Limit: a flag follows its data by a plain store, which is a release only under x86-64's total store order;
other processors are refused.
"""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path

import torch

from dsv4_symm_mem.backends.base import MappedMemory
from dsv4_symm_mem.communicator import Communicator, agree
from dsv4_symm_mem.errors import UnsupportedError

_STRONGLY_ORDERED = ("x86_64", "amd64", "i686")


class SharedBackend:
    """Symmetric memory of CPU processes on one host."""

    name = "shared"

    def __init__(self, communicator: Communicator) -> None:
        if communicator.device.type != "cpu":
            raise UnsupportedError(
                f"the shared back end is for CPU groups, this one is on {communicator.device}"
            )
        machine = platform.machine().lower()
        if machine not in _STRONGLY_ORDERED:
            raise UnsupportedError(
                f"the shared back end needs x86-64's store order, this processor is {machine}"
            )
        self._communicator = communicator
        self._path: Path | None = None
        self._nbytes = 0

    def allocate(self, nbytes: int) -> None:
        """Create this rank's file of `nbytes` zeros."""
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, path = tempfile.mkstemp(prefix="dsv4-symm-", dir=folder)
        self._path = Path(path)
        self._nbytes = nbytes
        try:
            # Reserve the pages now: a sparse file would raise SIGBUS at first touch when memory runs out.
            os.posix_fallocate(descriptor, 0, max(nbytes, 1))
        finally:
            os.close(descriptor)

    def map(self) -> MappedMemory:
        """Map every rank's file, then unlink one's own."""
        paths = self._communicator.all_gather(str(self._path))
        peers = agree(
            self._communicator, "mapping shared memory", lambda: tuple(self._open(p) for p in paths)
        )
        self._unlink()
        return MappedMemory(
            peers, tuple(peer.data_ptr() for peer in peers), 0, "host memory has no multicast address"
        )

    def release(self) -> None:
        """Unlink the file if it still has a name; the mapping goes with its tensors."""
        self._unlink()

    def _open(self, path: str) -> torch.Tensor:
        return torch.from_file(path, shared=True, size=self._nbytes, dtype=torch.uint8)

    def _unlink(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
