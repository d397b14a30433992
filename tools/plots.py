# SPDX-License-Identifier: Apache-2.0
"""Draws the plots of docs/results anew from the result files, beside which they lie.

Run `python -m tools.plots` where a benchmark ran on a machine without matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv4_gemm_rs.bench.link.results import plot as plot_link
from dsv4_gemm_rs.bench.plot import plot as plot_latency
from dsv4_gemm_rs.bench.report import Report
from dsv4_symm_mem.errors import UnsupportedError

from tools.workspace import RESULTS

Plot = Callable[[Report, Path], None]


def plot_of(result: dict[str, Any]) -> Plot | None:
    """What draws a result; None where it is a table only."""
    row = result["rows"][0]
    if "measure" in row:
        return plot_link if result["name"] == "link" else None
    return plot_latency if "case" in row else None


def main() -> int:
    """Draw all of them; 1 where matplotlib is not installed."""
    for path in sorted(RESULTS.glob("*.json")):
        draw = plot_of(json.loads(path.read_text(encoding="utf-8")))
        if draw is not None:
            try:
                draw(Report.read(path), path.with_suffix(".png"))
            except UnsupportedError as error:
                print(error, file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
