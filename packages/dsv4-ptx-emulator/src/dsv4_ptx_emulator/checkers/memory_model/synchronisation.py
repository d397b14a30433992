# SPDX-License-Identifier: Apache-2.0
"""Who synchronises with whom (PTX ISA 9.4, sections 8.8 and 8.9.4).

Flags: a location remembers the release patterns whose write is the last one, or from which a chain of atomics
leads to it; a strong read of it acquires them, or holds them for an acquire fence to come. mbarriers:
arrivals release into the object, waits acquire what there was when the phase completed. bar and
barrier.cluster: arrivals release into the phase, waits acquire it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.checkers.memory_model.clocks import (
    CAUSAL,
    CAUSAL_ROW,
    EVERY_ROW,
    Clock,
    Place,
    Release,
    WarpClock,
    advanced,
    includes,
    joined,
)
from dsv4_ptx_emulator.checkers.memory_model.findings import RULES, Finding
from dsv4_ptx_emulator.checkers.memory_model.judge import Miss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dsv4_ptx_emulator.checkers.memory_model.agents import CtaState
    from dsv4_ptx_emulator.checkers.memory_model.model import MemoryModel
    from dsv4_ptx_emulator.checkers.memory_model.operations import Operation
    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.memory import Memory
    from dsv4_ptx_emulator.machine.observer import Access, AccessKind
    from dsv4_ptx_emulator.machine.warp import Warp

_ACQUIRES = ("acquire", "acq_rel")
_RELEASES = ("release", "acq_rel")
_PHASE_BIT = 61


@dataclass(slots=True)
class _Barrier:
    """An mbarrier.

    Attributes:
        thread, epoch, line: Who initialised it.
        arrived: What arrivals have released so far, by the arriving thread's place and scope; completions of
            copies, which are for everybody, by None.
        done: The same when the last phase completed.
        parity: Of the phase that runs.
    """

    thread: int
    epoch: int
    line: int
    arrived: dict[tuple[Place, str] | None, Clock] = field(default_factory=dict)
    done: dict[tuple[Place, str] | None, Clock] = field(default_factory=dict)
    parity: int = 0


class Synchronisation:
    """All synchronising objects of one model."""

    def __init__(self, model: MemoryModel) -> None:
        self._model = model
        self._flags: dict[tuple[Any, int, int], list[Release]] = {}
        self._barriers: dict[tuple[int, int], _Barrier] = {}
        self._waits: dict[int, AccessKind] = {}
        self._phases: dict[tuple[Any, ...], Clock] = {}
        self._sequential: list[Release] = []

    def clear(self) -> None:
        """Forget everything."""
        self._flags.clear()
        self._barriers.clear()
        self._waits.clear()
        self._phases.clear()
        self._sequential.clear()

    def forget(self, cta: Cta) -> None:
        """A CTA has ended."""
        memory = id(cta.cluster.shared)
        if all(not other.running for other in cta.cluster.ctas):
            self._phases = {key: each for key, each in self._phases.items() if id(cta.cluster) not in key}
            self._barriers = {key: each for key, each in self._barriers.items() if key[0] != memory}
            self._flags = {key: each for key, each in self._flags.items() if key[0] != memory}
        self._phases = {key: each for key, each in self._phases.items() if id(cta) not in key}

    def barrier_by_warp(self, access: Access, warp: Warp, state: CtaState, clock: WarpClock) -> None:
        """An mbarrier instruction touched its object."""
        memory: Memory = warp.shared
        at = int(access.addresses[0])
        key = (id(memory), at)
        kind = access.kind
        lane = warp.acting if warp.acting >= 0 else warp.first_lane
        if access.action == "write":
            self._barriers.pop(key, None)
            if ".init" in kind.opcode:
                self._barriers[key] = _Barrier(clock.first + lane, clock.epoch, kind.line)
            return
        barrier = self._barriers.get(key)
        if barrier is None:
            return
        strand = clock.strand_of(lane)
        if barrier.thread != clock.first + lane:
            self._require_initialised(barrier, strand.clock, kind, warp.describe())
        if access.action == "read":
            self._waits[id(warp)] = kind
            return
        if kind.semantics in _RELEASES:
            released = clock.snapshot(1 << lane, self._model.components.columns)
            self._arrive(barrier, (state.place, kind.scope), released)
        self._note_phase(barrier, memory, at)

    def barrier_by_copy(self, access: Access, operation: Operation, told: Sequence[int]) -> None:
        """A copy told a barrier that pieces are complete."""
        barrier = self._barrier_of(access)
        if barrier is None:
            return
        self._require_initialised(barrier, operation.clock, access.kind, access.agent.describe())
        known = barrier.arrived.get(None)
        known = self._model.empty() if known is None else known
        columns = self._model.components.columns
        rows = CAUSAL_ROW if operation.covers else EVERY_ROW
        barrier.arrived[None] = advanced(known, told, operation.write_epoch, columns, rows)
        self._note_engines_phase(barrier, access)

    def barrier_by_commit(self, access: Access, done: Clock) -> None:
        """The tensor core told a barrier that operations are complete; `done` is what they end."""
        barrier = self._barrier_of(access)
        if barrier is not None:
            known = barrier.arrived.get(None)
            barrier.arrived[None] = done if known is None else joined(known, done)
            self._note_engines_phase(barrier, access)

    def _barrier_of(self, access: Access) -> _Barrier | None:
        assert access.owner is not None
        return self._barriers.get((id(access.owner.cluster.shared), int(access.addresses[0])))

    def _note_engines_phase(self, barrier: _Barrier, access: Access) -> None:
        assert access.owner is not None
        self._note_phase(barrier, access.owner.cluster.shared, int(access.addresses[0]))

    def _require_initialised(self, barrier: _Barrier, clock: Clock, kind: AccessKind, where: str) -> None:
        known = clock[CAUSAL, barrier.thread] if clock.shape[1] > barrier.thread else 0
        if known >= barrier.epoch:
            return
        sections, meaning = RULES["uninitialised-barrier"]
        text = f"{kind.opcode} after mbarrier.init of line {barrier.line}: {meaning} (PTX ISA {sections})"
        self._model.report(Finding("uninitialised-barrier", barrier.line, kind.line, text, where))

    def _arrive(self, barrier: _Barrier, key: tuple[Place, str], released: Clock) -> None:
        before = barrier.arrived.get(key)
        barrier.arrived[key] = released if before is None else joined(before, released)

    def _note_phase(self, barrier: _Barrier, memory: Memory, at: int) -> None:
        parity = memory.peek(at, 8) >> _PHASE_BIT & 1
        if parity != barrier.parity:
            barrier.parity = parity
            barrier.done = dict(barrier.arrived)

    def barrier(
        self, warp: Warp, state: CtaState, clock: WarpClock, name: str, channel: Any, line: int
    ) -> None:
        """A warp arrived at or passed a barrier of any kind."""
        columns = self._model.components.columns
        bits = warp.active_bits
        if name == "mbarrier.pass":
            self._pass(warp, state, clock, self._barriers.get((channel[1], channel[2])), line)
        elif name == "bar.arrive" or name.startswith("barrier.cluster.arrive"):
            if "relaxed" in name.split("."):
                for strand in clock.covering(bits):
                    if strand.initialised is not None:
                        self._into_phase(channel, strand.initialised)
            else:
                self._into_phase(channel, clock.snapshot(bits, columns))
        elif name == "bar.pass":
            clock.merge(bits, columns, self._phases.get(channel))
            self._phases.pop((*channel[:-1], channel[-1] - 2), None)
        elif name.startswith("barrier.cluster.wait"):
            arrived = self._phases.get(channel)
            if arrived is not None:
                clock.acquire(bits, arrived)

    def _into_phase(self, channel: tuple[Any, ...], released: Clock) -> None:
        before = self._phases.get(channel)
        self._phases[channel] = released if before is None else joined(before, released)

    def _pass(
        self, warp: Warp, state: CtaState, clock: WarpClock, barrier: _Barrier | None, line: int
    ) -> None:
        kind = self._waits.get(id(warp))
        if barrier is None or kind is None:
            return
        bits = warp.active_bits
        for key, released in barrier.done.items():
            if key is not None:
                place, scope = key
                if not (includes(scope, place, state.place) and includes(kind.scope, state.place, place)):
                    text = (
                        f"the mbarrier that {kind.opcode} of line {line} waits for was arrived at with scope "
                        f".{scope} from another CTA"
                    )
                    self._miss(clock, bits, released, "scope", text)
                    continue
            if kind.semantics == "acquire":
                clock.acquire(bits, released)
            else:
                text = f"{kind.opcode} of line {line} acquires nothing"
                self._miss(clock, bits, released, "relaxed", text)

    def _miss(
        self, clock: WarpClock, bits: int, released: Clock, rule: str, text: str, atomic: bool = False
    ) -> None:
        thread = clock.first + (bits & -bits).bit_length() - 1
        self._model.missed(Miss(released, thread, clock.epoch, rule, text, atomic))
        clock.epoch += 1

    def memory_fence(
        self, warp: Warp, state: CtaState, clock: WarpClock, words: list[str], line: int
    ) -> None:
        """fence.{sc, acq_rel, acquire, release} and membar, which is fence.sc (section 9.7.15.4)."""
        bits = warp.active_bits
        columns = self._model.components.columns
        if "mbarrier_init" in words:
            for strand in clock.covering(bits):
                strand.initialised = clock.with_own(strand.clock, strand.bits, strand.fenced, clock.epoch)
            clock.epoch += 1
            return
        scope = next((word for word in words if word in ("cta", "cluster", "gpu", "sys")), "")
        if words[0] == "membar":
            scope = "gpu" if "gl" in words else scope
        sequential = words[0] == "membar" or "sc" in words
        if "release" not in words:
            for strand in clock.covering(bits):
                for release in strand.observed:
                    if _meet(release, scope, state.place):
                        strand.clock = joined(strand.clock, release.clock)
                strand.observed = ()
            if sequential:
                for release in self._sequential:
                    if _meet(release, scope, state.place):
                        clock.acquire(bits, release.clock)
        if "acquire" not in words:
            for strand in clock.covering(bits):
                strand.fences[scope] = (strand.clock, strand.fenced, clock.epoch, line)
            clock.epoch += 1
            if sequential:
                released = clock.snapshot(bits, columns)
                thread = clock.first + warp.first_lane
                self._sequential.append(
                    Release(released, thread, clock.epoch - 1, state.place, scope, scope, line)
                )

    def strong(self, access: Access, lanes: NDArray[np.int64], state: CtaState, clock: WarpClock) -> None:
        """A warp's access that is stronger than weak: it may acquire, release, or both."""
        kind = access.kind
        space = id(access.owner.cluster.shared) if access.owner is not None else 0
        for lane, address in zip(lanes.tolist(), access.addresses.tolist(), strict=True):
            key = (space, address, access.size)
            records = self._flags.get(key)
            if records and access.action != "write" and not kind.opcode.startswith("red."):
                self._observe(records, kind, lane, state, clock)
            if access.action != "read":
                self._flags[key] = self._publish(records or [], access.action, kind, lane, state, clock)

    def _observe(
        self, records: list[Release], kind: AccessKind, lane: int, state: CtaState, clock: WarpClock
    ) -> None:
        bits, thread = 1 << lane, clock.first + lane
        for release in records:
            if release.thread == thread:
                continue
            strand = clock.strand_of(lane)
            known = strand.clock
            if known.shape[1] > release.thread and known[CAUSAL, release.thread] >= release.epoch:
                continue
            atomic = release.atomic and kind.opcode.startswith("atom")
            lines = f"the write of line {release.line} and the read of line {kind.line}"
            if not release.valid:
                text = f"the write of line {release.line} releases nothing"
                self._miss(clock, bits, release.clock, "relaxed", text, atomic)
            elif not (
                _meet(release, kind.scope, state.place)
                and includes(release.write_scope, release.place, state.place)
            ):
                scopes = f".{release.scope} and .{kind.scope}"
                text = f"{lines} have scopes {scopes}, too small for each other's thread"
                self._miss(clock, bits, release.clock, "scope", text, atomic)
            elif kind.semantics in _ACQUIRES:
                clock.acquire(bits, release.clock)
            else:
                text = f"the read of line {kind.line} acquires nothing"
                self._miss(clock, bits, release.clock, "relaxed", text, atomic)
                for mine in clock.covering(bits):
                    mine.observed = (*mine.observed, release)

    def _publish(
        self,
        records: list[Release],
        action: str,
        kind: AccessKind,
        lane: int,
        state: CtaState,
        clock: WarpClock,
    ) -> list[Release]:
        thread, columns = clock.first + lane, self._model.components.columns
        strand = clock.strand_of(lane)
        # A strong write after a release of the same thread to the same place belongs to that release's
        # pattern.
        kept = [each for each in records if action == "atomic" or (each.valid and each.thread == thread)]
        made: list[Release] = []
        for scope, (known, fenced, epoch, _) in strand.fences.items():
            released = clock.with_own(_long(known, columns), 1 << lane, fenced, epoch)
            made.append(Release(released, thread, epoch, state.place, scope, kind.scope, kind.line))
        epoch = clock.epoch
        if kind.semantics in _RELEASES:
            released = clock.snapshot(1 << lane, columns)
            made.append(Release(released, thread, epoch, state.place, kind.scope, kind.scope, kind.line))
        elif not made and not any(each.valid and each.thread == thread for each in kept):
            released = clock.snapshot(1 << lane, columns)
            made.append(
                Release(released, thread, epoch, state.place, kind.scope, kind.scope, kind.line, valid=False)
            )
        for release in made:
            release.atomic = action == "atomic"
        mine = {(each.thread, each.scope) for each in made}
        return [each for each in kept if (each.thread, each.scope) not in mine] + made


def _meet(release: Release, scope: str, place: Place) -> bool:
    """Whether a release's first operation and an acquire's last one include each other's thread."""
    return includes(release.scope, release.place, place) and includes(scope, place, release.place)


def _long(clock: Clock, columns: int) -> Clock:
    return advanced(clock, (), 0, columns)
