# SPDX-License-Identifier: Apache-2.0
"""One collective allocation per group and device, handed out in typed pieces that lie alike on every rank.

Contract: `create` either gives every rank an arena or raises the same error on every rank. `allocate` is
local and must be called in the same order with the same arguments on all ranks; `verify` checks that
collectively. A piece's address on a peer is that peer's base plus the piece's offset, so kernels need one
base address per rank and no table per tensor.

Rejected: one symmetric allocation per tensor, as it costs a rendezvous each and a mapping granule (2 MiB)
for a few flags; a general allocator with free, as the pieces live as long as the arena.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dsv4_symm_mem.accelerator import accelerator_of
from dsv4_symm_mem.backends import BACKENDS, Backend, MappedMemory, default_backend
from dsv4_symm_mem.communicator import Communicator, agree, communicator_of, require_equal
from dsv4_symm_mem.errors import ArgumentError, ClosedError
from dsv4_symm_mem.protocol.layout import LINE_BYTES, align_up


@dataclass(frozen=True)
class SymmetricTensor:
    """A tensor that lies at the same offset in every rank's memory.

    Attributes:
        name: The name given to `SymmetricArena.allocate`.
        offset: First byte within the arena, a multiple of 128.
        local: This rank's tensor.
        peers: Every rank's tensor as mapped in this process, `local` at index rank.
        pointers: Device addresses of `peers`.
        multicast_pointer: Multicast address of the tensor, or 0.
    """

    name: str
    offset: int
    local: torch.Tensor
    peers: tuple[torch.Tensor, ...]
    pointers: tuple[int, ...]
    multicast_pointer: int


class SymmetricArena:
    """Symmetric memory of one group on one device. Made by `create`, ended by the collective `close`."""

    def __init__(
        self, communicator: Communicator, backend: Backend, memory: MappedMemory, nbytes: int
    ) -> None:
        self.communicator = communicator
        self.nbytes = nbytes
        self._backend = backend
        self._memory: MappedMemory | None = memory
        self._used = 0
        self._pieces: list[tuple[str, tuple[int, ...], str]] = []

    @classmethod
    def create(
        cls,
        group: Communicator | dist.ProcessGroup,
        nbytes: int,
        *,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> SymmetricArena:
        """Allocate and map `nbytes` zeroed bytes on every rank; collective.

        Args:
            group: A process group or a rank of a `VirtualGroup`; never implied.
            nbytes: Bytes per rank, at least 1, equal on all ranks.
            device: This rank's device; default the group's.
            backend: "torch" (CUDA process groups), "shared" (CPU processes of one host), "virtual" (ranks of
                one process) or "auto", by the kind of group.

        Raises:
            ArgumentError: An argument is out of range; local, before any communication.
            MismatchError: Ranks passed different sizes or back ends; on every rank.
            GroupError: Allocation or mapping failed on some rank; the same text on every rank.
        """
        if nbytes < 1:
            raise ArgumentError("nbytes", nbytes, "at least 1")
        if backend != "auto" and backend not in BACKENDS:
            raise ArgumentError("backend", backend, f"auto or one of {', '.join(BACKENDS)}")
        communicator = communicator_of(group, device)
        name = default_backend(communicator) if backend == "auto" else backend
        require_equal(communicator, "creating a symmetric arena", {"nbytes": nbytes, "backend": name})
        chosen = agree(communicator, f"choosing the {name} back end", lambda: BACKENDS[name](communicator))
        rounded = align_up(nbytes, LINE_BYTES)
        try:
            agree(communicator, f"allocating {rounded} bytes", lambda: chosen.allocate(rounded))
            memory = chosen.map()
        except BaseException:
            chosen.release()
            raise
        return cls(communicator, chosen, memory, rounded)

    @property
    def backend(self) -> str:
        """Name of the back end in use."""
        return self._backend.name

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._memory is None

    @property
    def free_bytes(self) -> int:
        """Bytes not handed out yet."""
        return self.nbytes - self._used

    @property
    def multicast_reason(self) -> str:
        """Why pieces have no multicast address; empty when they have one."""
        return self._mapped().multicast_reason

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> SymmetricTensor:
        """Hand out the next piece, aligned to 128 bytes; local, in the same order on all ranks.

        Args:
            shape: Shape of the tensor.
            dtype: Its element type.
            name: What it is for, shown by `verify` when ranks disagree.

        Raises:
            ArgumentError: It does not fit into what is left.
            ClosedError: The arena was closed.
        """
        memory = self._mapped()
        size = tuple(int(extent) for extent in shape)
        nbytes = math.prod(size) * dtype.itemsize
        if any(extent < 0 for extent in size) or nbytes > self.free_bytes:
            raise ArgumentError(
                "shape", size, f"non-negative extents, at most {self.free_bytes} bytes of {dtype} in all"
            )
        offset = self._used
        self._used = align_up(offset + nbytes, LINE_BYTES)
        self._pieces.append((name, size, str(dtype)))
        peers = tuple(peer[offset : offset + nbytes].view(dtype).view(size) for peer in memory.peers)
        return SymmetricTensor(
            name=name,
            offset=offset,
            local=peers[self.communicator.rank],
            peers=peers,
            pointers=tuple(pointer + offset for pointer in memory.pointers),
            multicast_pointer=memory.multicast_pointer + offset if memory.multicast_pointer else 0,
        )

    def verify(self) -> None:
        """Check that all ranks made the same allocations; collective.

        Raises:
            MismatchError: On every rank, with each rank's list.
            ClosedError: The arena was closed.
        """
        self._mapped()
        require_equal(self.communicator, "verifying the arena's pieces", {"pieces": self._pieces})

    def close(self, *, wait: bool = True) -> None:
        """Free the memory; collective, idempotent.

        A peer may still be pushing into this rank's memory after this rank's last call has ended, so the
        ranks meet first. `wait=False` skips that for a group in which a rank is known to be dead.

        Raises:
            GroupError: A rank failed to finish its work; the memory is freed all the same.
        """
        if self._memory is None:
            return
        try:
            if wait:
                accelerator = accelerator_of(self.communicator)
                if accelerator is not None and accelerator.emulated:
                    # Launches are executed by whoever synchronises first, and all of them are to take part.
                    self.communicator.all_gather(None)
                agree(self.communicator, "closing a symmetric arena", self._synchronize)
        finally:
            self._memory = None
            self._backend.release()

    def _synchronize(self) -> None:
        accelerator = accelerator_of(self.communicator)
        if accelerator is not None:
            accelerator.synchronize()

    def _mapped(self) -> MappedMemory:
        if self._memory is None:
            raise ClosedError("this symmetric arena was closed")
        return self._memory
