# SPDX-License-Identifier: Apache-2.0
"""Random calls of the SM90 kernels in the PTX emulator: shapes, ranks, tiles and schedules that nobody chose.

A number stands for all that is random in a case. A few run with the others, many in `nox -s emulate_long`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsv4_gemm_rs import Keep, WeightKind, gemm_ar
from dsv4_gemm_rs.kernels.families import Operand, members
from dsv4_symm_mem.protocol.layout import shard_length
from emulated_ranks import ranks
from gemm_rs_support import assert_right, problems_for

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
Uneven: Any = pytest.importorskip("dsv4_ptx_emulator.machine.scheduler").Uneven
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

MakeEmulation = Callable[..., Any]
FEW = 6
MANY = 300
LARGEST = 3_000_000
"""Multiply-adds of a case's longest call on one rank, so that it takes seconds."""


def run(number: int, emulator: MakeEmulation) -> None:
    rng = random.Random(number)
    size = rng.choice((2, 2, 3, 4, 5, 8))
    operand = rng.choice((Operand.BF16, Operand.FP8_WEIGHT))
    config = rng.choice(members(90, operand))
    packed = operand is Operand.FP8_WEIGHT
    kind = WeightKind.MXFP8 if packed else rng.choice(list(WeightKind))
    n, k = 64 * rng.randint(1, 6), 128 * rng.randint(1, 5)
    most = max(LARGEST // (n * k), 1)
    tokens = [
        rng.choice((1, rng.randint(0, 2 * size), rng.randint(0, most))) for _ in range(rng.randint(1, 4))
    ]
    # The memory model's checker keeps a clock for each warp of each rank.
    checks = "memory-model" if size <= 3 and rng.random() < 0.25 else True
    emulation = emulator(
        size,
        processors=rng.randint(1, 4),
        seed=number,
        checks=checks,
        slow_engines=rng.random() < 0.5,
        uneven=rng.choice(list(Uneven)),
    )
    with ranks(emulation, max(*tokens, 1), n, config=config) as group:
        group.poison()
        results = []
        for m in tokens:
            problems = problems_for(size, m, n, k, kind, m, keep=Keep.FP8 if packed else Keep.BF16)
            gathered = rng.random() < 0.25
            pairs = list(zip(problems, group.workspaces, strict=True))
            outs = [gemm_ar(p.x, p.weight, space) for p, space in pairs] if gathered else group.call(problems)
            results.append((problems, gathered, outs))
        group.finish()
        for problems, gathered, outs in results:
            if gathered:
                assert all(torch.equal(out, outs[0]) for out in outs)
                m, length = outs[0].shape[0], shard_length(outs[0].shape[0], size)
                whole = torch.zeros(length * size, n, dtype=torch.bfloat16)
                whole[:m] = outs[0]
                outs = list(whole.split(length)) if length else [whole] * size
            assert_right(outs, problems)


@pytest.mark.parametrize("number", range(FEW))
def test_random_calls(number: int, emulator: MakeEmulation) -> None:
    run(number, emulator)


@pytest.mark.long
@pytest.mark.parametrize("number", range(FEW, MANY))
def test_more_random_calls(number: int, emulator: MakeEmulation) -> None:
    run(number, emulator)
