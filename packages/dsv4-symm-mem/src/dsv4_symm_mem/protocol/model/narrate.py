# SPDX-License-Identifier: Apache-2.0
"""Actions of the model in words, for counterexamples."""

from __future__ import annotations

from dsv4_symm_mem.protocol.model.effects import Content, tile_text
from dsv4_symm_mem.protocol.model.machine import Machine
from dsv4_symm_mem.protocol.model.program import Kind, Step
from dsv4_symm_mem.protocol.model.state import Action, Event, State


def narrate(machine: Machine, state: State, action: Action) -> str:
    """What `action` does in `state`, in one line."""
    rank = state.ranks[action.rank]
    match action.event:
        case Event.LAUNCH:
            return f"rank {action.rank} launches call {machine.sequences[action.rank][rank.launched] + 1}"
        case Event.DIE:
            return f"rank {action.rank} stops for ever"
        case Event.NOTICE:
            receiver, word = rank.notices[action.item]
            return f"the abort of rank {action.rank} (blames {word.blamed}) reaches rank {receiver}"
        case Event.LAND:
            store = rank.pending[action.worker][action.item]
            if store.is_flag:
                receiver = machine.receiver(store.place)
                return f"a flag of rank {action.rank} becomes visible at rank {receiver}"
            content = Content.decode(store.value)
            return f"{content} lands at rank {machine.home(store.place, content.call)}"
    frame = rank.frames[action.frame]
    worker = f" worker {action.worker}" if machine.scenario.workers > 1 else ""
    who = f"rank {action.rank}{worker}, call {frame.call + 1}:"
    if action.event is Event.START:
        return f"{who} starts"
    step = machine.locate(state, action)[3]
    what = _step_text(step)
    match action.event:
        case Event.FIND_MISMATCH:
            return f"{who} {what}: finds the call of another shape, ends it"
        case Event.GIVE_UP:
            return f"{who} still {what}"
        case Event.EXPIRE:
            return f"{who} {what}: the deadline passes"
    return f"{who} {what}"


def _step_text(step: Step) -> str:
    tile = tile_text(step.tile)
    reduced = "reduced " if step.peer != step.tile[0] else ""
    match step.kind:
        case Kind.BEGIN:
            return "begins"
        case Kind.SEND:
            return f"issues {reduced}tile {tile} to rank {step.peer}"
        case Kind.PUBLISH:
            return f"raises the flag of {reduced}tile {tile} at rank {step.peer}"
        case Kind.TOKEN:
            return f"sends a token to rank {step.peer}"
        case Kind.TAKE:
            return f"awaits and adds tile {tile} from rank {step.peer}"
        case Kind.REDUCE | Kind.COPY:
            return f"stores its output tile {tile}"
        case Kind.GATHER:
            return f"awaits and copies reduced tile {tile}"
        case Kind.AWAIT:
            return f"awaits tile {tile} from rank {step.peer}"
        case Kind.PULL:
            return f"reads the sum of all ranks' tiles {tile} and stores its output tile"
        case Kind.AWAIT_TOKEN:
            return f"awaits the token of rank {step.peer}"
        case Kind.EXIT:
            return "ends"
