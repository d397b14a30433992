# SPDX-License-Identifier: Apache-2.0
"""Consecutive bytes of a state space, and how a warp's addresses become indices into them.

NumPy takes two to four times as long for an operation with a scalar as with an array of 32, and longer
still for a reduction; so what addresses are combined with is here as arrays for every number of lanes, and
tests of all lanes compare bytes.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.machine.warp import LANES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.cta import Cta

ALIGNMENT = 32
"""Bytes of the widest access. A region that begins at a multiple of an access's size is accessed fastest."""


def _by_lanes(value: int) -> list[NDArray[np.uint64]]:
    """For every number of lanes, an array of equal values: NumPy takes far longer for a scalar operand."""
    whole = np.full(LANES, value, np.uint64)
    return [whole[:lanes] for lanes in range(LANES + 1)]


SIZES = (1, 2, 4, 8, 16, 32)
ROWS = {size: np.dtype(f"V{size}") for size in SIZES}
_SHIFTS = {size: _by_lanes(size.bit_length() - 1) for size in SIZES}
_LOW_BITS = {size: _by_lanes(size - 1) for size in SIZES}
_ZERO = [bytes(8 * lanes) for lanes in range(LANES + 1)]


class Region:
    """Consecutive bytes.

    Attributes:
        start: First byte's address in the space.
        end: One past the last.
        home: Rank where they live.
        name: For reports.
        owner: The CTA, for shared memory.
        visible: Ranks that may touch it; None for all.
    """

    __slots__ = (
        "_rows",
        "_starts",
        "data",
        "end",
        "home",
        "name",
        "owner",
        "start",
        "visible",
    )

    def __init__(
        self,
        start: int,
        data: NDArray[np.uint8],
        name: str,
        *,
        home: int = 0,
        owner: Cta | None = None,
        visible: frozenset[int] | None = None,
    ) -> None:
        self.start = start
        self.end = start + len(data)
        self.data = data
        self.name = name
        self.home = home
        self.owner = owner
        self.visible = visible
        self._starts = _by_lanes(start)
        self._rows: dict[int, NDArray[Any]] = {}

    @classmethod
    def of_host(
        cls, address: int, size: int, name: str, *, home: int = 0, visible: frozenset[int] | None = None
    ) -> Region:
        """The host's bytes [address, address + size); the caller keeps them alive."""
        raw = (ctypes.c_uint8 * size).from_address(address)
        return cls(address, np.ctypeslib.as_array(raw), name, home=home, visible=visible)

    def rows(self, size: int) -> NDArray[Any]:
        """The bytes in rows of `size` (1 to 32, a power of two), one element each, without a partial tail.

        None where the region does not begin at a multiple of `size`.
        """
        found = self._rows.get(size)
        if found is None:
            usable = 0 if self.start % size else len(self.data) // size * size
            found = self._rows[size] = self.data[:usable].view(ROWS[size])
        return found

    def indices(self, addresses: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
        """Where in `rows(size)` the addresses are; for one outside an index that does not exist."""
        lanes = len(addresses)
        few = lanes <= LANES
        offsets = addresses - (self._starts[lanes] if few else np.uint64(self.start))
        if size == 1:
            # What lies before the region must not become a negative index.
            offsets = np.minimum(offsets, np.uint64((1 << 63) - 1))
        else:
            offsets = offsets >> (_SHIFTS[size][lanes] if few else np.uint64(size.bit_length() - 1))
        return offsets.view(np.int64)


def misaligned(addresses: NDArray[np.uint64], size: int) -> bool:
    """Whether an address is not a multiple of `size`."""
    lanes = len(addresses)
    if lanes <= LANES:
        return (addresses & _LOW_BITS[size][lanes]).tobytes() != _ZERO[lanes]
    return bool((addresses & np.uint64(size - 1)).any())
