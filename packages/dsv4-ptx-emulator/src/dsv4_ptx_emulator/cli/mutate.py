# SPDX-License-Identifier: Apache-2.0
"""`dsv4-emulate mutate`: mutation testing of one kernel; writes JSON."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from dsv4_ptx_emulator.errors import ArgumentError
from dsv4_ptx_emulator.mutation.campaign import Campaign, read_arguments, run, say_on_stderr
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
        "--seeds", type=int, default=8, help="schedules per scenario for each mutant (default 8)"
    )
    parser.add_argument(
        "--clean-seeds", type=int, default=200, help="schedules per scenario for the original (default 200)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--arguments", type=Path, help="TOML file that argues equivalent mutants")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this mutant only")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.set_defaults(run=mutate)


def mutate(options: argparse.Namespace) -> int:
    """Run it; 1 if a check does not hold."""
    for name in ("seeds", "clean_seeds", "jobs"):
        if getattr(options, name) < 1:
            raise ArgumentError(f"--{name.replace('_', '-')}", getattr(options, name), "at least 1")
    sys.path[:0] = ["", *(str(path) for path in options.path)]
    campaign = Campaign(
        options.name,
        tuple(load(target) for target in options.scenarios),
        options.kernel,
        options.seeds,
        options.clean_seeds,
        options.jobs,
        read_arguments(options.arguments),
        frozenset(options.only),
    )
    command = shlex.join(["dsv4-emulate", *sys.argv[1:]])
    result = run(campaign, command, say_on_stderr)
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for check in result["checks"]:
        print(f"{'holds' if check['holds'] else 'FAILS'}: {check['name']} = {check['value']}")
    return 0 if all(check["holds"] for check in result["checks"]) else 1
