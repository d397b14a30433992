# SPDX-License-Identifier: Apache-2.0
"""The device's closed form of the order, compiled for the host: what a worker process of its test runs.

A process of its own, since a process that has run a compiled host function of the DSL can no longer compile
for the emulator, and other tests may want to.
"""

# The DSL's decorators have no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack
from dsv4_gemm_rs.schedule import TileShape
from dsv4_symm_mem.device.order import TileOrder, place

TILE = TileShape(16, 32)
MAX_POSITIONS = 4096
UNTOUCHED = -7


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
    by_column: cutlass.Constexpr[bool],
) -> None:
    order = TileOrder(m, n, world_size, rank, group_rows, lag, TILE.m, TILE.n, cluster, by_column)
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


@cache
def _compiled(cluster: int, by_column: bool) -> Any:
    table = from_dlpack(torch.zeros(MAX_POSITIONS, 3, dtype=torch.int32))
    return cute.compile(walk, table, *[Int32(1)] * 6, cluster, by_column)


def tables(cluster: int, by_column: bool, calls: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """For each (m, n, world_size, rank, group_rows, lag) the rows that `walk` wrote."""
    answers = []
    for numbers in calls:
        table = torch.full((MAX_POSITIONS, 3), UNTOUCHED, dtype=torch.int32)
        _compiled(cluster, by_column)(from_dlpack(table), *map(Int32, numbers))
        written = int((table != UNTOUCHED).any(1).sum())
        answers.append([tuple(row) for row in table[:written].tolist()])
    return answers
