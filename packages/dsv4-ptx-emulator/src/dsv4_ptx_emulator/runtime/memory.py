# SPDX-License-Identifier: Apache-2.0
"""Host memory that kernels may touch: leases on tensors, and the regions that follow from them.

Contract: a lease makes the exact bytes of a tensor accessible to one rank or to all; the bytes stay so as
long as some lease holds them. Tensors may overlap (views of one buffer, the same tensor leased twice): the
regions that the machine sees are the unions of overlapping leases, visible to whoever one of them admits. The
home of the bytes is the rank that leased them first.

Rejected: making a tensor's whole storage accessible; an access past the end of a view would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from dsv4_ptx_emulator.errors import ArgumentError
from dsv4_ptx_emulator.machine.memory import Memory
from dsv4_ptx_emulator.machine.region import Region


@dataclass(frozen=True)
class Extent:
    """Bytes [start, end) of host memory, and who keeps them alive."""

    start: int
    end: int
    owner: Any
    name: str


def extent_of(data: Any) -> Extent:
    """The bytes from the first to the last element of `data`.

    Args:
        data: A torch tensor on the CPU, a NumPy array, anything with the buffer protocol (mmap, bytearray),
        or
            a pair (address, bytes) whose memory the caller keeps.

    Raises:
        ArgumentError: It is none of these, or not in host memory.
    """
    if isinstance(data, tuple) and len(data) == 2:
        address, nbytes = data
        return Extent(int(address), int(address) + int(nbytes), None, f"{nbytes} bytes")
    if hasattr(data, "data_ptr"):
        if data.device.type != "cpu":
            raise ArgumentError("data", str(data.device), "memory of the host")
        return _strided(
            data.data_ptr(),
            data.shape,
            [s * data.element_size() for s in data.stride()],
            data.element_size(),
            data,
            str(data.dtype).removeprefix("torch."),
        )
    if not isinstance(data, np.ndarray):
        try:
            data = np.frombuffer(data, np.uint8)
        except (TypeError, BufferError, ValueError):
            raise ArgumentError("data", type(data).__name__, "a tensor, an array or a buffer") from None
    return _strided(data.ctypes.data, data.shape, data.strides, data.itemsize, data, str(data.dtype))


def _strided(
    address: int, shape: Sequence[int], steps: Sequence[int], itemsize: int, owner: Any, dtype: str
) -> Extent:
    name = f"[{', '.join(map(str, shape))}] {dtype}"
    if prod(shape) == 0:
        return Extent(address, address, owner, name)
    reach = [(extent - 1) * step for extent, step in zip(shape, steps, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return Extent(address + low, address + high + itemsize, owner, name)


@dataclass(eq=False)
class Lease:
    """A right to touch an extent.

    Attributes:
        extent: The bytes.
        home: Rank where they live.
        visible: Ranks that may touch them; None for all.
    """

    extent: Extent
    home: int
    visible: frozenset[int] | None


class HostMemory:
    """Leases on host memory, kept in step with the regions of a machine's global memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._leases: list[Lease] = []
        self._regions: list[Region] = []

    def lease(self, data: Any, *, home: int, shared: bool = False) -> Lease:
        """Make `data` accessible to its home, or to every rank if `shared`, until `release`.

        Raises:
            ArgumentError: See `extent_of`.
        """
        taken = Lease(extent_of(data), home, None if shared else frozenset({home}))
        self._leases.append(taken)
        self._update(taken.extent)
        return taken

    def release(self, lease: Lease) -> None:
        """Give a lease back; idempotent."""
        if lease in self._leases:
            self._leases.remove(lease)
            self._update(lease.extent)

    @contextmanager
    def leasing(self, data: Sequence[Any], *, home: int) -> Iterator[None]:
        """Leases for the time of a context."""
        leases = [self.lease(each, home=home) for each in data]
        try:
            yield
        finally:
            for each in leases:
                self.release(each)

    def _update(self, changed: Extent) -> None:
        """Make the regions around `changed` anew."""
        start, end = changed.start, changed.end
        if start == end:
            return
        for region in [region for region in self._regions if region.start < end and start < region.end]:
            self._regions.remove(region)
            self._memory.remove(region.start)
            start, end = min(start, region.start), max(end, region.end)
        inside = [
            lease
            for lease in self._leases
            if lease.extent.start < lease.extent.end
            and start <= lease.extent.start
            and lease.extent.end <= end
        ]
        for group in _unions(inside):
            self._add(group)

    def _add(self, group: list[Lease]) -> None:
        first = min(group, key=self._leases.index)
        everyone = any(lease.visible is None for lease in group)
        visible = None if everyone else frozenset().union(*(lease.visible or () for lease in group))
        start = min(lease.extent.start for lease in group)
        size = max(lease.extent.end for lease in group) - start
        name = f"{first.extent.name} of rank {first.home}"
        region = Region.of_host(start, size, name, home=first.home, visible=visible)
        self._memory.add(region)
        self._regions.append(region)


def _unions(leases: list[Lease]) -> list[list[Lease]]:
    """The leases in groups that overlap, directly or through others."""
    groups: list[list[Lease]] = []
    end = -1
    for lease in sorted(leases, key=lambda lease: lease.extent.start):
        if lease.extent.start < end:
            groups[-1].append(lease)
        else:
            groups.append([lease])
        end = max(end, lease.extent.end) if len(groups[-1]) > 1 else lease.extent.end
    return groups
