# SPDX-License-Identifier: Apache-2.0
"""The device's closed form of the order, compiled for the host, against `Schedule`'s enumeration."""

# The DSL's decorators have no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import itertools
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack
from dsv4_gemm_rs.schedule import Schedule, TileShape
from dsv4_symm_mem.device.order import TileOrder, place

TILE = TileShape(16, 32)


@cute.jit
def walk(
    out: cute.Tensor,
    m: Int32,
    n: Int32,
    world_size: Int32,
    rank: Int32,
    group_rows: Int32,
    lag: Int32,
    cluster: cutlass.Constexpr[int],
) -> None:
    order = TileOrder(m, n, world_size, rank, group_rows, lag, TILE.m, TILE.n, cluster)
    step = Int32(0)
    for position in range(order.positions):
        owner, row, column, step = place(order, position, step)
        out[position, 0] = owner
        out[position, 1] = row
        out[position, 2] = column
    last = order.positions
    out[last, 0] = Int32(-1)
    out[last, 1] = order.covered_rows
    out[last, 2] = order.own_rows


@pytest.fixture(scope="module")
def walks() -> dict[int, Any]:
    table = from_dlpack(torch.zeros(4096, 3, dtype=torch.int32))
    numbers = [Int32(1)] * 6
    return {cluster: cute.compile(walk, table, *numbers, cluster) for cluster in (1, 2)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("group_rows", "lag", "cluster"), itertools.product([1, 3], [0, 1, 2], [1, 2]))
def test_device_order_is_the_schedules(
    walks: dict[int, Any], world_size: int, group_rows: int, lag: int, cluster: int
) -> None:
    for m, n in itertools.product([0, 1, 7, 16, 63, 64, 65, 129, 300, 513], [32, 90]):
        for rank in range(world_size):
            schedule = Schedule(m, n, world_size, rank, TILE, group_rows, lag, cluster)
            wanted = [(p.owner, p.row, p.column) for p in schedule.places()]
            table = torch.full((4096, 3), -7, dtype=torch.int32)
            numbers = (Int32(x) for x in (m, n, world_size, rank, group_rows, lag))
            walks[cluster](from_dlpack(table), *numbers)
            got = [tuple(x) for x in table[: len(wanted) + 1].tolist()]
            length = -(-m // world_size)
            own = max(min(m - rank * length, length), 0)
            unit = TILE.m * cluster
            assert got == [*wanted, (-1, min(-(-own // unit) * unit, length), own)]
