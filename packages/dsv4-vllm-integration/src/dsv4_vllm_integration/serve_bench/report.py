# SPDX-License-Identifier: Apache-2.0
"""A comparison as Markdown, as JSON and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsv4_vllm_integration.serve_bench.arithmetic import METRICS, Comparison
from dsv4_vllm_integration.serve_bench.plan import Arm
from dsv4_vllm_integration.statistics import Interval

TITLES = {"output_rate": "output tok/s", "ttft_ms": "mean TTFT ms", "tpot_ms": "mean TPOT ms"}


def percent(change: float) -> str:
    """A change with its sign."""
    return f"{100 * change:+.2f} %"


def verdict(found: Interval | None) -> str:
    """The interval and whether it establishes a difference."""
    if found is None or found.count < 2:
        return "not established: one pair, no interval"
    bounds = f"{percent(found.low)} to {percent(found.high)}, {found.count} pairs"
    return bounds if found.established else f"not established: {bounds}"


def markdown(comparisons: Sequence[Comparison]) -> str:
    """The tables."""
    lines = ["| requests at a time | metric | baseline | candidate | change | 95 % interval of the pairs |"]
    lines.append("|---|---|---|---|---|---|")
    for found in comparisons:
        for metric in METRICS:
            before, after = (getattr(found.arms[arm], metric) for arm in Arm)
            lines.append(
                f"| {found.concurrency} | {TITLES[metric]} | {before:.2f} | {after:.2f} "
                f"| {percent(found.changes[metric])} | {verdict(found.intervals.get(metric))} |"
            )
    nodes = sorted({node for found in comparisons for node in found.node_changes["output_rate"]})
    lines += ["", "| requests at a time | metric | " + " | ".join(nodes) + " |"]
    lines.append("|---|---|" + "---|" * len(nodes))
    for found in comparisons:
        for metric in METRICS:
            changes = found.node_changes[metric]
            cells = [percent(changes[node]) if node in changes else "" for node in nodes]
            lines.append(f"| {found.concurrency} | {TITLES[metric]} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| requests at a time | arm | succeeded | wrong length | preemptions |",
        "|---|---|---|---|---|",
    ]
    for found in comparisons:
        for arm in Arm:
            held = found.arms[arm]
            wrong = "not recorded" if held.wrong_lengths is None else held.wrong_lengths
            preempted = "not reported" if held.preemptions is None else held.preemptions
            lines.append(
                f"| {found.concurrency} | {arm.value} | {held.completed} of {held.requests} "
                f"| {wrong} | {preempted} |"
            )
    return "\n".join(lines) + "\n"


def as_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Plain values; infinite bounds become None."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return [
        {
            "concurrency": found.concurrency,
            "arms": {arm.value: asdict(held) | {"sound": held.sound} for arm, held in found.arms.items()},
            "changes": found.changes,
            "node_changes": found.node_changes,
            "intervals": {
                metric: {
                    "mean": held.mean,
                    "low": finite(held.low),
                    "high": finite(held.high),
                    "pairs": held.count,
                    "established": held.established,
                }
                for metric, held in found.intervals.items()
            },
        }
        for found in comparisons
    ]


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw each metric's change by load, with its interval.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, len(METRICS))
    for axis, metric in zip(axes, METRICS, strict=True):
        axis.axhline(0, color="0.6", linewidth=0.8)
        for position, found in enumerate(comparisons):
            held = found.intervals.get(metric)
            if held is not None and math.isfinite(held.low):
                axis.plot([position] * 2, [100 * held.low, 100 * held.high], color="0.4", linewidth=1.2)
            axis.plot(position, 100 * found.changes[metric], "o", color="tab:blue")
        axis.set_xticks(range(len(comparisons)), [str(found.concurrency) for found in comparisons])
        axis.set_title(TITLES[metric])
        axis.set_xlabel("requests at a time")
    axes[0].set_ylabel("change, %")
    figure.savefig(path, dpi=150)
