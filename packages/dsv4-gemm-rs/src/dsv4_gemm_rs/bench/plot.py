# SPDX-License-Identifier: Apache-2.0
"""Latency by M, one line per case, both axes logarithmic."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4_symm_mem.errors import UnsupportedError

from dsv4_gemm_rs.bench.report import Report, exchange_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches.

    Raises:
        UnsupportedError: matplotlib is not installed; says how to get it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError("plots need matplotlib: pip install 'dsv4-gemm-rs[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def plot(report: Report, path: Path) -> None:
    """Draw `report` into an image file whose suffix says the format.

    Raises:
        UnsupportedError: matplotlib is not installed; says how to get it.
    """
    lines: dict[str, list[tuple[int, float, float, float]]] = defaultdict(list)
    for row in report.rows:
        lines[row["case"]].append((row["m"], row["median_us"], row["p10_us"], row["p90_us"]))
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    for case, points in lines.items():
        m, median, low, high = zip(*sorted(points), strict=True)
        (line,) = axes.plot(m, median, marker="o", markersize=4, label=case)
        axes.fill_between(m, low, high, alpha=0.15, color=line.get_color())
    floors = sorted({(row["m"], row["floor_us"]) for row in report.rows if row["floor_us"] is not None})
    if floors:
        m, limit = zip(*floors, strict=True)
        axes.plot(m, limit, color="black", linestyle="--", linewidth=1, label="physical limit")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tokens = sorted({row["m"] for row in report.rows})
    axes.set_xticks(tokens, [str(m) for m in tokens])
    axes.set_xlabel("tokens M")
    axes.set_ylabel("time per call, µs (median; band p10 to p90)")
    machine = report.machine
    shape = report.rows[0] if report.rows else {"n": "?", "k": "?", "kind": "?"}
    axes.set_title(
        f"{machine['device']}, {machine['ranks']} ranks ({machine['ranks_are']})\n"
        f"N={shape['n']}, K/rank={shape['k']}, {shape['kind']}, {exchange_of(report)}",
        fontsize=10,
    )
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
