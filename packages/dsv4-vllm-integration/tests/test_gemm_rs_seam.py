# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33.0's own gate, bind, projection and warm-up functions with our object, over ranks on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dsv4_gemm_rs.reference import gemm_reduce_scatter, tolerance
from vllm_operands import KINDS, exact_operands, tensor
from vllm_ranks import run_ranks
from vllm_scenarios import (
    N,
    decline,
    fail_later,
    lose_peer,
    one_group_of_two,
    project,
    read_configuration,
    without_sequence_parallelism,
)

pytestmark = pytest.mark.vllm

ON = {
    "VLLM_DSV41_GEMM_RS": "1",
    "VLLM_DSV41_GEMM_RS_MIN_TOKENS": "3",
    "DSV4_GEMM_RS_PATH": "host",
    "VLLM_PLUGINS": "dsv4",
}


@pytest.mark.parametrize(("kind", "world_size"), [(kind, 2) for kind in KINDS] + [(KINDS[1], 4), ("bf16", 3)])
def test_projection_is_what_vllm_computes(kind: str, world_size: int) -> None:
    tokens = [1, 2, 3, 5, 130, 256, 259]
    ranks = run_ranks(project, world_size, kind, tokens, 11, environment=ON)
    fused_calls = 0
    for load in (11, 61):
        for m in tokens:
            xs, ws = exact_operands(kind, m, load, world_size)
            exact = gemm_reduce_scatter(xs, ws)
            allowed = tolerance(xs, ws)
            rows = -(-m // world_size)
            for name in (f"{load} {m}", f"{load} {m} quantised"):
                if name not in ranks[0]:
                    continue
                fused_calls += 3 <= m <= 256
                for rank, results in enumerate(ranks):
                    ours, stock = map(tensor, results[name])
                    assert ours.shape == stock.shape == (rows, N)
                    assert ours.dtype == torch.bfloat16
                    assert ours.is_contiguous()
                    valid = min(max(m - rank * rows, 0), rows)
                    assert not ours[valid:].any()
                    if not 3 <= m <= 256:
                        # vLLM's own way, and its own rounding.
                        assert torch.equal(ours, stock)
                        continue
                    assert float((ours.double() - exact[rank]).abs().max()) <= allowed
    for results in ranks:
        assert results["calls"] == {"host": fused_calls}
        assert len(set(results["addresses"])) == 1
        assert results["quantizes"] is kind.startswith("FlashInfer")
    said = [line for results in ranks for line in results["lines"] if "gemm_rs on" in line]
    assert len(said) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_ubatching": True}, "ubatching"),
        ({"dtype": torch.float16}, "torch.float16"),
        ({"lora_config": object()}, "LoRA"),
        ({"enable_sleep_mode": True}, "sleep mode"),
        ({"max_num_batched_tokens": 2}, "at most 2 tokens"),
        ({"hidden_size": 96}, "no multiple of 64"),
    ],
)
def test_odd_settings_leave_vllm_as_it_is(changes: dict[str, Any], reason: str) -> None:
    answers = run_ranks(decline, 2, changes, "", environment=ON)
    assert [answer for answer, _ in answers] == [False, False]
    assert [sum(reason in line for line in lines) for _, lines in answers] == [1, 0]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("obstacle", "rank 1: RuntimeError: injected"),
        ("facts", "rank 1: RuntimeError: injected"),
        ("memory", "symmetric memory could not be mapped"),
        ("install", "rank 1: RuntimeError: injected"),
        ("signature", "GemmRsAr.apply(self, x, linear), found (self, x, linear, out=)"),
        ("name", "DeepseekV4Attention._wo_b_proj, found no such name"),
        ("threshold", "ranks differ in min_tokens: 3, 64"),
    ],
)
def test_one_rank_s_fault_leaves_all_ranks_stock(fault: str, reason: str) -> None:
    environment = ON | {"DSV4_GEMM_RS_DEADLINE": "5"}
    answers = run_ranks(decline, 2, {}, fault, environment=environment)
    assert [answer for answer, _ in answers] == [False, False]
    assert any(reason in line for line in answers[0][1]), answers


@pytest.mark.parametrize("step", ["inspect", "prepare", "refresh", "warm_up", "call"])
def test_later_faults_give_the_layer_back(step: str) -> None:
    for equal, lines in run_ranks(fail_later, 2, step, environment=ON):
        assert equal == [True, True]
        assert step == "inspect" or not any("Traceback" in line for line in lines)


def test_a_lost_peer_is_an_error() -> None:
    assert run_ranks(lose_peer, 2, environment=ON | {"DSV4_GEMM_RS_DEADLINE": "1"}) == [
        "PeerTimeoutError",
        "left",
    ]


def test_ranks_agree_within_their_tensor_parallel_group() -> None:
    answers = run_ranks(one_group_of_two, 4, environment=ON, tensor_parallel=2)
    assert [answer for answer, _ in answers] == [True, True, False, False]
    assert all(difference < 0.5 for _, difference in answers[:2])
    assert any("rank 1: RuntimeError: injected" in line for line in answers[2][1])


def test_without_sequence_parallelism() -> None:
    answers = run_ranks(without_sequence_parallelism, 2, environment=ON)
    assert [answer for answer, _ in answers] == [False, False]
    said = [line for _, lines in answers for line in lines if "without sequence parallelism (TP 2" in line]
    assert len(said) == 1


def test_what_the_gate_reads_is_there_in_vllm_s_configuration() -> None:
    assert run_ranks(read_configuration, 1) == [[]]


def test_more_ranks_than_supported() -> None:
    from dsv4_vllm_integration.seams.enabling import obstacle
    from dsv4_vllm_integration.switches import Settings
    from vllm_layers import configuration

    assert obstacle(configuration(), 16, Settings()) == "TP 16, expected 2 to 8"


def test_without_a_fused_path_it_stays_off() -> None:
    environment = {name: value for name, value in ON.items() if name != "DSV4_GEMM_RS_PATH"}
    answers = run_ranks(decline, 2, {}, "", environment=environment)
    assert [answer for answer, _ in answers] == [False, False]
    assert any("fused kernels need a GPU" in line for line in answers[0][1])
