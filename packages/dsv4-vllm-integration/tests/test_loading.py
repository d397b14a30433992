# SPDX-License-Identifier: Apache-2.0
"""vLLM's real plugin loading: fresh processes, `VLLM_PLUGINS`, and nothing changed while no switch is set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from vllm_ranks import run_ranks
from vllm_scenarios import ask_stock, load, load_only

pytestmark = pytest.mark.vllm

UNSET = {"gemm_rs": "unset", "gemm_ar": "unset", "mhc": "unset"}
ARMED = {"gemm_rs": "armed", "gemm_ar": "armed", "mhc": "armed"}
ON = {"VLLM_DSV41_GEMM_RS": "1", "VLLM_DSV41_GEMM_AR": "1", "VLLM_DSV41_MHC": "1"}

FRESH = """
import json, sys, time
from vllm.plugins import load_general_plugins
modules = set(sys.modules)
start = time.perf_counter()
load_general_plugins()
seconds = time.perf_counter() - start
import torch
heavy = ("vllm.models", "vllm.model_executor", "cutlass", "tilelang")
heavy += ("dsv4_gemm_rs", "dsv4_mhc", "dsv4_symm_mem")
print(json.dumps({
    "seconds": seconds,
    "imported": sorted(name for name in set(sys.modules) - modules if name.startswith(heavy)),
    "cuda": torch.cuda.is_initialized(),
}))
from vllm.models.deepseek_v41.nvidia import dspark, model
print(json.dumps({
    "gate": hasattr(model.maybe_init_gemm_rs, "dsv4_stock"),
    "draft": dspark.maybe_init_gemm_rs is model.maybe_init_gemm_rs,
    "mhc": hasattr(model.mhc_post_tilelang, "dsv4_stock"),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def test_vllm_finds_the_entry_point() -> None:
    found = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert found["dsv4"] == "dsv4_vllm_integration.plugin:register"


def test_a_fresh_process_pays_nothing_and_is_ready() -> None:
    environment = os.environ | ON | {"VLLM_PLUGINS": "dsv4"}
    command = [sys.executable, "-c", FRESH]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    before, after = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert before["imported"] == []
    assert not before["cuda"]
    # Mostly reading the metadata of installed distributions, which vLLM does.
    assert before["seconds"] < 2
    assert after == {"gate": True, "draft": True, "mhc": True, "cuda": False}


def test_a_spawned_process_is_armed_and_light() -> None:
    environment = ON | {"VLLM_PLUGINS": "dsv4"}
    assert run_ranks(load_only, 1, environment=environment, method="spawn") == [(ARMED, [])]


def test_without_switches_nothing_changes() -> None:
    assert run_ranks(load, 1) == [(UNSET, True)]


def test_switches_that_say_no_are_no_unknown_variables() -> None:
    environment = dict.fromkeys(ON, "0")
    ((states, _),) = run_ranks(load, 1, environment=environment)
    assert states == UNSET


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [
        (None, ARMED),
        ("dsv4", ARMED),
        ("lora_filesystem_resolver,dsv4", ARMED),
        ("lora_filesystem_resolver", UNSET),
        ("", UNSET),
    ],
)
def test_vllm_plugins_is_honoured(plugins: str | None, expected: dict[str, str]) -> None:
    environment = ON if plugins is None else ON | {"VLLM_PLUGINS": plugins}
    ((states, unchanged),) = run_ranks(load, 1, environment=environment)
    assert states == expected
    assert unchanged is (expected == UNSET)


def test_stock_s_own_switch_keeps_its_meaning() -> None:
    environment = ON | {"VLLM_ENABLE_GEMM_RS": "1", "VLLM_PLUGINS": "dsv4"}
    for answers, asked in run_ranks(ask_stock, 2, environment=environment):
        assert answers == [True, True, True, True]
        # V4.1 where ours declined, and Kimi-K3 before and after ours is on.
        assert asked == [(128, False), (128, False), (192, False)]
