# SPDX-License-Identifier: Apache-2.0
"""Writes the dispatcher's table of thresholds from the result files, so that no threshold is set by hand.

Every benchmark in docs/results that measured the fused kernel on several ranks gives an entry, unless fused
was faster at the least M already, which leaves the threshold open. Run `python -m tools.thresholds` after a
benchmark; a test holds the table to the files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dsv4_gemm_rs.dispatch.decide import operand_for
from dsv4_gemm_rs.dispatch.thresholds import PACKAGED, SCHEMA, Entry, Shape, Timed, as_json, threshold
from dsv4_gemm_rs.weights import WeightKind
from dsv4_symm_mem.errors import ArgumentError

from tools.workspace import RESULTS, ROOT

TABLE = ROOT / "packages/dsv4-gemm-rs/src/dsv4_gemm_rs/dispatch" / PACKAGED
FUSED, UNFUSED = "fused", "gemm-then-reduce-scatter"


def entry_of(result: dict[str, Any], source: str) -> Entry | None:
    """The entry that a benchmark's result gives; None where it is of something else, or leaves it open."""
    machine, rows = result["machine"], result["rows"]
    times = {(row["case"], row["m"]): row["median_us"] for row in rows if "case" in row and "m" in row}
    tokens = sorted(m for case, m in times if case == FUSED and (UNFUSED, m) in times)
    pushed = all(row.get("exchange", "push") == "push" for row in rows)
    if result["name"] != "kernel" or not machine["arch"] or machine["ranks"] < 2 or not tokens or not pushed:
        return None
    kind = WeightKind(rows[0]["kind"])
    shape = Shape(
        arch=machine["arch"],
        world_size=machine["ranks"],
        shared=machine["ranks_are"] != "processes",
        operand=operand_for(machine["arch"], kind).value,
        n=rows[0]["n"],
        k=rows[0]["k"],
    )
    measured = tuple(Timed(m, round(times[FUSED, m], 2), round(times[UNFUSED, m], 2)) for m in tokens)
    try:
        least = threshold(measured)
    except ArgumentError:
        return None
    return Entry(shape, least, measured, machine["device"], result["date"][:10], source)


def table() -> str:
    """The table's text."""
    found: list[Entry] = []
    for path in sorted(RESULTS.glob("*.json")):
        entry = entry_of(json.loads(path.read_text(encoding="utf-8")), f"docs/results/{path.name}")
        if entry is not None:
            found.append(entry)
    return json.dumps({"schema": SCHEMA, "entries": as_json(tuple(found))}, indent=1) + "\n"


def main(target: Path = TABLE) -> int:
    """Write the table; returns 0."""
    target.write_text(table(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
