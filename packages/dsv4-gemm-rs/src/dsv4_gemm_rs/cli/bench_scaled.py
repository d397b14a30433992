# SPDX-License-Identifier: Apache-2.0
"""`bench-scaled`: what SM90's FP8 tensor cores would make of MXFP8, against BF16; for Hopper GPUs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from dsv4_gemm_rs.bench.plot import plot
from dsv4_gemm_rs.bench.scaled.run import run_scaled_benchmark
from dsv4_gemm_rs.cli.bench import table
from dsv4_gemm_rs.cli.groups import add_out_features, require_positive
from dsv4_gemm_rs.cli.results import publish, require_writable
from dsv4_gemm_rs.problems import WO_B_N


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "bench-scaled",
        help="measure a product in SM90's FP8 tensor cores, which no call uses, against BF16",
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--sets", type=int, default=6, help="operands that rotate (default 6)")
    parser.add_argument("--samples", type=int, default=10, help="samples per case (default 10)")
    parser.add_argument("--output", type=Path, default=Path("results/scaled.json"))
    add_out_features(parser, default=WO_B_N, help=f"output features N (default {WO_B_N})")
    parser.add_argument("--k", type=int, default=2048, help="summed length (default 2048)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and report; 0, since a missed target is a result."""
    require_positive(
        sets=options.sets, samples=options.samples, tokens=min(options.tokens), n=options.n, k=options.k
    )
    require_writable(options.output)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = run_scaled_benchmark(
        device,
        tokens=options.tokens,
        n=options.n,
        k=options.k,
        sets=options.sets,
        samples=options.samples,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    publish(report, options.output, table, plot)
    return 0
