# SPDX-License-Identifier: Apache-2.0
"""Which tile a rank computes when: one static order, known to every rank.

A rank's work is every tile of the partial [M, N], cut as `dsv4_symm_mem.protocol.tiles` says. Row tiles are
taken in groups of `group_rows` per owner (about one wave of the machine): first the group's remote tiles,
owner (rank + d) mod P for d = 1 .. P-1, then the rank's own tiles of the group `lag` earlier, and at the
end the own tiles still due. All links are busy at once, no receiver is hot, and by the time a rank reaches
a tile of its own, its peers have sent theirs.

The order keeps the exchange from deadlock when workers take tiles in order (design rule ii): own tiles of
group g come no earlier than the remote tiles of group g on any rank, so a rank that waits in group g waits
for tiles before which their senders wait only in groups below g.

Rejected: own tiles last (adds G/P to the time), one owner at a time for the whole matrix (one hot
receiver), a dynamic scheduler (no order common to all ranks, so the argument above is lost).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4_symm_mem.protocol.layout import ceil_div
from dsv4_symm_mem.protocol.tiles import Tile, TileGrid, TileShape

DEFAULT_LAG = 1
SMALLEST_TILE = TileShape(64, 64)
"""No kernel uses a smaller tile, so it bounds the number of flags."""
LARGEST_TILE = TileShape(256, 256)
"""No kernel uses a larger tile, so it bounds the padding of a slot."""


@dataclass(frozen=True)
class Schedule:
    """The order in which `rank` takes the tiles of one call.

    Attributes:
        m, n: Shape of the partial.
        world_size: Number of ranks P.
        rank: The rank whose order this is.
        shape: Tile shape, equal on all ranks.
        group_rows: Row tiles per owner in a group.
        lag: Groups by which a rank's own tiles trail the remote ones.
    """

    m: int
    n: int
    world_size: int
    rank: int
    shape: TileShape
    group_rows: int = 1
    lag: int = DEFAULT_LAG

    @property
    def grid(self) -> TileGrid:
        """The tiles, without their order."""
        return TileGrid(self.m, self.n, self.world_size, self.shape)

    @property
    def groups(self) -> int:
        """Groups of row tiles, by the longest shard (rank 0's)."""
        return ceil_div(self.grid.row_tiles(0), self.group_rows)

    def __len__(self) -> int:
        grid = self.grid
        return sum(grid.owned_tiles(owner) for owner in range(self.world_size))

    def __iter__(self) -> Iterator[Tile]:
        for step in range(self.groups + self.lag):
            if step < self.groups:
                for distance in range(1, self.world_size):
                    yield from self._group(step, (self.rank + distance) % self.world_size)
            if step >= self.lag:
                yield from self._group(step - self.lag, self.rank)

    def _group(self, group: int, owner: int) -> Iterator[Tile]:
        grid = self.grid
        first = group * self.group_rows
        last = min(first + self.group_rows, grid.row_tiles(owner))
        for index in range(first * grid.column_tiles, last * grid.column_tiles):
            yield grid.tile(owner, index)


__all__ = ["DEFAULT_LAG", "LARGEST_TILE", "SMALLEST_TILE", "Schedule", "Tile", "TileGrid", "TileShape"]
