# SPDX-License-Identifier: Apache-2.0
"""All mutants of a kernel against its scenarios, in parallel processes, into one result.

Contract: the original runs first, over `clean_seeds` schedules of each scenario; what the memory model's
checker finds in it is listed, and passed over when mutants run (a mutant is caught by something new). Then
each mutant runs until somebody notices, over `seeds` schedules of each scenario in which the original got
to its line. Survivors need an argument why they are equivalent, from a file of arguments. One without runs on
to `most_seeds` schedules of each scenario; if nobody notices then, that is the check that fails.

A journal beside the result keeps what is done. An interrupted campaign goes on from there, and one whose
check failed is complete as soon as there are arguments for its survivors.

Workers are forked, so that they inherit compiled host functions.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from dsv4_ptx_emulator._version import __version__
from dsv4_ptx_emulator.errors import ArgumentError
from dsv4_ptx_emulator.mutation.arguments import Arguments, argue
from dsv4_ptx_emulator.mutation.journal import Journal, sources
from dsv4_ptx_emulator.mutation.mutants import Mutant, mutants
from dsv4_ptx_emulator.mutation.trial import PATIENCE, Clean, Scenario, attempt, clean
from dsv4_ptx_emulator.ptx.parser import parse

SCHEMA = 2
LIBRARIES = ("numpy", "torch", "nvidia-cutlass-dsl")


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is to be done.

    Attributes:
        name: Of the result.
        scenarios: In the order in which mutants meet them; cheap ones first.
        kernel: Part of the kernel's name.
        seeds: Schedules per scenario for each mutant.
        most_seeds: The same for one that nobody has noticed by then and no argument explains.
        clean_seeds: Schedules per scenario for the original.
        jobs: Processes.
        arguments: Why mutants are equivalent, and findings in the original stay.
        only: Names of mutants to run; all of them if empty.
    """

    name: str
    scenarios: tuple[Scenario, ...]
    kernel: str
    seeds: int
    most_seeds: int
    clean_seeds: int
    jobs: int
    arguments: Arguments
    only: frozenset[str] = frozenset()

    def seeds_of(self, mutant: Mutant) -> int:
        """How many schedules of each scenario the mutant has to pass unnoticed."""
        return self.seeds if mutant.name in self.arguments.mutants else max(self.seeds, self.most_seeds)


@dataclass(slots=True)
class _Shared:
    """What the workers inherit."""

    campaign: Campaign
    text: str
    known: frozenset[tuple[str, int]]
    max_steps: int
    lines: list[set[int]]


_shared: _Shared | None = None


def run(
    campaign: Campaign, command: str, say: Callable[[str], None], journal_path: Path | None = None
) -> dict[str, Any]:
    """Run a campaign, or the rest of it.

    Args:
        campaign: What is to be done.
        command: How the user said so.
        say: Told of progress.
        journal_path: Where to keep what is done until all is; None for nowhere.

    Returns:
        The result, ready for JSON.

    Raises:
        ArgumentError: No or several kernels have the name.
    """
    global _shared
    # The first runs are in this process, so that what is compiled is there for all.
    found = [clean(scenario, [0]) for scenario in campaign.scenarios]
    text, entry = _kernel(set().union(*(part.texts for part in found)), campaign.kernel)
    digest = hashlib.sha256(text.encode()).hexdigest()
    journal = Journal(journal_path, _about(campaign, digest))
    # The collector would walk all that libraries have made, again and again.
    gc.freeze()
    seconds = _baseline(campaign, found, journal, say)
    baseline = Clean()
    for part in found:
        baseline.add(part)
    known = frozenset((rule, first) for rule, first, _ in baseline.findings)
    _shared = _Shared(campaign, text, known, PATIENCE * baseline.steps, [part.lines for part in found])
    work = [each for each in mutants(text, entry) if not campaign.only or each.name in campaign.only]
    rows, spent = _rows(campaign, work, journal, say)
    result: dict[str, Any] = {
        "name": campaign.name,
        "machine": {
            "device": f"{getattr(campaign.scenarios[0], 'arch', 'sm_90a')} emulated by dsv4-ptx-emulator",
            "cpu": platform.machine(),
            "cpu_count": os.cpu_count(),
            "system": platform.system(),
        },
        "versions": _versions(),
        "command": command,
        "date": datetime.now(UTC).replace(microsecond=0).isoformat(),
        "rows": rows,
        "checks": [],
        "schema": {
            "version": SCHEMA,
            "kernel": entry,
            "kernel_sha256": digest,
            "scenarios": [_name(each) for each in campaign.scenarios],
            "seeds": campaign.seeds,
            "most_seeds": campaign.most_seeds,
            "clean_seeds": campaign.clean_seeds,
            "core_seconds": round(seconds + spent),
            "only": sorted(campaign.only),
            "findings": [asdict(finding) for finding in baseline.findings.values()],
            "failures": baseline.failures,
        },
    }
    argue(result, campaign.arguments)
    if all(check["holds"] for check in result["checks"]):
        journal.remove()
    return result


def _about(campaign: Campaign, digest: str) -> dict[str, Any]:
    """What must be the same for the entries of a journal to count."""
    return {
        "version": SCHEMA,
        "kernel_sha256": digest,
        "sources_sha256": sources(campaign.scenarios),
        "scenarios": [_name(each) for each in campaign.scenarios],
        "versions": _versions(),
    }


def _baseline(campaign: Campaign, found: list[Clean], journal: Journal, say: Callable[[str], None]) -> float:
    """Add what comes out of the original's other runs to `found`, by scenario; returns their seconds."""
    done = {
        (number, seed): (part, spent)
        for number, seed, part, spent in journal.entries.get("clean", ())
        if seed < campaign.clean_seeds
    }
    seconds = 0.0
    for (number, _), (part, spent) in done.items():
        found[number].add(Clean.from_json(part))
        seconds += spent
    tasks = [
        (number, seed)
        for seed in range(1, campaign.clean_seeds)
        for number in range(len(campaign.scenarios))
        if (number, seed) not in done
    ]
    with multiprocessing.get_context("fork").Pool(campaign.jobs) as pool:
        runs = pool.imap_unordered(partial(_clean_one, campaign.scenarios), tasks)
        for count, (number, seed, part, spent) in enumerate(runs, 1):
            journal.add("clean", (number, seed, part.as_json(), spent))
            found[number].add(part)
            seconds += spent
            if count % 50 == 0:
                say(f"original: {count} of {len(tasks)} runs")
    return seconds


def _clean_one(scenarios: Sequence[Scenario], task: tuple[int, int]) -> tuple[int, int, Clean, float]:
    number, seed = task
    started = time.process_time()
    part = clean(scenarios[number], [seed])
    return number, seed, part, round(time.process_time() - started, 3)


def _rows(
    campaign: Campaign, work: Sequence[Mutant], journal: Journal, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], float]:
    """The rows of all mutants, in order, and the seconds that they took."""
    assert _shared is not None
    known = [list(each) for each in sorted(_shared.known)]
    names = {each.name: each for each in work}
    rows = {}
    for row, spent, passed_over, reached in journal.entries.get("row", ()):
        mutant = names.get(row["mutant"])
        # What more runs of the original have found or reached since may change a row.
        if mutant is None or passed_over != known:
            continue
        if row["by"] or (reached == _reaching(mutant) and row["seeds"] >= campaign.seeds_of(mutant)):
            rows[mutant.name] = (row, spent)
    left = [each for each in work if each.name not in rows]
    with multiprocessing.get_context("fork").Pool(campaign.jobs) as pool:
        for mutant, (row, spent) in zip(left, pool.imap(_try, left), strict=True):
            journal.add("row", (row, spent, known, _reaching(mutant)))
            rows[row["mutant"]] = (row, spent)
            outcome = row["by"] or row["status"]
            say(f"{len(rows)}/{len(work)} {row['mutant']}: {outcome} ({row['runs']} runs)")
    return [rows[each.name][0] for each in work], sum(spent for _, spent in rows.values())


def _reaching(mutant: Mutant) -> list[int]:
    """Numbers of the scenarios in which the original gets to the mutant's line."""
    assert _shared is not None
    return [number for number, lines in enumerate(_shared.lines) if mutant.line in lines]


def _kernel(texts: set[str], name: str) -> tuple[str, str]:
    found = [(text, entry) for text in sorted(texts) for entry in parse(text).kernels if name in entry]
    if len(found) != 1:
        raise ArgumentError("kernel", name, f"part of one kernel's name; {len(found)} have it")
    return found[0]


def _try(mutant: Mutant) -> tuple[dict[str, Any], float]:
    """A mutant's row, before any argument, and the seconds that it took."""
    shared = _shared
    assert shared is not None
    started = time.process_time()
    rewrite = partial(_rewritten, shared.text, mutant.apply(shared.text))
    scenarios = [shared.campaign.scenarios[number] for number in _reaching(mutant)]
    row: dict[str, Any] = {"mutant": mutant.name, "line": mutant.line, "rule": mutant.rule}
    row |= {"status": "survived" if scenarios else "not reached", "by": "", "runs": 0}
    row |= {"seeds": 0, "scenario": "", "detail": ""}
    for seed in range(shared.campaign.seeds_of(mutant) if scenarios else 0):
        row["seeds"] = seed + 1
        for scenario in scenarios:
            row["runs"] += 1
            outcome = attempt(scenario, seed, rewrite, known=shared.known, max_steps=shared.max_steps)
            if outcome.by:
                row |= {"status": "caught", "by": outcome.by, "detail": outcome.detail}
                row["scenario"] = _name(scenario)
                return row, round(time.process_time() - started, 3)
    return row, round(time.process_time() - started, 3)


def _rewritten(original: str, changed: str, text: str) -> str:
    return changed if text == original else text


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
