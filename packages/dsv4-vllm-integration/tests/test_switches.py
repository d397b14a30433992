# SPDX-License-Identifier: Apache-2.0
"""The table of environment variables, and what is made of their values."""

from __future__ import annotations

from pathlib import Path

import pytest
from dsv4_vllm_integration.switches import SWITCHES, Feature, read


def test_nothing_is_on_by_default() -> None:
    settings = read({})
    assert settings.features == frozenset()
    assert settings.min_tokens == 128
    assert settings.complaints == ()


@pytest.mark.parametrize("value", ["1", "true", "ON", " yes "])
def test_on(value: str) -> None:
    assert read({"VLLM_DSV41_GEMM_RS": value}).features == {Feature.GEMM_RS}


@pytest.mark.parametrize("value", ["", "0", "false", "Off", "no"])
def test_off(value: str) -> None:
    settings = read({"VLLM_DSV41_MHC": value})
    assert settings.features == frozenset()
    assert settings.complaints == ()


def test_what_is_not_understood_is_off_and_said() -> None:
    settings = read({"VLLM_DSV41_MHC": "2", "VLLM_DSV41_GEMM_RS_MIN_TOKENS": "-5"})
    assert settings.features == frozenset()
    assert settings.min_tokens == 128
    assert [text.split("=")[0] for text in settings.complaints] == [
        "VLLM_DSV41_MHC",
        "VLLM_DSV41_GEMM_RS_MIN_TOKENS",
    ]


def test_threshold() -> None:
    assert read({"VLLM_DSV41_GEMM_RS_MIN_TOKENS": "1024"}).min_tokens == 1024


def test_defaults_in_the_table_are_what_unset_means() -> None:
    assert read({switch.name: switch.default for switch in SWITCHES}) == read({})


@pytest.mark.parametrize("page", ["README.md", "../../docs/vllm.md"])
def test_the_documented_table_is_the_table(page: str) -> None:
    text = (Path(__file__).parent.parent / page).read_text(encoding="utf-8")
    for switch in SWITCHES:
        assert f"| `{switch.name}` | {switch.default} | " in text
    listed = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `VLLM_")}
    assert listed == {switch.name for switch in SWITCHES}
