# SPDX-License-Identifier: Apache-2.0
"""The benchmark's cases where owners read sums through multicast, in the PTX emulator: right, and labelled.

Nothing is timed here. Every case is performed once, and what it leaves behind is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from dsv4_gemm_rs import WeightKind
from dsv4_gemm_rs.bench.cases import Case, cases, create_setups
from dsv4_gemm_rs.bench.report import Report
from dsv4_gemm_rs.bench.run import close_all, run_benchmark
from dsv4_gemm_rs.bench.targets import targets
from dsv4_gemm_rs.cli import bench
from dsv4_gemm_rs.dispatch import Exchange, Problem
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig, Operand
from dsv4_gemm_rs.reference import allowed_error, gemm_reduce_scatter, rounded, worst_error
from dsv4_symm_mem import VirtualGroup
from dsv4_symm_mem.errors import UnsupportedError
from dsv4_symm_mem.protocol.layout import Strategy
from gemm_rs_support import problems_for

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

SIZE, M, N, K = 2, 131, 64, 128
SHAPE: dict[str, Any] = {"m": M, "n": N, "k": K, "kind": WeightKind.MXFP8, "count": 1, "path": None}


@pytest.mark.parametrize("exchange", list(Strategy))
def test_every_case_is_right(exchange: Strategy, emulator: Callable[..., Any]) -> None:
    emulation = emulator(SIZE, arch="sm_100a")
    group = VirtualGroup(SIZE, emulation=emulation)
    tile = KernelConfig(Operand.MXFP8, 64, strategy=exchange)
    problems = problems_for(SIZE, M, N, K, WeightKind.MXFP8)
    xs, weights = [p.x_exact for p in problems], [p.weight_exact for p in problems]
    exact = gemm_reduce_scatter(xs, weights)
    allowed = allowed_error(worst_error(rounded(xs, weights, multicast=True), exact))
    with mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=tile):
        setups = create_setups(group, **SHAPE, exchange=exchange)
        machine = setups[0].workspaces[0].machine
        decided = {}
        for case in cases(setups, Problem(M, N, K, WeightKind.MXFP8), machine):
            decided[case.name] = case.decision.exchange
            epochs = perform(case, setups, group, emulation)
            if case.name in ("fused", "dispatched"):
                assert worst_error([setup.outs[0] for setup in setups.values()], exact) <= allowed
                assert epochs == 1
            if case.name == "fused-all-reduce":
                whole = torch.cat(exact)[:M]
                assert all(worst_error([setup.wholes[0]], [whole]) <= allowed for setup in setups.values())
                # Through multicast it is one call of the exchange, pushed it is two.
                assert epochs == (1 if exchange is Strategy.MULTICAST else 2)
        close_all(group, setups)
    expected = Exchange.MULTICAST if exchange is Strategy.MULTICAST else Exchange.PUSH
    ours = ("gemm-ours", "fused", "fused-all-reduce", "dispatched")
    assert {decided[name] for name in ours} == {expected}
    assert decided["reduce-scatter"] is decided["unfused-call"] is Exchange.PUSH_AFTER


def perform(case: Case, setups: dict[int, Any], group: VirtualGroup, emulation: Any) -> int:
    """Perform a case once on every rank; returns by how many calls the exchange went on."""

    def epoch() -> int:
        return int(setups[0].workspaces[0].exchange.epoch)

    before = epoch()
    for setup in setups.values():
        setup.outs[0].fill_(float("nan"))
        setup.wholes[0].fill_(float("nan"))
    for phase in case.phases:
        for rank in group.ranks:
            phase.step(rank, 0)
    emulation.run()
    for setup in setups.values():
        setup.workspaces[0].check()
    return epoch() - before


def test_rows_and_checks_say_how_was_exchanged(emulator: Callable[..., Any]) -> None:
    emulation = emulator(SIZE, arch="sm_100a")
    group = VirtualGroup(SIZE, emulation=emulation)
    tile = KernelConfig(Operand.MXFP8, 64, strategy=Strategy.MULTICAST)
    options: dict[str, Any] = {"tokens": [M], "n": N, "k": K, "kind": WeightKind.MXFP8, "workspaces": 1}
    # Only launching is timed; what was launched is executed afterwards.
    with mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=tile):
        report = run_benchmark(group, **options, samples=1, exchange=Strategy.MULTICAST)
    emulation.run()
    assert {row["exchange"] for row in report.rows} == {"multicast"}
    sent = {row["case"]: row["wire_bytes"] for row in report.rows}
    assert sent["fused"] == 2 * M * N == SIZE * sent["reduce-scatter"]
    assert all(check.name.startswith(f"M={M}, multicast: ") for check in report.checks)
    assert bench.table(report).startswith("exchange: multicast\n")


def test_checks_are_named_apart() -> None:
    medians = {"dispatched": 1.0, "unfused-call": 2.0}
    names = [
        targets(64, 128, medians, on_gpu=False, virtual=True, exchange=exchange)[0].name
        for exchange in Strategy
    ]
    assert names == ["M=64: dispatched / unfused-call", "M=64, multicast: dispatched / unfused-call"]


def test_results_from_before_there_was_a_choice_are_pushed() -> None:
    old = Report("kernel", {}, {}, "bench", "2026-11-30", [{"case": "fused", "m": 1, "median_us": 2.0}])
    assert bench.table(old).startswith("exchange: push\n")


def test_ranks_that_share_a_device_are_refused(emulator: Callable[..., Any]) -> None:
    group = VirtualGroup(SIZE, emulation=emulator(SIZE))
    with pytest.raises(UnsupportedError, match="no kernel for sm_90 that reads through multicast"):
        create_setups(group, **SHAPE, exchange=Strategy.MULTICAST)
