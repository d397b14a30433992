# SPDX-License-Identifier: Apache-2.0
"""What is ordered before what: vector clocks over threads and pieces of asynchronous operations.

A component is a thread, or a piece of an asynchronous operation, which is an agent of its own: it is ordered
after its issue and before its completion, and with nothing in between (PTX ISA 9.4, section 8.9.1.1). A clock
says of each component up to which of its epochs everything is ordered before some point. Clocks are never
changed in place, so a release is a reference.

A clock has a row for each kind of ordering. `CAUSAL` is base causality order (8.9.5). The others hold what a
proxy fence links as well: what is in `SHARED` and `GLOBAL` may be followed by accesses of the async proxy to
shared and global memory, what is in `ALIAS` by accesses through another virtual address of the same bytes,
what is in `MAPS` by tensor map fetches. A fence copies `CAUSAL` into its rows, synchronisation carries all
rows along. So a fence counts anywhere on the path from one access to the other, which is how the ISA puts it
for aliases; it says nothing more precise for the async proxy. Completed operations are entered into all
rows, because their completion includes a proxy fence (9.7.10.28.2 for bulk copies, 9.7.17.4 for wgmma); a
cp.async, which is of the generic proxy, into the first.

A warp's lanes are separate threads. `WarpClock` keeps one clock for all lanes that know the same (a strand)
and splits strands where lanes part; a lane's knowledge of itself is implied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Clock = NDArray[np.int32]
"""int32 [kinds of ordering, components]."""

CAUSAL, SHARED, GLOBAL, ALIAS, MAPS = range(5)
COMMON_ROWS = 3
"""Rows that every program needs; the others are kept once some kernel has their fences."""
ALL_ROWS = 5


EVERY_ROW, CAUSAL_ROW = slice(None), slice(1)


def joined(a: Clock, b: Clock) -> Clock:
    """Everything that either knows; either may be shorter, which means that it knows nothing of the rest."""
    if a.shape == b.shape:
        return np.maximum(a, b)
    rows, columns = max(a.shape[0], b.shape[0]), max(a.shape[1], b.shape[1])
    return np.maximum(widened(a, rows, columns), widened(b, rows, columns))


def widened(clock: Clock, rows: int, columns: int) -> Clock:
    """The clock with room for more; itself if it has that."""
    if clock.shape[0] >= rows and clock.shape[1] >= columns:
        return clock
    wide = np.zeros((max(rows, clock.shape[0]), max(columns, clock.shape[1])), np.int32)
    wide[: clock.shape[0], : clock.shape[1]] = clock
    return wide


def advanced(
    clock: Clock, components: Sequence[int], epoch: int, columns: int, rows: slice = EVERY_ROW
) -> Clock:
    """The clock that knows these components up to `epoch` as well, in all rows or in some."""
    result = widened(clock, 1, columns)
    result = result.copy() if result is clock else result
    for component in components:
        np.maximum(result[rows, component], epoch, out=result[rows, component])
    return result


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread runs, as numbers that scopes compare."""

    rank: int
    cluster: int
    cta: int


def includes(scope: str, a: Place, b: Place) -> bool:
    """Whether `scope`, given by a thread at `a`, includes a thread at `b` (section 8.5)."""
    match scope:
        case "sys":
            return True
        case "gpu":
            return a.rank == b.rank
        case "cluster":
            return a.cluster == b.cluster
        case _:
            return a.cta == b.cta


@dataclass(slots=True)
class Release:
    """A release pattern's write, or a strong write that is none (section 8.8).

    Attributes:
        clock: What its first operation releases; of a plain relaxed write, what it would.
        thread: Component of the thread.
        epoch: The thread's epoch then.
        place: Where it runs.
        scope: Of the pattern's first operation (a fence or the write itself).
        write_scope: Of the write.
        line: Line of the write.
        valid: False for a write that releases nothing.
        atomic: Whether the write is an atomic's.
    """

    clock: Clock
    thread: int
    epoch: int
    place: Place
    scope: str
    write_scope: str
    line: int
    valid: bool = True
    atomic: bool = False


@dataclass(slots=True)
class Strand:
    """Lanes of a warp that know the same of others.

    Attributes:
        bits: Which lanes.
        clock: What they know.
        fenced: By row, up to which epoch each of them has fenced its own accesses.
        fences: By scope, a release fence that later strong writes publish: (clock, fenced, epoch, line).
        observed: What relaxed reads have seen, for an acquire fence to come.
        initialised: Clock at a fence.mbarrier_init.
    """

    bits: int
    clock: Clock
    fenced: tuple[int, ...] = (0,) * ALL_ROWS
    fences: dict[str, tuple[Clock, tuple[int, ...], int, int]] = field(default_factory=dict)
    observed: tuple[Release, ...] = ()
    initialised: Clock | None = None

    def part(self, bits: int) -> Strand:
        """The same for some of its lanes."""
        return Strand(bits, self.clock, self.fenced, dict(self.fences), self.observed, self.initialised)


class WarpClock:
    """What each lane of a warp knows.

    Args:
        first: Component of lane 0; the other lanes follow.
        bits: Lanes that exist.
        clock: What they know at the start.
        epoch: Epoch to begin with, the first that was never used.

    Attributes:
        epoch: Of the accesses that come next, of all lanes.
        strands: Lanes by what they know.
    """

    def __init__(self, first: int, bits: int, clock: Clock, epoch: int) -> None:
        self.first = first
        self.epoch = epoch
        self.strands = [Strand(bits, clock)]

    def own(self, bits: int) -> Any:
        """Components of the lanes, as an index."""
        if bits == 0xFFFF_FFFF:
            return slice(self.first, self.first + 32)
        return [self.first + lane for lane in lanes_in(bits)]

    def covering(self, bits: int) -> Iterator[Strand]:
        """Strands that consist of these lanes exactly, after splitting those that hold others as well."""
        for strand in self.strands[:]:
            inside = strand.bits & bits
            if not inside:
                continue
            if inside != strand.bits:
                self.strands.append(strand.part(strand.bits & ~bits))
                strand.bits = inside
            yield strand

    def strand_of(self, lane: int) -> Strand:
        """The strand of a lane."""
        for strand in self.strands:
            if strand.bits >> lane & 1:
                return strand
        raise LookupError(lane)

    def snapshot(self, bits: int, columns: int) -> Clock:
        """Everything up to now of these lanes and what they know; what comes next is a new epoch."""
        result: Clock | None = None
        for strand in self.strands:
            inside = strand.bits & bits
            if inside:
                clock = widened(strand.clock, 1, columns)
                clock = self.with_own(clock, inside, strand.fenced, self.epoch)
                result = clock if result is None else joined(result, clock)
        self.epoch += 1
        assert result is not None
        return result

    def with_own(self, clock: Clock, bits: int, fenced: tuple[int, ...], epoch: int) -> Clock:
        """The clock with what lanes know of themselves."""
        own = self.own(bits)
        result = clock.copy()
        result[CAUSAL, own] = epoch
        for row in range(1, len(result)):
            result[row, own] = np.maximum(result[row, own], fenced[row])
        return result

    def acquire(self, bits: int, clock: Clock) -> None:
        """These lanes learn a clock."""
        for strand in self.covering(bits):
            strand.clock = joined(strand.clock, clock)

    def learn(
        self, bits: int, components: Sequence[int], epoch: int, columns: int, rows: slice = EVERY_ROW
    ) -> None:
        """These lanes learn that operations are complete."""
        for strand in self.covering(bits):
            strand.clock = advanced(strand.clock, components, epoch, columns, rows)

    def fence(self, bits: int, rows: Sequence[int]) -> None:
        """A proxy fence of these lanes."""
        for strand in self.covering(bits):
            clock = widened(strand.clock, max(rows) + 1, 1).copy()
            fenced = list(strand.fenced)
            for row in rows:
                np.maximum(clock[row], clock[CAUSAL], out=clock[row])
                fenced[row] = self.epoch
            strand.clock = clock
            strand.fenced = tuple(fenced)
        self.epoch += 1

    def merge(self, bits: int, columns: int, extra: Clock | None = None) -> None:
        """These lanes have met: each knows what all knew, and `extra`."""
        clock = self.snapshot(bits, columns)
        if extra is not None:
            clock = joined(clock, extra)
        observed: tuple[Release, ...] = ()
        initialised: Clock | None = None
        for strand in list(self.covering(bits)):
            observed += strand.observed
            if strand.initialised is not None:
                known = strand.initialised
                initialised = known if initialised is None else joined(initialised, known)
            self.strands.remove(strand)
        self.strands.append(Strand(bits, clock, observed=observed, initialised=initialised))


def lanes_in(bits: int) -> list[int]:
    """Lanes named by the bits."""
    return [lane for lane in range(bits.bit_length()) if bits >> lane & 1]
