# SPDX-License-Identifier: Apache-2.0
"""The workspace: room for every call it admits, agreement on the environment, ends that strand nobody."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from dsv4_gemm_rs import WeightKind, Workspace, prepare_weight
from dsv4_gemm_rs.dispatch import Machine, Problem
from dsv4_gemm_rs.dispatch.plan import plan_launch
from dsv4_gemm_rs.workspace import FUSED_ARCHS, exchange_layout
from dsv4_symm_mem import VirtualGroup
from dsv4_symm_mem.collectives.reduce_scatter import HOST_TILE
from dsv4_symm_mem.errors import ArgumentError, ClosedError, GroupError
from dsv4_symm_mem.protocol.tiles import TileGrid, TileShape
from gemm_rs_support import assert_right, problems_for, ranks

GPUS = (
    (90, 16, WeightKind.MXFP8),
    (90, 132, WeightKind.BF16),
    (100, 148, WeightKind.MXFP8),
    (103, 15, WeightKind.BF16),
)
"""Architecture, SMs and kind of operands."""


def test_every_plan_of_every_admitted_call_fits() -> None:
    chance = random.Random(0)
    sizes = [(2, 512, 5120), (2, 2048, 1280), (8, 64, 7168), (4, 8192, 5120), (3, 1000, 576), (16, 129, 64)]
    for world_size, max_tokens, max_n in sizes:
        layout = exchange_layout(world_size, max_tokens, max_n)
        columns = {max_n, *(64 * chance.randint(1, max_n // 64) for _ in range(4))}
        rows = {0, 1, max_tokens, *(chance.randint(1, max_tokens) for _ in range(12))}
        for m, n, k, (arch, sms, kind) in itertools.product(rows, columns, (128, 8192), GPUS):
            machine = Machine(arch, world_size, False, True, True, False, sms, FUSED_ARCHS)
            plan = plan_launch(machine, Problem(m, n, k, kind))
            TileGrid(m, n, world_size, plan.shape).require_fits(layout)
            TileGrid(m, n, world_size, HOST_TILE).require_fits(layout)


def test_what_does_not_fit_is_refused() -> None:
    layout = exchange_layout(2, 256, 320)
    with pytest.raises(ArgumentError, match="a shard of at most"):
        TileGrid(2000, 320, 2, TileShape(64, 128)).require_fits(layout)


def test_narrow_outputs_with_many_rows_work() -> None:
    with ranks(2, max_tokens=512, n=320) as group:
        problems = problems_for(2, 512, 320, 128, WeightKind.BF16)
        assert_right(group.call(problems), problems)


def test_an_environment_that_is_wrong_on_one_rank_is_everyones_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, None])

    def read() -> None:
        if next(answers, "wrong") == "wrong":
            raise ArgumentError("DSV4_GEMM_RS_PATH", "fusd", "auto")

    monkeypatch.setattr("dsv4_gemm_rs.workspace.requested_path", read)

    def step(rank: Any) -> None:
        with pytest.raises(GroupError, match="reading the environment failed on 1 rank"):
            Workspace.create(rank, max_tokens=4, n=64)

    VirtualGroup(3).run(step)


def test_a_rank_that_leaves_with_an_error_of_its_own_strands_nobody() -> None:
    def step(rank: Any) -> None:
        with Workspace.create(rank, max_tokens=4, n=64):
            if rank.rank == 1:
                raise KeyError("of the caller's own")

    with pytest.raises(KeyError, match="of the caller's own"):
        VirtualGroup(3).run(step)


def test_warming_up_checks_the_workspace_first() -> None:
    with ranks(2, max_tokens=4, n=64, path="unfused") as group:
        weights = [prepare_weight(torch.zeros(64, 64, dtype=torch.bfloat16)) for _ in range(2)]
        group.run(lambda space: space.warm_up(weights[space.rank]))
        group.close()
        errors = group.errors(lambda space: space.warm_up(weights[space.rank]))
        assert all(isinstance(error, GroupError) for error in errors)
        assert all(ClosedError.__name__ in str(error) for error in errors)
