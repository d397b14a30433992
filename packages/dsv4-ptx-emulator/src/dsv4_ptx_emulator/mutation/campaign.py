# SPDX-License-Identifier: Apache-2.0
"""All mutants of a kernel against its scenarios, in parallel processes, into one result.

Contract: the original runs first, over `clean_seeds` schedules of each scenario; what the memory model's
checker finds in it is listed, and passed over when mutants run (a mutant is caught by something new). Then
each mutant runs until somebody notices, at most `seeds` schedules of each scenario in which the original got
to its line. Survivors need an argument why they are equivalent, from a file of arguments; those without one
are the check that fails.

Workers are forked, so that they inherit compiled host functions.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from dsv4_ptx_emulator._version import __version__
from dsv4_ptx_emulator.errors import ArgumentError
from dsv4_ptx_emulator.mutation.mutants import Mutant, mutants
from dsv4_ptx_emulator.mutation.trial import PATIENCE, Clean, Scenario, attempt, clean
from dsv4_ptx_emulator.ptx.parser import parse

SCHEMA = 1
LIBRARIES = ("numpy", "torch", "nvidia-cutlass-dsl")


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is to be done.

    Attributes:
        name: Of the result.
        scenarios: In the order in which mutants meet them; cheap ones first.
        kernel: Part of the kernel's name.
        seeds: Schedules per scenario for each mutant.
        clean_seeds: Schedules per scenario for the original.
        jobs: Processes.
        arguments: By mutant's name, why it is equivalent.
        only: Names of mutants to run; all of them if empty.
    """

    name: str
    scenarios: tuple[Scenario, ...]
    kernel: str
    seeds: int
    clean_seeds: int
    jobs: int
    arguments: dict[str, str]
    only: frozenset[str] = frozenset()


def read_arguments(path: Path | None) -> dict[str, str]:
    """Arguments by mutant, from TOML: tables `[[equivalent]]` with `mutants` (names) and `because`."""
    if path is None:
        return {}
    tables = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])
    return {name: table["because"] for table in tables for name in table["mutants"]}


@dataclass(slots=True)
class _Shared:
    """What the workers inherit."""

    campaign: Campaign
    text: str
    known: frozenset[tuple[str, int]]
    max_steps: int
    lines: list[set[int]]


_shared: _Shared | None = None


def run(campaign: Campaign, command: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a campaign.

    Returns:
        The result, ready for JSON.

    Raises:
        ArgumentError: No or several kernels have the name, or an argument is about no mutant.
    """
    global _shared
    started = time.time()
    runs = _baseline(campaign, say)
    baseline = Clean()
    for part in runs:
        baseline.add(part)
    text, entry = _kernel(baseline.texts, campaign.kernel)
    known = frozenset((rule, first) for rule, first, _ in baseline.findings)
    _shared = _Shared(campaign, text, known, PATIENCE * baseline.steps, [part.lines for part in runs])
    work = [each for each in mutants(text, entry) if not campaign.only or each.name in campaign.only]
    if unknown := set(campaign.arguments) - {each.name for each in mutants(text, entry)}:
        raise ArgumentError("arguments", sorted(unknown), "names of mutants")
    rows = []
    context = multiprocessing.get_context("fork")
    with context.Pool(campaign.jobs) as pool:
        for row in pool.imap(_try, work):
            rows.append(row)
            say(f"{len(rows)}/{len(work)} {row['status']}: {row['mutant']} ({row['by']}, {row['runs']} runs)")
    return {
        "name": campaign.name,
        "machine": {
            "device": "sm_90a emulated by dsv4-ptx-emulator",
            "cpu": platform.machine(),
            "cpu_count": os.cpu_count(),
            "system": platform.system(),
        },
        "versions": _versions(),
        "command": command,
        "date": datetime.now(UTC).replace(microsecond=0).isoformat(),
        "rows": rows,
        "checks": _checks(campaign, rows, baseline),
        "schema": {
            "version": SCHEMA,
            "kernel": entry,
            "scenarios": [_name(each) for each in campaign.scenarios],
            "seeds": campaign.seeds,
            "clean_seeds": campaign.clean_seeds,
            "seconds": round(time.time() - started),
            "findings": [asdict(finding) for finding in baseline.findings.values()],
            "failures": baseline.failures,
        },
    }


def _baseline(campaign: Campaign, say: Callable[[str], None]) -> list[Clean]:
    """What came out of the original's runs, by scenario."""
    # The first run is in this process, so that what is compiled is there for all.
    found = [clean(scenario, [0]) for scenario in campaign.scenarios]
    tasks = [
        (number, seed) for number in range(len(campaign.scenarios)) for seed in range(1, campaign.clean_seeds)
    ]
    with multiprocessing.get_context("fork").Pool(campaign.jobs) as pool:
        runs = pool.imap_unordered(partial(_clean_one, campaign.scenarios), tasks)
        for done, (number, part) in enumerate(runs, 1):
            found[number].add(part)
            if done % 50 == 0:
                say(f"original: {done} of {len(tasks)} runs")
    return found


def _clean_one(scenarios: Sequence[Scenario], task: tuple[int, int]) -> tuple[int, Clean]:
    number, seed = task
    return number, clean(scenarios[number], [seed])


def _kernel(texts: set[str], name: str) -> tuple[str, str]:
    found = [(text, entry) for text in sorted(texts) for entry in parse(text).kernels if name in entry]
    if len(found) != 1:
        raise ArgumentError("kernel", name, f"part of one kernel's name; {len(found)} have it")
    return found[0]


def _try(mutant: Mutant) -> dict[str, Any]:
    shared = _shared
    assert shared is not None
    changed = mutant.apply(shared.text)
    runs = 0
    row: dict[str, Any] = {"mutant": mutant.name, "line": mutant.line, "rule": mutant.rule}
    scenarios = [
        scenario
        for scenario, lines in zip(shared.campaign.scenarios, shared.lines, strict=True)
        if mutant.line in lines
    ]
    for seed in range(shared.campaign.seeds):
        for scenario in scenarios:
            runs += 1
            outcome = attempt(
                scenario,
                seed,
                partial(_rewritten, shared.text, changed),
                known=shared.known,
                max_steps=shared.max_steps,
            )
            if outcome.by:
                caught = {"status": "caught", "by": outcome.by, "runs": runs, "seeds": seed + 1}
                return row | caught | {"scenario": _name(scenario), "detail": outcome.detail, "argument": ""}
    argument = shared.campaign.arguments.get(mutant.name, "")
    status = "equivalent" if argument else "survived" if scenarios else "not reached"
    return row | {
        "status": status,
        "by": "",
        "runs": runs,
        "seeds": shared.campaign.seeds,
        "scenario": "",
        "detail": "",
        "argument": argument,
    }


def _rewritten(original: str, changed: str, text: str) -> str:
    return changed if text == original else text


def _checks(campaign: Campaign, rows: list[dict[str, Any]], baseline: Clean) -> list[dict[str, Any]]:
    counts = Counter(row["status"] for row in rows)
    unexplained = counts["survived"] + counts["not reached"]
    refuted = sum(1 for row in rows if row["status"] == "caught" and row["mutant"] in campaign.arguments)
    values = {
        "findings in the original": len(baseline.findings),
        "failures of the original": len(baseline.failures),
        "mutants that nobody noticed and no argument explains": unexplained,
        "arguments that a run refutes": refuted,
    }
    return [
        {"name": name, "value": value, "target": 0, "holds": value == 0} for name, value in values.items()
    ]


def _name(scenario: Scenario) -> str:
    return str(getattr(scenario, "__name__", scenario))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "dsv4-ptx-emulator": __version__}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def say_on_stderr(text: str) -> None:
    """For progress."""
    print(text, file=sys.stderr, flush=True)
