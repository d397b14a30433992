# SPDX-License-Identifier: Apache-2.0
"""A state space: byte ranges with names, read and written by whole warps at a time.

One class serves all spaces. Global memory is host memory: its addresses are host addresses, its regions
are what the embedding program registered, each with a home rank and the ranks that may touch it. Shared
memory is one `Memory` per cluster: a CTA of rank r has its bytes at (r << 24) | offset, offset from 1024
on, as on hardware (the first KiB belongs to the system; CUTLASS clears bit 24 to name the even CTA of a
pair). So a shared::cta address is the shared::cluster address of the same byte.

Fast path: the region that the same instruction used last on the same rank, one gather through rows whose own
index check is the bounds check.

Checks here are what an address means: inside some region, multiple of the access size, rank may see it. The
rest (uninitialised, races) is for observers.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.errors import MisalignedError, OutOfBoundsError
from dsv4_ptx_emulator.machine.observer import Access, AccessKind
from dsv4_ptx_emulator.machine.region import ROWS, Region, misaligned

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.agent import AsyncAgent
    from dsv4_ptx_emulator.machine.warp import Warp

    Agent = Warp | AsyncAgent
    Hook = Callable[[Access], None]

__all__ = ["Memory", "Region"]

_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Memory:
    """A state space made of regions.

    Args:
        space: "global", "shared", "local" or "param".
    """

    def __init__(self, space: str) -> None:
        self.space = space
        self.access_hooks: list[Hook] = []
        self.watched: dict[int, list[Callable[[], None]]] = {}
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._used: dict[tuple[int, int], Region] = {}

    def add(self, region: Region) -> None:
        """Make a region accessible.

        Raises:
            ValueError: It overlaps another.
        """
        at = bisect.bisect_right(self._starts, region.start)
        if at and self._regions[at - 1].end > region.start:
            raise ValueError(f"{region.name} overlaps {self._regions[at - 1].name}")
        if at < len(self._starts) and self._starts[at] < region.end:
            raise ValueError(f"{region.name} overlaps {self._regions[at].name}")
        self._starts.insert(at, region.start)
        self._regions.insert(at, region)
        self._used.clear()

    def remove(self, start: int) -> None:
        """Forget the region that begins at `start`.

        Raises:
            KeyError: There is none.
        """
        at = bisect.bisect_left(self._starts, start)
        if at == len(self._starts) or self._starts[at] != start:
            raise KeyError(start)
        del self._starts[at], self._regions[at]
        self._used.clear()

    @property
    def regions(self) -> tuple[Region, ...]:
        """All regions in order of their addresses."""
        return tuple(self._regions)

    def find(self, address: int) -> Region | None:
        """The region that holds the byte at `address`."""
        at = bisect.bisect_right(self._starts, address)
        region = self._regions[at - 1] if at else None
        return region if region is not None and address < region.end else None

    def locate(self, address: int, size: int, agent: Agent, kind: AccessKind) -> Region:
        """The region that holds `size` bytes at `address` and that the agent's rank may touch.

        Raises:
            OutOfBoundsError: There is no such region.
        """
        region = self.find(address)
        if region is None or address + size > region.end:
            raise OutOfBoundsError(
                self._nearest(address, size, region), line=kind.line, where=agent.describe()
            )
        if region.visible is not None and agent.rank not in region.visible:
            raise OutOfBoundsError(
                f"{region.name} at {address:#x} is not mapped on rank {agent.rank}",
                line=kind.line,
                where=agent.describe(),
            )
        return region

    def gather(
        self, addresses: NDArray[np.uint64], width: int, count: int, agent: Agent, kind: AccessKind
    ) -> NDArray[Any]:
        """Read `count` elements of `width` bytes (1, 2, 4, 8) at each address.

        Returns:
            Shape (len(addresses),) for count 1, else (len(addresses), count); a copy.

        Raises:
            MisalignedError: An address is not a multiple of width * count (PTX ISA 6.4.1).
            OutOfBoundsError: Some bytes are in no region.
        """
        total = width * count
        if misaligned(addresses, total):
            self._misaligned(addresses, total, agent, kind)
        region = self._used.get((id(kind), agent.rank))
        if region is None:
            return self._gather_slowly(addresses, width, count, agent, kind)
        try:
            found = region.rows(total)[region.indices(addresses, total)]
        except IndexError:
            return self._gather_slowly(addresses, width, count, agent, kind)
        if self.access_hooks:
            self._tell("read", region, addresses, total, agent, kind)
        values: NDArray[Any] = found.view(_DTYPES[width])
        return values.reshape(-1, count) if count > 1 else values

    def scatter(
        self, addresses: NDArray[np.uint64], values: NDArray[Any], agent: Agent, kind: AccessKind
    ) -> None:
        """Write `values`, unsigned of shape (n,) or (n, count), at `addresses`, shape (n,).

        Of lanes that write the same byte the last one wins.

        Raises:
            MisalignedError: As for `gather`.
            OutOfBoundsError: As for `gather`; nothing is written then.
        """
        count = values.shape[1] if values.ndim > 1 else 1
        total = values.itemsize * count
        if misaligned(addresses, total):
            self._misaligned(addresses, total, agent, kind)
        rows = np.ascontiguousarray(values).view(ROWS[total]).reshape(-1)
        region = self._used.get((id(kind), agent.rank))
        try:
            if region is None:
                raise IndexError
            region.rows(total)[region.indices(addresses, total)] = rows
        except IndexError:
            self._scatter_slowly(addresses, rows, agent, kind)
        else:
            if self.access_hooks:
                self._tell("write", region, addresses, total, agent, kind)
        if self.watched:
            self._notify(addresses, total)

    def read_block(self, address: int, size: int, agent: Agent, kind: AccessKind) -> NDArray[np.uint8]:
        """A copy of `size` consecutive bytes; no alignment asked."""
        region = self.locate(address, size, agent, kind)
        if self.access_hooks:
            self._tell("read", region, np.array([address], np.uint64), size, agent, kind)
        at = address - region.start
        return region.data[at : at + size].copy()

    def write_block(self, address: int, data: NDArray[np.uint8], agent: Agent, kind: AccessKind) -> None:
        """Write consecutive bytes, shape (size,); no alignment asked."""
        size = len(data)
        region = self.locate(address, size, agent, kind)
        at = address - region.start
        region.data[at : at + size] = data
        if self.access_hooks:
            self._tell("write", region, np.array([address], np.uint64), size, agent, kind)
        if self.watched:
            self._notify(np.array([address], np.uint64), size)

    def update(
        self,
        address: int,
        width: int,
        change: Callable[[int], int],
        agent: Agent,
        kind: AccessKind,
    ) -> int:
        """Read-modify-write of one element of `width` bytes; returns the old value (an atomic's step).

        Raises:
            MisalignedError: As for `gather`.
            OutOfBoundsError: As for `gather`.
        """
        one = np.array([address], np.uint64)
        if address % width:
            self._misaligned(one, width, agent, kind)
        region = self.locate(address, width, agent, kind)
        at = address - region.start
        old = int.from_bytes(region.data[at : at + width].tobytes(), "little")
        new = change(old) & ((1 << 8 * width) - 1)
        region.data[at : at + width] = np.frombuffer(new.to_bytes(width, "little"), np.uint8)
        if self.access_hooks:
            self._tell("atomic", region, one, width, agent, kind)
        if self.watched and new != old:
            self._notify(one, width)
        return old

    def peek(self, address: int, width: int) -> int:
        """The element at `address` without any observer noticing (reports, tests).

        Raises:
            KeyError: No region holds it.
        """
        region = self.find(address)
        if region is None or address + width > region.end:
            raise KeyError(address)
        at = address - region.start
        return int.from_bytes(region.data[at : at + width].tobytes(), "little")

    def holds(self, addresses: NDArray[np.uint64], raw: bytes) -> bool:
        """Whether the elements at `addresses` are still `raw`, without any observer noticing."""
        width = len(raw) // len(addresses)
        now = (self.peek(address, width).to_bytes(width, "little") for address in addresses.tolist())
        return raw == b"".join(now)

    def watch(self, addresses: NDArray[np.uint64], call: Callable[[], None]) -> None:
        """Call `call` once after the next write to any of the 128-byte lines of `addresses`."""
        for line in {int(address) >> 7 for address in addresses}:
            self.watched.setdefault(line, []).append(call)

    def _notify(self, addresses: NDArray[np.uint64], size: int) -> None:
        if len(addresses) == 1 and size > 4096:
            first, last = int(addresses[0]) >> 7, (int(addresses[0]) + size - 1) >> 7
            lines = sorted(line for line in self.watched if first <= line <= last)
        else:
            touched: set[int] = set()
            for address in addresses.tolist():
                touched.update(range(address >> 7, ((address + size - 1) >> 7) + 1))
            lines = sorted(line for line in touched if line in self.watched)
        for line in lines:
            for call in self.watched.pop(line, ()):
                call()

    def _gather_slowly(
        self, addresses: NDArray[np.uint64], width: int, count: int, agent: Agent, kind: AccessKind
    ) -> NDArray[Any]:
        total = width * count
        values = np.empty((len(addresses), total), np.uint8)
        for region, lanes in self._split(addresses, total, agent, kind):
            at = (addresses[lanes] - np.uint64(region.start)).astype(np.int64)
            values[lanes] = region.data[at[:, None] + np.arange(total)]
            if self.access_hooks:
                self._tell("read", region, addresses[lanes], total, agent, kind, lanes)
        typed: NDArray[Any] = values.view(_DTYPES[width])
        return typed if count > 1 else typed.reshape(-1)

    def _scatter_slowly(
        self, addresses: NDArray[np.uint64], rows: NDArray[Any], agent: Agent, kind: AccessKind
    ) -> None:
        total = rows.itemsize
        raw = rows.view(np.uint8).reshape(-1, total)
        for region, lanes in self._split(addresses, total, agent, kind):
            at = (addresses[lanes] - np.uint64(region.start)).astype(np.int64)
            region.data[at[:, None] + np.arange(total)] = raw[lanes]
            if self.access_hooks:
                self._tell("write", region, addresses[lanes], total, agent, kind, lanes)

    def _split(
        self, addresses: NDArray[np.uint64], size: int, agent: Agent, kind: AccessKind
    ) -> list[tuple[Region, NDArray[np.bool_]]]:
        """The addresses by region, before anything is accessed; notes the last region for the fast path."""
        left = np.ones(len(addresses), np.bool_)
        parts: list[tuple[Region, NDArray[np.bool_]]] = []
        while left.any():
            region = self.locate(int(addresses[int(left.argmax())]), size, agent, kind)
            inside = left & (addresses >= region.start) & (addresses <= region.end - size)
            parts.append((region, inside))
            left &= ~inside
            self._used[id(kind), agent.rank] = region
        return parts

    def _tell(
        self,
        action: str,
        region: Region,
        addresses: NDArray[np.uint64],
        size: int,
        agent: Agent,
        kind: AccessKind,
        part: NDArray[np.bool_] | None = None,
    ) -> None:
        home = region.home if region.owner is None else agent.rank
        access = Access(
            action, self.space, agent, agent.rank, home, region.owner, addresses, size, kind, part
        )
        for hook in self.access_hooks:
            hook(access)

    def _misaligned(self, addresses: NDArray[np.uint64], size: int, agent: Agent, kind: AccessKind) -> None:
        wrong = addresses[(addresses & np.uint64(size - 1)) != 0]
        raise MisalignedError(
            f"{kind.opcode}: {self.space} address {int(wrong[0]):#x} is not a multiple of {size}",
            line=kind.line,
            where=agent.describe(),
        )

    def _nearest(self, address: int, size: int, region: Region | None) -> str:
        text = f"{size} bytes at {self.space} address {address:#x} are not mapped"
        if region is not None:
            return f"{text}: {region.name} ends at {region.end:#x}"
        at = bisect.bisect_right(self._starts, address)
        if at:
            before = self._regions[at - 1]
            text += f"; {address - before.end} bytes behind {before.name}"
        if at < len(self._regions):
            text += f"; {self._starts[at] - address} bytes before {self._regions[at].name}"
        return text
