# SPDX-License-Identifier: Apache-2.0
"""GPUs of one NVLink domain: symmetric memory through `torch.distributed._symmetric_memory`.

Contract: a process group whose ranks each have their own CUDA device and reach every peer's memory. The
group is the caller's, passed on by name, never the world by default.

Traps: rendezvous is collective and blocks if a rank is missing, so everything checkable is checked before;
multicast is reported as found, with the reason when it is absent.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch

from dsv4_symm_mem.backends.base import MappedMemory
from dsv4_symm_mem.communicator import Communicator, ProcessGroupCommunicator, agree
from dsv4_symm_mem.errors import UnsupportedError

DISABLE_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def multicast_obstacle(device: torch.device) -> str:
    """Why `device` gets no multicast address from torch; empty when nothing is known to stop it."""
    if device.type != "cuda":
        return f"{device.type} memory has no multicast address"
    if os.environ.get(DISABLE_MULTICAST, "0") not in ("", "0"):
        return f"{DISABLE_MULTICAST}={os.environ[DISABLE_MULTICAST]}"
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0):
        return "the driver reports no multicast support for this device"
    return ""


class TorchBackend:
    """Symmetric memory of a CUDA process group."""

    name = "torch"

    def __init__(self, communicator: Communicator) -> None:
        if not isinstance(communicator, ProcessGroupCommunicator):
            raise UnsupportedError("the torch back end needs a torch.distributed process group")
        if communicator.device.type != "cuda":
            raise UnsupportedError(
                f"torch symmetric memory needs CUDA devices, this rank is on {communicator.device}"
            )
        self._communicator = communicator
        self._group_name = cast(Any, communicator.group).group_name
        self._local: torch.Tensor | None = None
        self._handle: Any = None

    def allocate(self, nbytes: int) -> None:
        """Allocate zeroed symmetric memory on this rank's device."""
        import torch.distributed._symmetric_memory as symm_mem

        with torch.cuda.device(self._communicator.device):
            self._local = symm_mem.empty(nbytes, dtype=torch.uint8, device=self._communicator.device)
            self._local.zero_()
            torch.cuda.synchronize(self._communicator.device)

    def map(self) -> MappedMemory:
        """Check that every pair of devices has peer access, then rendezvous."""
        import torch.distributed._symmetric_memory as symm_mem

        agree(self._communicator, "checking peer access", self._check_peers)
        local = cast(torch.Tensor, self._local)

        def rendezvous() -> Any:
            handle = symm_mem.rendezvous(local, group=self._group_name)
            if handle is None:
                raise UnsupportedError("torch's symmetric-memory rendezvous returned no handle")
            return handle

        self._handle = agree(self._communicator, "symmetric-memory rendezvous", rendezvous)
        rank, nbytes = self._communicator.rank, local.numel()
        peers = tuple(
            local if peer == rank else self._handle.get_buffer(peer, (nbytes,), torch.uint8)
            for peer in range(self._communicator.size)
        )
        multicast = int(getattr(self._handle, "multicast_ptr", 0) or 0)
        reason = "" if multicast else multicast_obstacle(local.device) or "torch made no multicast mapping"
        return MappedMemory(peers, tuple(int(p) for p in self._handle.buffer_ptrs), multicast, reason)

    def release(self) -> None:
        """Drop the handle and the memory."""
        self._handle = None
        self._local = None

    def _check_peers(self) -> None:
        mine = self._communicator.device.index or 0
        devices = self._communicator.all_gather((os.uname().nodename, mine, str(_uuid(mine))))
        node, _, uuid = devices[self._communicator.rank]
        for peer, (peer_node, index, peer_uuid) in enumerate(devices):
            if peer == self._communicator.rank:
                continue
            if peer_uuid == uuid:
                raise UnsupportedError(f"ranks {self._communicator.rank} and {peer} share one device")
            visible = peer_node == node and index != mine and index < torch.cuda.device_count()
            if visible and not torch.cuda.can_device_access_peer(mine, index):
                raise UnsupportedError(f"device {mine} has no peer access to rank {peer}'s device {index}")


def _uuid(index: int) -> object:
    return torch.cuda.get_device_properties(index).uuid
