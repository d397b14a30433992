# SPDX-License-Identifier: Apache-2.0
"""Tile shapes x operands x exchanges x ranks x rows x operations on SM100, whole calls, in the PTX emulator.

Every pair of two axes' values occurs in the tests of every day, on one schedule each; `nox -s emulate_long`
runs all combinations, on a schedule of its own each. A combination is a sequence of calls that are queued at
once on poisoned slots: the call, one of the other operation with other rows and columns, the call again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from covering import Combination, everything, pairs_of, pairwise
from dsv4_gemm_rs import WeightKind, gemm_ar
from dsv4_gemm_rs.kernels.sm100.config import FAMILY, KernelConfig, Operand
from dsv4_gemm_rs.problems import RankProblem
from dsv4_symm_mem.protocol.layout import Strategy
from emulated_ranks import Ranks, ranks
from gemm_rs_support import assert_right, problems_for

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
emulated = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

MOST_CASES = 20
"""Budget of the tests of every day, a few seconds each; the least for these axes is 16."""
AXES: dict[str, Sequence[Any]] = {
    "tile": ((256, 2), (128, 2), (128, 1), (64, 1)),
    "rows": ("a rank without", "one more than ranks", "a tile and one", "two tiles and three"),
    "size": (2, 4, 8),
    "operand": (Operand.MXFP8, Operand.BF16),
    "exchange": tuple(Strategy),
    "gathered": (False, True),
}
EVERY_DAY, ALL = pairwise(AXES), everything(AXES)


def rows_of(case: Combination) -> int:
    size: int = case["size"]
    rows = {"a rank without": size - 1, "one more than ranks": size + 1}
    rows |= {"a tile and one": 129, "two tiles and three": 259}
    return rows[case["rows"]]


def name_of(case: Combination) -> str:
    tile_n, cluster = case["tile"]
    operation = "AR" if case["gathered"] else "RS"
    made_of = f"{128 * cluster}x{tile_n}-{case['operand']}-{case['exchange']}"
    return f"{made_of}-P{case['size']}-M{rows_of(case)}-{operation}"


def test_every_pair_occurs_within_the_budget() -> None:
    wanted = {(a, x, b, y) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    assert set().union(*map(pairs_of, EVERY_DAY)) == wanted
    assert len(EVERY_DAY) <= MOST_CASES
    assert {(config.tile_n, config.cluster) for config in FAMILY} == set(AXES["tile"])
    # One pair less is noticed.
    assert set().union(*map(pairs_of, EVERY_DAY[:-1])) != wanted


def call(group: Ranks, problems: Sequence[RankProblem], gathered: bool) -> list[torch.Tensor]:
    if not gathered:
        return group.call(problems)
    pairs = zip(problems, group.workspaces, strict=True)
    return [gemm_ar(problem.x, problem.weight, space) for problem, space in pairs]


def assert_call(
    outs: Sequence[torch.Tensor], problems: Sequence[RankProblem], gathered: bool, multicast: bool
) -> None:
    if gathered:
        assert all(torch.equal(out, outs[0]) for out in outs)
        size, m = len(outs), len(outs[0])
        length = -(-m // size)
        padded = torch.cat([outs[0], torch.zeros(size * length - m, outs[0].shape[1], dtype=outs[0].dtype)])
        outs = padded.split(length)
    assert_right(outs, problems, multicast=multicast)


def run_case(case: Combination, seed: int, emulator: Callable[..., Any]) -> None:
    size, operand, exchange = case["size"], case["operand"], case["exchange"]
    tile_n, cluster = case["tile"]
    kind = WeightKind.MXFP8 if operand is Operand.MXFP8 else WeightKind.BF16
    config = KernelConfig(operand, tile_n, cluster, strategy=exchange)
    m, multicast = rows_of(case), exchange is Strategy.MULTICAST
    # More columns than a tile has, the last tile filled in part; then one narrow tile.
    wide, narrow = tile_n + 64, 64
    first = problems_for(size, m, wide, 256, kind, seed=m)
    other = problems_for(size, 67, narrow, 128, kind, seed=m + 1)
    emulation = emulator(size, arch="sm_100a", processors=2, seed=seed)
    with ranks(emulation, max(m, 67), wide, config=config, exchange=exchange) as group:
        group.poison()
        calls = [
            (problems, gathered, call(group, problems, gathered))
            for problems, gathered in (
                (first, case["gathered"]),
                (other, not case["gathered"]),
                (first, case["gathered"]),
            )
        ]
        group.finish()
    for problems, gathered, outs in calls:
        assert_call(outs, problems, gathered, multicast)
    # The emulator adds what is read through multicast in one order, so this holds for both exchanges.
    assert all(torch.equal(a, b) for a, b in zip(calls[0][2], calls[2][2], strict=True))


@emulated
@pytest.mark.parametrize("case", EVERY_DAY, ids=name_of)
def test_every_pair(case: Combination, emulator: Callable[..., Any]) -> None:
    run_case(case, EVERY_DAY.index(case), emulator)


@emulated
@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=name_of)
def test_every_combination(case: Combination, emulator: Callable[..., Any]) -> None:
    run_case(case, 1000 + ALL.index(case), emulator)
