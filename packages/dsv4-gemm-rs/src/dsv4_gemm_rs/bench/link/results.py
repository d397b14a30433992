# SPDX-License-Identifier: Apache-2.0
"""What the link's figures say: the text table, the claims that are checked, and the plot.

The plot shows the largest message only: the smaller one differs by the cost of a launch, which the table
shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4_gemm_rs.bench.limits import KNOWN
from dsv4_gemm_rs.bench.link.cases import Direction
from dsv4_gemm_rs.bench.plot import new_figure
from dsv4_gemm_rs.bench.report import Check, Report

Rows = Sequence[Mapping[str, Any]]

FULL_DUPLEX = 0.9
"""Least ratio of the rate each way, when all ranks push, to the rate when one does."""
NEARLY = 0.9
"""Part of a way's best rate that the summary looks for the least multiprocessors for."""


def checks(rows: Rows, *, separate_devices: bool) -> tuple[Check, ...]:
    """The claims: every byte was right; where ranks have devices of their own, the link works both ways."""
    wrong = sum(row.get("wrong_words", 0) for row in rows)
    claims = [Check("wrong 32-bit words that landed", wrong, 0, wrong == 0)]
    if separate_devices:
        one, both = (_best_push(rows, direction) for direction in Direction)
        claims.append(
            Check("best push both ways / one way", both / one, FULL_DUPLEX, both >= FULL_DUPLEX * one)
        )
    return tuple(claims)


def _best_push(rows: Rows, direction: Direction) -> float:
    largest = largest_message(rows)
    pushes = (row for row in _bandwidths(rows, largest, direction) if row["case"].startswith("push"))
    return max(float(row["gb_per_s"]) for row in pushes)


def largest_message(rows: Rows) -> int:
    """Bytes of the largest message among the bandwidth rows."""
    return max(int(row["bytes"]) for row in rows if row["measure"] == "bandwidth")


def _bandwidths(rows: Rows, size: int, direction: str) -> list[Mapping[str, Any]]:
    return [
        row
        for row in rows
        if row["measure"] == "bandwidth" and row["bytes"] == size and row["direction"] == direction
    ]


def table(report: Report) -> str:
    """All medians as text: rates by multiprocessors, then latencies, then the checks."""
    machine = report.machine
    lines = [f"{machine['ranks']} ranks on {machine['device']} ({machine['ranks_are']})"]
    sizes = dict.fromkeys(row["bytes"] for row in report.rows if row["measure"] == "bandwidth")
    for size in sizes:
        for direction in Direction:
            lines += ["", *_rate_table(_bandwidths(report.rows, size, direction), size, direction)]
    lines += ["", *_summary(report)]
    for row in report.rows:
        if row["measure"] == "flag-round-trip":
            spread = f"p10 {row['p10_ns']:.0f}, p90 {row['p90_ns']:.0f}, {row['samples']} round trips"
            lines += ["", f"flag round trip, {row['case']}: {row['median_ns']:.0f} ns ({spread})"]
    lines += ["", *_publication_table([row for row in report.rows if row["measure"] == "publication"]), ""]
    for check in report.checks:
        verdict = "holds" if check.holds else "MISSED"
        lines.append(f"{verdict}: {check.name} = {check.value:g} (target {check.target:g})")
    return "\n".join(lines)


def _rate_table(rows: Rows, size: int, direction: str) -> list[str]:
    counts = sorted({row["multiprocessors"] for row in rows if row["multiprocessors"] is not None})
    title = f"{size / 2**20:g} MiB {direction}, GB/s each way"
    lines = [title, "multiprocessors".ljust(16) + "".join(f"{count:>8}" for count in counts)]
    for case in dict.fromkeys(row["case"] for row in rows):
        rates = {row["multiprocessors"]: row["gb_per_s"] for row in rows if row["case"] == case}
        cells = (f"{rates[count]:8.1f}" for count in ([None] if None in rates else counts))
        lines.append(case.ljust(16) + "".join(cells))
    return lines


def _summary(report: Report) -> list[str]:
    size = largest_message(report.rows)
    limits = KNOWN.get(str(report.machine["device"]))
    lines = []
    for direction in Direction:
        by_case: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row in _bandwidths(report.rows, size, direction):
            if row["multiprocessors"] is not None:
                by_case[row["case"]].append((row["multiprocessors"], row["gb_per_s"]))
        for case, points in by_case.items():
            best = max(rate for _, rate in points)
            least = min(count for count, rate in points if rate >= NEARLY * best)
            of_limit = f", {best * 1e9 / limits.nvlink:.2f} of NVLink's data sheet" if limits else ""
            lines.append(
                f"{size / 2**20:g} MiB {direction} {case}: best {best:.1f} GB/s{of_limit}; "
                f"{NEARLY:.0%} of it from {least} multiprocessors on"
            )
    return lines


def _publication_table(rows: Rows) -> list[str]:
    stores = sorted({row["stores"] for row in rows})
    lines = [
        "publication, median ns after so many 16-byte stores (or a bulk copy of as many bytes)",
        " " * 42 + "".join(f"{count:>8}" for count in stores),
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        times = {row["stores"]: row["median_ns"] for row in rows if row["case"] == case}
        lines.append(case.ljust(42) + "".join(f"{times[count]:8.0f}" for count in stores))
    return lines


def plot(report: Report, path: Path) -> None:
    """Draw rate by multiprocessors, one panel per direction, into a file whose suffix says the format.

    Raises:
        UnsupportedError: matplotlib is not installed; says how to get it.
    """
    size = largest_message(report.rows)
    figure = new_figure(12, 5)
    panels = figure.subplots(1, len(Direction), sharey=True)
    for axes, direction in zip(panels, Direction, strict=True):
        by_case: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row in _bandwidths(report.rows, size, direction):
            if row["multiprocessors"] is None:
                style = ":" if row["case"].endswith("pull") else "--"
                axes.axhline(row["gb_per_s"], color="black", linestyle=style, linewidth=1, label=row["case"])
            else:
                by_case[row["case"]].append((row["multiprocessors"], row["gb_per_s"]))
        for case, points in by_case.items():
            counts, rates = zip(*sorted(points), strict=True)
            axes.plot(counts, rates, marker="o", markersize=4, label=case)
        axes.set_xscale("log", base=2)
        ticks = sorted({count for points in by_case.values() for count, _ in points})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_title(str(direction), fontsize=10)
        axes.set_xlabel("multiprocessors of each sender (pull: of each receiver)")
        axes.grid(True, which="both", alpha=0.3)
    panels[0].set_ylabel(f"GB/s each way, message of {size / 2**20:g} MiB (median)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    machine = report.machine
    figure.suptitle(f"{machine['device']}, {machine['ranks']} ranks ({machine['ranks_are']})", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
