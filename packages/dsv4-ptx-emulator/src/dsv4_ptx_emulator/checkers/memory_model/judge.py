# SPDX-License-Identifier: Apache-2.0
"""Unordered conflicts: whether they are allowed after all, and if not, by which rule they are wrong.

Morally strong accesses may race (PTX ISA 9.4, sections 8.7 and 8.7.1): both strong, each with a scope that
includes the other's thread, same proxy, same bytes. What is left is a violation; its name says what is
missing. Where a release or acquire of too small a scope, or a relaxed access in the place of one, would have
ordered the two if it had been right, that is named instead, with its lines.

Between morally strong accesses order matters as well: a strong read may return the value of a write that
merely comes later here. For a poll that is the point. Where a pair of atomics stands between the two and
fails to synchronise, it is reported ("strong-race"); likewise two strong writes, either of which may be the
one that stays, with any release and acquire between them that fail to synchronise, such as a lock's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.checkers.memory_model.clocks import CAUSAL, Clock, Place, includes
from dsv4_ptx_emulator.checkers.memory_model.findings import RULES, Finding
from dsv4_ptx_emulator.checkers.memory_model.shadow import ASYNC_READ, WRITE
from dsv4_ptx_emulator.errors import MemoryModelError

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from dsv4_ptx_emulator.checkers.memory_model.agents import Owner
    from dsv4_ptx_emulator.checkers.memory_model.model import MemoryModel
    from dsv4_ptx_emulator.checkers.memory_model.operations import Operation
    from dsv4_ptx_emulator.machine.observer import Access, AccessKind

_MISSES = 256


@dataclass(slots=True)
class Miss:
    """A release and an acquire that met and did not synchronise.

    Attributes:
        clock: What would have been released.
        thread: Component of the acquiring thread.
        epoch: Its epoch then.
        rule: What is wrong with them.
        text: The same in words.
        atomic: Whether both are atomics.
    """

    clock: Clock
    thread: int
    epoch: int
    rule: str
    text: str
    atomic: bool = False


class Judge:
    """Judges for one model."""

    def __init__(self, model: MemoryModel, collect: bool, known: Collection[tuple[str, int]]) -> None:
        self._model = model
        self._known = frozenset(known)
        self._collect = collect
        self._keys: set[tuple[str, int, int]] = set()
        self._misses: deque[Miss] = deque(maxlen=_MISSES)

    def clear(self) -> None:
        """Forget what happened."""
        self._misses.clear()

    def missed(self, miss: Miss) -> None:
        """Remember a pair that did not synchronise."""
        self._misses.append(miss)

    def judge(
        self,
        access: Access,
        at: NDArray[np.int64],
        before: NDArray[np.int64],
        wrong: NDArray[np.bool_],
        mine: Any,
        clock: Clock,
        operation: Operation | None,
    ) -> None:
        """Report what is wrong with an access.

        Args:
            access: The later access.
            at: Granules, int64 [n].
            before: Earlier entries of those granules: the write [n], or all slots [5, n].
            wrong: Which of them are not known to be ordered; same shape.
            mine: Component of the access, or one per granule.
            clock: What is ordered before it, complete.
            operation: The asynchronous operation whose access it is, if it is one's.
        """
        grid = wrong if wrong.ndim == 2 else wrong[None]
        entries = before if before.ndim == 2 else before[None]
        slots, places = np.nonzero(grid)
        notes = self._model.shadow.notes[slots, at[places]]
        owners = np.full(len(places), mine) if np.ndim(mine) == 0 else mine[places]
        cases = zip(
            slots.tolist(), entries[slots, places].tolist(), notes.tolist(), owners.tolist(), strict=True
        )
        # A box of a copy meets thousands of granules and few accesses.
        seen: dict[tuple[int, int, int], int] = {}
        for slot, entry, note, own in cases:
            seen.setdefault((slot, entry, note), own)
        for (slot, entry, note), own in seen.items():
            self._one(access, slot, entry, note, own, clock, operation)

    def _one(
        self,
        access: Access,
        slot: int,
        entry: int,
        note: int,
        own: int,
        clock: Clock,
        operation: Operation | None,
    ) -> None:
        model = self._model
        component, epoch = entry >> 32, entry & 0xFFFF_FFFF
        first, size = model.note(note)
        second = access.kind
        owner, self_owner = model.components.owners[component], model.components.owners[own]
        assert owner is not None
        assert self_owner is not None
        asynchronous = owner.lane < 0
        if self._allowed(first, size, owner.cta.place, second, access.size, self_owner.cta.place):
            self._strong(access, slot, first, owner, component, epoch, own, clock, operation)
            return
        ordered = bool(clock[CAUSAL, component] >= epoch) or component == own
        hint = ""
        if asynchronous and first.proxy == "async":
            rule = "reuse" if slot >= ASYNC_READ else "incomplete-copy"
        elif asynchronous and not ordered:
            rule = "reuse" if slot != WRITE else "incomplete-copy"
        elif ordered:
            rule = "alias-fence" if "multimem" in (first.proxy, second.proxy) else "proxy-fence"
        else:
            strong = (first.semantics != "weak", second.semantics != "weak")
            rule = "weak-flag" if strong[0] != strong[1] else "race"
            if operation is not None and component in operation.issuers:
                # The issuing thread has gone on without waiting.
                rule = "reuse" if access.action == "read" else "incomplete-copy"
            if all(strong):
                rule = "mixed-size" if size != access.size else "scope"
        if not ordered:
            for miss in self._misses:
                if _explains(miss, component, epoch, own, clock):
                    rule, hint = miss.rule, f"; {miss.text}"
        self._tell(access, rule, first, "read" if slot != WRITE else "write", owner, hint, operation)

    def _strong(
        self,
        access: Access,
        slot: int,
        first: AccessKind,
        owner: Owner,
        component: int,
        epoch: int,
        own: int,
        clock: Clock,
        operation: Operation | None,
    ) -> None:
        """Morally strong accesses that nothing orders: wrong only if something was meant to."""
        written = slot == WRITE
        if access.kind.semantics == "weak" or (written and access.action != "write"):
            return
        if written and first.opcode.startswith(("atom", "red")):
            return
        for miss in self._misses:
            if (written or miss.atomic) and _explains(miss, component, epoch, own, clock):
                verb = "write" if written else "read"
                self._tell(access, "strong-race", first, verb, owner, f"; {miss.text}", operation)
                return

    def _tell(
        self,
        access: Access,
        rule: str,
        first: AccessKind,
        verb: str,
        owner: Owner,
        hint: str,
        operation: Operation | None,
    ) -> None:
        sections, meaning = RULES[rule]
        second = access.kind
        space = "shared memory" if access.owner is not None else "global memory"
        agent = owner.cta.cta.describe()
        who = f"{agent}, warp {owner.lane // 32}, lane {owner.lane % 32}"
        if owner.lane < 0:
            who = f"an operation of {agent}"
        at = int(access.addresses[0])
        text = (
            f"{second.opcode} {_does(access.action)} {space} at {at:#x} or behind, after the {verb} by "
            f"{first.opcode} of line {first.line} ({who}): {meaning} (PTX ISA {sections}){hint}"
        )
        where = access.agent.describe()
        if operation is not None:
            engine: Any = access.agent
            where = f"asynchronous operation of {engine.cta.describe()}"
        self.report(Finding(rule, first.line, second.line, text, where))

    def report(self, finding: Finding) -> None:
        """Raise, or keep what is new."""
        if (finding.rule, finding.first_line) in self._known:
            return
        if not self._collect:
            raise MemoryModelError(
                finding.text,
                rule=finding.rule,
                first_line=finding.first_line,
                line=finding.second_line,
                where=finding.where,
            )
        if finding.key not in self._keys:
            self._keys.add(finding.key)
            self._model.findings.append(finding)

    def _allowed(
        self, first: AccessKind, size: int, place: Place, second: AccessKind, other_size: int, here: Place
    ) -> bool:
        if size < 4 and other_size < 4:
            return True
        if first.opcode.startswith("cp.reduce") and second.opcode.startswith("cp.reduce"):
            return True
        return (
            first.semantics != "weak"
            and second.semantics != "weak"
            and first.proxy == second.proxy
            and size == other_size
            and includes(first.scope, place, here)
            and includes(second.scope, here, place)
        )


def _explains(miss: Miss, component: int, epoch: int, own: int, clock: Clock) -> bool:
    """Whether an access would be known to the thread `own`, with what `clock` knows, but for a miss."""
    through = miss.thread == own or clock[CAUSAL, miss.thread] >= miss.epoch
    return bool(through and miss.clock.shape[1] > component and miss.clock[CAUSAL, component] >= epoch)


def _does(action: str) -> str:
    return {"read": "reads", "write": "writes"}.get(action, "updates")
