# SPDX-License-Identifier: Apache-2.0
"""`dsv4-emulate mutate`: mutation testing of one kernel; writes JSON.

What is done is kept beside the output; the same command goes on where an earlier one was interrupted.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from dsv4_ptx_emulator.errors import ArgumentError
from dsv4_ptx_emulator.mutation.arguments import argue, read_arguments
from dsv4_ptx_emulator.mutation.campaign import Campaign, run, say_on_stderr
from dsv4_ptx_emulator.mutation.journal import SUFFIX
from dsv4_ptx_emulator.mutation.trial import load


def add_mutate(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "mutate", help="weaken each synchronisation of a kernel, and see who notices"
    )
    parser.add_argument(
        "scenarios", nargs="+", metavar="module:function", help="of a System; cheap ones first"
    )
    parser.add_argument("--path", type=Path, action="append", default=[], help="folder to import from")
    parser.add_argument("--kernel", required=True, help="part of the kernel's name")
    parser.add_argument("--name", required=True, help="of the result")
    parser.add_argument(
        "--seeds", type=int, default=4, help="schedules per scenario for each mutant (default 4)"
    )
    parser.add_argument(
        "--most-seeds",
        type=int,
        default=16,
        help="the same for one that nobody noticed and no argument explains (default 16)",
    )
    parser.add_argument(
        "--clean-seeds", type=int, default=200, help="schedules per scenario for the original (default 200)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--arguments", type=Path, help="TOML file that argues equivalent mutants")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this mutant only")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.set_defaults(run=mutate)
    again = commands.add_parser("argue", help="apply arguments to results of mutate, without any run")
    again.add_argument("results", nargs="+", type=Path, metavar="result.json", help="files to change")
    again.add_argument(
        "--arguments", type=Path, required=True, help="folder of TOML files, named as the results are"
    )
    again.set_defaults(run=argue_again)


def mutate(options: argparse.Namespace) -> int:
    """Run it; 1 if a check does not hold."""
    for name in ("seeds", "most_seeds", "clean_seeds", "jobs"):
        if getattr(options, name) < 1:
            raise ArgumentError(f"--{name.replace('_', '-')}", getattr(options, name), "at least 1")
    sys.path[:0] = ["", *(str(path) for path in options.path)]
    campaign = Campaign(
        options.name,
        tuple(load(target) for target in options.scenarios),
        options.kernel,
        options.seeds,
        options.most_seeds,
        options.clean_seeds,
        options.jobs,
        read_arguments(options.arguments),
        frozenset(options.only),
    )
    command = shlex.join(["dsv4-emulate", *sys.argv[1:]])
    journal = options.output.with_name(options.output.name + SUFFIX)
    result = run(campaign, command, say_on_stderr, journal)
    return _written(result, options.output)


def argue_again(options: argparse.Namespace) -> int:
    """Read results, apply the arguments of today, write them; 1 if a check does not hold."""
    codes = []
    for path in options.results:
        result = json.loads(path.read_text(encoding="utf-8"))
        argue(result, read_arguments(options.arguments / f"{result['name']}.toml"))
        print(f"{result['name']}:")
        codes.append(_written(result, path))
    return max(codes)


def _written(result: dict[str, Any], output: Path) -> int:
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for check in result["checks"]:
        print(f"{'holds' if check['holds'] else 'FAILS'}: {check['name']} = {check['value']}")
    return 0 if all(check["holds"] for check in result["checks"]) else 1
