# SPDX-License-Identifier: Apache-2.0
"""The compiled SM90 kernel behind the public API, in the PTX emulator: right, repeatable, on any schedule.

What a GPU test shows for the schedules that the GPU happens to take, this shows for others, and the emulator
checks each access on the way. Shapes are small: the emulator takes seconds where a GPU takes microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import emulated_ranks
import pytest
import torch
from dsv4_gemm_rs import WeightKind
from dsv4_gemm_rs.bench.run import wire_bytes
from dsv4_gemm_rs.dispatch import Path, Problem
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig
from dsv4_symm_mem.errors import CallMismatchError, ExchangeError, PeerTimeoutError
from dsv4_symm_mem.protocol.pacing import CLOCK_OFFSET, DURATION_OFFSET, block_duration
from gemm_rs_support import assert_right, problems_for

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
Uneven: Any = pytest.importorskip("dsv4_ptx_emulator.machine.scheduler").Uneven
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

TILE = KernelConfig(64, 128)
"""The smallest tile: most tiles, hence most exchange, for the fewest instructions."""
ABORTED = False
"""Whether reads of unwritten shared memory are faults where a call is aborted: its loader hands out chunks
that it
never loads, and what is made of them is overwritten with NaN."""
MakeEmulation = Callable[..., Any]


ranks = partial(emulated_ranks.ranks, config=TILE)
"""Ranks whose calls take the smallest tile, or `config`."""


@pytest.mark.parametrize(("size", "m"), [(1, 65), (2, 130), (4, 3), (4, 129)])
def test_right_on_awkward_shapes(size: int, m: int, emulator: MakeEmulation) -> None:
    with ranks(emulator(size), m, 192) as group:
        problems = problems_for(size, m, 192, 128, WeightKind.BF16, seed=m)
        group.poison()
        outs = group.call(problems)
        group.finish()
        assert_right(outs, problems)


@pytest.mark.parametrize("clock", [0, 1 << 62], ids=["past", "another-time"])
def test_pieces_take_turns_on_the_link(
    clock: int, emulator: MakeEmulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock was left at; a turn that is far off must not be waited for."""
    monkeypatch.setenv("DSV4_GEMM_RS_LINK_GBPS", "1")
    with ranks(emulator(2), 130, 192) as group:
        problems = problems_for(2, 130, 192, 128, WeightKind.BF16)
        words = []
        for space in group.workspaces:
            assert space.launches is not None
            words.append(space.launches.pacing)
            words[-1][CLOCK_OFFSET // 8] = clock
            assert int(words[-1][DURATION_OFFSET // 8]) == block_duration(1000.0)
        outs = group.call(problems)
        group.finish()
        assert_right(outs, problems)
        for word in words:
            assert 0 < int(word[CLOCK_OFFSET // 8]) < 1 << 62


def test_mxfp8_weights_and_the_decision(emulator: MakeEmulation) -> None:
    with ranks(emulator(2), 130, 128, path=None) as group:
        problems = problems_for(2, 130, 128, 256, WeightKind.MXFP8)
        outs = group.call(problems)
        group.finish()
        assert_right(outs, problems)
        decision = group.workspaces[0].decide(Problem(130, 128, 256, WeightKind.MXFP8))
        assert decision.path is Path.FUSED


def test_launches_with_changing_m_repeat_their_bits(emulator: MakeEmulation) -> None:
    size, cases = 2, {m: problems_for(2, m, 128, 64, WeightKind.BF16, seed=m) for m in (130, 1, 0, 64)}
    kept: dict[int, list[torch.Tensor]] = {}
    with ranks(emulator(size), 130, 128) as group:
        for m, problems in cases.items():
            kept[m] = group.call(problems)
        group.finish()
        for m, problems in cases.items():
            assert_right(kept[m], problems)
        group.poison()
        # All of them queued at once: a rank may be calls ahead of its peer, as far as the banks let it.
        again = [(m, group.call(cases[m])) for m in (1, 130, 130, 64, 0, 1)]
        group.finish()
        for m, outs in again:
            assert all(torch.equal(got, want) for got, want in zip(outs, kept[m], strict=True))
        for space in group.workspaces:
            assert space.exchange is not None
            assert space.exchange.epoch == len(cases) + len(again)


def test_every_schedule_gives_the_same_bits(emulator: MakeEmulation) -> None:
    problems = problems_for(2, 129, 256, 64, WeightKind.BF16)
    polls, results = set(), []
    for seed in range(3):
        emulation = emulator(2, seed=seed)
        with ranks(emulation, 129, 256) as group:
            results.append(group.call(problems))
            group.finish()
        polls.add(tuple(counts.polls for counts in emulation.counters.launches.values()))
    assert_right(results[0], problems)
    for outs in results[1:]:
        assert all(torch.equal(got, want) for got, want in zip(outs, results[0], strict=True))
    assert len(polls) > 1, "the seeds chose one schedule"


def test_links_carry_the_partials_and_little_else(emulator: MakeEmulation) -> None:
    size, m, n = 4, 256, 256
    emulation = emulator(size)
    with ranks(emulation, m, n) as group:
        problems = problems_for(size, m, n, 64, WeightKind.BF16)
        outs = group.call(problems)
        group.finish()
        assert_right(outs, problems)
    links = emulation.link_bytes()
    assert set(links) == {(a, b) for a in range(size) for b in range(size) if a != b}
    for rank in range(size):
        sent = sum(nbytes for (source, _), nbytes in links.items() if source == rank)
        # Shards are whole tiles here, so only the flags and tokens come on top: less than a per cent.
        assert wire_bytes(m, n, size) <= sent < 1.01 * wire_bytes(m, n, size)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late(late: int, emulator: MakeEmulation) -> None:
    """The other rank's launches begin first, and wait inside of the kernel."""
    problems = problems_for(2, 65, 128, 64, WeightKind.BF16)
    with ranks(emulator(2), 65, 128) as group:
        outs = {}
        for rank in (1 - late, late):
            for _ in range(2):
                outs[rank] = group.launch(rank, problems[rank])
        group.finish()
        assert_right([outs[0], outs[1]], problems)


@pytest.mark.parametrize("seed", range(4))
def test_peers_that_come_late_to_a_run_of_own_tiles(seed: int, emulator: MakeEmulation) -> None:
    """A CTA's two warpgroups wait for chunks of two own tiles that need more than the ring of chunks has."""
    problems = problems_for(4, 4 * 128, 128, 64, WeightKind.BF16)
    emulation = emulator(4, processors=1, seed=seed)
    emulation.emulator.machine.scheduler.uneven = Uneven.CTAS
    with ranks(emulation, 4 * 128, 128) as group:
        outs = [group.launch(rank, problem) for rank, problem in enumerate(problems) for _ in range(2)]
        group.finish()
        assert_right(outs[::2], problems)
        assert_right(outs[1::2], problems)


def test_the_least_ring_of_stages(emulator: MakeEmulation) -> None:
    with ranks(emulator(2), 200, 128, config=KernelConfig(64, 128, max_stages=2)) as group:
        problems = problems_for(2, 200, 128, 320, WeightKind.BF16)
        outs = group.call(problems)
        group.finish()
        assert_right(outs, problems)


def test_fused_and_unfused_ranks_meet_in_one_call(emulator: MakeEmulation) -> None:
    problems = problems_for(2, 100, 128, 64, WeightKind.BF16)
    with ranks(emulator(2), 100, 128) as group:
        group.workspaces[1].requested = Path.UNFUSED
        outs = group.call(problems)
        group.finish()
        assert_right(outs, problems)


def test_a_missing_rank_is_blamed_and_outputs_are_nan(emulator: MakeEmulation) -> None:
    problems = problems_for(2, 65, 128, 64, WeightKind.BF16)
    with ranks(emulator(2, checks=ABORTED), 65, 128, deadline=0.001) as group:
        out = group.launch(0, problems[0])
        with pytest.raises(PeerTimeoutError) as caught:
            group.finish()
        assert caught.value.blamed == 1
        assert out.isnan().all()


def test_ranks_that_disagree_on_m_end_with_a_mismatch(emulator: MakeEmulation) -> None:
    with ranks(emulator(2, checks=ABORTED), 200, 128, deadline=5.0) as group:
        for rank in range(2):
            (problem,) = problems_for(1, 65 + 64 * rank, 128, 64, WeightKind.BF16)
            group.launch(rank, problem)
        group.emulation.run()
        kinds = set()
        for space in group.workspaces:
            with pytest.raises(ExchangeError) as caught:
                space.check()
            kinds.add(type(caught.value))
        assert CallMismatchError in kinds
