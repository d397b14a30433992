# SPDX-License-Identifier: Apache-2.0
"""Multicast ranges: addresses of the same bytes in several ranks' memory (PTX ISA 9.4, section 9.7.10.15).

A range of a multicast object is mapped onto one range of global memory per member rank. Only `multimem`
instructions may use its addresses; for every other access they are memory that no rank has mapped. The
bytes themselves are ordinary global memory, and what `multimem` does to them are ordinary accesses to each
member's copy, with the proxy "multimem": another address of the same bytes, which the memory model wants a
`fence.proxy.alias` between.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsv4_ptx_emulator.errors import ArgumentError, OutOfBoundsError
from dsv4_ptx_emulator.machine.region import Region

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsv4_ptx_emulator.machine.memory import Memory
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.warp import Warp


@dataclass(frozen=True, slots=True)
class MulticastRange:
    """A mapped range.

    Attributes:
        start: First address.
        size: Bytes.
        members: Address of the same byte on each member rank, by rank, in ascending order of ranks.
        name: For reports.
    """

    start: int
    size: int
    members: tuple[tuple[int, int], ...]
    name: str


class Multicast:
    """All multicast ranges of a machine.

    Args:
        memory: Global memory.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._ranges: list[MulticastRange] = []
        self._starts: list[int] = []

    def add(self, start: int, size: int, members: Mapping[int, int], name: str = "") -> MulticastRange:
        """Map [start, start + size) onto `size` bytes at an address of each member rank.

        Args:
            start: First address, a multiple of 16.
            size: Bytes, above 0.
            members: Address by rank, multiples of 16. What is registered there is looked up at each access.
            name: For reports.

        Raises:
            ArgumentError: An address or the size is unusable.
            ValueError: The range overlaps registered memory or another range.
        """
        if start % 16 or any(address % 16 for address in members.values()):
            raise ArgumentError("start", start, "addresses that are multiples of 16")
        if size < 1 or not members:
            raise ArgumentError("size", size, "at least one byte and one member")
        label = name or f"multicast range of ranks {', '.join(map(str, sorted(members)))}"
        nobody = Region(start, np.zeros(0, np.uint8), label, visible=frozenset())
        nobody.end = start + size
        self._memory.add(nobody)
        found = MulticastRange(start, size, tuple(sorted(members.items())), label)
        at = bisect.bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._ranges.insert(at, found)
        return found

    def remove(self, start: int) -> None:
        """Undo the `add` at this address.

        Raises:
            KeyError: There is no range that begins there.
        """
        at = bisect.bisect_left(self._starts, start)
        if at == len(self._starts) or self._starts[at] != start:
            raise KeyError(start)
        del self._starts[at], self._ranges[at]
        self._memory.remove(start)

    def find(self, address: int, size: int, warp: Warp, kind: AccessKind) -> MulticastRange:
        """The range that holds `size` bytes at `address`.

        Raises:
            OutOfBoundsError: There is none, or the warp's rank is no member.
        """
        at = bisect.bisect_right(self._starts, address)
        found = self._ranges[at - 1] if at else None
        if found is None or address + size > found.start + found.size:
            raise OutOfBoundsError(
                f"{kind.opcode}: {size} bytes at {address:#x} are not in a multicast range",
                line=kind.line,
                where=warp.describe(),
            )
        if all(rank != warp.rank for rank, _ in found.members):
            raise OutOfBoundsError(
                f"{kind.opcode}: rank {warp.rank} is no member of the {found.name}",
                line=kind.line,
                where=warp.describe(),
            )
        return found
