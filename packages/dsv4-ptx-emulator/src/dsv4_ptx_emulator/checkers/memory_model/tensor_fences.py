# SPDX-License-Identifier: Apache-2.0
"""Fences between threads that access the same tensor memory (PTX ISA 9.4, section 9.7.18.6).

What a thread's tcgen05 operations have done is ordered before another's only by
tcgen05.fence::before_thread_sync in the one, something that synchronises the two, and
tcgen05.fence::after_thread_sync in the other. A commit contains the first of the fences. Whether the two have
synchronised at all is for others to say: here each access is asked, at the time when it happens in the run,
for a fence behind the other's access and a fence of its own that is later than that. Operations that one
thread issues keep their order, as far as it matters here.

A warp loads and stores for all of its lanes, each of which has its fence; one lane may tell others once they
have met, or each tells for itself.

Rejected: rows of the memory model's clocks for tensor memory. They would find a fence that is on another
path than the synchronisation as well, at twice the cost of all clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsv4_ptx_emulator.checkers.memory_model.findings import RULES, Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.tensor_memory import Block, TensorEvent
    from dsv4_ptx_emulator.machine.warp import Warp

RULE = "tensor-fence"
Issuer = tuple[int, int]
"""A CTA's identity, and the warp's number in it."""


@dataclass(slots=True)
class _Access:
    """The latest access of one issuer to one block.

    Attributes:
        kind: The instruction.
        operation: The asynchronous operation; None of a warp's load or store.
        fenced: Whether it has been fenced, or its operation committed.
        since: Since when it has been, and the lanes have met; 0 if they have not.
    """

    kind: AccessKind
    operation: Any
    fenced: bool = False
    since: int = 0


class TensorFences:
    """Follows all tensor memory.

    Args:
        report: Takes findings.
    """

    def __init__(self, report: Callable[[Finding], None]) -> None:
        self._report = report
        self._now = 0
        self._fences: dict[Issuer, int] = {}
        self._accesses: dict[int, dict[tuple[Issuer, Block], _Access]] = {}

    def fence(self, warp: Warp, name: str) -> None:
        """A warp has fenced."""
        self._now += 1
        issuer = (id(warp.cta), warp.index)
        if name.endswith("after_thread_sync"):
            self._fences[issuer] = self._now
            return
        for access in self._own(issuer):
            access.fenced = True

    def meet(self, warp: Warp) -> None:
        """All lanes of a warp are at a barrier, or tell one."""
        self._now += 1
        for access in self._own((id(warp.cta), warp.index)):
            if access.fenced and not access.since:
                access.since = self._now

    def _own(self, issuer: Issuer) -> Iterator[_Access]:
        """A warp's loads and stores."""
        for accesses in self._accesses.values():
            for (by, _), access in accesses.items():
                if by == issuer and access.operation is None:
                    yield access

    def follow(self, event: TensorEvent) -> None:
        """Something happened to tensor memory."""
        self._now += 1
        if event.action in ("read", "write"):
            warp: Any = event.agent
            self._access(event, (id(warp.cta), warp.index), warp.describe())
        elif event.action == "issue":
            pipe: Any = event.agent
            self._access(event, (id(pipe.cta), event.operation.thread[0]), pipe.cta.describe())
        elif event.action == "commit":
            for block in event.blocks:
                for access in self._accesses.get(id(block.memory), {}).values():
                    if access.operation is event.operation:
                        access.fenced, access.since = True, self._now
        elif event.action == "alloc":
            for block in event.blocks:
                self._drop(block, None)

    def forget(self, cta: Cta) -> None:
        """A CTA has ended."""
        memory = cta.scratch.get("tensor_memory")
        self._accesses.pop(id(memory), None)
        self._fences = {issuer: when for issuer, when in self._fences.items() if issuer[0] != id(cta)}

    def _access(self, event: TensorEvent, issuer: Issuer, where: str) -> None:
        fenced = self._fences.get(issuer, 0)
        for block in event.blocks:
            accesses = self._accesses.setdefault(id(block.memory), {})
            for (by, other), access in accesses.items():
                if by == issuer or not (block.writes or other.writes) or not block.overlaps(other):
                    continue
                if access.since > fenced:
                    what = "the later thread has not executed tcgen05.fence::after_thread_sync"
                elif access.since or access.operation is not None:
                    continue
                elif access.fenced:
                    what = "the lanes of the earlier warp have not met"
                else:
                    what = "the earlier threads have not executed tcgen05.fence::before_thread_sync"
                self._tell(event, access.kind, what, where)
            if block.writes:
                self._drop(block, issuer)
        for block in event.blocks:
            self._accesses[id(block.memory)][issuer, block] = _Access(event.kind, event.operation)

    def _drop(self, block: Block, issuer: Issuer | None) -> None:
        """Forget accesses to the cells: whoever comes next is to be ordered after the one at hand."""
        accesses = self._accesses.get(id(block.memory), {})
        for by, other in list(accesses):
            if by != issuer and block.overlaps(other):
                del accesses[by, other]

    def _tell(self, event: TensorEvent, first: AccessKind, what: str, where: str) -> None:
        sections, meaning = RULES[RULE]
        text = (
            f"{event.kind.opcode} accesses tensor memory that {first.opcode} of line {first.line} accessed "
            f"before: {meaning} (PTX ISA {sections}); {what} in between"
        )
        self._report(Finding(RULE, first.line, event.kind.line, text, where))
