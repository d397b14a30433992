# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel, or a mutant of it, against scenarios: who notices that something is wrong, and when.

A scenario is a function of a `System`: it launches on the system's devices, calls `run`, and raises
AssertionError where an answer is wrong. `ranks`, `processors` and `arch` are attributes of it (1, 4 and
sm_90a without), and `checks` that may turn the standard checkers off. Every run has the memory model's;
engines are slow in every second seed, and of four seeds CTAs run apart in one and warps in another.

A run that takes twenty times the steps of the slowest clean run is given up: it hangs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dsv4_ptx_emulator.checkers.memory_model.findings import Finding
from dsv4_ptx_emulator.checkers.memory_model.model import MemoryModel
from dsv4_ptx_emulator.errors import (
    ArgumentError,
    DeadlockError,
    EmulatorError,
    MemoryModelError,
    ProgramError,
    StepLimitError,
)
from dsv4_ptx_emulator.machine.observer import Access, AsyncEvent, Observer
from dsv4_ptx_emulator.machine.scheduler import Uneven
from dsv4_ptx_emulator.runtime.system import System

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.tensor_memory import TensorEvent
    from dsv4_ptx_emulator.machine.warp import Warp

Scenario = Callable[[System], None]
PATIENCE = 20
UNEVEN = (Uneven.NOBODY, Uneven.NOBODY, Uneven.CTAS, Uneven.WARPS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out of a run.

    Attributes:
        by: Who noticed: "memory model: RULE", a checker's error, "deadlock", "hang", "wrong answer"; "" if
            nobody.
        detail: What it said, in one line.
        steps: Instructions and steps of engines.
    """

    by: str
    detail: str = ""
    steps: int = 0


def load(target: str) -> Scenario:
    """The scenario `module:function`.

    Raises:
        ArgumentError: It cannot be imported.
    """
    module, colon, name = target.partition(":")
    try:
        scenario = getattr(importlib.import_module(module), name) if colon else None
    except (ImportError, AttributeError) as error:
        raise ArgumentError("scenario", target, f"module:function ({error})") from None
    if not callable(scenario):
        raise ArgumentError("scenario", target, "module:function")
    return scenario  # type: ignore[no-any-return]


def make_system(
    scenario: Scenario, seed: int, rewrite: Callable[[str], str] | None, max_steps: int | None
) -> System:
    """The devices for one run."""
    options: dict[str, Any] = {} if max_steps is None else {"max_steps": max_steps}
    return System(
        getattr(scenario, "ranks", 1),
        arch=getattr(scenario, "arch", "sm_90a"),
        processors=getattr(scenario, "processors", 4),
        seed=seed,
        checks=getattr(scenario, "checks", True),
        slow_engines=seed % 2 == 1,
        uneven=UNEVEN[seed % 4],
        rewrite=rewrite,
        **options,
    )


def attempt(
    scenario: Scenario,
    seed: int,
    rewrite: Callable[[str], str] | None = None,
    *,
    known: Collection[tuple[str, int]] = (),
    max_steps: int | None = None,
) -> Outcome:
    """One run of one schedule."""
    system = make_system(scenario, seed, rewrite, max_steps)
    system.emulator.attach(MemoryModel(known=known))
    try:
        scenario(system)
        system.run()
    except EmulatorError as error:
        return _named(error, system)
    except Exception as error:
        # A failed assertion, or whatever the program under test raises on its own account.
        if system.failure is not None and isinstance(system.failure, EmulatorError):
            return _named(system.failure, system)
        by = (
            "wrong answer"
            if isinstance(error, AssertionError)
            else f"error of the host: {type(error).__name__}"
        )
        return Outcome(by, str(error).split("\n", 1)[0], system.steps)
    return Outcome("", "", system.steps)


def _named(error: EmulatorError, system: System) -> Outcome:
    detail = str(error).split("\n", 1)[0]
    if isinstance(error, MemoryModelError):
        return Outcome(f"memory model: {error.rule}", detail, system.steps)
    if isinstance(error, DeadlockError):
        return Outcome("deadlock", error.waiting[0] if error.waiting else detail, system.steps)
    if isinstance(error, StepLimitError):
        return Outcome("hang", detail, system.steps)
    if isinstance(error, ProgramError):
        return Outcome(f"checker: {type(error).__name__}", detail, system.steps)
    return Outcome(f"error: {type(error).__name__}", detail, system.steps)


@dataclass(slots=True)
class Clean:
    """What came out of runs of the original.

    Attributes:
        findings: Of the memory model's checker, by key.
        failures: Whatever else went wrong.
        steps: The largest number of steps.
        texts: PTX texts that ran.
        lines: Lines of theirs that synchronise or access memory, and were executed.
    """

    findings: dict[tuple[str, int, int], Finding] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    steps: int = 0
    texts: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)

    def as_json(self) -> dict[str, Any]:
        """All but the texts, ready for JSON."""
        findings = [asdict(finding) for finding in self.findings.values()]
        kept = {"findings": findings, "failures": self.failures, "steps": self.steps}
        return kept | {"lines": sorted(self.lines)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Clean:
        """The inverse of `as_json`."""
        findings = [Finding(**each) for each in value["findings"]]
        found = {finding.key: finding for finding in findings}
        return cls(found, value["failures"], value["steps"], set(), set(value["lines"]))

    def add(self, other: Clean) -> None:
        """Take in the results of other runs."""
        self.findings.update(other.findings)
        self.failures += other.failures
        self.steps = max(self.steps, other.steps)
        self.texts |= other.texts
        self.lines |= other.lines


class _Reached(Observer):
    """Lines that hooks tell of, which is all that mutants change; not told apart by kernel."""

    def __init__(self) -> None:
        self.lines: set[int] = set()

    def on_access(self, access: Access) -> None:
        """A memory access."""
        self.lines.add(access.kind.line)

    def on_fence(self, warp: Warp, name: str, line: int) -> None:
        """A fence."""
        self.lines.add(line)

    def on_sync(self, warp: Warp, name: str, channel: Any, line: int) -> None:
        """A barrier."""
        self.lines.add(line)

    def on_async(self, event: AsyncEvent) -> None:
        """Issue, commit, wait."""
        self.lines.add(event.line)

    def on_tensor(self, event: TensorEvent) -> None:
        """Tensor memory."""
        self.lines.add(event.kind.line)


def clean(scenario: Scenario, seeds: Sequence[int]) -> Clean:
    """Run the original."""
    result = Clean()
    for seed in seeds:
        system = make_system(scenario, seed, None, None)
        model, reached = MemoryModel(collect=True), _Reached()
        system.emulator.attach(model)
        system.emulator.attach(reached)
        failures = []
        try:
            scenario(system)
            system.run()
        except Exception as error:
            failures.append(f"{getattr(scenario, '__name__', scenario)}, seed {seed}: {error}")
        findings = {finding.key: finding for finding in model.findings}
        result.add(Clean(findings, failures, system.steps, set(system.emulator.texts), reached.lines))
    return result
