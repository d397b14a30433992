# SPDX-License-Identifier: Apache-2.0
"""Argument parsing and exit codes: 0 all right, 1 a check failed, 2 the request cannot be met."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dsv4_symm_mem.errors import Dsv4Error

from dsv4_gemm_rs._version import __version__
from dsv4_gemm_rs.cli import (
    bench,
    bench_link,
    bench_scaled,
    bench_start,
    compile_kernels,
    demo,
    doctor,
    full_report,
    inspect_kernels,
    model,
    tune,
    verify,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="dsv4-gemm-rs",
        description="MXFP8 and BF16 GEMM with reduce-scatter for DeepSeek-V4.1's attention output.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (
        doctor,
        demo,
        verify,
        compile_kernels,
        inspect_kernels,
        model,
        bench,
        bench_link,
        bench_scaled,
        bench_start,
        tune,
        full_report,
    ):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except Dsv4Error as error:
        print(f"dsv4-gemm-rs: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
