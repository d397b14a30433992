# SPDX-License-Identifier: Apache-2.0
"""The memory consistency model of PTX as a checker (PTX ISA 9.4, chapter 8).

The machine executes one interleaving, sequentially consistent at each step. This observer asks of every pair
of conflicting accesses that meets in it whether the ISA orders them, or makes them morally strong; if
neither, then some GPU may do it otherwise, whatever came out here. So a missing fence is found although it
changed nothing.

What orders (sections 8.8, 8.9.4): program order of a thread; release and acquire patterns, fences included,
whose scopes include each other's thread; bar and barrier.cluster; mbarriers, whose operations are releases
and acquires of that kind; observed completion of asynchronous operations; the end of a launch and the start
of the next on its stream; the host between two runs. `clocks` says how that is kept, `shadow` what is kept
per byte.

Decisions where the text leaves room:

* A proxy fence counts anywhere on the path between two accesses, by whichever thread. The mixed-proxy
  paper (Lustig et al., ISCA 2022) wants it in the CTA of the access that is not generic.
* Completion of a bulk copy or wgmma includes a proxy fence for what the operation wrote and for what it read.
* Generic reads that come before an async write need a fence as writes do: the ISA makes no exception, and its
  own example fences them.
* mbarrier arrivals of earlier phases are ordered before a wait for a later one (a chain of
  read-modify-writes).
* A bulk copy signals its barrier in the generic proxy, for waits of any scope, and on behalf of its own
  accesses only (8.9.1.1: that says nothing of what its thread did before). The text makes this exception for
  copies alone. What comes before a matrix operation comes before what follows its commit, since causality
  order is transitive: pipelines that load a stage again once a commit has freed it count on that.
* Lanes of a warp are threads. elect, shfl and vote order no memory; bar.warp.sync does.

Not judged: bytes within a word, textures and ld.nc apart from other loads, tensor memory but for the fences
between threads (`tensor_fences`; see the checker of tensor memory for the rest), local memory and parameters.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.checkers.memory_model.agents import Components, CtaState, Owner
from dsv4_ptx_emulator.checkers.memory_model.clocks import (
    ALIAS,
    ALL_ROWS,
    CAUSAL,
    CAUSAL_ROW,
    COMMON_ROWS,
    EVERY_ROW,
    GLOBAL,
    MAPS,
    SHARED,
    Clock,
    Place,
    WarpClock,
    advanced,
    joined,
    lanes_in,
    widened,
)
from dsv4_ptx_emulator.checkers.memory_model.findings import Finding
from dsv4_ptx_emulator.checkers.memory_model.judge import Judge, Miss
from dsv4_ptx_emulator.checkers.memory_model.operations import Operation
from dsv4_ptx_emulator.checkers.memory_model.shadow import ASYNC_READ, GENERIC_READ, SLOTS, WRITE, Shadow
from dsv4_ptx_emulator.checkers.memory_model.synchronisation import Synchronisation
from dsv4_ptx_emulator.checkers.memory_model.tensor_fences import TensorFences
from dsv4_ptx_emulator.engines.copies import CopyEngine
from dsv4_ptx_emulator.machine.observer import Access, AccessKind, AsyncEvent, Observer
from dsv4_ptx_emulator.machine.warp import Warp

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.launch import Launch
    from dsv4_ptx_emulator.machine.tensor_memory import TensorEvent

_EPOCHS = (1 << 32) - 1
_FEW = np.arange(32, dtype=np.int64)
FEW_BYTES = 16


@lru_cache(maxsize=1024)
def _lanes(bits: int) -> NDArray[np.int64]:
    found = np.array(lanes_in(bits), np.int64)
    found.flags.writeable = False
    return found


class MemoryModel(Observer):
    """Raises `MemoryModelError` at the first violation, or collects them all.

    Args:
        collect: Keep findings instead of raising the first.
        known: Findings to pass over in silence, by rule and line of the earlier access.

    Attributes:
        findings: What was found so far; each pair of lines once.
    """

    def __init__(self, *, collect: bool = False, known: Collection[tuple[str, int]] = ()) -> None:
        self.findings: list[Finding] = []
        self.components = Components()
        self.shadow = Shadow()
        self.rows = COMMON_ROWS
        self._judge = Judge(self, collect, known)
        self._synchronisation = Synchronisation(self)
        self._tensor_fences = TensorFences(self.report)
        self._ctas: dict[int, CtaState] = {}
        self._ended: dict[int, dict[int, CtaState]] = {}
        """By launch: of CTAs that have ended with stores to others under way."""
        self._starts: dict[int, Clock] = {}
        self._ends: dict[int, Clock] = {}
        self._streams: dict[tuple[int, int], Clock] = {}
        self._last_start: dict[tuple[int, int], Clock] = {}
        self._running: set[int] = set()
        self._places = 0
        self._notes: list[tuple[AccessKind, int]] = []
        self._note_numbers: dict[tuple[int, int], int] = {}
        self._aliased: NDArray[np.bool_] | None = None
        self._executing: dict[int, Operation] = {}
        self._tensor_done: dict[int, Clock] = {}

    def state_of(self, cta: Cta) -> CtaState:
        """What is known of a CTA that runs."""
        return self._ctas[id(cta)]

    def note(self, number: int) -> tuple[AccessKind, int]:
        """Instruction and size that a note in the shadow stands for."""
        return self._notes[number]

    def report(self, finding: Finding) -> None:
        """Raise or keep a finding."""
        self._judge.report(finding)

    def missed(self, miss: Miss) -> None:
        """A release and an acquire met without synchronising; explains a violation that follows from it."""
        self._judge.missed(miss)

    def empty(self) -> Clock:
        """A clock that knows nothing."""
        return np.zeros((self.rows, self.components.columns), np.int32)

    def on_launch_begin(self, launch: Launch) -> None:
        """A launch comes after the one before it on its stream, unless it was allowed to overlap with that.

        Then griddepcontrol.wait orders it, whether or not the other has ended by now.
        """
        opcodes = {instruction.opcode for instruction in launch.kernel.instructions}
        if any("proxy.alias" in each or "multimem" in each or "tensormap::" in each for each in opcodes):
            self.rows = ALL_ROWS
        if self._aliased is None and any("multimem" in each for each in opcodes):
            self._aliased = np.array([kind.proxy == "multimem" for kind, _ in self._notes], np.bool_)
        stream = (launch.rank, launch.stream)
        if launch.dependent:
            start = self._last_start.get(stream, self.empty())
        else:
            start = self._streams.get(stream, self.empty())
        self._starts[launch.number] = self._last_start[stream] = start
        self._ends[launch.number] = start
        self._running.add(launch.number)

    def on_launch_end(self, launch: Launch) -> None:
        """What the launch did comes before whatever follows on its stream, in all proxies (section 8.9.4)."""
        self._running.discard(launch.number)
        self._ended.pop(launch.number, None)
        self._streams[launch.rank, launch.stream] = _bounded(self._ends.pop(launch.number))
        self._starts.pop(launch.number)
        if not launch.machine.launches and not self._running:
            self._forget()

    def _forget(self) -> None:
        """The host has waited for everything, so nothing that follows can conflict with what was."""
        self.components = Components()
        self.shadow.clear()
        self._streams.clear()
        self._last_start.clear()
        self._executing.clear()
        self._tensor_done.clear()
        self._synchronisation.clear()
        self._judge.clear()

    def on_cta_begin(self, cta: Cta) -> None:
        """Its threads begin with what the launch begins with."""
        launch = cta.launch
        self._places += 1
        cluster = cta.cluster.scratch.setdefault("memory_model", self._places)
        place = Place(cta.rank, cluster, self._places)
        x, y, z = cta.index
        key: tuple[int, ...] = (launch.rank, launch.stream, x, y, z)
        if launch.dependent:
            key = (*key, launch.number)
        reserved = self.components.reserve(key, 32 * len(cta.warps))
        state = CtaState(cta, place, reserved)
        for warp in cta.warps:
            first = reserved.first + 32 * warp.index
            epoch = reserved.epochs.get(warp.index, 1)
            state.warps[warp.index] = WarpClock(first, warp.live_bits, self._starts[launch.number], epoch)
            for lane in range(32):
                self.components.owners[first + lane] = Owner(state, 32 * warp.index + lane)
        state.granules = len(cta.shared_data) // 4
        state.shadow = self.shadow.allocate(state.granules) if state.granules else 0
        self._ctas[id(cta)] = state

    def on_cta_end(self, cta: Cta) -> None:
        """Its threads' last words go into what follows the launch."""
        state = self._ctas.pop(id(cta))
        engine = cta.scratch.get("copy_engine")
        if isinstance(engine, CopyEngine) and engine.ready():
            self._ended.setdefault(cta.launch.number, {})[id(cta)] = state
        end = self._ends[cta.launch.number]
        columns = self.components.columns
        for index, clock in state.warps.items():
            warp = cta.warps[index]
            end = joined(end, clock.snapshot(warp.born_bits, columns))
            state.reserved.epochs[index] = clock.epoch
        reserved = state.reserved
        end = end.copy()
        end[CAUSAL, reserved.pieces[: state.used_pieces]] = reserved.piece_epoch + 1
        reserved.piece_epoch += 2
        self._ends[cta.launch.number] = end
        self._synchronisation.forget(cta)
        self._tensor_fences.forget(cta)
        if state.granules:
            self.shadow.release(state.shadow, state.granules)

    def on_access(self, access: Access) -> None:
        """Compare with what touched the bytes before, and remember."""
        if access.space not in ("global", "shared"):
            return
        if access.agent.__class__ is Warp:
            self._warp_access(access, access.agent)
        else:
            self._engine_access(access, access.agent)

    def _warp_access(self, access: Access, warp: Warp) -> None:
        state = self._ctas[id(warp.cta)]
        clock = state.warps[warp.index]
        kind = access.kind
        if access.owner is not None and "mbarrier" in kind.opcode:
            self._synchronisation.barrier_by_warp(access, warp, state, clock)
            return
        lanes = _accessing(access, warp)
        few = len(lanes) == 1 and access.size <= FEW_BYTES
        if few and self._by_one_lane(access, state, clock, int(lanes[0])):
            if kind.semantics != "weak":
                self._synchronisation.strong(access, lanes, state, clock)
            return
        granules = self._granules(access)
        if granules is None:
            return
        row = MAPS if kind.proxy == "tensormap" else ALIAS if kind.proxy == "multimem" else CAUSAL
        note = self._note(kind, access.size)
        components = clock.first + lanes
        for strand in clock.strands[:]:
            at, mine = granules, components
            if len(clock.strands) > 1:
                inside = (strand.bits >> lanes) & 1 == 1
                if not np.count_nonzero(inside):
                    continue
                at, mine = granules[inside], components[inside]
            self._compare(access, at, mine, clock.epoch, strand.clock, row, note, fenced=strand.fenced[ALIAS])
        if kind.semantics != "weak":
            self._synchronisation.strong(access, lanes, state, clock)

    def _by_one_lane(self, access: Access, state: CtaState, clock: WarpClock, lane: int) -> bool:
        """What `_compare` does for few granules and one thread, without arrays.

        Returns whether that was all: nothing is wrong, and no address is an alias.
        """
        kind = access.kind
        if self._aliased is not None or kind.proxy != "generic":
            return False
        address = int(access.addresses[0])
        owner = access.owner
        if owner is None:
            at = self.shadow.global_few(address, access.size)
        else:
            state = self._ctas.get(id(owner), state)
            at = self.shadow.shared_few(state.shadow, address - owner.shared_base, access.size)
        mine = clock.first + lane
        entry = mine << 32 | clock.epoch
        known = clock.strand_of(lane).clock[CAUSAL]
        entries = self.shadow.entries
        reads = access.action == "read"
        for slot in (WRITE,) if reads else range(SLOTS):
            for before in entries[slot, at.start : at.stop].tolist():
                other = before >> 32
                if not before or other == mine:
                    continue
                if other >= len(known) or known[other] < before & _EPOCHS:
                    return False
        note = self._note(kind, access.size)
        if reads:
            self.shadow.note_few_reads(at, entry, note)
        else:
            entries[1:, at.start : at.stop] = 0
            entries[WRITE, at.start : at.stop] = entry
            self.shadow.notes[WRITE, at.start : at.stop] = note
        return True

    def _engine_access(self, access: Access, engine: Any) -> None:
        cta = engine.cta
        state = self._ctas.get(id(cta)) or self._ended.get(cta.launch.number, {}).get(id(cta))
        if state is None:
            return
        acting = getattr(engine, "acting", None)
        kind = access.kind
        if acting is None:
            operation = self._executing.get(id(engine))
            if access.owner is not None and access.action == "atomic":
                self._synchronisation.barrier_by_commit(
                    access, self._tensor_done.get(id(engine), self.empty())
                )
                return
            component = operation.pieces[0] if operation is not None else 0
        elif isinstance(acting, tuple):
            transfer, targets = acting
            operation = state.operations.get(id(transfer))
            if operation is None:
                return
            if access.action == "atomic":
                told = [operation.pieces[id(target)] for target in targets if operation.pieces]
                told += operation.covers
                self._synchronisation.barrier_by_copy(access, operation, told)
                return
            component = operation.pieces[id(targets[0])]
        else:
            operation = state.operations.get(id(acting))
            component = operation.pieces[0] if operation is not None else 0
        granules = self._granules(access)
        if operation is None or granules is None:
            return
        row = CAUSAL
        if kind.proxy == "async":
            row = GLOBAL if access.owner is None else SHARED
        epoch = operation.read_epoch if access.action == "read" else operation.write_epoch
        mine = np.array([component], np.int64)
        if operation.lanes:
            own = operation.lanes[id(targets[0])]
            mine = own if access.part is None else own[access.part[: len(own)]]
            mine = mine[: len(granules)]
        self._compare(
            access, granules, mine, epoch, operation.clock, row, self._note(kind, access.size), operation
        )

    def _compare(
        self,
        access: Access,
        granules: NDArray[np.int64],
        components: NDArray[np.int64],
        epoch: int,
        clock: Clock,
        row: int,
        note: int,
        operation: Operation | None = None,
        fenced: int = 0,
    ) -> None:
        """One access by components [1] or [accesses], to granules [accesses, granules of each].

        `fenced` is the epoch up to which the threads' own accesses may be followed by accesses to an alias.
        """
        at = granules.reshape(-1)
        entry: Any = components << 32 | epoch
        if len(components) == 1:
            mine: Any = int(components[0])
            entry = int(entry[0])
        else:
            mine = np.repeat(components, granules.shape[1])
            entry = np.repeat(entry, granules.shape[1])
        shadow = self.shadow
        columns = self.components.columns
        if clock.shape[0] < self.rows or clock.shape[1] < columns:
            clock = widened(clock, self.rows, columns)
        known = clock[row]
        slots = WRITE if access.action == "read" else slice(None)
        before = shadow.entries[slots, at]
        if np.count_nonzero(before):
            others = before >> 32
            if row == MAPS:
                # A thread's own writes need the fence as well.
                wrong = known[others] < (before & _EPOCHS)
            elif self._aliased is not None and row in (CAUSAL, ALIAS):
                through = self._aliased[shadow.notes[slots, at]] != (row == ALIAS)
                reached = np.where(through, clock[ALIAS][others], clock[CAUSAL][others])
                foreign = others != mine
                wrong = (reached < (before & _EPOCHS)) & (through | foreign)
                wrong &= foreign | ((before & _EPOCHS) > fenced)
            else:
                wrong = (known[others] < (before & _EPOCHS)) & (others != mine)
            if np.count_nonzero(wrong):
                self._judge.judge(access, at, before, wrong, mine, clock, operation)
        if access.action == "read":
            shadow.note_read(at, entry, note, GENERIC_READ if operation is None else ASYNC_READ)
        else:
            shadow.note_write(at, entry, note)

    def _granules(self, access: Access) -> NDArray[np.int64] | None:
        owner = access.owner
        if owner is None:
            return self.shadow.global_(access.addresses, access.size)
        state = self._ctas.get(id(owner))
        if state is None:
            return None
        return self.shadow.shared(state.shadow, owner.shared_base, access.addresses, access.size)

    def _note(self, kind: AccessKind, size: int) -> int:
        key = (id(kind), size)
        number = self._note_numbers.get(key)
        if number is None:
            number = self._note_numbers[key] = len(self._notes)
            self._notes.append((kind, size))
            if self._aliased is not None:
                self._aliased = np.append(self._aliased, kind.proxy == "multimem")
        return number

    def on_fence(self, warp: Warp, name: str, line: int) -> None:
        """Memory fences and proxy fences."""
        words = name.split(".")
        if words[0] == "tcgen05":
            self._tensor_fences.fence(warp, name)
        if words[0] not in ("fence", "membar"):
            return
        state = self._ctas[id(warp.cta)]
        clock = state.warps[warp.index]
        if "proxy" in words:
            clock.fence(warp.active_bits, _fenced_rows(words))
        else:
            self._synchronisation.memory_fence(warp, state, clock, words, line)

    def on_sync(self, warp: Warp, name: str, channel: Any, line: int) -> None:
        """Barriers."""
        if warp.active_bits == warp.live_bits and "wait" not in name and "pass" not in name:
            self._tensor_fences.meet(warp)
        state = self._ctas[id(warp.cta)]
        clock = state.warps[warp.index]
        if name == "bar.warp":
            clock.merge(warp.active_bits, self.components.columns)
        elif name == "griddepcontrol.wait":
            launch = warp.cta.launch
            clock.acquire(warp.active_bits, self._streams.get((launch.rank, launch.stream), self.empty()))
        else:
            self._synchronisation.barrier(warp, state, clock, name, channel, line)

    def on_async(self, event: AsyncEvent) -> None:
        """Issue, commit and wait."""
        warp = event.warp
        state = self._ctas[id(warp.cta)]
        clock = state.warps[warp.index]
        if event.action == "issue":
            self._issue(event, state, clock)
            return
        lanes = [-1] if event.family == "wgmma" else lanes_in(event.lanes)
        for lane in lanes:
            groups = state.groups_of(event.family, warp, lane)
            if event.action == "commit":
                groups.commit()
                continue
            complete = groups.waited(event.allowed, event.reads)
            if complete:
                bits = event.lanes if lane < 0 else 1 << lane
                epoch = state.reserved.piece_epoch + (0 if event.reads else 1)
                rows = CAUSAL_ROW if event.family == "cp.async" else EVERY_ROW
                clock.learn(bits, complete, epoch, self.components.columns, rows)

    def _issue(self, event: AsyncEvent, state: CtaState, clock: WarpClock) -> None:
        subject, warp = event.operation, event.warp
        known = clock.snapshot(event.lanes, self.components.columns)
        issuers = {clock.first + lane for lane in lanes_in(event.lanes)}
        operation = state.operations.get(id(subject))
        if operation is not None:
            # A wgmma, which four warps issue one after the other.
            operation.clock = joined(operation.clock, known)
        elif event.family == "wgmma":
            pieces = {0: self.components.piece(state)}
            operation = Operation(subject, known, event.line, pieces, state.reserved.piece_epoch)
        else:
            targets = [target for _, targets in subject.unread for target in targets]
            pieces = {id(target): self.components.piece(state) for target in targets}
            operation = Operation(subject, known, event.line, pieces, state.reserved.piece_epoch)
            if not targets:
                for lane in lanes_in(event.lanes):
                    operation.covers += state.copies.get((warp.index, lane), ())
            elif event.family == "cp.async":
                self._issue_of_lanes(warp, state, operation, targets)
        operation.issuers |= issuers
        state.operations[id(subject)] = operation
        if event.family and not operation.lanes:
            for lane in [-1] if event.family == "wgmma" else lanes_in(event.lanes):
                state.groups_of(event.family, warp, lane).open += operation.pieces.values()

    def _issue_of_lanes(
        self, warp: Warp, state: CtaState, operation: Operation, targets: Sequence[Any]
    ) -> None:
        """A cp.async: each lane's copy is an operation of its own, in the lane's groups."""
        for target in targets:
            own = [self.components.piece(state) for _ in target.lanes]
            operation.lanes[id(target)] = np.array(own, np.int64)
            for lane, component in zip(target.lanes, own, strict=True):
                state.copies.setdefault((warp.index, lane), []).append(component)
                state.groups_of("cp.async", warp, lane).open.append(component)

    def on_tensor(self, event: TensorEvent) -> None:
        """Operations of the tensor core: what they read of shared memory, and when that is over."""
        self._tensor_fences.follow(event)
        if event.action not in ("issue", "execute", "commit"):
            return
        pipe: Any = event.agent
        work = event.operation
        state = self._ctas.get(id(pipe.cta))
        if state is None:
            return
        if event.action == "issue":
            warp, lane = work.thread
            known = state.warps[warp].snapshot(1 << lane, self.components.columns)
            pieces = {0: self.components.piece(state)}
            epoch = state.reserved.piece_epoch
            state.operations[id(work)] = Operation(work, known, event.kind.line, pieces, epoch)
        elif event.action == "execute":
            self._executing[id(pipe)] = state.operations[id(work)]
        else:
            operation = state.operations[id(work)]
            before = self._tensor_done.get(id(pipe))
            done = operation.clock if before is None else joined(before, operation.clock)
            told, columns = list(operation.pieces.values()), self.components.columns
            self._tensor_done[id(pipe)] = advanced(done, told, operation.write_epoch, columns)


def _accessing(access: Access, warp: Warp) -> NDArray[np.int64]:
    """Lanes that an access is for, one per address."""
    if warp.acting >= 0:
        return _FEW[warp.acting : warp.acting + 1]
    lanes = _lanes(warp.active_bits)
    if access.part is not None and len(access.part) == len(lanes):
        lanes = lanes[access.part]
    count = len(access.addresses)
    return lanes if count == len(lanes) else _FEW[:count]


def _bounded(clock: Clock) -> Clock:
    """What a kernel's boundary passes on: all is known to every proxy but that of tensor maps."""
    result = clock.copy()
    for row in range(1, min(len(result), MAPS)):
        result[row] = result[CAUSAL]
    return result


def _fenced_rows(words: list[str]) -> tuple[int, ...]:
    if "alias" in words:
        return (ALIAS,)
    if any("tensormap" in word for word in words):
        return (MAPS,)
    if "global" in words or "async::global" in words:
        return (GLOBAL,)
    if any("shared" in word for word in words):
        return (SHARED,)
    return (SHARED, GLOBAL)
