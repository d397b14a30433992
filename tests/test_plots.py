# SPDX-License-Identifier: Apache-2.0
"""Which published results have a plot, and that it can be drawn from the file."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from dsv4_gemm_rs.bench.report import Report

from tools.plots import plot_of
from tools.workspace import RESULTS

RESULT_FILES = sorted(RESULTS.glob("*.json"))


def test_a_result_has_the_plot_that_belongs_to_it() -> None:
    drawn = {path.stem for path in RESULT_FILES if plot_of(json.loads(path.read_text(encoding="utf-8")))}
    assert drawn == {path.stem for path in RESULTS.glob("*.png")}


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("path", RESULT_FILES, ids=lambda path: path.stem)
def test_plots_come_from_the_files(path: Path, tmp_path: Path) -> None:
    draw = plot_of(json.loads(path.read_text(encoding="utf-8")))
    if draw is not None:
        draw(Report.read(path), tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
