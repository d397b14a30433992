# SPDX-License-Identifier: Apache-2.0
"""The protocol keeps its promises in every interleaving, and each broken rule is caught.

The catalogue says what is explored; here the model is also held against itself: the reduced search against
the full one, counterexamples against the model's own steps, outcomes of faults against what each allows.
"""

from __future__ import annotations

import functools
import importlib
import random
from dataclasses import fields, replace

import pytest
from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.model import (
    SOUND,
    Call,
    Deadline,
    Report,
    Rules,
    Scenario,
    ViolationKind,
    explore,
    grouped_order,
    uniform_call,
)
from dsv4_symm_mem.protocol.model.catalogue import (
    BROKEN_CASES,
    SOUND_CASES,
    SPARE_CASES,
    Case,
    disagreeing_call,
    without,
)
from dsv4_symm_mem.protocol.model.search import reducible
from dsv4_symm_mem.protocol.words import Operation


def name_of(case: Case) -> str:
    return "-".join([*sorted(case.rules.broken), case.scenario.name])


@functools.cache
def explored(scenario: Scenario, rules: Rules, reduce: bool | None) -> Report:
    return explore(scenario, rules, reduce)


def run(case: Case) -> Report:
    return explored(case.scenario, case.rules, False if case.full else None)


@pytest.mark.parametrize("case", SOUND_CASES + SPARE_CASES, ids=name_of)
def test_no_promise_breaks(case: Case) -> None:
    report = run(case)
    assert report.violation is None, "\n".join([*report.trace, str(report.violation)])
    if case.scenario.deadline is Deadline.OFF:
        assert report.outcomes == {("done",) * case.scenario.world_size}


@pytest.mark.parametrize("case", BROKEN_CASES, ids=name_of)
def test_broken_rule_is_caught(case: Case) -> None:
    report = run(case)
    assert report.violation is not None
    assert report.violation.kind is case.expected, "\n".join([*report.trace, str(report.violation)])
    assert report.trace
    intact = explored(case.scenario, SOUND, None)
    signatures = {call.signatures for call in case.scenario.calls}
    if all(len(set(signature)) == 1 for signature in signatures):
        assert intact.violation is None, "the scenario is at fault, not the rule"


def test_every_rule_is_broken_somewhere() -> None:
    broken = {name for case in BROKEN_CASES for name in case.rules.broken}
    assert broken | {"expiry_reads_row"} == {field.name for field in fields(Rules)}


def test_counterexamples_are_shortest_and_repeatable() -> None:
    scenario = Scenario("", (uniform_call((1, 1)),) * 2)
    first, second = (explore(scenario, without("two_banks"), reduce=False) for _ in range(2))
    assert first == second
    assert first.trace[-1] == "call 2's tile 1:0 from rank 0 lands at rank 1"
    # Both ranks must send in call 1 (launch, begin, issue, land, raise: 5 each), rank 0 must take, store and
    # end (3) and go on until its second tile lands (4).
    assert len(first.trace) == 17


REDUCIBLE = [
    case
    for case in SOUND_CASES + SPARE_CASES + BROKEN_CASES
    if reducible(case.scenario, case.rules) and case.full
]


@pytest.mark.parametrize("case", REDUCIBLE, ids=name_of)
def test_reduction_loses_nothing(case: Case) -> None:
    reduced = explore(case.scenario, case.rules, reduce=True)
    full = run(case)
    assert reduced.states <= full.states
    if case.expected is None:
        assert reduced.outcomes == full.outcomes
        assert reduced.violation is full.violation is None
    else:
        assert reduced.violation is not None
        assert full.violation is not None
        assert reduced.violation.kind is full.violation.kind


@pytest.mark.parametrize("seed", range(24))
def test_random_scenarios(seed: int) -> None:
    draw = random.Random(seed)
    world_size = draw.choice((2, 2, 3))
    calls = []
    for _ in range(draw.randint(4, 6) if world_size == 2 else 3):
        longest = draw.randint(0, 2)
        owned = sorted((draw.randint(0, longest) for _ in range(world_size)), reverse=True)
        calls.append(uniform_call(owned, draw.choice(list(Operation)), lag=draw.randint(0, 2)))
    scenario = Scenario(
        f"seed {seed}",
        tuple(calls),
        workers=draw.randint(1, 3 if world_size == 2 else 2),
        publish_lag=draw.randint(0, 2),
        flags_in_flight=draw.random() < 0.5,
        tokens_always=draw.random() < 0.25,
        shared_banks=True,
    )
    report = explore(scenario)
    assert report.violation is None, "\n".join([str(scenario), *report.trace, str(report.violation)])
    assert report.outcomes == {("done",) * world_size}


def test_tile_that_a_peer_never_sends_is_a_deadlock() -> None:
    call = uniform_call((2, 1))
    shortened = tuple(tile for tile in call.orders[1] if tile != (0, 1))
    scenario = Scenario("", (Call((call.orders[0], shortened), call.signatures),))
    report = explore(scenario)
    assert report.violation is not None
    assert report.violation.kind is ViolationKind.DEADLOCK
    assert report.violation.detail == "rank 0, call 1: still awaits and adds tile 0:1 from rank 1"


def test_every_survivor_of_a_death_blames_the_dead_rank() -> None:
    scenario = Scenario("", (uniform_call((1, 1, 1)),), mortal=(0, 1, 2), deadline=Deadline.PATIENT)
    outcomes = explore(scenario).outcomes
    for dead in range(3):
        verdict = f"timeout, blames {dead}"
        assert tuple("dead" if rank == dead else verdict for rank in range(3)) in outcomes
    for outcome in outcomes:
        if "dead" in outcome:
            dead = outcome.index("dead")
            assert set(outcome) <= {"dead", "done", f"timeout, blames {dead}"}


def test_hasty_deadlines_end_every_rank_and_all_agree() -> None:
    report = explore(Scenario("", (uniform_call((1, 1, 1)),), deadline=Deadline.HASTY))
    assert report.violation is None
    assert report.outcomes == {("done",) * 3, *((f"timeout, blames {rank}",) * 3 for rank in range(3))}


@pytest.mark.parametrize(
    "shapes",
    [((2, 2), (1, 1)), ((1, 0), (1, 1)), ((1, 0), (0, 0)), ((2, 2, 2), (2, 2, 2), (1, 1, 0))],
    ids=str,
)
def test_ranks_that_disagree_on_the_shape_are_told_without_a_deadline(
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    report = explore(Scenario("", (disagreeing_call(*shapes),)))
    assert report.violation is None
    assert report.outcomes
    for outcome in report.outcomes:
        assert len(set(outcome)) == 1
        assert outcome[0].startswith("mismatch")


def test_tile_awaited_where_a_token_comes_needs_the_deadline() -> None:
    calls = (disagreeing_call((2, 2), (0, 0)),)
    silent = explore(Scenario("", calls))
    assert silent.violation is not None
    assert silent.violation.kind is ViolationKind.DEADLOCK

    patient = Scenario("", calls, deadline=Deadline.PATIENT)
    expired = explore(patient)
    assert expired.violation is None
    assert {text.split(",")[0] for outcome in expired.outcomes for text in outcome} == {"mismatch"}

    unread = explore(patient, without("expiry_reads_row"))
    assert {text.split(",")[0] for outcome in unread.outcomes for text in outcome} == {"timeout"}


def test_one_bank_is_not_enough_once_an_all_reduce_meets_a_reduce_scatter() -> None:
    calls = (uniform_call((1, 1)), uniform_call((1, 1), Operation.ALL_REDUCE))
    for order in (calls * 2, calls[::-1] * 2):
        report = explore(Scenario("", order), without("two_banks"))
        assert report.violation is not None
        assert report.violation.kind is ViolationKind.OVERWRITE


@pytest.mark.parametrize("operation", list(Operation))
def test_a_rank_that_begins_a_call_finds_its_bank_free(operation: Operation) -> None:
    """Because of the messages of the call between: with tokens always, with one bank never."""
    for calls in [(uniform_call((1, 0), operation),) * 3, (uniform_call((1, 1), operation),) * 3]:
        scenario = Scenario("", calls, shared_banks=True)
        assert explore(scenario).violation is None
        report = explore(scenario, without("two_banks"))
        assert report.violation is not None
        assert report.violation.kind in (ViolationKind.BANK_IN_USE, ViolationKind.LOST_FLAG)


@pytest.mark.parametrize("length", range(1, 6))
def test_epochs_in_memory_suit_graphs_of_any_length(length: int) -> None:
    calls = (uniform_call((1, 1)),) * 6
    assert explore(Scenario("", calls, graph_calls=length)).violation is None


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_baked_epochs_break_at_the_first_replay(length: int) -> None:
    calls = (uniform_call((1, 1)),) * (length + 1)
    assert (
        explore(Scenario("", calls[:length], graph_calls=length), without("epoch_in_memory")).violation
        is None
    )
    assert explore(Scenario("", calls, graph_calls=length), without("epoch_in_memory")).violation is not None


def test_baked_epochs_of_a_graph_of_four_break_only_where_a_flag_rests() -> None:
    same = (uniform_call((1, 1)),) * 8
    assert explore(Scenario("", same, graph_calls=4), without("epoch_in_memory")).violation is None
    resting = (uniform_call((2, 1)), *same[:3]) * 2
    report = explore(Scenario("", resting, graph_calls=4), without("epoch_in_memory"))
    assert report.violation is not None
    assert report.violation.kind is ViolationKind.STALE_READ


def test_grouped_order_is_the_design_s() -> None:
    assert grouped_order((2, 2, 1), 0) == ((1, 0), (2, 0), (1, 1), (0, 0), (0, 1))
    assert grouped_order((2, 2, 1), 2, lag=0) == ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))
    assert grouped_order((0, 0), 1) == ()


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda: Call(((), ()), (1,)), "signatures"),
        (lambda: Call(((), ()), (1, 1 << 16)), "signatures"),
        (lambda: Call((((1, 0), (1, 0)), ()), (1, 1)), "orders"),
        (lambda: Call((((2, 0),), ()), (1, 1)), "orders"),
        (lambda: Call((((1, 0),), ()), (1, 1), units=((2,), ())), "units"),
        (lambda: Scenario("", ()), "calls"),
        (lambda: Scenario("", (uniform_call((1,)), uniform_call((1, 1)))), "calls"),
        (lambda: Scenario("", (uniform_call((1,)),), workers=0), "workers"),
        (lambda: Scenario("", (uniform_call((1,)),), publish_lag=-1), "publish_lag"),
        (lambda: Scenario("", (uniform_call((1,)),), mortal=(1,)), "mortal"),
        (lambda: explore(Scenario("", (uniform_call((1,)),), overlap=True), SOUND, reduce=True), "reduce"),
    ],
)
def test_unusable_arguments(build: object, argument: str) -> None:
    assert callable(build)
    with pytest.raises(ArgumentError) as caught:
        build()
    assert caught.value.argument == argument


def test_table_tells_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = importlib.import_module("dsv4_symm_mem.protocol.model.__main__")
    monkeypatch.setattr(command, "SOUND_CASES", SOUND_CASES[:1])
    monkeypatch.setattr(command, "SPARE_CASES", ())
    monkeypatch.setattr(command, "BROKEN_CASES", BROKEN_CASES[:1])
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    assert "overwrite of an unread slot" in printed
    assert " 17 call 2's tile 1:0 from rank 0 lands at rank 1" in printed
    assert "UNEXPECTED" not in printed

    monkeypatch.setattr(command, "SOUND_CASES", (replace(BROKEN_CASES[0], expected=None),))
    assert command.main([]) == 1
    assert "UNEXPECTED" in capsys.readouterr().out
