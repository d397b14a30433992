# SPDX-License-Identifier: Apache-2.0
"""The device's closed form of the order, compiled for the host, against `Schedule`'s enumeration."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from dsv4_gemm_rs.schedule import Schedule
from order_on_host import TILE, tables


@pytest.fixture(scope="module")
def worker() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("group_rows", "lag", "cluster"), itertools.product([1, 3], [0, 1, 2], [1, 2]))
@pytest.mark.parametrize("by_column", [False, True], ids=["by-row", "by-column"])
def test_device_order_is_the_schedules(
    worker: ProcessPoolExecutor, by_column: bool, world_size: int, group_rows: int, lag: int, cluster: int
) -> None:
    sizes = itertools.product([0, 1, 7, 16, 63, 64, 65, 129, 300, 513], [32, 90], range(world_size))
    calls = [(m, n, world_size, rank, group_rows, lag) for m, n, rank in sizes]
    answers = worker.submit(tables, cluster, by_column, calls).result()
    for (m, n, _, rank, _, _), got in zip(calls, answers, strict=True):
        schedule = Schedule(m, n, world_size, rank, TILE, group_rows, lag, cluster, by_column)
        wanted = [(place.owner, place.row, place.column) for place in schedule.places()]
        length = -(-m // world_size)
        own = max(min(m - rank * length, length), 0)
        unit = TILE.m * cluster
        assert got == [*wanted, (-1, min(-(-own // unit) * unit, length), own)]
