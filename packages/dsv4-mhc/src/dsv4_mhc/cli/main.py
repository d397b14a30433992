# SPDX-License-Identifier: Apache-2.0
"""Parse, run, and turn errors raised on purpose into one line and exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from dsv4_mhc._version import __version__
from dsv4_mhc.compile import ARCHITECTURES, Variant, cache_folder, compile_variant, variants
from dsv4_mhc.errors import ArgumentError, MhcError
from dsv4_mhc.plan import Quant

TOKENS = [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
HIDDEN = [4096, 5120, 7168]
TILED = [64, 128, 256, 512, 1024, 2048, 4096, 8192]


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    root = argparse.ArgumentParser(prog="dsv4-mhc", description="Hyper-connections of DeepSeek V4 and V4.1.")
    root.add_argument("--version", action="version", version=__version__)
    commands = root.add_subparsers(required=True, metavar="command")

    compiling = commands.add_parser("compile", help="fill the kernel cache; needs no GPU")
    compiling.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=["sm_90a"])
    compiling.add_argument("--hidden", type=int, nargs="+", required=True, metavar="H")
    compiling.add_argument("--quant", type=Quant, nargs="+", choices=list(Quant), default=[Quant.NONE])
    compiling.add_argument("--wiring", choices=["v4", "v4.1", "both"], default="both")
    compiling.add_argument(
        "--cache", type=Path, default=None, help="folder; the server then needs TILELANG_CACHE_DIR set to it"
    )
    compiling.add_argument("--jobs", type=int, default=1, help="processes that compile (default 1)")
    compiling.set_defaults(run=run_compile)

    measuring = commands.add_parser("bench", help="measure operators and seams on this machine's GPU")
    measuring.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="T")
    measuring.add_argument("--hidden", type=int, nargs="+", default=HIDDEN, metavar="H")
    measuring.add_argument("--samples", type=int, default=30, help="replays a case (default 30)")
    measuring.add_argument("--cases", nargs="+", default=None, help="names or their beginnings (default all)")
    measuring.add_argument("--output", type=Path, default=Path("results/mhc.json"))
    measuring.set_defaults(run=run_bench)

    comparing = commands.add_parser(
        "bench-tiles", help="compare the bits and times of the seams' tiles on this machine's GPU"
    )
    comparing.add_argument("--tokens", type=int, nargs="+", default=TILED, metavar="T")
    comparing.add_argument("--hidden", type=int, nargs="+", default=HIDDEN, metavar="H")
    comparing.add_argument("--samples", type=int, default=5, help="replays a tile (default 5)")
    comparing.add_argument("--runs", type=int, default=6, help="runs whose bits are compared (default 6)")
    comparing.add_argument("--output", type=Path, default=Path("results/mhc_tiles.json"))
    comparing.set_defaults(run=run_bench_tiles)
    return root


def compile_timed(variant: Variant, arch: str) -> float:
    """Compile or find a variant; seconds that it took."""
    begun = time.perf_counter()
    compile_variant(variant, arch)
    return time.perf_counter() - begun


def run_compile(options: argparse.Namespace) -> int:
    """Compile or find every variant; a line for each."""
    if options.jobs < 1:
        raise ArgumentError("jobs", options.jobs, "at least 1")
    if options.cache is not None:
        os.environ["TILELANG_CACHE_DIR"] = str(options.cache.resolve())
    start = time.perf_counter()
    tasks = [
        (variant, arch)
        for hidden in options.hidden
        for variant in variants(hidden, quants=options.quant, wiring=options.wiring)
        for arch in options.arch
    ]
    with contextlib.ExitStack() as stack:
        run: Callable[..., Iterable[float]] = map
        if options.jobs > 1:
            # Not forked: a child of a process with threads may wait for a lock that nobody holds.
            pool = ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn"))
            run = stack.enter_context(pool).map
        seconds = run(compile_timed, *zip(*tasks, strict=True))
        for (variant, arch), took in zip(tasks, seconds, strict=True):
            print(f"{took:6.2f} s  {arch}  {describe(variant.module, variant.arguments)}", flush=True)
    print(f"{len(tasks)} kernels in {time.perf_counter() - start:.1f} s, in {cache_folder()}")
    return 0


def describe(module: str, arguments: tuple[object, ...]) -> str:
    """A variant in a few words."""
    return f"{module} {' '.join(str(argument) for argument in arguments)}"


def show(line: str) -> None:
    """Say what was just done."""
    print(line, file=sys.stderr, flush=True)


def write(report: dict[str, Any], output: Path) -> None:
    """A report as JSON."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def run_bench_tiles(options: argparse.Namespace) -> int:
    """Compare, write JSON, print the checks; 1 if tiles differ."""
    from dsv4_mhc.bench.tiles import run

    report = run(options.tokens, options.hidden, options.samples, options.runs, show)
    write(report, options.output)
    for check in report["checks"]:
        holds = "holds" if check["holds"] else "MISSED"
        print(f"{check['name']} = {check['value']:.3f} (target {check['target']:g}): {holds}")
    return 1 if any(row["different"] for row in report["rows"]) else 0


def run_bench(options: argparse.Namespace) -> int:
    """Measure, write JSON and Markdown, print the table."""
    from dsv4_mhc.bench.report import markdown
    from dsv4_mhc.bench.run import run

    report = run(options.tokens, options.hidden, options.samples, options.cases, show)
    write(report, options.output)
    table = markdown(report)
    options.output.with_suffix(".md").write_text(table, encoding="utf-8")
    print(table)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except MhcError as error:
        print(f"dsv4-mhc: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
