# SPDX-License-Identifier: Apache-2.0
"""The state after an action, or the promise that it breaks.

A store into a peer's slot is issued and lands later, as a separate action; a flag becomes visible when it is
stored, or later in the order in which its worker stored them (`Scenario.flags_in_flight`).
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from dsv4_symm_mem.protocol.layout import BANKS
from dsv4_symm_mem.protocol.model.machine import Machine
from dsv4_symm_mem.protocol.model.program import Kind, Step
from dsv4_symm_mem.protocol.model.scenario import TileId
from dsv4_symm_mem.protocol.model.state import (
    ENDED,
    NEW,
    NOT_STARTED,
    Action,
    Blame,
    Event,
    Frame,
    Pending,
    Rank,
    State,
    Violation,
    ViolationKind,
    Worker,
)
from dsv4_symm_mem.protocol.words import SIGNATURE_MASK, Operation, epoch_of

Item = TypeVar("Item")

_SCATTERING = frozenset({Operation.REDUCE_SCATTER, Operation.MULTICAST_REDUCE_SCATTER})
"""Operations whose output has a rank's own tiles only."""


class Content(NamedTuple):
    """What a slot holds: the tile that `source` computed in `call`."""

    call: int
    signature: int
    source: int
    tile: TileId

    def encode(self) -> int:
        """A positive integer, one per content, with the bit `NEW` clear."""
        word = self.call + 1
        for field, bits in ((self.signature, 16), (self.source, 8), (self.tile[0], 8), (self.tile[1], 16)):
            word = word << bits | field
        return word << 1

    @classmethod
    def decode(cls, word: int) -> Content:
        """The content that `encode` gave `word`."""
        word >>= 1
        fields = []
        for bits in (16, 8, 8, 16):
            fields.append(word & (1 << bits) - 1)
            word >>= bits
        index, owner, source, signature = fields
        return cls(word - 1, signature, source, (owner, index))

    def __str__(self) -> str:
        return f"call {self.call + 1}'s tile {tile_text(self.tile)} from rank {self.source}"


def tile_text(tile: TileId) -> str:
    """How traces name a tile."""
    return f"{tile[0]}:{tile[1]}"


def apply(machine: Machine, state: State, action: Action) -> State | Violation:
    """The state after `action`, which is enabled in `state`, or what it breaks."""
    rank = state.ranks[action.rank]
    match action.event:
        case Event.LAUNCH:
            worker = Worker(0 if machine.starts_at_once else NOT_STARTED)
            call = machine.sequences[action.rank][rank.launched]
            frames = (*rank.frames, Frame(call, (worker,) * machine.scenario.workers))
            return _with_rank(state, action.rank, rank._replace(launched=rank.launched + 1, frames=frames))
        case Event.START:
            return _with_worker(state, action, Worker(0))
        case Event.STEP:
            return _step(machine, state, action)
        case Event.LAND:
            return _land(machine, state, action)
        case Event.NOTICE:
            receiver, word = rank.notices[action.item]
            rank = rank._replace(notices=_without(rank.notices, action.item))
            state = _with_rank(state, action.rank, rank)
            told = state.ranks[receiver]
            if told.dead:
                return state
            return _with_rank(state, receiver, told._replace(abort=_stronger(machine, told.abort, word)))
        case Event.DIE:
            # What it had under way is dropped: had it landed, it would have done so just before the death.
            return _with_rank(state, action.rank, Rank(True, 0, (), (), ((),) * machine.scenario.workers))
        case _:
            return _abort(machine, state, action)


def _step(machine: Machine, state: State, action: Action) -> State | Violation:
    rank, frame, worker, step = machine.locate(state, action)
    call = machine.scenario.calls[frame.call]
    cell = machine.cell(step.place, worker.epoch)
    after = Worker(worker.step + 1, worker.epoch, worker.added)
    match step.kind:
        case Kind.BEGIN:
            epoch = rank.epochs[call.workspace] + 1
            if machine.scenario.shared_banks and (held := _held_bank(machine, state, action, epoch)):
                return held
            if not machine.rules.epoch_in_memory:
                epoch = frame.call % (machine.scenario.graph_calls or len(machine.scenario.calls)) + 1
            return _with_worker(state, action, after._replace(epoch=epoch))
        case Kind.SEND:
            content = Content(frame.call, call.signatures[action.rank], action.rank, step.tile)
            slot = machine.cell(step.data, worker.epoch)
            state = _with_pending(state, action, Pending(False, slot, content.encode(), cell))
            return _with_worker(state, action, after)
        case Kind.PUBLISH | Kind.TOKEN:
            value = machine.flag_value(action.rank, frame.call, worker.epoch)
            state = _with_worker(state, action, after)
            if machine.scenario.flags_in_flight:
                return _with_pending(state, action, Pending(True, cell, value, cell))
            return _raise_flag(machine, state, cell, value)
        case Kind.REDUCE:
            added = list(worker.added)
            added.insert(action.rank, action.rank)
            if added != list(range(machine.scenario.world_size)):
                return Violation(ViolationKind.WRONG_OUTPUT, f"tile {tile_text(step.tile)} adds {added}")
            return _store_output(state, action, after._replace(added=()), step.tile)
        case Kind.PULL:
            return _pull(machine, state, action, after, step)
        case Kind.COPY:
            return _store_output(state, action, after, step.tile)
        case Kind.EXIT:
            return _end_call(machine, _with_worker(state, action, Worker(ENDED)), action)
        case _:
            return _read(machine, state, action, after, step)


def _read(machine: Machine, state: State, action: Action, after: Worker, step: Step) -> State | Violation:
    frame = state.ranks[action.rank].frames[action.frame]
    cell = machine.cell(step.place, after.epoch)
    state = state._replace(flags=_set(state.flags, cell, state.flags[cell] & ~NEW))
    if step.kind is Kind.AWAIT_TOKEN:
        return _with_worker(state, action, after)
    added = after._replace(added=(*after.added, step.peer))
    if step.kind is Kind.AWAIT:
        return _with_worker(state, action, added)
    read = _read_slot(machine, state, action, frame.call, machine.cell(step.data, after.epoch), step)
    if isinstance(read, Violation):
        return read
    if step.kind is Kind.GATHER:
        return _store_output(read, action, after, step.tile)
    return _with_worker(read, action, added)


def _pull(machine: Machine, state: State, action: Action, after: Worker, step: Step) -> State | Violation:
    """Read all ranks' partials of an own tile, of which every one must have been awaited."""
    if list(after.added) != list(range(machine.scenario.world_size)):
        return Violation(ViolationKind.WRONG_OUTPUT, f"tile {tile_text(step.tile)} sums {list(after.added)}")
    call = state.ranks[action.rank].frames[action.frame].call
    for source, place in enumerate(machine.partials(call, *step.tile)):
        cell = machine.cell(place, after.epoch)
        read = _read_slot(machine, state, action, call, cell, step._replace(peer=source))
        if isinstance(read, Violation):
            return read
        state = read
    return _store_output(state, action, after._replace(added=()), step.tile)


def _read_slot(
    machine: Machine, state: State, action: Action, call: int, cell: int, step: Step
) -> State | Violation:
    """The slot is to hold the step's tile, from its peer; it counts as read then."""
    signature = machine.scenario.calls[call].signatures[action.rank]
    wanted = Content(call, signature, step.peer, step.tile)
    held = state.slots[cell] & ~NEW
    if held == wanted.encode():
        return state._replace(slots=_set(state.slots, cell, held))
    found = Content.decode(held) if held else None
    foreign = found is not None and found._replace(signature=signature) == wanted
    kind = ViolationKind.FOREIGN_READ if foreign else ViolationKind.STALE_READ
    detail = f"rank {action.rank} wants {wanted}, the slot holds {found or 'nothing'}"
    return Violation(kind, detail + " of another shape" * foreign)


def _held_bank(machine: Machine, state: State, action: Action, epoch: int) -> Violation | None:
    """Whether some rank is still in the call before that had the bank of call `epoch`."""
    rank = state.ranks[action.rank]
    workspace = machine.scenario.calls[rank.frames[action.frame].call].workspace
    over = epoch - (BANKS if machine.rules.two_banks else 1)
    late = (
        number
        for number, other in enumerate(state.ranks)
        if not other.dead and other.abort is None and other.epochs[workspace] < over
    )
    if (number := next(late, None)) is None:
        return None
    text = f"rank {action.rank} begins call {epoch} while rank {number} has not ended call {over}"
    return Violation(ViolationKind.BANK_IN_USE, text)


def _store_output(state: State, action: Action, after: Worker, tile: TileId) -> State | Violation:
    rank = _with_worker(state, action, after).ranks[action.rank]
    frame = rank.frames[action.frame]
    if tile in frame.written:
        return Violation(
            ViolationKind.WRONG_OUTPUT, f"rank {action.rank} stores tile {tile_text(tile)} twice"
        )
    frame = frame._replace(written=tuple(sorted((*frame.written, tile))))
    return _with_rank(state, action.rank, rank._replace(frames=_set(rank.frames, action.frame, frame)))


def _end_call(machine: Machine, state: State, action: Action) -> State | Violation:
    """If all workers have ended: the output as it is left, the epoch's bump."""
    rank = state.ranks[action.rank]
    frame = rank.frames[action.frame]
    if any(worker.step != ENDED for worker in frame.workers):
        return state
    call = machine.scenario.calls[frame.call]
    if frame.aborted:
        if frame.written and not machine.rules.last_worker_fills:
            tiles = ", ".join(map(tile_text, frame.written))
            detail = f"rank {action.rank}, call {frame.call + 1}: tiles {tiles} were stored after the NaN"
            return Violation(ViolationKind.NUMBER_IN_ABORTED_OUTPUT, detail)
    else:
        everything = call.operation not in _SCATTERING
        expected = sorted(tile for tile in call.orders[action.rank] if everything or tile[0] == action.rank)
        if list(frame.written) != expected:
            detail = f"rank {action.rank}, call {frame.call + 1}: {list(frame.written)}, not {expected}"
            return Violation(ViolationKind.WRONG_OUTPUT, detail)
    epochs = _set(rank.epochs, call.workspace, rank.epochs[call.workspace] + 1)
    frames = _without(rank.frames, action.frame)
    return _with_rank(state, action.rank, rank._replace(epochs=epochs, frames=frames))


def _land(machine: Machine, state: State, action: Action) -> State | Violation:
    rank = state.ranks[action.rank]
    pending = rank.pending[action.worker]
    store = pending[action.item]
    left = _set(rank.pending, action.worker, _without(pending, action.item))
    state = _with_rank(state, action.rank, rank._replace(pending=left))
    if store.is_flag:
        return _raise_flag(machine, state, store.place, store.value)
    if state.slots[store.place] & NEW:
        lost = Content.decode(state.slots[store.place])
        reader = machine.reader(store.place, lost.source)
        if _still_reads(state, reader):
            detail = f"{Content.decode(store.value)} lands on {lost}, which rank {reader} has not read"
            return Violation(ViolationKind.OVERWRITE, detail)
    return State(state.ranks, state.flags, _set(state.slots, store.place, store.value | NEW))


def _raise_flag(machine: Machine, state: State, cell: int, value: int) -> State | Violation:
    receiver = machine.receiver(cell)
    if state.flags[cell] & NEW and _still_reads(state, receiver):
        old = state.flags[cell] >> 1
        detail = f"{_flag_text(value)} lands on {_flag_text(old)}, which rank {receiver} has not seen"
        return Violation(ViolationKind.LOST_FLAG, detail)
    return State(state.ranks, _set(state.flags, cell, value << 1 | NEW), state.slots)


def _still_reads(state: State, reader: int) -> bool:
    """What is lost on a dead rank, or one that has ended its call, harms nobody."""
    rank = state.ranks[reader]
    return not rank.dead and rank.abort is None


def _abort(machine: Machine, state: State, action: Action) -> State | Violation:
    """End a worker that waits: the abort word on its own rank, word to all others, its output as NaN."""
    rank, frame, worker, step = machine.locate(state, action)
    silent = action.event is Event.GIVE_UP or (
        action.event is Event.EXPIRE
        and not (machine.rules.expiry_reads_row and _row_mismatches(machine, state, action))
    )
    if action.event is not Event.GIVE_UP or machine.rules.earliest_wait_blames:
        word = _stronger(machine, rank.abort, Blame(silent, worker.epoch, step.level, step.peer))
        if word != rank.abort:
            alive = (
                other for other, peer in enumerate(state.ranks) if other != action.rank and not peer.dead
            )
            told = (
                {*rank.notices, *((other, word) for other in alive)} if machine.rules.broadcast_abort else ()
            )
            rank = rank._replace(abort=word, notices=tuple(sorted(told)))
    written = frame.written if machine.rules.last_worker_fills else ()
    ended = Frame(frame.call, _set(frame.workers, action.worker, Worker(ENDED)), written, aborted=True)
    rank = rank._replace(frames=_set(rank.frames, action.frame, ended))
    return _end_call(machine, _with_rank(state, action.rank, rank), action)


def _row_mismatches(machine: Machine, state: State, action: Action) -> bool:
    """Some flag from the rank that is waited for is of this very call, with another signature."""
    _, frame, worker, step = machine.locate(state, action)
    wanted = machine.flag_value(action.rank, frame.call, worker.epoch)
    workspace = machine.scenario.calls[frame.call].workspace
    return any(
        machine.mismatches(state.flags[machine.cell(place, worker.epoch)] >> 1, wanted)
        for place in machine.row(workspace, action.rank, step.peer)
    )


def _stronger(machine: Machine, old: Blame | None, new: Blame) -> Blame:
    if old is None:
        return new
    return min(old, new) if machine.rules.earliest_wait_blames else old


def _flag_text(value: int) -> str:
    return f"the flag of epoch {epoch_of(value)} (signature {value & SIGNATURE_MASK:#x})"


def _set(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _without(items: tuple[Item, ...], index: int) -> tuple[Item, ...]:
    return items[:index] + items[index + 1 :]


def _with_rank(state: State, number: int, rank: Rank) -> State:
    return State(_set(state.ranks, number, rank), state.flags, state.slots)


def _with_worker(state: State, action: Action, worker: Worker) -> State:
    rank = state.ranks[action.rank]
    frame = rank.frames[action.frame]
    workers = _set(frame.workers, action.worker, worker)
    frame = Frame(frame.call, workers, frame.written, frame.aborted)
    return _with_rank(state, action.rank, rank._replace(frames=_set(rank.frames, action.frame, frame)))


def _with_pending(state: State, action: Action, store: Pending) -> State:
    rank = state.ranks[action.rank]
    queue = (*rank.pending[action.worker], store)
    return _with_rank(state, action.rank, rank._replace(pending=_set(rank.pending, action.worker, queue)))
