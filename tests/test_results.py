# SPDX-License-Identifier: Apache-2.0
"""What the documentation quotes is what the result files say, and those are complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dsv4_gemm_rs.bench.report import Report
from dsv4_gemm_rs.model.report import all_rows

from tools.mutants_page import PATTERN as MUTANTS
from tools.results_table import PAGES, RESULTS, updated

FIELDS = {"name", "machine", "versions", "command", "date", "rows", "checks", "schema"}


def test_the_pages_are_up_to_date() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert [updated(page) for page in pages] == pages, "run python -m tools.results_table"
    measured = [path for path in RESULTS.glob("*.json") if not path.match(MUTANTS)]
    assert sum(page.count("<!-- results:") for page in pages) == len(measured)


def test_the_model_is_what_the_code_computes() -> None:
    result = json.loads((RESULTS / "b200_model.json").read_text(encoding="utf-8"))
    measured = [Report.read(path) for path in sorted(RESULTS.glob("h200_tp2_*.json"))]
    for now, published in zip(all_rows(measured), result["rows"], strict=True):
        assert now == pytest.approx(published), f"run {result['command']}"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_are_complete(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert set(result) == FIELDS
    assert result["machine"]["device"]
    assert path.name in result["command"]
    for check in result["checks"]:
        assert set(check) == {"name", "value", "target", "holds"}
