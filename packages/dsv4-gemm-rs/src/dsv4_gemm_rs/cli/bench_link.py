# SPDX-License-Identifier: Apache-2.0
"""`bench-link`: measure the link between GPUs, write the result file and the plot, print the table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dsv4_symm_mem.backends import VirtualGroup

from dsv4_gemm_rs.bench.link.results import plot, table
from dsv4_gemm_rs.bench.link.run import VIRTUAL, run_link_benchmark
from dsv4_gemm_rs.cli.groups import (
    add_group_options,
    command_group,
    progress_of,
    require_positive,
    speaks,
)
from dsv4_gemm_rs.cli.results import publish, require_writable


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "bench-link", help="measure bandwidth and latency between GPUs; under torchrun one process a rank"
    )
    parser.add_argument(
        "--mebibytes", type=int, nargs="+", default=[64, 8], help="message sizes in MiB (default 64 8)"
    )
    parser.add_argument("--samples", type=int, default=9, help="samples per transfer (default 9)")
    parser.add_argument("--output", type=Path, default=Path("results/link.json"))
    add_group_options(parser, 2, f"without torchrun: {VIRTUAL}; a trial")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and report; returns 1 if a wrong word landed, else 0: a slow link is a result."""
    require_positive(mebibytes=min(options.mebibytes), samples=options.samples)
    require_writable(options.output)
    with command_group(options) as group:
        progress = progress_of(group)
        if isinstance(group, VirtualGroup):
            progress(f"note: {VIRTUAL}")
        report = run_link_benchmark(
            group,
            sizes=[size * 2**20 for size in options.mebibytes],
            samples=options.samples,
            progress=progress,
        )
    if speaks(group):
        publish(report, options.output, table, plot)
    return int(any(row.get("wrong_words", 0) for row in report.rows))
