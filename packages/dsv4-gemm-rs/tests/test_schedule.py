# SPDX-License-Identifier: Apache-2.0
"""The schedule lists every tile once, in an order that cannot deadlock, for any M, N, P, group and lag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from dsv4_gemm_rs.schedule import DEFAULT_LAG, Schedule, Tile, TileShape
from dsv4_symm_mem.protocol.layout import shard_rows
from hypothesis import given, settings
from hypothesis import strategies as st

UNIT = TileShape(1, 1)

schedules = st.builds(
    Schedule,
    m=st.integers(0, 300),
    n=st.integers(1, 40),
    world_size=st.integers(1, 16),
    rank=st.just(0),
    shape=st.builds(TileShape, st.integers(8, 64), st.integers(8, 32)),
    group_rows=st.integers(1, 5),
    lag=st.integers(0, 3),
    cluster=st.integers(1, 3),
    by_column=st.booleans(),
)


def all_ranks(schedule: Schedule) -> list[Schedule]:
    return [replace(schedule, rank=rank) for rank in range(schedule.world_size)]


def row_tile(tile: Tile, schedule: Schedule) -> int:
    return tile.index // schedule.grid.column_tiles


def group(tile: Tile, schedule: Schedule) -> int:
    return row_tile(tile, schedule) // (schedule.cluster * schedule.group_rows)


def positions_of(schedule: Schedule) -> list[list[Tile]]:
    """The schedule's tiles, position by position, from the closed form."""
    grid = schedule.grid
    positions = []
    for place in map(schedule.place, range(schedule.positions)):
        first = place.row * schedule.cluster
        rows = range(first, min(first + schedule.cluster, grid.row_tiles(place.owner)))
        positions.append([grid.tile(place.owner, row * grid.column_tiles + place.column) for row in rows])
    return positions


def stuck_workers(orders: Sequence[Sequence[Sequence[Tile]]], workers: int) -> int:
    """Workers that never end when each takes its positions in order and own tiles wait for all peers'.

    A tile sent stays sent, so the order in which workers are advanced cannot change who gets stuck.
    """
    lists = [
        (rank, [tile for position in order[worker::workers] for tile in position])
        for rank, order in enumerate(orders)
        for worker in range(workers)
    ]
    sent = [set[tuple[int, int]]() for _ in orders]
    places = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for number, (rank, tiles) in enumerate(lists):
            while places[number] < len(tiles):
                tile = tiles[places[number]]
                key = (tile.owner, tile.index)
                if tile.owner != rank:
                    sent[rank].add(key)
                elif not all(key in sent[peer] for peer in range(len(orders)) if peer != rank):
                    break
                places[number] += 1
                moved = True
    return sum(place < len(tiles) for place, (_, tiles) in zip(places, lists, strict=True))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schedules)
def test_every_element_is_in_one_tile_which_its_owner_owns(schedule: Schedule) -> None:
    tiles = list(schedule)
    assert len(tiles) == len(schedule)
    assert len({(tile.owner, tile.index) for tile in tiles}) == len(tiles)
    covered: Counter[int] = Counter()
    for tile in tiles:
        owned = shard_rows(schedule.m, schedule.world_size, tile.owner)
        assert len(tile.rows) in range(1, schedule.shape.m + 1)
        assert len(tile.columns) in range(1, schedule.shape.n + 1)
        assert set(tile.rows) <= set(owned)
        covered.update(row * schedule.n + column for row in tile.rows for column in tile.columns)
    assert covered == dict.fromkeys(range(schedule.m * schedule.n), 1)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(schedules, st.data())
def test_closed_form_is_the_plain_enumeration(schedule: Schedule, data: st.DataObject) -> None:
    mine = replace(schedule, rank=data.draw(st.integers(0, schedule.world_size - 1)))
    assert [mine.place(position) for position in range(mine.positions)] == list(mine.places())
    assert [tile for position in positions_of(mine) for tile in position] == list(mine)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(schedules)
def test_indices_count_each_owner_s_tiles_row_tile_major(schedule: Schedule) -> None:
    for owner in range(schedule.world_size):
        tiles = sorted((tile for tile in schedule if tile.owner == owner), key=lambda tile: tile.index)
        assert [tile.index for tile in tiles] == list(range(schedule.grid.owned_tiles(owner)))
        corners = [(tile.rows.start, tile.columns.start) for tile in tiles]
        assert corners == sorted(corners)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(schedules)
def test_order_is_the_design_s_on_every_rank(schedule: Schedule) -> None:
    """Group by group: owners rank + 1, rank + 2, ..., then the own group `lag` earlier."""
    world_size = schedule.world_size
    for mine in all_ranks(schedule):

        def step(tile: Tile, mine: Schedule = mine) -> tuple[int, int, tuple[int, ...]]:
            distance = (tile.owner - mine.rank) % world_size
            # Own tiles follow the remote tiles of their step.
            at = group(tile, mine) + (mine.lag if distance == 0 else 0)
            row, column = divmod(tile.index, mine.grid.column_tiles)
            place = (row // mine.cluster, column, row)
            return at, distance or world_size, (column, *place) if mine.by_column else place

        tiles = list(mine)
        assert tiles == sorted(tiles, key=step)
        assert {(tile.owner, tile.index) for tile in tiles} == {(tile.owner, tile.index) for tile in schedule}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(schedules)
def test_an_own_tile_comes_after_all_remote_tiles_of_its_row_tile_and_below(schedule: Schedule) -> None:
    for mine in all_ranks(schedule):
        highest_own = -1
        for tile in mine:
            if tile.owner == mine.rank:
                highest_own = max(highest_own, row_tile(tile, mine))
            else:
                assert row_tile(tile, mine) > highest_own


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schedules, st.integers(1, 7), st.data())
def test_workers_in_order_never_wait_in_a_circle(
    schedule: Schedule, workers: int, data: st.DataObject
) -> None:
    """Also where ranks differ in group size, lag and cluster."""
    orders = []
    for mine in all_ranks(schedule):
        group_rows, lag, cluster = data.draw(
            st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(1, 3))
        )
        orders.append(positions_of(replace(mine, group_rows=group_rows, lag=lag, cluster=cluster)))
    assert stuck_workers(orders, workers) == 0


def test_own_tiles_first_do_wait_in_a_circle() -> None:
    ranks = all_ranks(Schedule(4, 2, 2, 0, UNIT))
    own_first = [
        sorted(positions_of(mine), key=lambda position: position[0].owner != mine.rank) for mine in ranks
    ]
    assert stuck_workers(own_first, 1) == 2
    assert stuck_workers([positions_of(mine) for mine in ranks], 1) == 0


def test_uneven_shards_make_positions_no_measure_of_who_waits_for_whom() -> None:
    """Position 2 of rank 0 waits for position 2 of rank 1: 'lower-numbered' holds of row tiles only."""
    first, second = all_ranks(Schedule(3, 1, 2, 0, UNIT, lag=0))
    assert [(tile.owner, tile.index) for tile in first] == [(1, 0), (0, 0), (0, 1)]
    assert [(tile.owner, tile.index) for tile in second] == [(0, 0), (1, 0), (0, 1)]


def test_small_schedules_by_hand() -> None:
    def order(
        m: int, rank: int, lag: int = DEFAULT_LAG, group_rows: int = 1, *, by_column: bool = False
    ) -> list[tuple[int, int]]:
        schedule = Schedule(m, 2, 3, rank, TileShape(1, 1), group_rows, lag, by_column=by_column)
        return [(tile.owner, tile.index) for tile in schedule]

    assert order(0, 0) == []
    # One row, so ranks 1 and 2 own nothing; two columns.
    assert order(1, 0) == [(0, 0), (0, 1)]
    assert order(1, 2) == [(0, 0), (0, 1)]
    assert order(3, 1) == [(2, 0), (2, 1), (0, 0), (0, 1), (1, 0), (1, 1)]
    # Two rows each: with a lag of one group, own row tile 0 follows remote row tile 1.
    two = [(1, 0), (1, 1), (2, 0), (2, 1), (1, 2), (1, 3), (2, 2), (2, 3), (0, 0), (0, 1), (0, 2), (0, 3)]
    assert order(6, 0) == two
    plain = [(1, 0), (1, 1), (2, 0), (2, 1), (0, 0), (0, 1), (1, 2), (1, 3), (2, 2), (2, 3), (0, 2), (0, 3)]
    assert order(6, 0, lag=0) == plain
    assert order(6, 0, lag=0, group_rows=2) == [
        *((1, i) for i in range(4)),
        *((2, i) for i in range(4)),
        *((0, i) for i in range(4)),
    ]
    # By column: two rows of two columns each.
    assert order(6, 0, lag=0, group_rows=2, by_column=True) == [
        (o, i) for o in (1, 2, 0) for i in (0, 2, 1, 3)
    ]


@pytest.mark.parametrize("m", [1, 7, 8, 127, 128, 129, 1023, 1024, 1025])
def test_rows_at_the_edges(m: int) -> None:
    schedule = Schedule(m, 300, 8, 3, TileShape(128, 256), group_rows=2)
    heights = Counter[int]()
    for tile in schedule:
        if tile.columns.start == 0:
            heights[tile.owner] += len(tile.rows)
    assert heights == Counter({rank: rows for rank in range(8) if (rows := len(shard_rows(m, 8, rank)))})
    assert {tile.columns for tile in schedule} == {range(256), range(256, 300)}
