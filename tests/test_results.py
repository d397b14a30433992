# SPDX-License-Identifier: Apache-2.0
"""What docs/performance.md quotes is what the result files say, and those are complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.mutants_page import PATTERN as MUTANTS
from tools.results_table import PAGE, RESULTS, updated

FIELDS = {"name", "machine", "versions", "command", "date", "rows", "checks", "schema"}


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert updated(page) == page, "run python -m tools.results_table"
    measured = [path for path in RESULTS.glob("*.json") if not path.match(MUTANTS)]
    assert page.count("<!-- results:") == len(measured)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_are_complete(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert set(result) == FIELDS
    assert result["machine"]["device"]
    assert path.name in result["command"]
    for check in result["checks"]:
        assert set(check) == {"name", "value", "target", "holds"}
