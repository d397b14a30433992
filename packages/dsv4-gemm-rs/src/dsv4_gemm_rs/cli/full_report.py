# SPDX-License-Identifier: Apache-2.0
"""`full-report`: everything worth knowing of a machine with GPUs in one file, to be sent back.

Contract: each step is a process of its own with a time limit, so that one that fails, hangs or takes the
driver down costs that step and no other; what it printed last is kept. The file is written anew after every
step, so it is worth sending whenever the command ends. It holds what these commands print: names of devices,
versions, times; command lines and paths are among it. Steps through multicast are skipped, by name and with
the reason, where the group cannot exchange that way, by what `doctor`, an earlier step, has found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from dsv4_symm_mem.compiled import gpu_arch
from dsv4_symm_mem.errors import UnsupportedError

from dsv4_gemm_rs._version import __version__
from dsv4_gemm_rs.bench.report import today
from dsv4_gemm_rs.cli.results import require_writable
from dsv4_gemm_rs.json_file import write_json
from dsv4_gemm_rs.kernels.families import MULTICAST_FAMILIES, Strategy

LIMIT_SECONDS = 1800
KEPT_CHARACTERS = 8000
"""Of what a step prints."""
TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DOCTOR = "doctor"
GROUPS = (2, 4, 8)
"""Numbers of ranks that are run where there are as many GPUs."""


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: For people.
        command: Its words.
        result: File of JSON that it writes; None if it prints JSON or plain text.
        limit_s: Seconds it may take.
        multicast: Whether ranks read sums through multicast.
        inputs: Files of earlier steps that end the command, those that have been written.
    """

    name: str
    command: tuple[str, ...]
    result: Path | None = None
    limit_s: float = LIMIT_SECONDS
    multicast: bool = False
    inputs: tuple[Path, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The command as it is now."""
        return (*self.command, *(str(path) for path in self.inputs if path.exists()))


@dataclass(frozen=True)
class Outcome:
    """What came of a step.

    Attributes:
        name, command: Of the step.
        exit: Its exit code; None where it was ended at its limit or could not be started.
        seconds: Time it took.
        output: The end of what it printed.
        result: What it wrote or printed as JSON, or None.
        skipped: Why it was not tried; empty if it was.
    """

    name: str
    command: str
    exit: int | None
    seconds: float
    output: str
    result: Any
    skipped: str = ""

    @property
    def verdict(self) -> str:
        """For people."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        return "done" if self.exit == 0 else f"FAILED (exit {self.exit})"


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "full-report",
        help="correctness, benchmarks and the machine in one file; needs GPUs, takes an hour or two",
    )
    parser.add_argument("--output", type=Path, default=Path("dsv4-report.json"))
    parser.add_argument("--list", action="store_true", help="print the steps' commands, and run none")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run every step; returns 1 if one failed."""
    gpus = torch.cuda.device_count()
    if not gpus and not options.list:
        raise UnsupportedError("full-report needs at least one GPU that PyTorch can use")
    arch = gpu_arch(torch.cuda.get_device_capability(0)) if gpus else "sm_100a"
    require_writable(options.output)
    with tempfile.TemporaryDirectory(prefix="dsv4-report-") as folder:
        steps = list(steps_for(gpus or max(GROUPS), arch, Path(folder)))
        if options.list:
            print("\n".join(f"{step.name}: {' '.join(step.command)}" for step in steps))
            return 0
        outcomes: list[Outcome] = []
        for number, step in enumerate(steps, 1):
            print(f"[{number}/{len(steps)}] {step.name} ...", flush=True)
            why = multicast_obstacle(gpus, arch, outcomes) if step.multicast else ""
            skipped = Outcome(step.name, " ".join(step.command), None, 0.0, "", None, why)
            made = skipped if why else perform(step)
            outcomes.append(made)
            print(f"[{number}/{len(steps)}] {step.name}: {made.verdict} in {made.seconds:.0f} s", flush=True)
            write(options.output, outcomes)
    failed = [made.name for made in outcomes if made.exit != 0 and not made.skipped]
    omitted = [made.name for made in outcomes if made.skipped]
    print(f"\nwritten: {options.output}")
    print(f"failed steps: {', '.join(failed) or 'none'}; skipped steps: {', '.join(omitted) or 'none'}")
    return int(bool(failed))


def multicast_obstacle(gpus: int, arch: str, outcomes: Sequence[Outcome]) -> str:
    """Why steps through multicast are pointless here; empty if nothing is known to be against them.

    What `doctor` found counts. Where that failed they are tried, and say themselves what they lack.
    """
    if arch not in {gpu_arch(divmod(each, 10)) for each in MULTICAST_FAMILIES}:
        return f"this version has no kernel for {arch} that reads through multicast"
    if gpus < min(GROUPS):
        return f"multicast needs several GPUs, and there is {gpus}"
    for made in outcomes:
        if made.name == DOCTOR and isinstance(made.result, dict):
            return str(made.result.get("multicast_obstacle", ""))
    return ""


def steps_for(gpus: int, arch: str, folder: Path) -> Iterator[Step]:
    """The steps on a machine with that many GPUs of `arch`; results go to `folder`."""

    def ours(
        name: str,
        *words: str,
        ranks: int = 0,
        result: str = "",
        limit_s: float = LIMIT_SECONDS,
        multicast: bool = False,
    ) -> Step:
        launcher: tuple[str, ...] = (sys.executable, "-m")
        if ranks:
            launcher += ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m")
        file = folder / result if result else None
        exchange = ("--exchange", Strategy.MULTICAST.value) if multicast else ()
        output = ("--output", str(file)) if file else ()
        command = (*launcher, "dsv4_gemm_rs.cli.main", *words, *exchange, *output)
        return Step(name + ", multicast" * multicast, command, file, limit_s, multicast)

    groups = [ranks for ranks in GROUPS if ranks <= gpus]
    for question in (("-q",), ("topo", "-m")):
        yield Step(f"nvidia-smi {' '.join(question)}", ("nvidia-smi", *question), limit_s=60)
    yield ours("compile", "compile", "--arch", arch)
    yield ours(DOCTOR, "doctor", "--json", ranks=gpus if gpus > 1 else 0)
    yield ours("start-up", "bench-start", "--arch", arch, result="start.json")
    yield ours("compiled kernels", "inspect", "--arch", arch, result="static.json")
    yield ours("correctness, 2 virtual ranks", "verify", "--ranks", "2", "--json")
    for ranks in groups:
        yield ours(f"correctness, {ranks} GPUs", "verify", "--json", ranks=ranks)
    yield ours("compile", "compile", "--arch", arch, multicast=True)
    for ranks in groups:
        yield ours(f"correctness, {ranks} GPUs", "verify", "--json", ranks=ranks, multicast=True)
    if groups:
        yield ours("link", "bench-link", ranks=2, result="link.json")
    bench = ("bench", "--workspaces", "6", "--samples", "20", "--tokens", *map(str, TOKENS))
    measured = []
    for ranks in groups or [2]:
        name = f"bench-{ranks}.json"
        measured.append(folder / name)
        where = f"{ranks} GPUs" if groups else f"{ranks} virtual ranks"
        chosen = () if groups else ("--ranks", str(ranks))
        yield ours(f"benchmark, {where}", *bench, *chosen, ranks=ranks if groups else 0, result=name)
    for ranks in groups:
        name = f"bench-multicast-{ranks}.json"
        measured.append(folder / name)
        yield ours(f"benchmark, {ranks} GPUs", *bench, ranks=ranks, result=name, multicast=True)
    for ranks in groups:
        # Into the report; the machine's own table stays as it is.
        yield ours(f"thresholds, {ranks} GPUs", "tune", ranks=ranks, result=f"thresholds-{ranks}.json")
    model = ours("model beside benchmarks", "model", result="model.json")
    yield replace(model, command=(*model.command, "--measured"), inputs=tuple(measured))


def perform(step: Step) -> Outcome:
    """Run a step to its end or its limit."""
    started = time.perf_counter()
    words = step.words

    def outcome(code: int | None, output: str, result: Any = None) -> Outcome:
        seconds = time.perf_counter() - started
        return Outcome(step.name, " ".join(words), code, seconds, output[-KEPT_CHARACTERS:], result)

    if shutil.which(step.command[0]) is None:
        return outcome(None, f"there is no {step.command[0]}")
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        # Its own session: the limit ends its ranks, too.
        process = subprocess.Popen(words, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        printed.seek(0)
        output = printed.read()
    return outcome(code, output, _result(step, output))


def _result(step: Step, output: str) -> Any:
    """What the step wrote, or the last of its lines or the end of its output that is JSON."""
    if step.result is not None:
        try:
            return json.loads(step.result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    for start in (
        i for i in range(len(output)) if output.startswith("{", i) and (i == 0 or output[i - 1] == "\n")
    ):
        try:
            return json.loads(output[start:])
        except ValueError:
            continue
    return None


def write(path: Path, outcomes: list[Outcome]) -> None:
    """Write the file whole or not at all."""
    held = {
        "name": "full-report",
        "version": __version__,
        "date": today(),
        "steps": [asdict(made) for made in outcomes],
    }
    write_json(path, held)
