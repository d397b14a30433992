# SPDX-License-Identifier: Apache-2.0
"""Who touched which bytes last: a shadow of memory in granules of four bytes.

Per granule, the last write and four reads: the two latest of different threads in the generic proxy, and
the two latest of different operations in the async proxy. An entry is component << 32 | epoch, 0 for none
(component 0 is nobody), and a number that leads to the instruction. As in FastTrack (Flanagan and Freund,
PLDI 2009), the last write is enough since an earlier one was ordered before it, or has been reported; of
reads two are kept instead of all, so that one that a third reader has displaced may be missed in a run.
Another seed displaces another.

Accesses narrower than a granule are not told apart from others in the same granule, and two of them are never
in conflict here.

Shared memory is shadowed per CTA, global memory by pages as they are touched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Granules = NDArray[np.int64]

SLOTS = 5
WRITE, GENERIC_READ, ASYNC_READ = 0, 1, 3
PAGE_BITS = 16
PAGE = 1 << PAGE_BITS - 2
"""Granules of a page."""


class Shadow:
    """The shadow of everything.

    Attributes:
        entries: int64 [5, granules]: the write, two generic reads, two async reads.
        notes: int32, the same shape: numbers of instructions.
    """

    def __init__(self) -> None:
        self.entries: NDArray[np.int64] = np.zeros((SLOTS, 1 << 18), np.int64)
        self.notes: NDArray[np.int32] = np.zeros((SLOTS, 1 << 18), np.int32)
        self._used = 0
        self._pages: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}

    def allocate(self, granules: int) -> int:
        """A cleared range; returns its first granule."""
        free = self._free.get(granules)
        if free:
            start = free.pop()
            self.entries[:, start : start + granules] = 0
            return start
        start = self._used
        self._used += granules
        have = self.entries.shape[1]
        if self._used > have:
            grown = max(2 * have, self._used)
            for name in ("entries", "notes"):
                old = getattr(self, name)
                new = np.zeros((SLOTS, grown), old.dtype)
                new[:, :have] = old
                setattr(self, name, new)
        return start

    def release(self, start: int, granules: int) -> None:
        """Give a range back."""
        self._free.setdefault(granules, []).append(start)

    def clear(self) -> None:
        """Forget everything but ranges of shared memory, which nobody has."""
        self.entries[:, : self._used] = 0
        self._used = 0
        self._pages.clear()
        self._free.clear()

    def shared(self, start: int, base: int, addresses: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
        """Granules of accesses to a CTA's shared memory, int64 [accesses, granules of each]."""
        offsets = addresses.astype(np.int64) - base
        return start + (offsets >> 2)[:, None] + _steps(size, int(addresses[0]))

    def global_(self, addresses: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
        """The same for global memory."""
        granules = (addresses.astype(np.int64) >> 2)[:, None] + _steps(size, int(addresses[0]))
        page = int(granules[0, 0]) >> PAGE_BITS - 2
        offsets = granules - page * PAGE
        if not np.count_nonzero(offsets & ~(PAGE - 1)):
            near: Granules = offsets + self._page(page)
            return near
        low, high = int(granules.min()) >> PAGE_BITS - 2, int(granules.max()) >> PAGE_BITS - 2
        if high - low < 64:
            starts = np.array([self._page(page) - page * PAGE for page in range(low, high + 1)], np.int64)
            found: Granules = granules + starts[(granules >> PAGE_BITS - 2) - low]
            return found
        pages, inverse = np.unique(granules >> PAGE_BITS - 2, return_inverse=True)
        starts = np.array([self._page(page) - page * PAGE for page in pages.tolist()], np.int64)
        far: Granules = granules + starts[inverse.reshape(granules.shape)]
        return far

    def shared_few(self, start: int, offset: int, size: int) -> range:
        """Granules of one access to a CTA's shared memory."""
        return range(start + (offset >> 2), start + (offset + size - 1 >> 2) + 1)

    def global_few(self, address: int, size: int) -> range:
        """Granules of one aligned access to global memory, which is in one page."""
        first = address >> 2
        page = first >> PAGE_BITS - 2
        start = self._page(page) + first - page * PAGE
        return range(start, start + (address + size - 1 >> 2) - first + 1)

    def _page(self, page: int) -> int:
        start = self._pages.get(page)
        if start is None:
            start = self._pages[page] = self.allocate(PAGE)
        return start

    def note_read(self, at: NDArray[np.int64], entry: Any, note: int, slot: int) -> None:
        """Record a read of the granules `at` [n]; `entry` per granule or one for all."""
        latest = self.entries[slot, at]
        other = ((latest ^ entry) >> 32 != 0) & (latest != 0)
        if np.count_nonzero(other):
            moved = at[other]
            self.entries[slot + 1, moved] = latest[other]
            self.notes[slot + 1, moved] = self.notes[slot, moved]
        self.entries[slot, at] = entry
        self.notes[slot, at] = note

    def note_few_reads(self, at: range, entry: int, note: int) -> None:
        """`note_read` of few granules by one thread in the generic proxy."""
        entries, notes = self.entries, self.notes
        for place in at:
            latest = int(entries[GENERIC_READ, place])
            if latest and latest >> 32 != entry >> 32:
                entries[GENERIC_READ + 1, place] = latest
                notes[GENERIC_READ + 1, place] = notes[GENERIC_READ, place]
            entries[GENERIC_READ, place] = entry
            notes[GENERIC_READ, place] = note

    def note_write(self, at: NDArray[np.int64], entry: Any, note: int) -> None:
        """Record a write; it takes the place of the reads that it came after."""
        self.entries[1:, at] = 0
        self.entries[WRITE, at] = entry
        self.notes[WRITE, at] = note


def _steps(size: int, address: int) -> NDArray[np.int64]:
    return np.arange(max(1, ((address & 3) + size + 3) >> 2), dtype=np.int64)
