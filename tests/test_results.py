# SPDX-License-Identifier: Apache-2.0
"""What the documentation quotes is what the result files say, and those are complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dsv4_gemm_rs.bench.report import Report
from dsv4_gemm_rs.model.report import all_rows

from tools.mutants_page import PATTERN as MUTANTS
from tools.results_table import PAGES, render, updated
from tools.thresholds import TABLE, table
from tools.workspace import RESULTS

FIELDS = {"name", "machine", "versions", "command", "date", "rows", "checks", "schema"}


def test_the_pages_are_up_to_date() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert [updated(page) for page in pages] == pages, "run python -m tools.results_table"
    measured = [path for path in RESULTS.glob("*.json") if not path.match(MUTANTS)]
    assert sum(page.count("<!-- results:") for page in pages) == len(measured)


def test_the_thresholds_follow_from_the_results() -> None:
    assert TABLE.read_text(encoding="utf-8") == table(), "run python -m tools.thresholds"


def test_the_model_is_what_the_code_computes() -> None:
    result = json.loads((RESULTS / "b200_model.json").read_text(encoding="utf-8"))
    measured = [Report.read(path) for path in sorted(RESULTS.glob("h200_tp2_*.json"))]
    for now, published in zip(all_rows(measured), result["rows"], strict=True):
        assert now == pytest.approx(published), f"run {result['command']}"


def test_what_was_measured_on_b200s_stands_beside_the_prediction() -> None:
    result = json.loads((RESULTS / "b200_model.json").read_text(encoding="utf-8"))
    assert "nothing of it is measured" in render(result)
    rows = [row for row in result["rows"] if row["table"] == "prediction"]
    rows[0]["measured_push_us"], rows[1]["measured_multicast_us"] = 12.25, 34.5
    text = render(result)
    assert "nothing of it is measured" not in text
    assert "| **ours** | measured | ours, multicast | multicast, measured | published kernel |" in text
    assert f"| {rows[0]['ours_us']:.1f} | 12.2 | {rows[0]['multicast_us']:.1f} |  |" in text
    assert f"| {rows[1]['ours_us']:.1f} |  | {rows[1]['multicast_us']:.1f} | 34.5 |" in text


def test_a_benchmark_through_multicast_says_so() -> None:
    result = json.loads((RESULTS / "h200_tp2_k2048.json").read_text(encoding="utf-8"))
    assert "multicast" not in render(result)
    for row in result["rows"]:
        row["exchange"] = "multicast"
    assert "Fused kernels exchange through multicast." in render(result)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_are_complete(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert set(result) == FIELDS
    assert result["machine"]["device"]
    assert path.name in result["command"]
    for check in result["checks"]:
        assert set(check) == {"name", "value", "target", "holds"}
