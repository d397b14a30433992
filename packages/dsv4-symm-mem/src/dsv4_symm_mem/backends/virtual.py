# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks: P ranks in one process on one device, each peer's memory just another buffer.

Contract: everything a group of processes can do, within one process, so protocol and kernels are tested
without P devices. `VirtualGroup.run` gives each rank a thread; on a CUDA device each also gets its own
stream, and its kernels need a share of the multiprocessors small enough for all ranks to be resident.

Traps: with 16 ranks or more on one GPU set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA initialises, else
ranks share a hardware queue and the first one's kernel waits for a peer that is queued behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar, cast

import torch

from dsv4_symm_mem.accelerator import Accelerator, Emulation, MulticastRange
from dsv4_symm_mem.backends.base import MappedMemory
from dsv4_symm_mem.communicator import Communicator
from dsv4_symm_mem.errors import ArgumentError, GroupError, UnsupportedError
from dsv4_symm_mem.protocol.layout import LINE_BYTES
from dsv4_symm_mem.protocol.words import MAX_WORLD_SIZE

T = TypeVar("T")


class VirtualGroup:
    """P ranks of one process.

    Args:
        size: Number of ranks P, 1 to 128.
        device: The one device that all ranks use.
        emulation: Executes the ranks' kernels on host memory; None for the device's own. Tensors are on the
        CPU
            then.
    """

    def __init__(
        self, size: int, device: torch.device | str = "cpu", *, emulation: Emulation | None = None
    ) -> None:
        if not 1 <= size <= MAX_WORLD_SIZE:
            raise ArgumentError("size", size, f"1 to {MAX_WORLD_SIZE}")
        self.size = size
        self.device = torch.device(device)
        if emulation is not None and self.device.type != "cpu":
            raise ArgumentError("device", str(self.device), "cpu, where kernels are emulated")
        if emulation is not None and len(emulation.accelerators) != size:
            raise ArgumentError(
                "emulation", len(emulation.accelerators), f"{size} devices, one for each rank"
            )
        self.emulation = emulation
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._barrier = threading.Barrier(size)
        self._box: list[object] = [None] * size
        self.ranks = tuple(VirtualRank(self, rank) for rank in range(size))

    def run(self, step: Callable[[VirtualRank], T]) -> list[T]:
        """Run `step` on every rank at once, one thread each, and return the results in rank order.

        Raises:
            Exception: What `step` raised, the lowest rank's first; a rank that was left waiting in a
                collective by another's failure reports that failure only if there is no other.
        """
        self._barrier.reset()
        with ThreadPoolExecutor(self.size, thread_name_prefix="virtual-rank") as pool:
            futures = [pool.submit(self._run_rank, step, rank) for rank in self.ranks]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            primary = [error for error in errors if not isinstance(error, _LeftWaitingError)]
            raise (primary or errors)[0]
        return [future.result() for future in futures]

    def _run_rank(self, step: Callable[[VirtualRank], T], rank: VirtualRank) -> T:
        stream = rank.stream
        try:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                return step(rank)
        except BaseException:
            self._barrier.abort()
            raise

    def all_gather(self, rank: int, value: T) -> list[T]:
        """Every rank's `value`; used through `VirtualRank.all_gather`."""
        try:
            self._box[rank] = value
            self._barrier.wait()
            gathered = list(self._box)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise _LeftWaitingError("virtual all_gather", {rank: "another rank left with an error"}) from None
        return cast(list[T], gathered)


class _LeftWaitingError(GroupError):
    """A rank's collective was cut short because another rank raised."""


class VirtualRank:
    """One rank of a `VirtualGroup`; its control plane and, on CUDA, its stream."""

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self._stream: torch.cuda.Stream | None = None

    @property
    def size(self) -> int:
        """Number of ranks P."""
        return self.group.size

    @property
    def device(self) -> torch.device:
        """The group's device."""
        return self.group.device

    @property
    def accelerator(self) -> Accelerator | None:
        """This rank's emulated device, or None."""
        emulation = self.group.emulation
        return None if emulation is None else emulation.accelerators[self.rank]

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """This rank's own CUDA stream, made at first use; None on a CPU."""
        if self._stream is None and self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def synchronize(self) -> None:
        """Wait for what this rank has launched; does nothing on a CPU that emulates nothing."""
        if self.accelerator is not None:
            self.accelerator.synchronize()
        elif self.stream is not None:
            self.stream.synchronize()

    def all_gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order; objects are shared, not copied."""
        return self.group.all_gather(self.rank, value)


class VirtualBackend:
    """Symmetric memory of virtual ranks: plain tensors of one device."""

    name = "virtual"

    def __init__(self, communicator: Communicator) -> None:
        if not isinstance(communicator, VirtualRank):
            raise UnsupportedError("the virtual back end needs a rank of a VirtualGroup as its group")
        self._communicator = communicator
        self._local: torch.Tensor | None = None
        self._multicast: MulticastRange | None = None

    def allocate(self, nbytes: int) -> None:
        """Allocate `nbytes` of zeros, aligned to 128 bytes."""
        padded = torch.zeros(nbytes + LINE_BYTES, dtype=torch.uint8, device=self._communicator.device)
        start = -padded.data_ptr() % LINE_BYTES
        self._local = padded[start : start + nbytes]
        if self._local.device.type == "cuda":
            # The zeros are written on this rank's stream; peers touch the memory from theirs.
            torch.cuda.current_stream(self._local.device).synchronize()
        if self._communicator.accelerator is not None:
            self._communicator.accelerator.share(self._local)

    def map(self) -> MappedMemory:
        """Collect every rank's buffer; emulated devices also have multicast addresses of them."""
        peers = tuple(self._communicator.all_gather(cast(torch.Tensor, self._local)))
        multicast, reason = 0, "virtual ranks share one device, and multicast needs several"
        emulation = self._communicator.group.emulation
        if emulation is not None:
            if self._communicator.rank == 0:
                self._multicast = emulation.map_multicast(peers)
            mapped = self._communicator.all_gather(self._multicast)[0]
            multicast, reason = cast(MulticastRange, mapped).address, ""
        return MappedMemory(peers, tuple(peer.data_ptr() for peer in peers), multicast, reason)

    def release(self) -> None:
        """Drop the buffer."""
        if self._multicast is not None:
            self._multicast.close()
            self._multicast = None
        if self._local is not None and self._communicator.accelerator is not None:
            self._communicator.accelerator.unshare(self._local)
        self._local = None
