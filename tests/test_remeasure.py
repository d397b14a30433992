# SPDX-License-Identifier: Apache-2.0
"""Which published results a machine can measure again, and what is run for it."""

from __future__ import annotations

import sys

import pytest

from tools.remeasure import gpus_of, program, read, runnable
from tools.workspace import RESULTS

PUBLISHED = read(RESULTS)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_whatever_was_measured_on_a_gpu_can_be_run_again(name: str) -> None:
    result = PUBLISHED[name]
    if gpus_of(result["machine"]):
        words = program(result["command"])
        assert words[:2] == [sys.executable, "-m"]
        assert words[words.index("--output") + 1] == f"docs/results/{name}.json"


def test_a_machine_takes_what_it_has_gpus_for() -> None:
    assert runnable(PUBLISHED, None, 0) == []
    assert runnable(PUBLISHED, 100, 8) == []
    one, two = runnable(PUBLISHED, 90, 1), runnable(PUBLISHED, 90, 2)
    assert "h200_virtual_tp8" in one
    assert "h200_mhc" in one
    assert not {"h200_tp2_k2048", "h200_link"} & set(one)
    assert {"h200_tp2_k2048", "h200_link", *one} <= set(two)
    assert "sm100_static" not in two


def test_other_commands_are_refused() -> None:
    with pytest.raises(ValueError, match="rm"):
        program("rm -r docs")
