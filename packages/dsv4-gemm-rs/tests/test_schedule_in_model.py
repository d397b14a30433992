# SPDX-License-Identifier: Apache-2.0
"""Real schedules keep the exchange's promises in every interleaving of the protocol model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from dsv4_gemm_rs.schedule import Schedule, TileShape
from dsv4_symm_mem.protocol.model import Call, Deadline, Rules, Scenario, ViolationKind, explore
from dsv4_symm_mem.protocol.words import Operation, call_signature

UNIT = TileShape(1, 1)
RS, AR = Operation.REDUCE_SCATTER, Operation.ALL_REDUCE
MRS, MAR = Operation.MULTICAST_REDUCE_SCATTER, Operation.MULTICAST_ALL_REDUCE


def scheduled(
    m: int,
    n: int,
    world_size: int,
    operation: Operation = RS,
    options: Sequence[tuple[int, int]] = ((1, 1),),
    shape: TileShape = UNIT,
    cluster: int = 1,
) -> Call:
    """A call whose orders are schedules; `options` are (group_rows, lag), rank by rank in turn."""
    orders, units = [], []
    for rank in range(world_size):
        group_rows, lag = options[rank % len(options)]
        schedule = Schedule(m, n, world_size, rank, shape, group_rows, lag, cluster)
        orders.append(tuple((tile.owner, tile.index) for tile in schedule))
        row_tiles = [
            schedule.grid.row_tiles(place.owner) - place.row * cluster for place in schedule.places()
        ]
        units.append(tuple(min(cluster, left) for left in row_tiles))
    signature = call_signature(operation, m, n, shape.m, shape.n)
    return Call(tuple(orders), (signature,) * world_size, operation, units=tuple(units))


def assert_clean(scenario: Scenario) -> None:
    report = explore(scenario)
    assert report.violation is None, "\n".join([*report.trace, str(report.violation)])
    assert report.outcomes == {("done",) * scenario.world_size}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("group_rows", [1, 2])
def test_two_ranks_with_changing_m(group_rows: int, lag: int, workers: int) -> None:
    sizes = [(6, RS), (1, RS), (0, RS), (3, AR), (4, RS), (1, AR)]
    calls = tuple(scheduled(m, 1, 2, operation, [(group_rows, lag)]) for m, operation in sizes)
    assert_clean(Scenario("two ranks", calls, workers=workers))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("group_rows", [1, 2])
def test_three_ranks_with_changing_m(group_rows: int, lag: int, workers: int) -> None:
    sizes = [(4, RS), (1, RS), (0, AR), (5, RS)] if workers == 1 else [(4, RS), (1, RS), (3, RS)]
    calls = tuple(scheduled(m, 1, 3, operation, [(group_rows, lag)]) for m, operation in sizes)
    assert_clean(Scenario("three ranks", calls, workers=workers))


@pytest.mark.parametrize("n", [1, 2])
def test_tiles_larger_than_one(n: int) -> None:
    shape = TileShape(2, 2)
    calls = tuple(
        scheduled(m, 2 * n, 2, operation, shape=shape)
        for m, operation in [(7, RS), (2, RS), (5, AR), (3, RS)]
    )
    assert_clean(Scenario("cut tiles", calls, workers=2))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("lag", [0, 1])
def test_clusters_of_two_row_tiles(lag: int, workers: int) -> None:
    """Trailing clusters are half empty: shards of 3, 2 and 1 row tiles."""
    sizes = [(5, RS), (1, RS), (3, AR), (6, RS)]
    calls = tuple(scheduled(m, 2, 2, operation, [(1, lag)], TileShape(1, 2), 2) for m, operation in sizes)
    assert_clean(Scenario("two ranks", calls, workers=workers))
    calls = tuple(scheduled(m, 1, 3, RS, [(1, lag)], cluster=2) for m in (7, 2, 5))
    assert_clean(Scenario("three ranks", calls, workers=workers))


@pytest.mark.parametrize("workers", [1, 2])
def test_sums_read_through_multicast_between_pushed_ones(workers: int) -> None:
    sizes = [(5, MRS), (1, MAR), (0, MRS), (3, RS), (6, MAR)]
    calls = tuple(scheduled(m, 1, 2, operation, [(2, 1)], cluster=2) for m, operation in sizes)
    assert_clean(Scenario("two ranks", calls, workers=workers, shared_banks=True))
    sizes = [(4, MRS), (1, MAR), (2, RS)]
    calls = tuple(scheduled(m, 1, 3, operation) for m, operation in sizes)
    assert_clean(Scenario("three ranks", calls, workers=workers, shared_banks=True))


def test_ranks_may_differ_in_group_size_and_lag() -> None:
    options = [(1, 0), (2, 1), (1, 2)]
    assert_clean(
        Scenario("two ranks", tuple(scheduled(m, 1, 2, RS, options) for m in (6, 4, 5, 6)), workers=2)
    )
    assert_clean(Scenario("three ranks", tuple(scheduled(m, 1, 3, RS, options) for m in (6, 2, 5))))


def test_every_interleaving_without_reduction() -> None:
    calls = tuple(scheduled(m, 1, 2, operation) for m, operation in [(3, RS), (1, RS), (0, RS), (2, AR)])
    report = explore(Scenario("unreduced", calls, workers=2), reduce=False)
    assert report.violation is None
    assert report.outcomes == {("done", "done")}


def test_death_is_blamed_on_the_dead() -> None:
    calls = tuple(scheduled(m, 1, 3) for m in (4, 3))
    report = explore(Scenario("a death", calls, mortal=(0, 1, 2), deadline=Deadline.PATIENT))
    assert report.violation is None, "\n".join([*report.trace, str(report.violation)])


@pytest.mark.parametrize("world_size", [2, 3])
def test_own_tiles_first_deadlock(world_size: int) -> None:
    calls = (scheduled(2 * world_size, 1, world_size),)
    report = explore(Scenario("own first", calls), Rules(remote_tiles_first=False))
    assert report.violation is not None
    assert report.violation.kind is ViolationKind.DEADLOCK
