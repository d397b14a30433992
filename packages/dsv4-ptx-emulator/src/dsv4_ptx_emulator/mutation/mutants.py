# SPDX-License-Identifier: Apache-2.0
"""Mutants of a PTX text: one instruction changed each, so that one synchronisation is missing or weaker.

A mutant changes a single line in place: line numbers stay what they were, so that a finding names the same
lines as in the original. It is identified by opcode, ordinal of that opcode in the kernel, and change: that
survives a new compiler version better than a line number does.

Changes: fences, barriers, arrivals, commits and waits are removed (a wait that yields a predicate "passes at
once"); a group wait also waits for one group less, or for `.read` only; releases and acquires become relaxed
or get the next smaller scope; a fence's scope or state space is narrowed; expect-tx counts are off by 16
bytes either way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from dsv4_ptx_emulator.ptx.module import Instruction
from dsv4_ptx_emulator.ptx.parser import parse

NARROWER = {"sys": "gpu", "gpu": "cta", "cluster": "cta"}
REMOVED = {
    "fence": "8.4, 9.7.15.4: no fence orders or links the accesses before and after",
    "membar": "8.4, 9.7.15.4: no fence orders or links the accesses before and after",
    "wgmma.fence": "9.7.17.7.1: registers are not ordered before wgmma",
    "wgmma.commit_group": "9.7.17.7.2: wgmma in no group, so that no wait covers it",
    "wgmma.wait_group": "9.7.17.7.3: wgmma is not known to be complete",
    "bar.": "8.9.4, 9.7.15.1: threads do not synchronise",
    "barrier.": "8.9.4, 9.7.15: threads do not synchronise",
    "mbarrier.arrive": "9.7.15.16.16: an arrival is missing",
    "cp.async.mbarrier.arrive": "9.7.15.16.18: an arrival is missing",
    "mbarrier.expect_tx": "9.7.15.16.14: bytes are not expected",
    "cp.async.bulk.commit_group": "9.7.10.28.6.1: copies in no group, so that no wait covers them",
    "cp.async.bulk.wait_group": "9.7.10.28.6.2: copies are not known to be complete or read",
    "cp.async.commit_group": "9.7.10.28.3.2: copies in no group, so that no wait covers them",
    "cp.async.wait": "9.7.10.28.3.3: copies are not known to be complete",
    "tcgen05.commit": "9.7.18.11: an arrival is missing",
    "tcgen05.wait": "9.7.18.8.5: loads or stores are not known to be complete",
    "tcgen05.fence": "9.7.18.6.4: tcgen05 operations are not ordered across threads",
    "griddepcontrol.wait": "9.7.15.14: the launch before is not known to have ended",
}
"""Beginnings of opcodes that are removed, and what then is wrong by which section of PTX ISA 9.4."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change.

    Attributes:
        name: Opcode, ordinal and change; unique in a kernel.
        line: Line in the text.
        rule: What it makes wrong, by section of the ISA, unless it is equivalent.
        text: What the line becomes.
    """

    name: str
    line: int
    rule: str
    text: str

    def apply(self, ptx: str) -> str:
        """The whole text with the change."""
        lines = ptx.split("\n")
        lines[self.line - 1] = self.text
        return "\n".join(lines)


def mutants(ptx: str, entry: str) -> Iterator[Mutant]:
    """Every mutant of a kernel, in order of its lines.

    Raises:
        KeyError: The text has no such kernel.
    """
    lines = ptx.split("\n")
    counts: Counter[str] = Counter()
    for instruction in parse(ptx).kernels[entry].instructions:
        line = lines[instruction.line - 1]
        changes = list(_changes(instruction, line))
        if not changes:
            continue
        counts[instruction.opcode] += 1
        for change, rule, text in changes:
            name = f"{instruction.opcode} #{counts[instruction.opcode]}: {change}"
            yield Mutant(name, instruction.line, rule, text)


def _changes(instruction: Instruction, line: str) -> Iterator[tuple[str, str, str]]:
    opcode = instruction.opcode
    words = instruction.words()
    whole = re.compile(r"(?:@!?[%\w]+\s+)?" + re.escape(_written(instruction, line)))
    nothing = whole.sub("// removed", line, count=1)

    def becomes(new: str) -> str:
        return line.replace(opcode, new, 1)

    if opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        target = re.search(r"(?:try|test)_wait[\w.:]*\s+([%\w]+)\s*,", line)
        assert target is not None, line
        done = line.replace(_written(instruction, line), f"setp.eq.b32 {target[1]}, 0, 0;", 1)
        yield "passes at once", "8.8, 9.7.15.16.19: the phase is not known to be complete", done
    else:
        for beginning, rule in REMOVED.items():
            if opcode.startswith(beginning):
                yield "removed", rule, nothing
                break
    if "expect_tx" in words:
        rule = "9.7.15.16.5: the phase completes too early, or never"
        for change, amount in (("16 bytes more", 16), ("16 bytes fewer", -16)):
            yield change, rule, _counting(instruction, line, amount)
    if "wait_group" in words:
        yield from _group_waits(instruction, becomes, line)
    yield from _orders(opcode, words, becomes)


def _written(instruction: Instruction, line: str) -> str:
    start = line.index(instruction.opcode)
    return line[start : line.index(";", start) + 1]


def _counting(instruction: Instruction, line: str, amount: int) -> str:
    written = _written(instruction, line)
    count = written.rstrip("; \t").rsplit(",", 1)[1].strip()
    new = written.rstrip("; \t").rsplit(",", 1)[0] + ", mutated;"
    before = line[: line.index(written)]
    guard = re.search(r"@!?[%\w]+\s+$", before)
    prefix = guard[0] if guard else ""
    inner = f"{{ .reg .b32 mutated; add.s32 mutated, {count}, {amount}; {prefix}{new} }}"
    return before[: len(before) - len(prefix)] + inner + line[line.index(written) + len(written) :]


def _group_waits(instruction: Instruction, becomes: object, line: str) -> Iterator[tuple[str, str, str]]:
    opcode = instruction.opcode
    written = _written(instruction, line)
    found = re.search(r"(\d+)\s*;$", written)
    if found:
        looser = written[: found.start(1)] + str(int(found[1]) + 1) + ";"
        yield (
            "one group less",
            "9.7.10.28.6.2, 9.7.17.7.3: the last group is not known to be complete",
            line.replace(written, looser, 1),
        )
    if opcode == "cp.async.bulk.wait_group":
        yield (
            ".read only",
            "9.7.10.28.6.2: writes of the copies are not known to be visible",
            line.replace(opcode, f"{opcode}.read", 1),
        )


def _orders(opcode: str, words: tuple[str, ...], becomes: object) -> Iterator[tuple[str, str, str]]:
    assert callable(becomes)
    relaxed = "8.8: no release or acquire pattern, so nothing synchronises"
    scope_rule = "8.5, 8.7: the scope leaves the other thread out"
    if words[0] in ("ld", "st", "atom", "red"):
        sem = next((word for word in words if word in ("acquire", "release", "acq_rel")), None)
        if sem is None:
            return
        weaker = ["relaxed"] + (["acquire", "release"] if sem == "acq_rel" else [])
        for word in weaker:
            yield f"{sem} to {word}", relaxed, becomes(opcode.replace(f".{sem}", f".{word}", 1))
        scope = next((word for word in words if word in NARROWER or word == "cta"), None)
        if scope is None:
            yield "scope gpu to cta", scope_rule, becomes(opcode.replace(f".{sem}", f".{sem}.cta", 1))
        elif scope in NARROWER:
            narrower = NARROWER[scope]
            yield (
                f"scope {scope} to {narrower}",
                scope_rule,
                becomes(opcode.replace(f".{scope}", f".{narrower}", 1)),
            )
    elif words[0] == "mbarrier" and words[1] in ("arrive", "try_wait", "test_wait"):
        sem = next((word for word in words if word in ("acquire", "release", "relaxed")), None)
        if sem == "relaxed":
            return
        if sem is None:
            at = next(place for place, word in enumerate(words) if word.startswith("shared") or word == "b64")
            sem = "release" if words[1] == "arrive" else "acquire"
            yield (
                f"{sem} to relaxed",
                relaxed,
                becomes(".".join([*words[:at], "relaxed", "cta", *words[at:]])),
            )
        else:
            yield f"{sem} to relaxed", relaxed, becomes(opcode.replace(f".{sem}", ".relaxed", 1))
            if "cluster" in words:
                yield "scope cluster to cta", scope_rule, becomes(opcode.replace(".cluster", ".cta", 1))
    elif words[0] == "fence":
        if opcode == "fence.proxy.async":
            for space in ("global", "shared::cta"):
                yield (
                    f"of {space} only",
                    "9.7.15.4: the fence leaves the other state space out",
                    becomes(f"{opcode}.{space}"),
                )
        scope = next((word for word in words if word in NARROWER), None)
        if scope is not None and "proxy" not in words and "mbarrier_init" not in words:
            narrower = NARROWER[scope]
            yield (
                f"scope {scope} to {narrower}",
                scope_rule,
                becomes(opcode.replace(f".{scope}", f".{narrower}", 1)),
            )
    elif words[:2] == ("barrier", "cluster") and words[2] == "arrive" and "relaxed" not in words:
        yield (
            "release to relaxed",
            relaxed,
            becomes(opcode.replace(".arrive", ".arrive.relaxed", 1).replace(".release", "", 1)),
        )
