# SPDX-License-Identifier: Apache-2.0
"""The page of mutants is what the result files say, and every mutant in it is accounted for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.mutants_page import PAGE, PATTERN, RESULTS, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.mutants_page"


@pytest.mark.parametrize("path", sorted(RESULTS.glob(PATTERN)), ids=lambda path: path.stem)
def test_every_mutant_is_noticed_or_argued(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = result["rows"]
    assert rows
    if not result["schema"]["findings"]:
        # What was found in the original may hide a mutant.
        assert [row["mutant"] for row in rows if row["status"] in ("survived", "not reached")] == []
    assert all(row["argument"] for row in rows if row["status"] == "equivalent")
