# SPDX-License-Identifier: Apache-2.0
"""A benchmark's rows as Markdown: one table for each hidden size, cases down, tokens across."""

from __future__ import annotations

from typing import Any


def cell(row: dict[str, Any] | None) -> str:
    """Cold microseconds and the share of the floor that they reach, or why there are none."""
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    return f"{row['cold_us']:.1f} ({row['floor_us'] / row['cold_us']:.2f})"


def markdown(report: dict[str, Any]) -> str:
    """The report as text."""
    copy = report["machine"]["copy_bytes_per_us"] / 1e6
    timed = [row for row in report["rows"] if row["measure"] == "mhc"]
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        f"{report['machine']['device']}, measured copy {copy:.2f} TB/s. Microseconds of a call in a CUDA",
        "graph with a cold L2, in brackets the floor (bytes over measured copy bandwidth) over that.",
    ]
    for hidden in dict.fromkeys(row["hidden"] for row in timed):
        rows = [row for row in timed if row["hidden"] == hidden]
        tokens = list(dict.fromkeys(row["tokens"] for row in rows))
        found = {(row["case"], row["tokens"]): row for row in rows}
        lines += ["", f"H = {hidden}", "", "| case | " + " | ".join(map(str, tokens)) + " |"]
        lines.append("|---" * (len(tokens) + 1) + "|")
        for case in dict.fromkeys(row["case"] for row in rows):
            cells = " | ".join(cell(found.get((case, count))) for count in tokens)
            lines.append(f"| {case} | {cells} |")
    missed = [check for check in report["checks"] if not check["holds"]]
    lines += [
        "",
        f"{len(report['checks']) - len(missed)} of {len(report['checks'])} checks hold. Missed:",
        "",
    ]
    lines += [f"* {check['name']} = {check['value']:.3f} (target {check['target']:.3g})" for check in missed]
    return "\n".join(lines) + "\n"
