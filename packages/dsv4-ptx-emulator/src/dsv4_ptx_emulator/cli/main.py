# SPDX-License-Identifier: Apache-2.0
"""Arguments and exit codes of `dsv4-emulate`: 0 all right, 1 a finding or a failed check, 2 not to be done.

    dsv4-emulate run kernel.toml                     a launch description
    dsv4-emulate run package.module:function         a function of a `System`
    dsv4-emulate trace package.module:function out.json
    dsv4-emulate mutate package.module:function --kernel NAME --name NAME --output result.json
    dsv4-emulate argue result.json --arguments FOLDER
    dsv4-emulate list-instructions

The function is called with the system, launches on its devices and returns None, or something to print. What
it leaves queued is executed afterwards. A function that raises AssertionError has found a fault.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsv4_ptx_emulator._version import __version__
from dsv4_ptx_emulator.cli.description import Description, read_description
from dsv4_ptx_emulator.cli.mutate import add_mutate
from dsv4_ptx_emulator.errors import ArgumentError, EmulatorError, ProgramError
from dsv4_ptx_emulator.machine.limits import LIMITS
from dsv4_ptx_emulator.report.instructions import markdown_page, plain_list
from dsv4_ptx_emulator.runtime.system import DEFAULT_PROCESSORS, System


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ProgramError, AssertionError) as error:
        print(f"dsv4-emulate: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except (EmulatorError, OSError) as error:
        print(f"dsv4-emulate: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsv4-emulate", description="Run PTX on a CPU, several GPUs at once, and check what it does."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a launch description (.toml) or module:function")
    trace = commands.add_parser("trace", help="the same, and write the schedule as a Chrome trace")
    for command in (run, trace):
        command.add_argument("target", help="file.toml, or module:function that takes a System")
        command.add_argument(
            "--ranks", type=int, default=None, help="emulated GPUs (default: as many as needed)"
        )
        command.add_argument("--arch", choices=sorted(LIMITS), default="sm_90a")
        command.add_argument("--seed", type=int, default=0, help="decides every interleaving (default 0)")
        command.add_argument("--seeds", type=int, default=1, metavar="N", help="run N seeds, from --seed on")
        command.add_argument(
            "--processors", type=int, default=DEFAULT_PROCESSORS, help="SMs that a GPU claims to have"
        )
        command.add_argument("--max-steps", type=int, default=None, help="give a run up after so many steps")
        command.add_argument("--json", action="store_true", help="print the counters as JSON")
        command.set_defaults(run=_run, trace_file=None)
    trace.add_argument("trace_file", type=Path, help="where to write it")
    add_mutate(commands)
    listing = commands.add_parser("list-instructions", help="what is emulated, with the PTX ISA's sections")
    listing.add_argument("--markdown", action="store_true", help="as the documentation's page")
    listing.set_defaults(run=_list)
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.seeds < 1:
        raise ArgumentError("--seeds", options.seeds, "at least 1")
    work, ranks = _target(options.target)
    further = {} if options.max_steps is None else {"max_steps": options.max_steps}
    for seed in range(options.seed, options.seed + options.seeds):
        system = System(
            options.ranks or ranks,
            arch=options.arch,
            seed=seed,
            processors=options.processors,
            trace=options.trace_file is not None,
            **further,
        )
        started = time.perf_counter()
        try:
            answer = work(system, seed)
            system.run()
        except (EmulatorError, AssertionError):
            print(f"seed {seed}:", file=sys.stderr)
            raise
        finally:
            if options.trace_file is not None:
                system.write_trace(options.trace_file)
        _report(system, seed, answer, time.perf_counter() - started, options)
    return 0


def _report(system: System, seed: int, answer: Any, seconds: float, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({"seed": seed, "seconds": seconds, **system.as_dict()}, indent=1))
        return
    if answer is not None:
        print(answer)
    print(system.summary())
    rate = system.counters.instructions() / max(seconds, 1e-9)
    print(f"seed {seed}: {system.steps:,} steps in {seconds:.2f} s, {rate:,.0f} instructions/s")
    if options.trace_file is not None:
        print(f"trace: {options.trace_file} (open in chrome://tracing or ui.perfetto.dev; steps, not time)")


def _target(target: str) -> tuple[Callable[[System, int], Any], int]:
    """What to do with a system, and how many ranks it needs at least.

    Raises:
        ArgumentError: It is neither a description nor a function that can be imported.
    """
    if target.endswith(".toml"):
        description: Description = read_description(Path(target))
        return description.run, description.ranks
    module, colon, name = target.partition(":")
    if not colon:
        raise ArgumentError("target", target, "file.toml or module:function")
    # As for `python -m`: what lies in the current folder can be imported.
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError("target", target, f"a function that can be imported ({error})") from None
    return (lambda system, seed: function(system)), getattr(function, "ranks", 1)


def _list(options: argparse.Namespace) -> int:
    print(markdown_page() if options.markdown else plain_list(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
