# SPDX-License-Identifier: Apache-2.0
"""`bench`: measure, write the result file and the plot, print the table."""

from __future__ import annotations

import argparse
from pathlib import Path as FilePath
from typing import Any

from dsv4_symm_mem.protocol.layout import Strategy

from dsv4_gemm_rs.bench.plot import plot
from dsv4_gemm_rs.bench.report import Report, exchange_of
from dsv4_gemm_rs.bench.run import run_benchmark
from dsv4_gemm_rs.cli.groups import (
    add_group_options,
    add_out_features,
    command_group,
    progress_of,
    require_positive,
    speaks,
)
from dsv4_gemm_rs.cli.results import publish, require_writable
from dsv4_gemm_rs.dispatch import Path
from dsv4_gemm_rs.problems import WO_B_K, WO_B_N, default_k
from dsv4_gemm_rs.weights import Keep, WeightKind


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "bench", help="measure the parts and the whole; under torchrun one process a rank"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument(
        "--workspaces", type=int, default=10, help="rotating workspaces and operands (default 10)"
    )
    parser.add_argument("--samples", type=int, default=40, help="samples per case (default 40)")
    parser.add_argument("--output", type=FilePath, default=FilePath("results/kernel.json"))
    add_group_options(parser)
    add_out_features(parser, default=WO_B_N, help=f"output features N (default {WO_B_N})")
    parser.add_argument(
        "--k", type=int, default=None, help=f"input features of a rank (default {WO_B_K} / P)"
    )
    parser.add_argument("--kind", type=WeightKind, choices=list(WeightKind), default=WeightKind.MXFP8)
    parser.add_argument(
        "--keep",
        type=Keep,
        choices=list(Keep),
        default=Keep.BF16,
        help="fp8: also the kernel for weights kept in FP8 (SM90)",
    )
    parser.add_argument(
        "--exchange",
        type=Strategy,
        choices=list(Strategy),
        default=Strategy.PUSH,
        help="how fused kernels exchange (default push); multicast needs several SM100 GPUs that have it",
    )
    parser.add_argument("--path", type=Path, choices=list(Path), default=None, help="default: the best one")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and report; returns 0, since a missed target is a result and not a failure of the program."""
    require_positive(
        workspaces=options.workspaces,
        samples=options.samples,
        tokens=min(options.tokens),
        n=options.n,
        k=options.k,
    )
    require_writable(options.output)
    with command_group(options) as group:
        report = run_benchmark(
            group,
            tokens=options.tokens,
            n=options.n,
            k=default_k(group.size) if options.k is None else options.k,
            kind=options.kind,
            workspaces=options.workspaces,
            samples=options.samples,
            path=options.path,
            keep=options.keep,
            exchange=options.exchange,
            progress=progress_of(group),
        )
    if speaks(group):
        publish(report, options.output, table, plot)
    return 0


def table(report: Report) -> str:
    """The report's medians as a text table, a row for each M, and its checks."""
    names = list(dict.fromkeys(row["case"] for row in report.rows))
    medians = {(row["m"], row["case"]): row["median_us"] for row in report.rows}
    width = max(len(name) for name in names) + 2
    head = "median µs".ljust(10) + "".join(name.rjust(width) for name in names)
    lines = [f"exchange: {exchange_of(report)}", head]
    for m in dict.fromkeys(row["m"] for row in report.rows):
        cells = (f"{medians[m, name]:.1f}" if (m, name) in medians else "-" for name in names)
        lines.append(f"M={m}".ljust(10) + "".join(cell.rjust(width) for cell in cells))
    lines += map(str, report.checks)
    return "\n".join(lines)
