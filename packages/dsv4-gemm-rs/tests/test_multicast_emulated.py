# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernel whose owners read sums through multicast, in the PTX emulator, launched by itself.

Reduce-scatters and all-reduces, queued together on banks that are poisoned before: right, alike on all ranks,
on any schedule, and how calls end that lose a rank. Kernels of single SMs run under the checker of the memory
model; what that says of pairs, pushed or pulled, `test_emulated_memory_model.py` has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from dsv4_gemm_rs import WeightKind, Workspace, gemm_ar
from dsv4_gemm_rs.dispatch import Exchange, Path, Problem
from dsv4_gemm_rs.kernels.sm100.config import MULTICAST_FAMILY, KernelConfig, Operand
from dsv4_gemm_rs.problems import RankProblem
from dsv4_symm_mem import SymmetricArena, VirtualGroup
from dsv4_symm_mem.errors import CallMismatchError, ExchangeError, PeerTimeoutError, UnsupportedError
from dsv4_symm_mem.protocol.layout import Strategy
from emulated_ranks import ranks
from gemm_rs_support import assert_right, problems_for
from sm100_support import Group, case

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

ARCH = "sm_100a"
SMALL = KernelConfig(Operand.MXFP8, 64, strategy=Strategy.MULTICAST)
PAIR = replace(SMALL, tile_n=128, cluster=2)
MakeEmulation = Callable[..., Any]
Shape = tuple[int, int]


def name_of(value: object) -> str:
    if isinstance(value, KernelConfig):
        return f"{value.operand}-{128 * value.cluster}x{value.tile_n}"
    return str(value)


def checks_for(config: KernelConfig, size: int) -> bool | str:
    """The memory model's checker keeps clocks of every thread for every other, gigabytes for many ranks."""
    return "memory-model" if config.cluster == 1 and size == 2 else True


def assert_both_right(
    shards: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], problems: Sequence[RankProblem]
) -> None:
    """An all-reduce has the same bits on every rank and, as the emulator adds in one order, the shards'."""
    assert_right(shards, problems, multicast=True)
    whole = torch.cat(list(shards))[: len(wholes[0])]
    assert all(torch.equal(out, whole) for out in wholes)


def run_both(
    config: KernelConfig, size: int, shapes: Sequence[Shape], k: int, emulation: Any
) -> list[torch.Tensor]:
    """A reduce-scatter and an all-reduce of each shape, all queued at once; returns the all-reduces' results.

    A bank is written again two calls later, by another shape, or by the other operation.
    """
    group = Group(emulation, config, max(m for m, _ in shapes), max(n for _, n in shapes))
    group.poison()
    made = []
    for number, (m, n) in enumerate(shapes):
        problems, operands = case(config, size, m, n, k, seed=m + n)
        order = (False, True) if number % 2 else (True, False)
        outs = {gathered: group.call(operands, gathered=gathered) for gathered in order}
        made.append((outs, problems))
    group.finish()
    for outs, problems in made:
        assert_both_right(outs[False], outs[True], problems)
    group.close()
    return [outs[True][0] for outs, _ in made]


# Shards that no tile fills, ranks without rows, no rows at all, odd row tiles for pairs, N filled in part.
CASES: list[tuple[KernelConfig, int, list[Shape], int]] = [
    (SMALL, 2, [(131, 192), (1, 64), (259, 64)], 256),
    (replace(SMALL, tile_n=128), 4, [(129, 192), (3, 64)], 128),
    (PAIR, 4, [(257, 64), (5, 192)], 128),
    (replace(PAIR, tile_n=256), 2, [(389, 320), (1, 64)], 128),
    (replace(SMALL, operand=Operand.BF16), 4, [(65, 64), (0, 64), (2, 128)], 64),
]
REST: list[tuple[KernelConfig, int, list[Shape], int]] = [
    *((config, 8, [(517, 64), (7, 128), (0, 64), (65, 64)], 128) for config in MULTICAST_FAMILY),
    *((config, 3, [(390, 192), (2, 64), (131, 320)], 128) for config in MULTICAST_FAMILY),
    # More k steps than there are stages.
    *((config, 2, [(1, 64), (130, 192), (2, 64)], 1152) for config in MULTICAST_FAMILY),
]


@pytest.mark.parametrize(("config", "size", "shapes", "k"), CASES, ids=name_of)
def test_right_on_awkward_shapes(
    config: KernelConfig, size: int, shapes: list[Shape], k: int, emulator: MakeEmulation
) -> None:
    emulation = emulator(size, arch=ARCH, processors=2, checks=checks_for(config, size))
    run_both(config, size, shapes, k, emulation)


def test_four_ranks_obey_the_memory_model(emulator: MakeEmulation) -> None:
    emulation = emulator(4, arch=ARCH, processors=1, checks="memory-model")
    run_both(SMALL, 4, [(9, 64), (2, 64)], 128, emulation)


@pytest.mark.long
@pytest.mark.parametrize(
    "number", range(len(REST)), ids=lambda number: "-".join(map(name_of, REST[number][:2]))
)
def test_right_everywhere(number: int, emulator: MakeEmulation) -> None:
    config, size, shapes, k = REST[number]
    emulation = emulator(size, arch=ARCH, processors=2, seed=number, checks=checks_for(config, size))
    run_both(config, size, shapes, k, emulation)


@pytest.mark.long
@pytest.mark.parametrize("exchange", list(Strategy))
def test_sixteen_ranks(exchange: Strategy, emulator: MakeEmulation) -> None:
    """As many as one NVLink domain's models are split over; the last of them have no rows."""
    size, n, k = 16, 64, 128
    emulation = emulator(size, arch=ARCH, processors=1)
    config = replace(SMALL, strategy=exchange)
    with ranks(emulation, 33, n, config=config, exchange=exchange) as group:
        group.poison()
        made = []
        for m in (33, 17, 33):
            problems = problems_for(size, m, n, k, WeightKind.MXFP8, seed=m)
            pairs = list(zip(problems, group.workspaces, strict=True))
            wholes = [gemm_ar(problem.x, problem.weight, space) for problem, space in pairs]
            made.append((group.call(problems), wholes, problems))
        group.finish()
    for shards, wholes, problems in made:
        assert_right(shards, problems, multicast=exchange is Strategy.MULTICAST)
        assert all(torch.equal(whole, torch.cat(shards)[: len(whole)]) for whole in wholes)


def both_operations(system: Any) -> None:
    """A scenario for the emulator's mutation runs."""
    run_both(SMALL, 2, [(131, 64), (1, 64)], 128, system)


both_operations.ranks, both_operations.processors = 2, 2  # type: ignore[attr-defined]
both_operations.arch = ARCH  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", ""),
        ("fence.proxy.alias;", "", "memory model: alias-fence"),
        ("st.release.sys.global.b64", "st.relaxed.sys.global.b64", "memory model"),
        ("ld.acquire.sys.global.b64", "ld.relaxed.sys.global.b64", "memory model"),
        ("ld.acquire.sys.global.b64", "ld.acquire.gpu.global.b64", "memory model: scope"),
        ("multimem.ld_reduce.relaxed.sys.global.add", "multimem.ld_reduce.relaxed.sys.global.max", "wrong"),
    ],
    ids=["original", "no-alias-fence", "no-release", "no-acquire", "narrow-acquire", "no-sum"],
)
def test_what_orders_partials_and_sums_is_needed(old: str, new: str, found: str) -> None:
    """One line of the exchange less, or weaker, and some schedule of few is wrong."""
    from dsv4_ptx_emulator.mutation.trial import attempt

    def rewritten(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    outcomes = [attempt(both_operations, seed, rewritten if old else None) for seed in range(2)]
    assert all(outcome.by.startswith(found) for outcome in outcomes), outcomes
    if not found:
        assert not any(outcome.by for outcome in outcomes), outcomes


@pytest.mark.long
def test_the_command_that_verifies(emulator: MakeEmulation) -> None:
    """Every tile by itself, and calls as dispatched."""
    from dsv4_gemm_rs.cli.verify import verify, worst_of

    group = VirtualGroup(2, emulation=emulator(2, arch=ARCH, processors=2))
    rows = worst_of(group.run(lambda rank: verify(rank, [(64, 128)], [0, 130], Strategy.MULTICAST)))
    calls = [row["call"] for row in rows]
    assert set(calls) >= {"gemm_ar, fused", "tile 256x256", "tile 128x64", "all-reduce, tile 256x256"}
    assert calls.count("all-reduce, tile 128x64") == calls.count("tile 128x64") == 4
    assert all(row["passed"] for row in rows), rows


def test_every_schedule_gives_the_same_bits(emulator: MakeEmulation) -> None:
    shapes = [(131, 64), (2, 64), (131, 64)]
    results = [
        run_both(SMALL, 2, shapes, 128, emulator(2, arch=ARCH, seed=seed, processors=2)) for seed in (1, 2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_graphs_replay_an_odd_number_of_calls(emulator: MakeEmulation) -> None:
    """Three calls in the graph, replayed between eager ones, on inputs that change."""
    size, m, n, k = 2, 67, 64, 128
    emulation = emulator(size, arch=ARCH)
    group = Group(emulation, SMALL, m, n)
    problems, operands = case(SMALL, size, m, n, k)
    with emulation.capture() as graph:
        captured = [group.call(operands, gathered=gathered) for gathered in (True, False, True)]
    for replay in range(3):
        problems, fresh = case(SMALL, size, m, n, k, seed=replay + 5)
        for old, new in zip(operands, fresh, strict=True):
            for name, tensor in vars(old).items():
                tensor.copy_(getattr(new, name))
        graph.replay()
        eager = group.call(operands)
        group.finish()
        assert_both_right(eager, captured[2], problems)
        assert_both_right(captured[1], captured[0], problems)
    group.close()


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late(late: int, emulator: MakeEmulation) -> None:
    """The other rank's launches begin first, and wait inside of the kernel."""
    problems, operands = case(SMALL, 2, 200, 64, 128)
    group = Group(emulator(2, arch=ARCH), SMALL, 200, 64)
    outs: dict[int, list[torch.Tensor]] = {}
    for rank in (1 - late, late):
        outs[rank] = [group.launch(rank, operands[rank], gathered=gathered) for gathered in (False, True)]
    group.finish()
    assert_both_right([outs[0][0], outs[1][0]], [outs[0][1], outs[1][1]], problems)
    group.close()


def test_links_carry_a_partial_and_a_share_of_it(emulator: MakeEmulation) -> None:
    """Everything that a rank sends: its partial of every tile that others own, once, and sums of its own."""
    size, m, n = 2, 512, 128
    emulation = emulator(size, arch=ARCH)
    group = Group(emulation, SMALL, m, n)
    _, operands = case(SMALL, size, m, n, 128)
    sent = []
    for gathered in (False, True):
        before = sum(emulation.link_bytes().values())
        group.call(operands, gathered=gathered)
        group.finish()
        sent.append(sum(emulation.link_bytes().values()) - before)
    remote = 2 * m * n * (size - 1)
    assert remote <= sent[0] < 1.01 * remote
    assert 2 * remote <= sent[1] < 2.02 * remote
    group.close()


@pytest.mark.parametrize("gathered", [False, True], ids=["scatter", "reduce"])
@pytest.mark.parametrize("m", [140, 1], ids=["tiles", "token"])
def test_a_missing_rank_is_blamed_and_outputs_are_nan(
    m: int, gathered: bool, emulator: MakeEmulation
) -> None:
    _, operands = case(SMALL, 3, m, 64, 128)
    group = Group(emulator(3, arch=ARCH, processors=2), SMALL, 140, 64, deadline=0.001)
    outs = [group.launch(rank, operands[rank], gathered=gathered) for rank in range(2)]
    group.emulation.run()
    kinds = set()
    for rank, out in enumerate(outs):
        with pytest.raises(ExchangeError) as caught:
            group.exchanges[rank].check()
        assert caught.value.blamed == 2
        kinds.add(type(caught.value))
        rows = m if gathered else min(max(m - rank * len(out), 0), len(out))
        assert out[:rows].isnan().all()
    assert PeerTimeoutError in kinds
    # A call that finds the abort word set does nothing else.
    again = group.launch(0, operands[0], gathered=gathered)
    group.emulation.run()
    assert again.isnan().all()
    group.close()


def test_calls_of_a_model_through_a_workspace(emulator: MakeEmulation) -> None:
    """Few tokens go unfused, pushing into banks that fused calls read through multicast before and after."""
    size, n, k = 2, 64, 128
    cases = {m: problems_for(size, m, n, k, WeightKind.MXFP8, seed=m) for m in (130, 9, 203)}
    with ranks(emulator(size, arch=ARCH), 203, n, config=SMALL, path=None, exchange="multicast") as group:
        space = group.workspaces[0]
        assert space.launches is not None
        assert space.launches.multicast
        group.poison()
        made = []
        for m in (130, 9, 203, 130, 130, 9, 9, 203):
            problems = cases[m]
            wholes = [
                gemm_ar(p.x, p.weight, workspace)
                for p, workspace in zip(problems, group.workspaces, strict=True)
            ]
            made.append((group.call(problems), wholes, problems))
        group.finish()
        for shards, wholes, problems in made:
            assert_both_right(shards, wholes, problems)
        decision = space.decide(Problem(130, n, k, WeightKind.MXFP8))
        assert (decision.path, decision.exchange) == (Path.FUSED, Exchange.MULTICAST)
        assert space.decide(Problem(9, n, k, WeightKind.MXFP8)).exchange is Exchange.PUSH_AFTER
        assert space.counters.calls == {"fused": 10, "unfused": 6}
        # A fused all-reduce is one call of the exchange, an unfused one is two.
        assert space.exchange is not None
        assert space.exchange.epoch == 10 + 3 + 2 * 3


def test_the_dispatcher_chooses_a_tile_and_one_rank_needs_no_exchange(emulator: MakeEmulation) -> None:
    (problem,) = problems_for(1, 65, 64, 128, WeightKind.MXFP8)
    with ranks(emulator(1, arch=ARCH), 65, 64, config=None, exchange="multicast") as group:
        plan = group.workspaces[0].plan(Problem(65, 64, 128, WeightKind.MXFP8))
        assert plan.config in MULTICAST_FAMILY
        out = gemm_ar(problem.x, problem.weight, group.workspaces[0])
        (shard,) = group.call([problem])
        group.finish()
    assert_right([shard], [problem])
    assert torch.equal(out, shard)


def test_sm90_refuses(emulator: MakeEmulation) -> None:
    group = VirtualGroup(2, emulation=emulator(2))
    with pytest.raises(UnsupportedError, match="no kernel for sm_90 that reads through multicast"):
        group.run(lambda rank: Workspace.create(rank, max_tokens=8, n=64, exchange="multicast"))


@pytest.mark.parametrize("path", ["unfused", "host"])
def test_other_paths_refuse(path: str, emulator: MakeEmulation) -> None:
    group = VirtualGroup(2, emulation=emulator(2, arch=ARCH))
    with pytest.raises(UnsupportedError, match=f"path '{path}' was requested, too"):
        group.run(lambda rank: Workspace.create(rank, max_tokens=8, n=64, path=path, exchange="multicast"))


def test_ranks_without_multicast_addresses_are_named(
    emulator: MakeEmulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        SymmetricArena,
        "multicast_reason",
        property(lambda arena: "switched off" if arena.communicator.rank else ""),
    )
    group = VirtualGroup(2, emulation=emulator(2, arch=ARCH))
    with pytest.raises(UnsupportedError, match=r"on some rank; rank 1: switched off$"):
        group.run(lambda rank: Workspace.create(rank, max_tokens=8, n=64, exchange="multicast"))
    # Who does not ask for it does not care.
    spaces = group.run(lambda rank: Workspace.create(rank, max_tokens=8, n=64))
    assert not spaces[0].machine.multicast
    group.run(lambda rank: spaces[rank.rank].close())


def test_ranks_that_disagree_on_the_operation_end_with_a_mismatch(emulator: MakeEmulation) -> None:
    _, operands = case(SMALL, 2, 130, 64, 128)
    group = Group(emulator(2, arch=ARCH), SMALL, 130, 64, deadline=5.0)
    for rank in range(2):
        group.launch(rank, operands[rank], gathered=bool(rank))
    group.emulation.run()
    kinds = set()
    for exchange in group.exchanges:
        with pytest.raises(ExchangeError) as caught:
            exchange.check()
        kinds.add(type(caught.value))
    assert CallMismatchError in kinds
    group.close()
