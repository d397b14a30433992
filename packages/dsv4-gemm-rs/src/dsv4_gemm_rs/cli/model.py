# SPDX-License-Identifier: Apache-2.0
"""`model`: what calls should take on B200s, what the model makes of known results, and what moves it.

Benchmarks of a B200 or an H200 (`--measured`) stand beside the modelled times.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsv4_gemm_rs.bench.report import Report, describe_machine, describe_versions, this_command, today
from dsv4_gemm_rs.cli.results import require_writable
from dsv4_gemm_rs.model.report import all_rows, checks


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser("model", help="predict latencies on B200s; needs no GPU")
    parser.add_argument(
        "--measured", type=Path, nargs="*", default=[], help="results of `bench` to put beside the model's"
    )
    parser.add_argument("--output", type=Path, default=Path("results/model.json"))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compute and report; returns 0, since a miss is a result and not a failure of the program."""
    require_writable(options.output)
    rows = all_rows([Report.read(path) for path in options.measured])
    cpu = torch.device("cpu")
    report = Report(
        name="model",
        machine=describe_machine(cpu, 4, "modelled"),
        versions=describe_versions(cpu),
        command=this_command(),
        date=today(),
        rows=rows,
        checks=checks(rows),
    )
    report.write(options.output)
    print(table(rows))
    for check in report.checks:
        if not check.holds:
            print(check)
    print(f"\nwritten: {options.output}")
    return 0


def _shown(measured: float | None) -> str:
    return "" if measured is None else f"{measured:.1f}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Comparison, prediction and what moves it, as text."""
    lines = [f"{'machine':<10}{'what':<38}{'M':>6}{'K':>6}{'modelled':>10}{'known':>9}{'ratio':>7}"]
    for row in rows:
        if row["table"] == "comparison":
            lines.append(
                f"{row['machine']:<10}{row['what']:<38}{row['m']:>6}{row['k']:>6}"
                f"{row['modelled_us']:>10.1f}{row['known_us']:>9.1f}{row['ratio']:>7.2f}"
            )
    lines += [
        "",
        f"{'B200s':<7}{'M':>6}{'tile':>9}{'ours':>8}{'measured':>10}{'multicast':>11}{'measured':>10}"
        f"{'published':>11}{'unfused':>9}  µs",
    ]
    for row in rows:
        if row["table"] == "prediction":
            lines.append(
                f"{row['world_size']:<7}{row['m']:>6}{row['tile']:>9}"
                f"{row['ours_us']:>8.1f}{_shown(row['measured_push_us']):>10}"
                f"{row['multicast_us']:>11.1f}{_shown(row['measured_multicast_us']):>10}"
                f"{row['pulled_us']:>11.1f}{row['unfused_us']:>9.1f}"
            )
    rest = [row for row in rows if row["table"] == "sensitivity"]
    for exchange in dict.fromkeys(row["exchange"] for row in rest):
        mine = [row for row in rest if row["exchange"] == exchange]
        names = [name for name in mine[0] if name.startswith(("down_", "up_"))]
        lines += ["", f"{exchange + ', TP4':<26}{''.join(name.rjust(11) for name in names)}  µs by input"]
        for row in sorted(mine, key=lambda row: -max(abs(row[name]) for name in names)):
            lines.append(f"{row['input']:<26}{''.join(f'{row[name]:>+11.1f}' for name in names)}")
    return "\n".join(lines)
