# SPDX-License-Identifier: Apache-2.0
"""`bench-start`: measure how long kernels take to be ready, write the result file, print the table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsv4_gemm_rs.bench.report import Check, Report, describe_machine, describe_versions, this_command, today
from dsv4_gemm_rs.bench.start import PHASES, WARM_LIMIT, measure
from dsv4_gemm_rs.cli.groups import require_positive
from dsv4_gemm_rs.cli.results import require_writable


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "bench-start", help="measure start-up with an empty and a full cache of compiled kernels"
    )
    parser.add_argument("--arch", default="sm_90a", help="architecture to compile for (default sm_90a)")
    parser.add_argument("--processes", type=int, default=8, help="that start at once (default 8)")
    parser.add_argument("--samples", type=int, default=5, help="starts with a full cache (default 5)")
    parser.add_argument("--output", type=Path, default=Path("results/start.json"))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and report; returns 0, since a missed target is a result and not a failure of the program."""
    require_positive(processes=options.processes, samples=options.samples)
    require_writable(options.output)
    rows = measure(
        options.arch,
        options.processes,
        options.samples,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    cpu = torch.device("cpu")
    report = Report(
        name="start",
        machine=describe_machine(cpu, options.processes, "processes"),
        versions=describe_versions(cpu),
        command=this_command(),
        date=today(),
        rows=rows,
        checks=checks(rows),
    )
    report.write(options.output)
    print(table(report.rows))
    for check in report.checks:
        print(check)
    print(f"\nwritten: {options.output}")
    return 0


def checks(rows: Sequence[Mapping[str, Any]]) -> tuple[Check, ...]:
    """The claims: a full cache means no compiling and little time, and nothing is compiled twice."""
    by_case = {(row["processes"], row["case"]): row for row in rows}
    kernels = by_case[1, "cold"]["compiled"]
    claims = []
    for count in dict.fromkeys(row["processes"] for row in rows):
        cold, warm = by_case[count, "cold"], by_case[count, "warm"]
        who = f"{count} process" if count == 1 else f"{count} processes"
        ratio = warm["kernels_s"] / cold["kernels_s"]
        claims += [
            Check(f"{who}: kernels, warm / cold", ratio, WARM_LIMIT, ratio <= WARM_LIMIT),
            Check(f"{who}: compiled, cold", cold["compiled"], kernels, cold["compiled"] == kernels),
            Check(f"{who}: compiled, warm", warm["compiled"], 0, warm["compiled"] == 0),
        ]
    return tuple(claims)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The phases in seconds, a line for each case."""
    head = ["processes", "cache", *(phase.removesuffix("_s") for phase in PHASES), "compiled", "loaded"]
    lines = ["".join(cell.rjust(13) for cell in head)]
    for row in rows:
        cells = [str(row["processes"]), row["case"], *(f"{row[phase]:.2f}" for phase in PHASES)]
        cells += [str(row["compiled"]), str(row["loaded"])]
        lines.append("".join(cell.rjust(13) for cell in cells))
    return "\n".join(lines)
