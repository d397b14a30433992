# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels in the emulator: a row's bits depend on nothing but the row, where that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import emulated_ranks
import pytest
import torch
from dsv4_gemm_rs import WeightKind, gemm_ar
from dsv4_gemm_rs.dispatch import Exchange, Gemm, Problem
from dsv4_gemm_rs.kernels.families import Operand, TileConfig, members
from dsv4_gemm_rs.problems import RankProblem
from dsv4_gemm_rs.weights import Keep, prepare_weight
from gemm_rs_support import assert_right, problems_for

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

SIZE, M, N, K = 2, 131, 128, 256
PLACES = [130, 7, 64, 99, 0]
"""Rows of the large call that make the small one: other places, and other owners."""


INVARIANT: dict[str, Any] = {"path": None, "batch_invariant": True}


def taken(problems: Sequence[RankProblem], rows: Sequence[int]) -> list[RankProblem]:
    """The same problems of these rows alone."""
    return [replace(p, x=p.x[list(rows)].contiguous(), x_exact=p.x_exact[list(rows)]) for p in problems]


def results(
    emulation: Any, config: TileConfig, problems: Sequence[RankProblem], **options: Any
) -> list[torch.Tensor]:
    """Every rank's shard of a call in tiles of `config`."""
    with emulated_ranks.ranks(emulation, M, N, config=config, **options) as group:
        group.poison()
        outs = group.call(problems)
        group.finish()
    return outs


def whole(outs: Sequence[torch.Tensor], m: int) -> torch.Tensor:
    """Bits of the rows of all shards."""
    return torch.cat(list(outs))[:m].view(torch.int16)


@pytest.mark.parametrize(
    ("arch", "kind", "operand"),
    [
        (90, WeightKind.MXFP8, Operand.BF16),
        (90, WeightKind.MXFP8, Operand.FP8_WEIGHT),
        (100, WeightKind.MXFP8, Operand.MXFP8),
        (100, WeightKind.BF16, Operand.BF16),
    ],
)
def test_products_are_the_rows_whatever_the_tile_and_m(
    arch: int, kind: WeightKind, operand: Operand, emulator: Callable[..., Any]
) -> None:
    (problem,) = problems_for(1, M, 64, K, kind)
    if operand is Operand.FP8_WEIGHT:
        weight = problem.weight
        problem = replace(problem, weight=prepare_weight(weight.data, weight.scale, keep=Keep.FP8))
    few = taken([problem], PLACES)
    family = members(arch, operand)
    # A GPU tries them all; here one takes seconds.
    configs = (family[0], family[len(family) // 2], family[-1])

    def product(config: TileConfig, given: list[RankProblem]) -> torch.Tensor:
        emulation = emulator(1, arch=f"sm_{arch}a", processors=4)
        return whole(results(emulation, config, given, **INVARIANT), given[0].x.shape[0])

    wanted = product(configs[-1], [problem])[PLACES]
    for config in configs:
        assert torch.equal(product(config, few), wanted), config


def test_sums_are_the_rows_whatever_the_owner(emulator: Callable[..., Any]) -> None:
    problems = problems_for(SIZE, M, N, K, WeightKind.MXFP8)
    configs = members(90, Operand.BF16)
    many = results(emulator(SIZE), configs[0], problems, **INVARIANT)
    assert_right(many, problems)
    few = results(emulator(SIZE), configs[-1], taken(problems, PLACES), **INVARIANT)
    assert torch.equal(whole(few, len(PLACES)), whole(many, M)[PLACES])


def test_a_fused_call_is_not_so(emulator: Callable[..., Any]) -> None:
    """Or the tests above would show nothing."""
    config = members(90, Operand.BF16)[-1]
    problems = problems_for(SIZE, M, N, K, WeightKind.MXFP8)
    many = whole(results(emulator(SIZE), config, problems), M)
    few = whole(results(emulator(SIZE), config, taken(problems, PLACES)), len(PLACES))
    assert not torch.equal(few, many[PLACES])
    # Rows that the same rank owns in both calls are the same all the same.
    same = [i for i, row in enumerate(PLACES) if (row >= 66) == (i >= 3)]
    assert same
    assert torch.equal(few[same], many[PLACES][same])


def test_the_all_reduce_is_so_too(emulator: Callable[..., Any]) -> None:
    problems = problems_for(SIZE, M, N, K, WeightKind.MXFP8)
    made = []
    for given in (problems, taken(problems, PLACES)):
        m = given[0].x.shape[0]
        config = members(90, Operand.BF16)[0 if m == M else -1]
        with emulated_ranks.ranks(emulator(SIZE), M, N, config=config, **INVARIANT) as group:
            outs = [torch.empty(m, N, dtype=torch.bfloat16) for _ in given]
            for space, problem, out in zip(group.workspaces, given, outs, strict=True):
                gemm_ar(problem.x, problem.weight, space, out)
            decision = group.workspaces[0].decide(Problem(m, N, K, WeightKind.MXFP8))
            assert (decision.gemm, decision.exchange) == (Gemm.FUSED_SM90, Exchange.PUSH_AFTER)
            group.finish()
        assert torch.equal(outs[0], outs[1])
        made.append(outs[0].view(torch.int16))
    assert torch.equal(made[1], made[0][PLACES])
