# SPDX-License-Identifier: Apache-2.0
"""Breadth-first search through every state that a scenario can reach.

All interleavings are covered: every enabled action is taken in every state, states are remembered whole (no
hashing to fewer bits), and the search ends only when no state is left or a promise is broken. Breadth first,
so a counterexample is as short as any.

Reduction. An action is *eager* when nothing that other workers can do before it touches what it touches;
then it is taken alone, and the orders that differ only in when it happens are not walked one by one. Every
action sequence that is left out equals, up to swaps of independent actions, one that is walked; the graph
has no cycle, so nothing is put off for ever. Eager are
  * steps on the rank's own variables (launch, begin, send, reduce, exit);
  * raising a flag whose present value has been seen: its receiver can look at it again only when it is
    raised, and then for a later call;
  * the landing of a tile in a slot that has been read, while its flag's present value has been seen: its
    receiver can read it only after the flag is raised, which comes after the landing.
Whether an action is eager is read from the state, not from the protocol being right: a slot or flag that is
not yet read or seen makes its overwriting an ordinary action, taken in every order. The argument needs
flags that equal no earlier value and calls that follow each other on a rank; where a rule that gives either
is broken, or deadlines are hasty, or places on a device run short, nothing is reduced.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.model.effects import apply
from dsv4_symm_mem.protocol.model.machine import Machine
from dsv4_symm_mem.protocol.model.moves import enabled
from dsv4_symm_mem.protocol.model.narrate import narrate
from dsv4_symm_mem.protocol.model.program import WAITS, Kind
from dsv4_symm_mem.protocol.model.scenario import SOUND, Deadline, Rules, Scenario
from dsv4_symm_mem.protocol.model.state import (
    NEW,
    Action,
    Event,
    State,
    Violation,
    ViolationKind,
)

_REDUCIBLE_WITHOUT = frozenset(
    {
        "two_banks",
        "tokens",
        "flush_before_poll",
        "flush_before_exit",
        "remote_tiles_first",
        "one_stream",
        "deadline",
        "broadcast_abort",
        "earliest_wait_blames",
        "expiry_reads_row",
    }
)


@dataclass(frozen=True)
class Report:
    """What an exploration found.

    Attributes:
        states: Distinct states visited.
        transitions: Actions taken between them.
        reduced: Eager actions were taken alone.
        outcomes: For each end that was reached, what each rank ended with: "done", "dead", or an abort as
            "timeout, blames 2".
        violation: The first promise found broken, None when there is none in any state.
        trace: A shortest sequence of actions that leads to the violation, in words.
    """

    states: int
    transitions: int
    reduced: bool
    outcomes: frozenset[tuple[str, ...]]
    violation: Violation | None = None
    trace: tuple[str, ...] = ()


def reducible(scenario: Scenario, rules: Rules) -> bool:
    """Whether the argument for eager actions holds."""
    return (
        rules.broken <= _REDUCIBLE_WITHOUT
        and scenario.deadline is not Deadline.HASTY
        and not scenario.overlap
        and not scenario.shared_device
        and scenario.places is None
    )


def explore(scenario: Scenario, rules: Rules = SOUND, reduce: bool | None = None) -> Report:
    """Visit every reachable state of `scenario` under `rules`, until a promise is broken.

    Args:
        scenario: What is run.
        rules: The rules in force.
        reduce: Take eager actions alone; None for wherever that loses nothing.

    Raises:
        ArgumentError: `reduce` is asked for where the argument for it does not hold.
    """
    if reduce is None:
        reduce = reducible(scenario, rules)
    elif reduce and not reducible(scenario, rules):
        raise ArgumentError("reduce", reduce, "None or False for this scenario and these rules")
    machine = Machine(scenario, rules)
    start = machine.initial()
    came_from: dict[State, tuple[State, Action] | None] = {start: None}
    queue = deque([start])
    transitions = 0
    outcomes: set[tuple[str, ...]] = set()

    def report(violation: Violation | None = None, trace: tuple[str, ...] = ()) -> Report:
        return Report(len(came_from), transitions, reduce, frozenset(outcomes), violation, trace)

    while queue:
        state = queue.popleft()
        actions = enabled(machine, state)
        if all(action.event is Event.DIE for action in actions):
            outcomes.add(tuple(_outcome(machine, state, number) for number in range(scenario.world_size)))
            violation = _judge_end(machine, state)
            if violation is not None:
                return report(violation, _trace(machine, came_from, state))
        if reduce:
            actions = next(([action] for action in actions if _is_eager(machine, state, action)), actions)
        for action in actions:
            transitions += 1
            after = apply(machine, state, action)
            if isinstance(after, Violation):
                steps = _trace(machine, came_from, state)
                return report(after, (*steps, narrate(machine, state, action)))
            if after not in came_from:
                came_from[after] = (state, action)
                queue.append(after)
    return report()


def _is_eager(machine: Machine, state: State, action: Action) -> bool:
    if action.event is Event.LAUNCH:
        return True
    at_risk = action.rank in machine.scenario.mortal and not any(rank.dead for rank in state.ranks)
    if action.event is Event.LAND:
        store = state.ranks[action.rank].pending[action.worker][action.item]
        flag_seen = not state.flags[store.guard] & NEW
        if store.is_flag:
            return flag_seen and not at_risk
        return flag_seen and not state.slots[store.place] & NEW
    if action.event is not Event.STEP:
        return False
    _, _, worker, step = machine.locate(state, action)
    if step.kind in WAITS or step.kind is Kind.PULL:
        return False
    if step.kind in (Kind.PUBLISH, Kind.TOKEN) and not machine.scenario.flags_in_flight:
        return not at_risk and not state.flags[machine.cell(step.place, worker.epoch)] & NEW
    return True


def _judge_end(machine: Machine, state: State) -> Violation | None:
    """What is wrong with a state in which nothing more can happen."""
    living = [number for number, rank in enumerate(state.ranks) if not rank.dead]
    dead = [number for number, rank in enumerate(state.ranks) if rank.dead]
    stuck = [number for number in living if not machine.finished(state.ranks[number])]
    if stuck:
        kind = ViolationKind.ENDLESS_WAIT if dead else ViolationKind.DEADLOCK
        waits = [narrate(machine, state, action) for action in _stuck_workers(machine, state, stuck)]
        return Violation(kind, "; ".join(waits) or f"ranks {stuck} cannot start")
    words = {number: state.ranks[number].abort for number in living}
    blamed = {word.blamed for word in words.values() if word is not None}
    if dead and blamed - set(dead):
        return Violation(ViolationKind.WRONG_BLAME, _words_text(machine, state))
    if len(blamed) > 1 or (blamed and None in words.values()):
        return Violation(ViolationKind.DISAGREEMENT, _words_text(machine, state))
    return None


def _stuck_workers(machine: Machine, state: State, ranks: list[int]) -> list[Action]:
    return [
        Action(Event.GIVE_UP, number, position, index)
        for number in ranks
        for position, frame in enumerate(state.ranks[number].frames)
        for index, worker in enumerate(frame.workers)
        if worker.step >= 0
    ]


def _words_text(machine: Machine, state: State) -> str:
    return ", ".join(
        f"rank {number}: {_outcome(machine, state, number)}" for number in range(len(state.ranks))
    )


def _outcome(machine: Machine, state: State, number: int) -> str:
    rank = state.ranks[number]
    if rank.dead:
        return "dead"
    if rank.abort is not None:
        return f"{rank.abort.kind.name.lower()}, blames {rank.abort.blamed}"
    return "done" if machine.finished(rank) else "stuck"


def _trace(
    machine: Machine, came_from: dict[State, tuple[State, Action] | None], state: State
) -> tuple[str, ...]:
    steps: list[str] = []
    while (origin := came_from[state]) is not None:
        state, action = origin
        steps.append(narrate(machine, state, action))
    return tuple(reversed(steps))
