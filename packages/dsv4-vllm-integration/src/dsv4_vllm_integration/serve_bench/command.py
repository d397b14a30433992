# SPDX-License-Identifier: Apache-2.0
"""`dsv4-vllm bench-serve`: run a comparison of two servers, or print one that was run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dsv4_symm_mem import UnsupportedError

from dsv4_vllm_integration.serve_bench.arithmetic import compare
from dsv4_vllm_integration.serve_bench.client import run_plan, saved_runs
from dsv4_vllm_integration.serve_bench.plan import read_plan
from dsv4_vllm_integration.serve_bench.report import as_json, markdown, plot


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "bench-serve",
        help="compare two servers under load with `vllm bench serve`, arms swapped across nodes",
    )
    parser.add_argument(
        "--plan", type=Path, help="TOML file of what to run; without it only the report is made"
    )
    parser.add_argument("--folder", type=Path, required=True, help="where runs are saved, and read from")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--plot", type=Path, help="draw the changes here (needs matplotlib)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run what is missing and print the tables; 1 if requests failed or had another length."""
    if options.plan is not None:
        run_plan(
            read_plan(options.plan), options.folder, lambda text: print(text, file=sys.stderr, flush=True)
        )
    comparisons = compare(list(saved_runs(options.folder)))
    if not comparisons:
        raise UnsupportedError(f"{options.folder} holds no load that both arms ran")
    tables = markdown(comparisons)
    print(tables, end="")
    if options.markdown is not None:
        options.markdown.write_text(tables, encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(comparisons), indent=1), encoding="utf-8")
    if options.plot is not None:
        plot(comparisons, options.plot)
    return 0 if all(held.sound for found in comparisons for held in found.arms.values()) else 1
