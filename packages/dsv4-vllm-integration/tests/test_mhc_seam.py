# SPDX-License-Identifier: Apache-2.0
"""vLLM's hyper-connection functions with ours behind them, against vLLM's torch references."""

from __future__ import annotations

import pytest
from mhc_scenarios import hyper_connections
from vllm_ranks import run_ranks

pytestmark = pytest.mark.vllm

ON = {"VLLM_DSV41_MHC": "1", "VLLM_PLUGINS": "dsv4"}
ALLOWED = 0.07
"""One BF16 rounding of the largest values here, which are below 16."""


def test_results_are_vllm_s() -> None:
    (differences, lines), (other, _) = run_ranks(hyper_connections, 2, "", environment=ON)
    assert differences == other
    assert len(differences) == 10
    for name, values in differences.items():
        assert max(values) <= ALLOWED, (name, values)
    assert sum("mhc on" in line for line in lines) == 2


def test_a_kernel_that_fails_is_not_called_again() -> None:
    (found, lines), _ = run_ranks(hyper_connections, 2, "call", environment=ON)
    assert found == ["ours", "stock", "stock"]
    assert sum("mhc_post_tilelang goes back to vLLM: RuntimeError: injected" in line for line in lines) == 1


def test_a_kernel_that_is_not_loaded_in_a_capture_is_left_out_there() -> None:
    (found, lines), _ = run_ranks(hyper_connections, 2, "not compiled", environment=ON)
    assert found == ["ours", "stock", "ours"]
    assert not any("goes back" in line for line in lines)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("prepare", "rank 1: RuntimeError: injected"),
        ("signature", "mhc_post_tilelang(x, residual, post_layer_mix, comb_res_mix), found (x, residual)"),
    ],
)
def test_a_fault_leaves_all_ranks_stock(fault: str, reason: str) -> None:
    answers = run_ranks(hyper_connections, 2, fault, environment=ON)
    assert [on for on, _ in answers] == [False, False]
    assert any(reason in line for line in answers[0][1]), answers
