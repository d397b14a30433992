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
    """One result as Markdown: machine, command, medians by M, checks that do not hold."""
    rows = result["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    medians = {(row["m"], row["case"]): row["median_us"] for row in rows}
    machine, versions = result["machine"], result["versions"]
    software = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "nvidia-cutlass-dsl") if name in versions
    )
    lines = [
        f"{machine['device']}, driver {machine['driver']}, CUDA {machine['cuda']}, {software}; "
        f"{machine['ranks']} ranks ({machine['ranks_are']}); {result['date'][:10]}.",
        "",
        f"`{result['command']}`",
        "",
        "| median µs | " + " | ".join(cases) + " | limit |",
        "|---|" + "---|" * (len(cases) + 1),
    ]
    for m in dict.fromkeys(row["m"] for row in rows):
        cells = [f"{medians[m, case]:.1f}" if (m, case) in medians else "" for case in cases]
        floor = next(row["floor_us"] for row in rows if row["m"] == m)
        lines.append(f"| M = {m} | " + " | ".join(cells) + f" | {floor:.1f} |" if floor else "")
    missed = [check for check in result["checks"] if not check["holds"]]
    held = len(result["checks"]) - len(missed)
    lines += ["", f"{held} of {len(result['checks'])} checks hold. Missed:" if missed else "All checks hold."]
    lines += [""] * bool(missed)
    lines += [f"* {c['name']} = {c['value']:.3f} (target {c['target']:g})" for c in missed]
    return "\n".join(lines) + "\n"


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
