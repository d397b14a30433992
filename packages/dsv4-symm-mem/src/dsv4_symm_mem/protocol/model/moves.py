# SPDX-License-Identifier: Apache-2.0
"""What can happen in a state of the model.

Every difference in timing between ranks, workers, links and hosts is a choice between the actions listed
here; none is forced. Time itself enters only through `Deadline`.
"""

from __future__ import annotations

from dsv4_symm_mem.protocol.model.machine import Machine
from dsv4_symm_mem.protocol.model.program import WAITS, Kind
from dsv4_symm_mem.protocol.model.scenario import Deadline
from dsv4_symm_mem.protocol.model.state import ENDED, NOT_STARTED, PROGRESS, Action, Event, State


def enabled(machine: Machine, state: State) -> list[Action]:
    """Everything that can happen in `state`, in a fixed order."""
    actions: list[Action] = []
    expiries: list[Action] = []
    for number, rank in enumerate(state.ranks):
        if rank.dead:
            continue
        actions += [Action(Event.NOTICE, number, item=item) for item in range(len(rank.notices))]
        for worker, pending in enumerate(rank.pending):
            flag_before = False
            for item, store in enumerate(pending):
                if not (store.is_flag and flag_before):
                    actions.append(Action(Event.LAND, number, worker=worker, item=item))
                flag_before = flag_before or store.is_flag
        if _may_launch(machine, state, number):
            actions.append(Action(Event.LAUNCH, number))
        _add_steps(machine, state, number, actions, expiries)
    patient = machine.scenario.deadline is not Deadline.HASTY
    if not (patient and any(action.event in PROGRESS for action in actions)):
        actions += expiries
    if machine.scenario.mortal and not any(rank.dead for rank in state.ranks):
        mortal = (number for number in machine.scenario.mortal if not machine.finished(state.ranks[number]))
        actions += [Action(Event.DIE, number) for number in mortal]
    return actions


def _may_launch(machine: Machine, state: State, number: int) -> bool:
    rank = state.ranks[number]
    if rank.launched == len(machine.scenario.calls) or rank.abort is not None:
        return False
    if not machine.rules.warmed_up and rank.launched == 0:
        on_device = state.ranks if machine.scenario.shared_device else (rank,)
        if any(other.frames for other in on_device):
            return False
    if not rank.frames:
        return True
    if not machine.scenario.overlap or len(rank.frames) == 2:
        return False
    started = [worker.step != NOT_STARTED for worker in rank.frames[-1].workers]
    return all(started) if machine.rules.launch_after_all_run else any(started)


def _add_steps(
    machine: Machine, state: State, number: int, actions: list[Action], expiries: list[Action]
) -> None:
    rank = state.ranks[number]
    running = sum(worker.step >= 0 for frame in rank.frames for worker in frame.workers)
    for position, frame in enumerate(rank.frames):
        for index, worker in enumerate(frame.workers):
            if worker.step == ENDED:
                continue
            if worker.step == NOT_STARTED:
                if running < machine.capacity:
                    actions.append(Action(Event.START, number, position, index))
                continue
            step = machine.programs[number][frame.call][index][worker.step]
            go_on = Action(Event.STEP, number, position, index)
            if step.kind in WAITS:
                _add_wait(machine, state, go_on, actions, expiries)
            elif step.kind is Kind.BEGIN:
                if position == 0 or not machine.rules.waits_for_previous_call:
                    actions.append(go_on)
            elif step.kind is Kind.PUBLISH and _waits_for_landing(machine, frame.call):
                cell = machine.cell(step.data, worker.epoch)
                if not any(store.place == cell and not store.is_flag for store in rank.pending[index]):
                    actions.append(go_on)
            else:
                actions.append(go_on)


def _waits_for_landing(machine: Machine, call: int) -> bool:
    rules = machine.rules
    return rules.alias_fences if machine.is_multicast(call) else rules.publish_after_landing


def _add_wait(
    machine: Machine, state: State, go_on: Action, actions: list[Action], expiries: list[Action]
) -> None:
    """A wait goes on when its flag is raised; only while it is not does it look at anything else."""
    rank, frame, worker, step = machine.locate(state, go_on)
    seen = state.flags[machine.cell(step.place, worker.epoch)] >> 1
    wanted = machine.flag_value(go_on.rank, frame.call, worker.epoch)
    if seen == wanted:
        actions.append(go_on)
    elif machine.mismatches(seen, wanted):
        actions.append(go_on._replace(event=Event.FIND_MISMATCH))
    else:
        if rank.abort is not None:
            actions.append(go_on._replace(event=Event.GIVE_UP))
        if machine.rules.deadline and machine.scenario.deadline is not Deadline.OFF:
            expiries.append(go_on._replace(event=Event.EXPIRE))
