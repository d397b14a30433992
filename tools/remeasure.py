# SPDX-License-Identifier: Apache-2.0
"""Runs published benchmarks again by the commands that their result files hold, then writes what follows.

`python -m tools.remeasure` takes every result in docs/results that was measured on GPUs of this machine's
architecture and needs no more of them than there are; `python -m tools.remeasure h200_tp2_k2048 …` those.
Thresholds, model and tables of the documentation are made anew from what was measured; plots come from the
benchmarks, or from `python -m tools.plots`. What the pages say in words is not: read it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.workspace import RESULTS, ROOT

MODEL = "b200_model"
MODULES = {
    "torchrun": "torch.distributed.run",
    "dsv4-gemm-rs": "dsv4_gemm_rs.cli.main",
    "dsv4-mhc": "dsv4_mhc.cli.main",
}
"""What stands behind the commands, so that they need not be on PATH."""


def gpus_of(machine: Mapping[str, Any]) -> int:
    """GPUs that a result of `machine` was measured with; virtual ranks share one."""
    if machine.get("arch") is None:
        return 0
    return int(machine["ranks"]) if machine.get("ranks_are") == "processes" else 1


def runnable(results: Mapping[str, Any], arch: int | None, gpus: int) -> list[str]:
    """Names of the results that `gpus` GPUs of compute capability `arch` can measure again."""
    return [
        name
        for name, result in sorted(results.items())
        if 0 < gpus_of(result["machine"]) <= gpus and result["machine"]["arch"] == arch
    ]


def program(command: str) -> list[str]:
    """A result's command as arguments that this interpreter runs.

    Raises:
        ValueError: It is none of this repository's.
    """
    first, *rest = shlex.split(command)
    if first not in MODULES:
        raise ValueError(f"{command!r} is not run by one of {', '.join(MODULES)}")
    return [sys.executable, "-m", MODULES[first], *rest]


def read(folder: Path) -> dict[str, Any]:
    """All results by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 if a benchmark fails, and then nothing is made from the results."""
    parser = argparse.ArgumentParser(prog="python -m tools.remeasure", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="results in docs/results (default: all that can be)")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    options = parser.parse_args(arguments)
    results = read(RESULTS)
    if unknown := set(options.names) - set(results):
        parser.error(f"no results: {', '.join(sorted(unknown))}")
    gpus = torch.cuda.device_count()
    capability = torch.cuda.get_device_capability() if gpus else None
    arch = None if capability is None else 10 * capability[0] + capability[1]
    able = runnable(results, arch, gpus)
    if unable := set(options.names) - set(able):
        parser.error(f"{gpus} GPU(s) of architecture {arch} cannot measure {', '.join(sorted(unable))}")
    names = options.names or able
    for number, name in enumerate(names, 1):
        command = results[name]["command"]
        print(f"{number}/{len(names)} {name}: {command}", flush=True)
        if options.list:
            continue
        started = time.monotonic()
        code = subprocess.run(program(command), cwd=ROOT, check=False).returncode
        print(
            f"{number}/{len(names)} {name}: exit {code} after {time.monotonic() - started:.0f} s", flush=True
        )
        if code:
            return 1
    if not options.list:
        for step in (
            program(results[MODEL]["command"]),
            [sys.executable, "-m", "tools.thresholds"],
            [sys.executable, "-m", "tools.results_table"],
        ):
            subprocess.run(step, cwd=ROOT, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
