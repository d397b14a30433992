# SPDX-License-Identifier: Apache-2.0
"""Argument parsing and exit codes: 0 all right, 1 a check failed, 2 the request cannot be met."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence

from dsv4_symm_mem import Dsv4Error

from dsv4_vllm_integration import doctor, numerics
from dsv4_vllm_integration._version import __version__
from dsv4_vllm_integration.evaluate import command as evaluate
from dsv4_vllm_integration.serve_bench import command as serve_bench


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="dsv4-vllm",
        description="The dsv4 kernels in vLLM: what is on and why, speed, accuracy, numerics.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (doctor, serve_bench, evaluate, numerics):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (Dsv4Error, OSError, tomllib.TOMLDecodeError, ImportError) as error:
        print(f"dsv4-vllm: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
