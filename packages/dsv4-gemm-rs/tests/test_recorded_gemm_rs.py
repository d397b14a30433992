# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernel in the emulator against what the same kernel made of the same operands on an H200.

Bit for bit for integer operands; for others within what different FP32 sums can do to a BF16 result, see
gemm_rs_cases.py. Whether a recording is there or not, every case is checked against exact arithmetic, so that
the emulator's side of it cannot rot.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dsv4_gemm_rs import Workspace, gemm_rs
from dsv4_gemm_rs.problems import RankProblem
from dsv4_symm_mem import VirtualGroup
from dsv4_symm_mem.protocol.layout import shard_length
from gemm_rs_cases import CASES, CHANGED, Case, difference_allowed, fingerprint, joined, on_tiles, values
from gemm_rs_support import assert_right

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

DATA = Path(__file__).with_name("data")
RECORDER = "python packages/dsv4-gemm-rs/tests/support/record_gemm_rs.py packages/dsv4-gemm-rs/tests/data"


@functools.cache
def recordings() -> dict[str, dict[str, Any]]:
    path = DATA / "gemm_rs_h200.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())["cases"] if path.exists() else {}
    return found


def emulate(case: Case, problems: list[RankProblem], emulation: Any) -> list[torch.Tensor]:
    group = VirtualGroup(case.size, emulation=emulation)
    with on_tiles(case.config):
        spaces = group.run(lambda rank: Workspace.create(rank, max_tokens=case.m, n=case.n, path="fused"))
        outs = []
        for problem, space in zip(problems, spaces, strict=True):
            rows = shard_length(case.m, case.size)
            out = torch.full((rows, case.n), float("nan"), dtype=torch.bfloat16)
            outs.append(gemm_rs(problem.x, problem.weight, space, out))
        emulation.run()
        for space in spaces:
            space.check()
        group.run(lambda rank: spaces[rank.rank].close())
    return outs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_on_the_gpu(case: Case, emulator: Callable[..., Any]) -> None:
    problems = case.problems()
    outs = emulate(case, problems, emulator(case.size))
    assert_right(outs, problems)
    recorded = recordings().get(case.name)
    if recorded is None:
        pytest.skip(f"{case.name} has not been recorded on an H200: run {RECORDER} there")
    assert fingerprint(problems) == recorded["operands"], "the operands are no longer those of the recording"
    here = joined(outs)
    if case.exact:
        assert hashlib.sha256(here.tobytes()).hexdigest() == recorded["result"]
        return
    there = np.load(DATA / "gemm_rs_h200.npz")[case.name]
    assert hashlib.sha256(there.tobytes()).hexdigest() == recorded["result"]
    difference = (values(here) - values(there)).abs()
    beyond = difference > difference_allowed(problems)
    assert not beyond.any(), f"{int(beyond.sum())} elements, the worst by {float(difference.max())}"
    assert float((here != there).mean()) <= CHANGED


@pytest.mark.parametrize("case", [case for case in CASES if case.exact], ids=lambda case: case.name)
def test_integer_operands_leave_no_choice(case: Case) -> None:
    """Every sum of magnitudes fits the 24 bits of an FP32: no order of summation can round."""
    for problem in case.problems():
        most = float((problem.x_exact.abs() @ problem.weight_exact.abs().T).max())
        assert most <= 2**24
        assert bool((problem.x_exact == problem.x_exact.round()).all())
        assert bool((problem.weight_exact == problem.weight_exact.round()).all())
