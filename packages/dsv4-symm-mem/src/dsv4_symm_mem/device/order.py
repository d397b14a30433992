# SPDX-License-Identifier: Apache-2.0
"""The order in which a rank takes the tiles of a call, in closed form on the device.

Contract: position rows (`cluster` row tiles of one owner) go in groups of `group_rows` per owner: a group's
remote positions, owner (rank + d) mod P for d = 1 .. P-1, then the own positions of the group `lag` earlier.
The host's twin, `dsv4_gemm_rs.schedule.Schedule`, derives the closed form and is held against enumeration by
tests; names here follow it. A role that asks for growing positions carries the step from call to call; each
answer then costs two or three integer divisions. Shared by all kernels that exchange tiles.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32


def select(condition: Boolean, yes: int | Int32, no: int | Int32) -> Int32:
    """`yes` where `condition` holds, else `no`, as 32-bit values without a branch."""
    return Int32(cutlass.select_(condition, Int32(yes), Int32(no)))


class TileOrder:
    """The numbers of `Schedule` that a launch fixes, as 32-bit device values.

    Args:
        m, n: Shape of the partial.
        world_size, rank: Ranks, and whose order this is.
        group_rows, lag: Position rows per owner in a group; groups by which own positions trail.
        tile_m, tile_n, cluster: Constants of the kernel.
        by_column: Constant: whether an owner's rows of a group go column by column, not row by row.
    """

    def __init__(
        self,
        m: Int32,
        n: Int32,
        world_size: Int32,
        rank: Int32,
        group_rows: Int32,
        lag: Int32,
        tile_m: int | Int32,
        tile_n: int | Int32,
        cluster: int,
        by_column: bool = False,
    ) -> None:
        self.by_column = by_column
        self.m, self.rank, self.group_rows, self.lag = m, rank, group_rows, lag
        self.cluster = cluster
        self.tile_m = tile_m
        self.shard = (m + world_size - 1) // world_size
        length = cutlass.max(self.shard, 1)
        self.last_owner = (m + length - 1) // length - 1
        unit = tile_m * cluster
        self.full = (self.shard + unit - 1) // unit
        self.last = (rows_of(self, cutlass.max(self.last_owner, 0)) + unit - 1) // unit
        self.own_rows = rows_of(self, rank)
        self.own = (self.own_rows + unit - 1) // unit
        self.covered_rows = cutlass.min(self.own * unit, self.shard)
        self.columns = (n + tile_n - 1) // tile_n
        early = rank < self.last_owner
        last = cutlass.max(self.last_owner, 0)
        self.peers_full = last - select(early, 1, 0)
        self.last_is_peer = select(self.last_owner == rank, 0, 1)
        self.after = select(early, self.last_owner - rank - 1, last)
        self.first = select(early, rank + 1, 0)
        self.ahead = select(early, rank, 0)
        self.positions = self.columns * (
            self.peers_full * self.full + self.last_is_peer * self.last + self.own
        )


def rows_of(order: TileOrder, owner: Int32) -> Int32:
    """Rows of the partial that `owner` has."""
    return cutlass.max(cutlass.min(order.m - owner * order.shard, order.shard), 0)


def row_tiles(order: TileOrder, owner: Int32) -> Int32:
    """Row tiles of `owner`'s shard."""
    return (rows_of(order, owner) + order.tile_m - 1) // order.tile_m


def before(order: TileOrder, step: Int32) -> Int32:
    """Positions that precede `step`."""
    remote = step * order.group_rows
    own = cutlass.max(step - order.lag, 0) * order.group_rows
    return order.columns * (
        order.peers_full * cutlass.min(remote, order.full)
        + order.last_is_peer * cutlass.min(remote, order.last)
        + cutlass.min(own, order.own)
    )


@cute.jit
def place(order: Constexpr[TileOrder], position: Int32, step: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """(owner, position row, column tile, step) of `position`, given a step that is not past it."""
    while before(order, step + 1) <= position:
        step += 1
    first_row = step * order.group_rows
    rest = position - before(order, step)
    full_rows = cutlass.max(cutlass.min(order.full - first_row, order.group_rows), 0)
    last_rows = cutlass.max(cutlass.min(order.last - first_row, order.group_rows), 0) * order.last_is_peer
    full, last = order.columns * full_rows, order.columns * last_rows
    after_full = order.after * full
    ahead_full = order.ahead * full
    owner = Int32(order.rank)
    row = first_row
    rows = full_rows
    if rest < after_full:
        owner = order.first + rest // full
        rest = rest % full
    elif rest < after_full + last:
        owner = Int32(order.last_owner)
        rest -= after_full
        rows = last_rows
    elif rest < after_full + last + ahead_full:
        rest -= after_full + last
        owner = rest // full
        rest = rest % full
    else:
        rest -= after_full + last + ahead_full
        row = first_row - order.lag * order.group_rows
        rows = cutlass.min(order.own - row, order.group_rows)
    if cutlass.const_expr(order.by_column):
        return owner, row + rest % rows, rest // rows, step
    return owner, row + rest // order.columns, rest % order.columns, step
