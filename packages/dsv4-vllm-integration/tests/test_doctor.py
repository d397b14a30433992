# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdicts for constructed observations, and its command here."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from dsv4_vllm_integration.cli import main
from dsv4_vllm_integration.doctor import Observation, findings
from dsv4_vllm_integration.switches import Feature, Settings

GOOD = Observation(
    settings=Settings(frozenset(Feature), 128),
    versions={"vllm": "0.33.0", "tilelang": "0.1.12"},
    obstacles={},
    archs=(90, 90),
    fused_archs=(90,),
    workspace_bytes=160 * 2**20,
)


def verdicts(seen: Observation) -> dict[str, tuple[str, str, str]]:
    return {entry.feature: (entry.verdict, entry.reason, entry.remedy) for entry in findings(seen)}


def test_a_machine_as_it_should_be() -> None:
    found = verdicts(GOOD)
    assert found["gemm_rs"][0] == found["mhc"][0] == "depends"
    assert "160 MiB" in found["gemm_rs"][1]
    assert "sequence parallelism" in found["gemm_rs"][2]
    assert found["gemm_ar"][:2] == found["gemm_rs"][:2]
    assert "without sequence parallelism" in found["gemm_ar"][2]


@pytest.mark.parametrize(
    ("change", "feature", "reason", "remedy"),
    [
        ({"settings": Settings()}, "gemm_rs", "VLLM_DSV41_GEMM_RS is not 1", "export VLLM_DSV41_GEMM_RS=1"),
        ({"versions": {"vllm": "0.32.0"}}, "mhc", "found 0.32.0", "install vLLM 0.33.x"),
        ({"versions": {}}, "gemm_rs", "vLLM is not installed", "install vLLM 0.33.x"),
        ({"settings": Settings()}, "gemm_ar", "VLLM_DSV41_GEMM_AR is not 1", "export VLLM_DSV41_GEMM_AR=1"),
        ({"archs": (80,)}, "gemm_ar", "no fused kernel for sm_80, only for sm_90", ""),
        ({"archs": ()}, "gemm_rs", "sees no GPU", "where the server runs"),
        ({"archs": (90, 120)}, "gemm_rs", "no fused kernel for sm_120, only for sm_90", ""),
        ({"versions": {"vllm": "0.33.0"}}, "mhc", "TileLang is not installed", "pip install tilelang"),
        ({"obstacles": {Feature.MHC: "expected f(a), found (b)"}}, "mhc", "found (b)", "use a release"),
    ],
)
def test_what_keeps_a_feature_off(change: dict[str, object], feature: str, reason: str, remedy: str) -> None:
    verdict, found_reason, found_remedy = verdicts(replace(GOOD, **change))[feature]  # type: ignore[arg-type]
    assert verdict == "off"
    assert reason in found_reason
    assert remedy in found_remedy


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [entry["feature"] for entry in shown["features"]] == [feature.value for feature in Feature]
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "VLLM_DSV41_GEMM_RS_MIN_TOKENS (default 128)" in text


@pytest.mark.vllm
def test_the_installed_vllm_has_the_signatures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    reasons = {entry["feature"]: entry["reason"] for entry in shown["features"]}
    assert not any("expected" in reason or "imported" in reason for reason in reasons.values()), reasons
