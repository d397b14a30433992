# SPDX-License-Identifier: Apache-2.0
"""Which tile a rank computes when: one static order, in closed form, known to every rank.

A rank's work is every tile of the partial [M, N], cut as `dsv4_symm_mem.protocol.tiles` says. `cluster`
consecutive row tiles of one owner and one column tile make a position, taken by one thread-block cluster
(one row tile per CTA; where an owner's row tiles run out, the trailing CTAs have nothing to store). Rows of
positions are taken in groups of `group_rows` per owner (about one wave of the machine): first the group's
remote positions, owner (rank + d) mod P for d = 1 .. P-1, then the rank's own positions of the group `lag`
earlier, and at the end the own ones still due. All links are busy at once, no receiver is hot, and where
ranks run level, peers have sent theirs by the time a rank reaches a tile of its own.

The order keeps the exchange from deadlock when workers take positions in order (design rule ii): on every
rank an own tile comes after all remote tiles of its row tile and of those before, so a rank that waits in a
row tile waits for tiles before which their senders wait only in earlier row tiles. This holds for any
`group_rows`, `lag` and `cluster`, by rows or by columns, also where ranks differ in them. It does not hold of
positions: where shards differ in row tiles, position i may wait for a peer's position i or a later one.

Closed form. With q the last owner that has rows, owners 0 .. q-1 have `full` position rows each, q has
`last <= full` and the rest have none. Owner o has min(s·group_rows, rows(o)) position rows before step s, so
all positions before step s number

    column_tiles · ( peers_full · min(s·group_rows, full) + [q != rank] · min(s·group_rows, last)
                     + min(max(s - lag, 0)·group_rows, own) )

which grows with s: a worker whose positions grow keeps s and steps it. Within a step the owners form at
most four runs: full owners after `rank` (all full ones when rank > q), q, full owners before `rank`, own.

Rejected: own tiles last (adds G/P to the time), one owner at a time for the whole matrix (one hot
receiver), a dynamic scheduler (no order common to all ranks, so the argument above is lost), a list in
device memory (a copy per call, and M would no longer be free within a graph).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dsv4_symm_mem.protocol.layout import ceil_div
from dsv4_symm_mem.protocol.tiles import Tile, TileGrid, TileShape

DEFAULT_LAG = 2


@dataclass(frozen=True)
class Place:
    """Where a position lies: `row` counts position rows of the owner's shard, `column` column tiles."""

    owner: int
    row: int
    column: int


@dataclass(frozen=True)
class Schedule:
    """The order in which `rank` takes the tiles of one call.

    Attributes:
        m, n: Shape of the partial.
        world_size: Number of ranks P.
        rank: The rank whose order this is.
        shape: Tile shape, equal on all ranks.
        group_rows: Position rows per owner in a group.
        lag: Groups by which a rank's own tiles trail the remote ones.
        cluster: Row tiles per position.
        by_column: Whether an owner's rows of a group go column by column, so that a wave is as many rows and
            columns as its operands are least; else row by row.
    """

    m: int
    n: int
    world_size: int
    rank: int
    shape: TileShape
    group_rows: int = 1
    lag: int = DEFAULT_LAG
    cluster: int = 1
    by_column: bool = False

    @cached_property
    def grid(self) -> TileGrid:
        """The tiles, without their order."""
        return TileGrid(self.m, self.n, self.world_size, self.shape)

    def position_rows(self, owner: int) -> int:
        """Rows of positions of `owner`'s shard."""
        return ceil_div(self.grid.row_tiles(owner), self.cluster)

    @property
    def groups(self) -> int:
        """Groups of position rows, by the longest shard (rank 0's)."""
        return ceil_div(self.position_rows(0), self.group_rows)

    @cached_property
    def last_owner(self) -> int:
        """The last rank that owns rows, or -1."""
        return ceil_div(self.m, self.grid.shard_length) - 1 if self.m else -1

    @cached_property
    def positions(self) -> int:
        """Positions of the whole call."""
        return self.before(self.groups + self.lag)

    def before(self, step: int) -> int:
        """Positions that precede `step`, by the closed form of the module's docstring."""
        last_owner, rank = self.last_owner, self.rank
        if last_owner < 0:
            return 0
        remote = step * self.group_rows
        own = max(step - self.lag, 0) * self.group_rows
        peers_full = last_owner - (1 if rank < last_owner else 0)
        rows = peers_full * min(remote, self.position_rows(0)) if peers_full else 0
        if last_owner != rank:
            rows += min(remote, self.position_rows(last_owner))
        rows += min(own, self.position_rows(rank))
        return rows * self.grid.column_tiles

    def place(self, position: int) -> Place:
        """Where `position`, in [0, positions), lies; what kernels evaluate."""
        step = 0
        while self.before(step + 1) <= position:
            step += 1
        columns, last_owner, rank = self.grid.column_tiles, self.last_owner, self.rank
        first_row = step * self.group_rows
        rest = position - self.before(step)
        rows = full_rows = max(min(self.position_rows(0) - first_row, self.group_rows), 0)
        last_rows = max(min(self.position_rows(last_owner) - first_row, self.group_rows), 0)
        if last_owner == rank:
            last_rows = 0
        full, last = columns * full_rows, columns * last_rows
        after = last_owner - rank - 1 if rank < last_owner else last_owner
        first = rank + 1 if rank < last_owner else 0
        before = rank if rank < last_owner else 0
        if rest < after * full:
            owner, rest = first + rest // full, rest % full
        elif rest < after * full + last:
            owner, rest, rows = last_owner, rest - after * full, last_rows
        elif rest < (after + before) * full + last:
            rest -= after * full + last
            owner, rest = rest // full, rest % full
        else:
            owner, rest = rank, rest - ((after + before) * full + last)
            first_row = (step - self.lag) * self.group_rows
            rows = min(self.position_rows(rank) - first_row, self.group_rows)
        if self.by_column:
            return Place(owner, first_row + rest % rows, rest // rows)
        return Place(owner, first_row + rest // columns, rest % columns)

    def __len__(self) -> int:
        return sum(self.grid.owned_tiles(owner) for owner in range(self.world_size))

    def __iter__(self) -> Iterator[Tile]:
        grid = self.grid
        for place in self.places():
            first = place.row * self.cluster
            for row_tile in range(first, min(first + self.cluster, grid.row_tiles(place.owner))):
                yield grid.tile(place.owner, row_tile * grid.column_tiles + place.column)

    def places(self) -> Iterator[Place]:
        """All positions in order, by plain enumeration."""
        for step in range(self.groups + self.lag):
            if step < self.groups:
                for distance in range(1, self.world_size):
                    yield from self._group(step, (self.rank + distance) % self.world_size)
            if step >= self.lag:
                yield from self._group(step - self.lag, self.rank)

    def _group(self, group: int, owner: int) -> Iterator[Place]:
        first = group * self.group_rows
        rows = range(first, min(first + self.group_rows, self.position_rows(owner)))
        columns = range(self.grid.column_tiles)
        if self.by_column:
            yield from (Place(owner, row, column) for column in columns for row in rows)
        else:
            yield from (Place(owner, row, column) for row in rows for column in columns)


__all__ = [
    "DEFAULT_LAG",
    "Place",
    "Schedule",
    "Tile",
    "TileGrid",
    "TileShape",
]
