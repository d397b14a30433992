# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of the documentation from the result files, so that no number is typed by hand.

A table stands between `<!-- results: NAME -->` and `<!-- end -->` and shows docs/results/NAME.json. Run
`python -m tools.results_table` after a benchmark; a test holds the pages to the files.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from dsv4_gemm_rs.cli.inspect_kernels import store_widths

from tools.workspace import RESULTS, ROOT

PAGES = tuple(ROOT / "docs" / name for name in ("performance.md", "sm100.md", "mhc.md"))
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(result: dict[str, Any]) -> str:
    """One result as Markdown: machine, command, what was measured, checks that do not hold."""
    machine, versions = result["machine"], result["versions"]
    software = ", ".join(
        f"{name} {versions[name]}"
        for name in ("torch", "nvidia-cutlass-dsl", "tilelang", "tile-kernels")
        if name in versions
    )
    tables = {"start": _start, "latency": _latencies, "static": _static, "model": _model, "mhc": _mhc}
    table = tables.get(result["rows"][0].get("measure", "latency"), _link)
    where = f"{machine['device']}, driver {machine['driver']}, CUDA {machine['cuda']}"
    if machine["arch"] is None:
        where = f"{machine['cpu_count']} cores of {machine['device']}, no GPU"
    ranks = f"; {machine['ranks']} ranks ({machine['ranks_are']})" if "ranks" in machine else ""
    lines = [
        f"{where}, {software}{ranks}; {result['date'][:10]}.",
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
    table = _table(["median µs", *cases, "limit"], body)
    pushed = rows[0].get("exchange", "push") == "push"
    return table if pushed else [*table, "", f"Fused kernels exchange through {rows[0]['exchange']}."]


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


def _static(rows: list[dict[str, Any]]) -> list[str]:
    """What compiled kernels are made of, a row for each configuration."""
    counted = [row["sass"] or row["ptx"] for row in rows]
    body = [
        [
            row["operand"],
            row["tile"].replace("x", " x "),
            row.get("exchange", "push"),
            f"{row['registers']}",
            f"{row['stack_bytes']}",
            f"{row['shared_bytes']:,}",
            f"{row['stages']}",
            f"{row['tensor_columns'] or ''}",
            f"{codes['multiply_loop']['instructions']}",
            f"{codes['drain_loop']['instructions']}" if codes["drain_loop"] else "",
            store_widths(row),
            f"{row['sent_bytes']:,}",
            f"{row['flag_bytes']:,}",
        ]
        for row, codes in zip(rows, counted, strict=True)
    ]
    head = ["operands", "tile", "exchange", "registers", "stack", "shared memory", "stages", "tensor columns"]
    head += ["k loop", "epilogue loop", "wide stores", "bytes sent", "of flags"]
    call = f"bytes of a call with M = {rows[0]['m']}, N = {rows[0]['n']} on {rows[0]['world_size']} ranks"
    source = "from the machine code" if rows[0]["sass"] else "from PTX"
    units = f"loops in instructions, wide stores as instructions x bytes a thread, {source}"
    return [*_table(head, body), "", f"{rows[0]['arch']}; {units}; {call}."]


def _model(rows: list[dict[str, Any]]) -> list[str]:
    """The model's inputs, its comparison with known results, its prediction and what moves it."""
    by_table: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_table.setdefault(row["table"], []).append(row)
    lines = ["Inputs, in microseconds and bytes:", ""]
    body = [[r["input"], f"{r['b200']:.4g}", f"{r['h200']:.4g}", r["source"]] for r in by_table["inputs"]]
    lines += _table(["input", "B200", "H200", "source of the B200's"], body)
    lines += ["", "Against what is known, in microseconds:", ""]
    body = [
        [
            *(r["machine"], r["what"], f"{r['m']}", f"{r['k']}"),
            *(f"{r['modelled_us']:.1f}", f"{r['known_us']:.1f}", f"{r['ratio']:.2f}"),
        ]
        for r in by_table["comparison"]
    ]
    lines += _table(["machine", "what", "M", "K", "modelled", "known", "ratio"], body)
    columns = {"quantise_us": "quantiser", "gemm_us": "product alone", "wire_us": "wire alone"}
    columns |= {"ours_us": "**ours**", "measured_push_us": "measured"}
    columns |= {"multicast_us": "ours, multicast", "measured_multicast_us": "multicast, measured"}
    columns |= {"pulled_us": "published kernel", "unfused_us": "unfused"}
    predicted = by_table["prediction"]
    shown = {key: name for key, name in columns.items() if any(r[key] is not None for r in predicted)}
    none = "nothing of it is measured" if not any(key.startswith("measured") for key in shown) else "modelled"
    lines += ["", f"Predicted for B200s at N = 5120, in microseconds; {none}:", ""]
    body = [
        [
            f"TP{r['world_size']}",
            f"{r['m']}",
            r["tile"].replace("x", " x "),
            *("" if r[key] is None else f"{r[key]:.1f}" for key in shown),
        ]
        for r in predicted
    ]
    lines += _table(["ranks", "M", "tile", *shown.values()], body)
    rest = by_table["sensitivity"]
    tokens = [key.removeprefix("up_") for key in rest[0] if key.startswith("up_")]
    lines += ["", "By how much ours moves at TP4 with an input a quarter down and up, in microseconds;"]
    lines += ["inputs that move nothing are left out:"]
    signs = ("down", "up")

    def most(row: dict[str, Any]) -> float:
        return max(abs(float(row[f"{sign}_{m}"])) for sign in signs for m in tokens)

    for exchange in dict.fromkeys(row["exchange"] for row in rest):
        body = [
            [r["input"], *(" / ".join(f"{r[f'{sign}_{m}']:+.1f}" for sign in signs) for m in tokens)]
            for r in sorted(rest, key=most, reverse=True)
            if r["exchange"] == exchange
        ]
        lines += ["", *_table([f"{exchange}: input", *(f"M = {m}" for m in tokens)], body)]
    return lines


def _mhc(rows: list[dict[str, Any]]) -> list[str]:
    """Microseconds with a cold L2, a row for each case, a column for each T; then errors beside TF32's."""
    lines: list[str] = []
    timed = [row for row in rows if row["measure"] == "mhc"]
    for hidden in dict.fromkeys(row["hidden"] for row in timed):
        found = {(row["case"], row["tokens"]): row for row in timed if row["hidden"] == hidden}
        tokens = sorted({count for _, count in found})
        body = []
        for case in dict.fromkeys(case for case, _ in found):
            cells = [found.get((case, count), {}).get("cold_us") for count in tokens]
            body.append([case, *("" if cell is None else f"{cell:.1f}" for cell in cells)])
        lines += [*_table([f"µs, H = {hidden}", *(f"T = {count}" for count in tokens)], body), ""]
    errors = [row for row in rows if row["measure"] == "mhc-error"]
    body = [[row["name"], f"{row['ours']:.1e}", f"{row['tf32']:.1e}"] for row in errors]
    return [*lines, *_table(["largest error against FP64", "ours", "TF32"], body)]


def updated(page: str) -> str:
    """`page` with every table as the result files have it."""

    def table(match: re.Match[str]) -> str:
        result = json.loads((RESULTS / f"{match[2]}.json").read_text(encoding="utf-8"))
        return f"{match[1]}{render(result)}{match[3]}"

    return BLOCK.sub(table, page)


def main() -> int:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
