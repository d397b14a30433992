# SPDX-License-Identifier: Apache-2.0
"""The decision table, every row with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dsv4_gemm_rs.dispatch import Exchange, Gemm, Machine, Path, Problem, decide
from dsv4_gemm_rs.dispatch.decide import FUSED_MIN_TOKENS, least_tokens, operand_for
from dsv4_gemm_rs.dispatch.plan import plan_launch
from dsv4_gemm_rs.dispatch.thresholds import Entry, Shape
from dsv4_gemm_rs.environment import default_deadline, link_rate, requested_path
from dsv4_gemm_rs.kernels.families import Operand, members, operand_of
from dsv4_gemm_rs.weights import WeightKind
from dsv4_symm_mem.errors import ArgumentError, UnsupportedError
from dsv4_symm_mem.protocol.layout import Strategy

CPU = Machine(None, 4, False, True, False, False, 0, frozenset())
HOPPER = Machine(90, 4, False, True, True, False, 132, frozenset())
BLACKWELL = replace(HOPPER, arch=100, multicast=True)
MXFP8 = Problem(1024, 5120, 2048, WeightKind.MXFP8)
BF16 = replace(MXFP8, kind=WeightKind.BF16)


@pytest.mark.parametrize(
    ("machine", "problem", "path", "gemm", "exchange", "reason"),
    [
        (CPU, MXFP8, Path.HOST, Gemm.HOST, Exchange.HOST_PUSH, "fused kernels need a GPU"),
        (replace(CPU, world_size=1), MXFP8, Path.HOST, Gemm.HOST, Exchange.NONE, "need a GPU"),
        (
            replace(CPU, symmetric=False, process_group=True),
            MXFP8,
            Path.UNFUSED,
            Gemm.BF16,
            Exchange.ALL_TO_ALL,
            "symmetric memory could not be mapped",
        ),
        (HOPPER, MXFP8, Path.UNFUSED, Gemm.BF16, Exchange.ALL_TO_ALL, "no fused kernel for sm_90"),
        (HOPPER, BF16, Path.UNFUSED, Gemm.BF16, Exchange.ALL_TO_ALL, "no fused kernel for sm_90"),
        (
            replace(HOPPER, process_group=False),
            MXFP8,
            Path.UNFUSED,
            Gemm.BF16,
            Exchange.HOST_PUSH,
            "no fused kernel for sm_90",
        ),
        (BLACKWELL, MXFP8, Path.UNFUSED, Gemm.SCALED_MM, Exchange.ALL_TO_ALL, "no fused kernel for sm_100"),
        (
            replace(BLACKWELL, flashinfer=True),
            MXFP8,
            Path.UNFUSED,
            Gemm.FLASHINFER,
            Exchange.ALL_TO_ALL,
            "no fused kernel for sm_100",
        ),
        (replace(BLACKWELL, flashinfer=True), BF16, Path.UNFUSED, Gemm.BF16, Exchange.ALL_TO_ALL, "sm_100"),
        (replace(HOPPER, world_size=1), MXFP8, Path.UNFUSED, Gemm.BF16, Exchange.NONE, "sm_90"),
        (
            replace(HOPPER, fused_archs=frozenset({90}), symmetric=False),
            MXFP8,
            Path.UNFUSED,
            Gemm.BF16,
            Exchange.ALL_TO_ALL,
            "symmetric memory could not be mapped",
        ),
    ],
)
def test_fallbacks_say_why(
    machine: Machine, problem: Problem, path: Path, gemm: Gemm, exchange: Exchange, reason: str
) -> None:
    decision = decide(machine, problem)
    assert (decision.path, decision.gemm, decision.exchange) == (path, gemm, exchange)
    assert decision.rejected[0].path is Path.FUSED
    assert any(reason in rejection.reason for rejection in decision.rejected)
    assert reason in str(decision)


def test_few_tokens_go_unfused_unless_fused_was_asked_for() -> None:
    machine = replace(HOPPER, fused_archs=frozenset({90}))
    few, enough = replace(MXFP8, m=FUSED_MIN_TOKENS - 1), replace(MXFP8, m=FUSED_MIN_TOKENS)
    decision = decide(machine, few)
    assert (decision.path, decision.exchange) == (Path.UNFUSED, Exchange.PUSH_AFTER)
    assert "below 128 tokens" in decision.reason
    assert decision.rejected == ()
    assert decide(machine, enough).path is Path.FUSED
    assert decide(machine, few, Path.FUSED).path is Path.FUSED


@pytest.mark.parametrize(
    ("arch", "k", "shared", "least"),
    [(90, 2048, False, 128), (90, 4096, False, 256), (90, 2048, True, 1024), (100, 8192, False, 128)],
)
def test_the_nearest_shape_measured_says_from_how_many_tokens(
    arch: int, k: int, shared: bool, least: int
) -> None:
    machine = replace(HOPPER, arch=arch, fused_archs=frozenset({arch}), shared=shared)
    paths = [decide(machine, replace(MXFP8, m=m, k=k)).path for m in (least - 1, least)]
    assert paths == [Path.UNFUSED, Path.FUSED]


def test_own_thresholds_come_before_the_packages() -> None:
    machine = replace(HOPPER, fused_archs=frozenset({90}))
    shape = Shape(90, 4, False, Operand.BF16.value, MXFP8.n, MXFP8.k)
    for least in (16, 4096, None):
        own = replace(machine, table=(Entry(shape, least, (), "a GPU", "today", "a test"),))
        assert least_tokens(own, MXFP8) == least
        fused = least is not None and least <= MXFP8.m
        decision = decide(own, MXFP8)
        assert decision.path is (Path.FUSED if fused else Path.UNFUSED)
        # What packed weights take was not measured.
        assert least_tokens(own, replace(MXFP8, packed=True)) == FUSED_MIN_TOKENS
    assert "the faster way for any number of tokens" in decision.reason


@pytest.mark.parametrize("machine", [HOPPER, BLACKWELL, replace(HOPPER, symmetric=False)])
def test_few_tokens_do_not_hide_that_there_is_no_fused_path(machine: Machine) -> None:
    decision = decide(machine, replace(MXFP8, m=1))
    assert decision.path is Path.UNFUSED
    assert decision.rejected[0].path is Path.FUSED
    assert "tokens" not in decision.reason


@pytest.mark.parametrize(("arch", "gemm"), [(90, Gemm.FUSED_SM90), (100, Gemm.FUSED_SM100)])
def test_a_fused_kernel_is_taken_where_there_is_one(arch: int, gemm: Gemm) -> None:
    decision = decide(replace(HOPPER, arch=arch, fused_archs=frozenset({90, 100})), MXFP8)
    assert (decision.path, decision.gemm, decision.exchange) == (Path.FUSED, gemm, Exchange.PUSH)
    assert decision.rejected == ()


@pytest.mark.parametrize(
    ("arch", "kind", "operand"),
    [
        (90, WeightKind.MXFP8, Operand.BF16),
        (100, WeightKind.MXFP8, Operand.MXFP8),
        (103, WeightKind.MXFP8, Operand.MXFP8),
        (100, WeightKind.BF16, Operand.BF16),
    ],
)
def test_plans_take_what_the_tensor_cores_multiply(arch: int, kind: WeightKind, operand: Operand) -> None:
    machine = replace(HOPPER, arch=arch, multiprocessors=147)
    plan = plan_launch(machine, replace(MXFP8, kind=kind, m=4096))
    assert operand_for(arch, kind) is operand_of(plan.config) is operand
    assert plan.config in members(arch, operand)
    assert plan.grid == 147 // plan.config.cluster * plan.config.cluster
    # A reduce-scatter of a product that another rank multiplies fused: equal facts, equal plan.
    assert plan == plan_launch(replace(machine, flashinfer=True), replace(MXFP8, kind=kind, m=4096))


@pytest.mark.parametrize(
    ("arch", "problem", "gemm"),
    [
        (90, MXFP8, Gemm.FUSED_SM90),
        (90, BF16, Gemm.FUSED_SM90),
        (90, replace(MXFP8, packed=True), Gemm.SM90_FP8),
        (100, MXFP8, Gemm.FUSED_SM100),
    ],
)
@pytest.mark.parametrize("m", [0, 1, 100, 8192])
@pytest.mark.parametrize("size", [1, 4])
def test_batch_invariance_keeps_to_our_kernels_and_rounds_every_partial(
    arch: int, problem: Problem, gemm: Gemm, m: int, size: int
) -> None:
    machine = replace(HOPPER, arch=arch, world_size=size, fused_archs=frozenset({90, 100}), flashinfer=True)
    machine = replace(machine, batch_invariant=True)
    for requested in (None, Path.UNFUSED):
        decision = decide(machine, replace(problem, m=m), requested)
        assert (decision.path, decision.gemm) == (Path.UNFUSED, gemm)
        assert decision.exchange is (Exchange.PUSH_AFTER if size > 1 else Exchange.NONE)
        assert decision.rejected == ()
        assert decision.capturable


@pytest.mark.parametrize(
    ("change", "requested", "why"),
    [
        ({}, Path.FUSED, "rounds all partials but the owner's"),
        ({}, Path.HOST, "PyTorch's products may depend on M"),
        ({"arch": None}, None, "no kernel for a CPU"),
        ({"arch": 89}, None, "no kernel for sm_89"),
        ({"strategy": Strategy.MULTICAST}, None, "in an order that the switch chooses"),
        ({"symmetric": False, "process_group": False}, None, "neither a process group nor symmetric memory"),
    ],
)
def test_batch_invariance_is_had_or_refused(change: dict[str, Any], requested: Path | None, why: str) -> None:
    machine = replace(HOPPER, fused_archs=frozenset({90}), batch_invariant=True)
    with pytest.raises(UnsupportedError, match=why):
        decide(replace(machine, **change), MXFP8, requested)


def test_an_emulated_gpu_has_no_library_with_block_scales() -> None:
    machine = replace(BLACKWELL, fused_archs=frozenset({100}), emulated=True)
    assert decide(machine, MXFP8).gemm is Gemm.FUSED_SM100
    assert decide(machine, MXFP8, Path.UNFUSED).gemm is Gemm.BF16


def test_one_rank_takes_the_library_but_may_ask_for_the_kernel() -> None:
    alone = replace(HOPPER, world_size=1, fused_archs=frozenset({90}))
    decision = decide(alone, MXFP8)
    assert (decision.path, decision.exchange) == (Path.UNFUSED, Exchange.NONE)
    assert "nothing to exchange" in str(decision)
    assert decide(alone, MXFP8, Path.FUSED).path is Path.FUSED


def test_the_unfused_path_uses_the_slots_where_there_is_a_kernel() -> None:
    decision = decide(replace(HOPPER, fused_archs=frozenset({90})), MXFP8, Path.UNFUSED)
    assert (decision.gemm, decision.exchange) == (Gemm.BF16, Exchange.PUSH_AFTER)
    assert decision.capturable
    assert not decide(CPU, MXFP8).capturable


def test_a_request_is_met_or_refused_never_replaced() -> None:
    assert decide(HOPPER, MXFP8, Path.HOST).path is Path.HOST
    assert decide(CPU, MXFP8, Path.UNFUSED).exchange is Exchange.HOST_PUSH
    with pytest.raises(
        UnsupportedError, match="'fused' was requested, but this version has no fused kernel for sm_90"
    ):
        decide(HOPPER, MXFP8, Path.FUSED)
    with pytest.raises(
        UnsupportedError, match="'host' was requested, but symmetric memory could not be mapped"
    ):
        decide(replace(HOPPER, symmetric=False), MXFP8, Path.HOST)
    with pytest.raises(UnsupportedError, match=r"no path: fused: .*; host: .*; unfused: there is neither"):
        decide(replace(CPU, symmetric=False), MXFP8)


def test_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, path in (("auto", None), ("", None), ("HOST", Path.HOST), (" unfused ", Path.UNFUSED)):
        monkeypatch.setenv("DSV4_GEMM_RS_PATH", value)
        assert requested_path() is path
    monkeypatch.setenv("DSV4_GEMM_RS_PATH", "fast")
    with pytest.raises(ArgumentError, match="DSV4_GEMM_RS_PATH: got 'fast'"):
        requested_path()
    assert default_deadline() == 30.0
    monkeypatch.setenv("DSV4_GEMM_RS_DEADLINE", "0.5")
    assert default_deadline() == 0.5
    for value in ("-1", "soon", "inf", "nan"):
        monkeypatch.setenv("DSV4_GEMM_RS_DEADLINE", value)
        with pytest.raises(ArgumentError, match="DSV4_GEMM_RS_DEADLINE"):
            default_deadline()
    assert link_rate() is None
    monkeypatch.setenv("DSV4_GEMM_RS_LINK_GBPS", "180")
    assert link_rate() == 180_000.0
    for value in ("-1", "fast", "nan"):
        monkeypatch.setenv("DSV4_GEMM_RS_LINK_GBPS", value)
        with pytest.raises(ArgumentError, match="DSV4_GEMM_RS_LINK_GBPS"):
            link_rate()
