# SPDX-License-Identifier: Apache-2.0
"""What a symmetric-memory back end is: a local allocation step, then a collective mapping step.

The two are apart because the first may fail on one rank alone; the arena lets the ranks agree on it before
any of them enters the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from dsv4_symm_mem.communicator import Communicator


@dataclass(frozen=True)
class MappedMemory:
    """One rank's view of memory that every rank of the group has mapped.

    Attributes:
        peers: Every rank's memory as a uint8 tensor in this process, own at index `rank`.
        pointers: Device addresses of `peers` as this rank's kernels use them.
        multicast_pointer: Multicast address of the memory, or 0.
        multicast_reason: Why there is no multicast address; empty when there is one.
    """

    peers: tuple[torch.Tensor, ...]
    pointers: tuple[int, ...]
    multicast_pointer: int
    multicast_reason: str


class Backend(Protocol):
    """Allocates and maps symmetric memory for one rank."""

    @property
    def name(self) -> str:
        """The name that selects this back end."""
        ...

    def allocate(self, nbytes: int) -> None:
        """Allocate this rank's memory; local, may raise."""
        ...

    def map(self) -> MappedMemory:
        """Map every rank's memory; collective, called once all ranks have allocated."""
        ...

    def release(self) -> None:
        """Give the memory back; local, idempotent, also after a failed `allocate` or `map`."""
        ...


class BackendFactory(Protocol):
    """Makes a rank's back end or says why the group cannot have it."""

    def __call__(self, communicator: Communicator) -> Backend:
        """Raises `UnsupportedError` when this machine or group cannot use the back end."""
        ...
