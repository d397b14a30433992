# SPDX-License-Identifier: Apache-2.0
"""Scenarios for mutation testing: the fused kernels that push, in small, with an exact or bounded answer.

Each is a function of a system of emulated devices that launches, runs, and raises AssertionError for a wrong
answer. Shapes are as small as they can be while the rings of stages, staged tiles, bounce pieces and both
banks of slots are all used more than once. Where a peer is lost, several CTAs or lanes of a rank give up at
about the same time, so that they compete for the lock of its diagnosis.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from typing import Any
from unittest import mock

import forked_workers  # noqa: F401
import pytest
import torch
from dsv4_gemm_rs import WeightKind, Workspace, gemm_rs
from dsv4_gemm_rs.dispatch import Path
from dsv4_gemm_rs.kernels.families import Operand, TileConfig
from dsv4_gemm_rs.kernels.launch import launch
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig as Sm100Config
from dsv4_gemm_rs.problems import RankProblem
from dsv4_symm_mem import VirtualGroup
from dsv4_symm_mem.errors import ExchangeError, PeerTimeoutError
from dsv4_symm_mem.protocol.layout import shard_length
from gemm_rs_support import assert_right, problems_for

TILE = KernelConfig(64, 128)
# Few stages, so that a ring of them comes round soon.
SM100_TILE = Sm100Config(Operand.MXFP8, 64, max_stages=3)
SM100_PAIR = Sm100Config(Operand.MXFP8, 128, 2, max_stages=3)


@cache
def _problems(size: int, m: int, n: int, k: int, kind: WeightKind = WeightKind.BF16) -> list[RankProblem]:
    return problems_for(size, m, n, k, kind, seed=m)


def _launch_early(*arguments: Any, early: bool) -> None:
    launch(*arguments, early=True)


def _calls(
    system: Any,
    shapes: list[int],
    n: int,
    k: int,
    *,
    unfused: int | None = None,
    tile: TileConfig = TILE,
    kind: WeightKind = WeightKind.BF16,
    early: bool = False,
) -> None:
    """Several calls at once on all ranks, each checked; `early` ones may begin while others still run.

    Rank `unfused` runs the stand-alone reduce-scatter, but where it has no rows and awaits tokens.
    """
    size = len(system.devices)
    with ExitStack() as stack:
        if early:
            stack.enter_context(mock.patch("dsv4_gemm_rs.fused.launch", _launch_early))
        stack.enter_context(mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=tile))
        group = VirtualGroup(size, emulation=system)
        spaces = group.run(lambda rank: Workspace.create(rank, max_tokens=max(shapes), n=n, path="fused"))
        for space in spaces:
            assert space.exchange is not None
            space.exchange.blocks[space.rank][space.exchange.layout.slots_offset :].fill_(0xFF)
        results = []
        for m in shapes:
            problems = _problems(size, m, n, k, kind)
            if unfused is not None:
                spaces[unfused].requested = Path.UNFUSED if m >= size else Path.FUSED
            outs = []
            for rank, problem in enumerate(problems):
                out = torch.full((shard_length(m, size), n), float("nan"), dtype=torch.bfloat16)
                outs.append(gemm_rs(problem.x, problem.weight, spaces[rank], out))
            results.append((outs, problems))
        system.run()
        for space in spaces:
            space.check()
        for outs, problems in results:
            assert_right(outs, problems)
        group.run(lambda rank: spaces[rank.rank].close())


def fused_rings(system: Any) -> None:
    """Two ranks, one CTA each, with four remote tiles, then four own ones: every ring goes round.

    Tokens in the second call, then a bank is used again.
    """
    _calls(system, [256, 1, 128], 256, 192, early=True)


fused_rings.ranks, fused_rings.processors = 2, 1  # type: ignore[attr-defined]


def fused_trio(system: Any) -> None:
    """Three ranks, one CTA each, with two own tiles in a row, each of which takes a whole ring of chunks."""
    _calls(system, [384], 128, 64)


fused_trio.ranks, fused_trio.processors = 3, 1  # type: ignore[attr-defined]


def fused_and_unfused(system: Any) -> None:
    """Two ranks, two CTAs each; one runs the stand-alone reduce-scatter, whose stores are ordinary ones.

    Not for tokens, in the second call. A tile takes more stages than the ring has.
    """
    _calls(system, [200, 1, 128], 128, 512, unfused=1)


fused_and_unfused.ranks, fused_and_unfused.processors = 2, 2  # type: ignore[attr-defined]


def sm100_banks(system: Any) -> None:
    """Two ranks, two CTAs each, MXFP8 by single SMs; tokens in the second call: a bank is used again.

    Behind the tokens one rank sends by ordinary stores.
    """
    _calls(system, [200, 1, 200], 64, 128, tile=SM100_TILE, kind=WeightKind.MXFP8, early=True, unfused=1)


sm100_banks.ranks, sm100_banks.processors, sm100_banks.arch = 2, 2, "sm_100a"  # type: ignore[attr-defined]


def sm100_rings(system: Any) -> None:
    """Two ranks, one CTA each, MXFP8 by single SMs: stages, accumulators, buffers and pieces come round."""
    _calls(system, [200], 192, 256, tile=SM100_TILE, kind=WeightKind.MXFP8)


sm100_rings.ranks, sm100_rings.processors, sm100_rings.arch = 2, 1, "sm_100a"  # type: ignore[attr-defined]


def sm100_pair(system: Any) -> None:
    """Two ranks, a pair of CTAs each that multiplies MXFP8 together; a bank is used again."""
    _calls(system, [260, 1, 130], 128, 128, tile=SM100_PAIR, kind=WeightKind.MXFP8, early=True, unfused=1)


sm100_pair.ranks, sm100_pair.processors, sm100_pair.arch = 2, 2, "sm_100a"  # type: ignore[attr-defined]


def sm100_pair_rings(system: Any) -> None:
    """Two ranks, a pair of CTAs each: stages, accumulators, buffers and pieces come round."""
    _calls(system, [260], 384, 128, tile=SM100_PAIR, kind=WeightKind.MXFP8)


sm100_pair_rings.ranks, sm100_pair_rings.processors = 2, 2  # type: ignore[attr-defined]
sm100_pair_rings.arch = "sm_100a"  # type: ignore[attr-defined]


def _fused_lost(
    system: Any,
    m: int,
    k: int = 64,
    tile: TileConfig = TILE,
    kind: WeightKind = WeightKind.BF16,
    lost: int = 1,
) -> None:
    """The `lost` last ranks never come: the deadline ends the call on the others, and they blame the last.

    Another call of theirs is queued behind it, which ends before it begins.
    """
    size = len(system.devices)
    with mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=tile):
        group = VirtualGroup(size, emulation=system)
        spaces = group.run(
            lambda rank: Workspace.create(rank, max_tokens=m, n=128, path="fused", deadline=0.001)
        )
        problems = _problems(size, m, 128, k, kind)
        length = shard_length(m, size)
        alive = range(size - lost)
        ended = [[torch.zeros((length, 128), dtype=torch.bfloat16) for _ in alive] for _ in range(2)]
        for outs in ended:
            for rank, out in enumerate(outs):
                gemm_rs(problems[rank].x, problems[rank].weight, spaces[rank], out)
        system.run()
        kinds = set()
        for rank in alive:
            with pytest.raises(ExchangeError) as caught:
                spaces[rank].check()
            assert caught.value.blamed == size - 1
            assert all(outs[rank][: max(m - rank * length, 0)].isnan().all() for outs in ended)
            kinds.add(type(caught.value))
        assert PeerTimeoutError in kinds


def fused_lost(system: Any) -> None:
    """Two ranks with two CTAs each wait for tiles of a third."""
    _fused_lost(system, 384)


fused_lost.ranks, fused_lost.processors = 3, 2  # type: ignore[attr-defined]
# An aborted call reads stages that were never loaded; its output is overwritten with NaN.
fused_lost.checks = False  # type: ignore[attr-defined]


def fused_lost_at_once(system: Any) -> None:
    """As before with twice the CTAs, which give up at once: one diagnosis stays, and it is whole."""
    _fused_lost(system, 768)


fused_lost_at_once.ranks, fused_lost_at_once.processors = 3, 4  # type: ignore[attr-defined]
fused_lost_at_once.checks = False  # type: ignore[attr-defined]


def sm100_lost(system: Any) -> None:
    """Two ranks with two CTAs each wait for tiles of a third; MXFP8 by single SMs."""
    _fused_lost(system, 384, 128, SM100_TILE, WeightKind.MXFP8)


sm100_lost.ranks, sm100_lost.processors, sm100_lost.arch = 3, 2, "sm_100a"  # type: ignore[attr-defined]
sm100_lost.checks = False  # type: ignore[attr-defined]


def sm100_lost_token(system: Any) -> None:
    """Two ranks wait for four others, one of them for their tokens; MXFP8 by single SMs."""
    _fused_lost(system, 1, 128, SM100_TILE, WeightKind.MXFP8, 4)


sm100_lost_token.ranks, sm100_lost_token.processors = 6, 1  # type: ignore[attr-defined]
sm100_lost_token.arch, sm100_lost_token.checks = "sm_100a", False  # type: ignore[attr-defined]


def sm100_pair_lost(system: Any) -> None:
    """Two ranks with two pairs of CTAs each wait for tiles of a third."""
    _fused_lost(system, 400, 128, SM100_PAIR, WeightKind.MXFP8)


sm100_pair_lost.ranks, sm100_pair_lost.processors, sm100_pair_lost.arch = 3, 4, "sm_100a"  # type: ignore[attr-defined]
sm100_pair_lost.checks = False  # type: ignore[attr-defined]


def sm100_pair_lost_token(system: Any) -> None:
    """Two ranks with a pair of CTAs each wait for four others, one of them for their tokens."""
    _fused_lost(system, 1, 128, SM100_PAIR, WeightKind.MXFP8, 4)


sm100_pair_lost_token.ranks, sm100_pair_lost_token.processors = 6, 2  # type: ignore[attr-defined]
sm100_pair_lost_token.arch, sm100_pair_lost_token.checks = "sm_100a", False  # type: ignore[attr-defined]


def fused_lost_token(system: Any) -> None:
    """Two ranks wait for four others, one of them for their tokens."""
    _fused_lost(system, 1, lost=4)


fused_lost_token.ranks, fused_lost_token.processors = 6, 1  # type: ignore[attr-defined]
fused_lost_token.checks = False  # type: ignore[attr-defined]
