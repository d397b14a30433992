# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33.0's own gate, decoder layer, row-parallel layer and warm-up with our all-reduce, on CPU ranks."""

from __future__ import annotations

from typing import Any

import all_reduce_scenarios as scenarios
import pytest
import torch
from dsv4_gemm_rs.reference import gemm_reduce_scatter, tolerance
from vllm_operands import KINDS, exact_operands, tensor
from vllm_ranks import run_ranks
from vllm_scenarios import N

pytestmark = pytest.mark.vllm

ON = {
    "VLLM_DSV41_GEMM_AR": "1",
    "VLLM_DSV41_GEMM_RS_MIN_TOKENS": "3",
    "DSV4_GEMM_RS_PATH": "host",
    "VLLM_PLUGINS": "dsv4",
}
TOKENS = [1, 2, 3, 5, 130, 256, 259]
ROUNDING = 2.0**-9
"""Of BF16: half a unit in the last of 8 digits."""


def allowed_between(xs: list[torch.Tensor], ws: list[torch.Tensor]) -> torch.Tensor:
    """How far stock's result and ours may lie apart, for each element.

    Stock rounds P partials and P - 1 sums, ours the partials and one sum; each rounds by at most 2^-9 of what
    is bounded by the partials' sizes. The products' own FP32 sums add K 2^-24 of the terms' sizes, and 2 %
    are for products of these.
    """
    partials = sum((x @ w.T).abs() for x, w in zip(xs, ws, strict=True))
    terms = sum(x.abs() @ w.abs().T for x, w in zip(xs, ws, strict=True))
    assert isinstance(partials, torch.Tensor)
    assert isinstance(terms, torch.Tensor)
    bound: torch.Tensor = 1.02 * (
        (2 * len(xs) + 1) * ROUNDING * partials + 2 * xs[0].shape[1] * 2.0**-24 * terms
    )
    return bound


@pytest.mark.parametrize(
    ("kind", "world_size"), [(kind, 2) for kind in KINDS] + [(KINDS[1], 3), (KINDS[3], 3), ("bf16", 4)]
)
def test_projection_is_what_vllm_computes(kind: str, world_size: int) -> None:
    ranks = run_ranks(scenarios.project, world_size, kind, TOKENS, 11, environment=ON)
    fused_calls = 0
    for load in (11, 61):
        for m in TOKENS:
            xs, ws = exact_operands(kind, m, load, world_size)
            exact = torch.cat(gemm_reduce_scatter(xs, ws))[:m]
            for name in (f"{load} {m}", f"{load} {m} quantised"):
                if name not in ranks[0]:
                    continue
                fused = 3 <= m <= 256
                fused_calls += fused
                everywhere = [tuple(map(tensor, results[name])) for results in ranks]
                for ours, stock in everywhere:
                    assert ours.shape == stock.shape == (m, N)
                    assert ours.dtype == torch.bfloat16
                    assert ours.is_contiguous()
                    if not fused:
                        # vLLM's own way, and its own rounding.
                        assert torch.equal(ours, stock)
                        continue
                    assert torch.equal(ours, everywhere[0][0])
                    assert float((ours.double() - exact).abs().max()) <= tolerance(xs, ws)
                    apart = (ours.double() - stock.double()).abs()
                    assert bool((apart <= allowed_between(xs, ws)).all())
    for results in ranks:
        assert results["calls"] == {"host": fused_calls}
        assert len(set(results["addresses"])) == 1
        assert results["quantizes"] is kind.startswith("FlashInfer")
    said = [line for results in ranks for line in results["lines"] if "gemm_ar on" in line]
    assert len(said) == 1
    assert f"host for 3 to 256 tokens, TP {world_size}, N {N}" in said[0]
    assert said[0].endswith("VLLM_DSV41_GEMM_AR=0 turns it off")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_ubatching": True}, "ubatching"),
        ({"lora_config": object()}, "LoRA"),
        ({"enable_sleep_mode": True}, "sleep mode"),
        ({"max_num_batched_tokens": 2}, "at most 2 tokens"),
        ({"sequence_parallel": True}, "ends in a reduce-scatter; VLLM_DSV41_GEMM_RS=1 is for that"),
    ],
)
def test_odd_settings_leave_vllm_as_it_is(changes: dict[str, Any], reason: str) -> None:
    answers = run_ranks(scenarios.decline, 2, changes, "", environment=ON)
    assert [off for off, _ in answers] == [True, True]
    assert [sum(reason in line for line in lines) for _, lines in answers] == [1, 0]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("obstacle", "rank 1: RuntimeError: injected"),
        ("facts", "rank 1: RuntimeError: injected"),
        ("memory", "symmetric memory could not be mapped"),
        ("install", "rank 1: RuntimeError: injected"),
        ("half installed", "rank 1: RuntimeError: injected"),
        ("constructor", "found (self, vllm_config, prefix, topk_indices_buffer, more=)"),
        ("folds", "folds this all-reduce into its hyper-connection kernel"),
    ],
)
def test_one_rank_s_fault_leaves_all_ranks_stock(fault: str, reason: str) -> None:
    answers = run_ranks(scenarios.decline, 2, {}, fault, environment=ON | {"DSV4_GEMM_RS_DEADLINE": "5"})
    assert [off for off, _ in answers] == [True, True]
    assert any(reason in line for line in answers[0][1]), answers


@pytest.mark.parametrize("step", ["inspect", "follow", "prepare", "refresh", "warm_up", "call"])
def test_later_faults_give_the_layer_back(step: str) -> None:
    answers = run_ranks(scenarios.fail_later, 2, step, environment=ON)
    assert [equal for equal, _ in answers] == [[True, True]] * 2
    assert any("gemm_ar: a" in line and "injected" in line for line in answers[0][1]), answers


def test_a_lost_peer_is_an_error() -> None:
    environment = ON | {"DSV4_GEMM_RS_DEADLINE": "1"}
    assert run_ranks(scenarios.lose_peer, 2, environment=environment) == ["PeerTimeoutError", "left"]


def test_ranks_agree_within_their_tensor_parallel_group() -> None:
    answers = run_ranks(scenarios.one_group_of_two, 4, environment=ON, tensor_parallel=2)
    assert [answer[0] for answer in answers] == [True, True, False, False]
    assert all(difference < 0.5 and calls == {"host": 1} for _, difference, calls in answers[:2])
    assert any("rank 1: RuntimeError: injected" in line for line in answers[2][1])


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"), [(True, (True, "on", "off")), (False, (False, "off", "on"))]
)
def test_of_both_features_the_one_that_fits_is_on(sequence_parallel: bool, expected: Any) -> None:
    environment = ON | {"VLLM_DSV41_GEMM_RS": "1"}
    assert run_ranks(scenarios.both, 2, sequence_parallel, environment=environment) == [expected] * 2


def test_only_layers_that_reduce_are_followed() -> None:
    for followed, lines in run_ranks(scenarios.folded_layers, 2, environment=ON):
        assert followed == [True, False, False, False], lines


@pytest.mark.parametrize("value", ["", "0"])
def test_without_the_switch_nothing_changes(value: str) -> None:
    environment = ON | {"VLLM_DSV41_GEMM_AR": value}
    assert run_ranks(scenarios.untouched, 2, environment=environment) == [(False, None, [], True, True)] * 2
