# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/performance.md from the result files, so that no number is typed by hand.

A table stands between `<!-- results: NAME -->` and `<!-- end -->` and shows docs/results/NAME.json. Run
`python -m tools.results_table` after a benchmark; a test holds the page to the files.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from tools.workspace import ROOT

PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "docs" / "results"
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(result: dict[str, Any]) -> str:
    """One result as Markdown: machine, command, what was measured, checks that do not hold."""
    machine, versions = result["machine"], result["versions"]
    software = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "nvidia-cutlass-dsl") if name in versions
    )
    table = {"start": _start, "latency": _latencies}.get(result["rows"][0].get("measure", "latency"), _link)
    where = f"{machine['device']}, driver {machine['driver']}, CUDA {machine['cuda']}"
    if machine["arch"] is None:
        where = f"{machine['cpu_count']} cores of {machine['device']}, no GPU"
    lines = [
        f"{where}, {software}; {machine['ranks']} ranks ({machine['ranks_are']}); {result['date'][:10]}.",
        "",
        f"`{result['command']}`",
        "",
        *table(result["rows"]),
    ]
    missed = [check for check in result["checks"] if not check["holds"]]
    held = len(result["checks"]) - len(missed)
    lines += ["", f"{held} of {len(result['checks'])} checks hold. Missed:" if missed else "All checks hold."]
    lines += [""] * bool(missed)
    lines += [f"* {c['name']} = {c['value']:.3f} (target {c['target']:g})" for c in missed]
    return "\n".join(lines) + "\n"


def _table(head: list[str], body: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def _latencies(rows: list[dict[str, Any]]) -> list[str]:
    """Median microseconds, a row for each M and a column for each case."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    medians = {(row["m"], row["case"]): row["median_us"] for row in rows}
    body = []
    for m in dict.fromkeys(row["m"] for row in rows):
        cells = [f"{medians[m, case]:.1f}" if (m, case) in medians else "" for case in cases]
        floor = next(row["floor_us"] for row in rows if row["m"] == m)
        body.append([f"M = {m}", *cells, f"{floor:.1f}" if floor else ""])
    return _table(["median µs", *cases, "limit"], body)


def _start(rows: list[dict[str, Any]]) -> list[str]:
    """Seconds of a start by phase, a row for each case."""
    phases = {"torch_s": "import torch", "package_s": "import dsv4", "dsl_s": "import DSL"}
    phases |= {"kernels_s": "kernels", "total_s": "total", "kernels_cpu_s": "kernels' processor time"}
    body = [
        [
            f"{row['processes']}",
            row["case"],
            *(f"{row[phase]:.2f}" for phase in phases),
            f"{row['compiled']}",
            f"{row['loaded']}",
        ]
        for row in rows
    ]
    head = ["processes", "cache", *(f"{name}, s" for name in phases.values()), "compiled", "loaded"]
    return _table(head, body)


def _link(rows: list[dict[str, Any]]) -> list[str]:
    """Bandwidth both ways by multiprocessors, largest message; the cost of publishing; the round trip."""
    transfers = [row for row in rows if row["measure"] == "bandwidth" and row["direction"] == "both-ways"]
    largest = max(row["bytes"] for row in transfers)
    transfers = [row for row in transfers if row["bytes"] == largest]
    counts = sorted({row["multiprocessors"] for row in transfers if row["multiprocessors"]})
    rates = {(row["case"], row["multiprocessors"]): f"{row['gb_per_s']:.0f}" for row in transfers}
    cases = list(dict.fromkeys(row["case"] for row in transfers))
    body = [
        [case, *(rates.get((case, n), "") for n in counts), rates.get((case, None), "")] for case in cases
    ]
    lines = _table([f"GB/s each way, {largest >> 20} MiB, by SMs", *map(str, counts), "any"], body)
    published = [row for row in rows if row["measure"] == "publication"]
    stores = sorted({row["stores"] for row in published})
    costs = {(row["case"], row["stores"]): f"{row['median_ns']:.0f}" for row in published}
    body = [
        [case, *(costs[case, n] for n in stores)] for case in dict.fromkeys(row["case"] for row in published)
    ]
    lines += ["", *_table(["ns after so many stores of 16 bytes", *map(str, stores)], body)]
    trips = [row for row in rows if row["measure"] == "flag-round-trip"]
    return [*lines, "", *(f"Flag round trip ({row['case']}): {row['median_ns']:.0f} ns." for row in trips)]


def updated(page: str) -> str:
    """`page` with every table as the result files have it."""

    def table(match: re.Match[str]) -> str:
        result = json.loads((RESULTS / f"{match[2]}.json").read_text(encoding="utf-8"))
        return f"{match[1]}{render(result)}{match[3]}"

    return BLOCK.sub(table, page)


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
