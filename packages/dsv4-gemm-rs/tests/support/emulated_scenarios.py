# SPDX-License-Identifier: Apache-2.0
"""Scenarios for mutation testing: the kernels' exchanges in small, with an exact or bounded answer.

Each is a function of a system of emulated devices that launches, runs, and raises AssertionError for a wrong
answer. Shapes are as small as they can be while the rings of stages, staged tiles, bounce pieces and both
banks of slots are all used more than once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from dsv4_gemm_rs import WeightKind, Workspace, gemm_rs
from dsv4_gemm_rs.dispatch import Path
from dsv4_gemm_rs.kernels.families import Operand, TileConfig
from dsv4_gemm_rs.kernels.launch import launch
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig as Sm100Config
from dsv4_gemm_rs.problems import RankProblem
from dsv4_symm_mem import SymmetricArena, VirtualGroup
from dsv4_symm_mem.collectives.cuda import all_gather_cuda, reduce_scatter_cuda
from dsv4_symm_mem.errors import ExchangeError, PeerTimeoutError
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.layout import BF16_BYTES, ExchangeLayout, shard_length
from dsv4_symm_mem.protocol.tiles import TileGrid, TileShape
from dsv4_symm_mem.protocol.words import Operation, bank_of, call_signature, signal
from gemm_rs_support import assert_right, problems_for

# Workers run side by side. In a forked one PyTorch renews its pool of threads at first use, which must not be
# by several threads at once.
torch.set_num_threads(1)
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
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
    """Several calls at once on all ranks, each checked; `early` ones may begin while others still run."""
    size = len(system.devices)
    with ExitStack() as stack:
        if early:
            stack.enter_context(mock.patch("dsv4_gemm_rs.fused.launch", _launch_early))
        stack.enter_context(mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=tile))
        group = VirtualGroup(size, emulation=system)
        spaces = group.run(lambda rank: Workspace.create(rank, max_tokens=max(shapes), n=n, path="fused"))
        if unfused is not None:
            spaces[unfused].requested = Path.UNFUSED
        for space in spaces:
            assert space.exchange is not None
            space.exchange.blocks[space.rank][space.exchange.layout.slots_offset :].fill_(0xFF)
        results = []
        for m in shapes:
            problems = _problems(size, m, n, k, kind)
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
    """Two ranks, two CTAs each, one of which takes own tiles, the other remote ones: every ring goes round.

    Tokens in the second call, then a bank is used again.
    """
    _calls(system, [512, 1, 128], 128, 192)


fused_rings.ranks, fused_rings.processors = 2, 2  # type: ignore[attr-defined]


def fused_and_unfused(system: Any) -> None:
    """Two ranks, two CTAs each; one runs the stand-alone reduce-scatter, whose stores are ordinary ones."""
    _calls(system, [200, 1, 128], 128, 64, unfused=1)


fused_and_unfused.ranks, fused_and_unfused.processors = 2, 2  # type: ignore[attr-defined]


def sm100_banks(system: Any) -> None:
    """Two ranks, two CTAs each, MXFP8 by single SMs; tokens in the second call: a bank is used again."""
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
    """The `lost` last ranks never come: the deadline ends the call on the others, and they blame the last."""
    size = len(system.devices)
    with mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=tile):
        group = VirtualGroup(size, emulation=system)
        spaces = group.run(
            lambda rank: Workspace.create(rank, max_tokens=m, n=128, path="fused", deadline=0.001)
        )
        problems = _problems(size, m, 128, k, kind)
        length = shard_length(m, size)
        outs = [torch.zeros((length, 128), dtype=torch.bfloat16) for _ in range(size - lost)]
        for rank, out in enumerate(outs):
            gemm_rs(problems[rank].x, problems[rank].weight, spaces[rank], out)
        system.run()
        kinds = set()
        for rank, out in enumerate(outs):
            with pytest.raises(ExchangeError) as caught:
                spaces[rank].check()
            assert caught.value.blamed == size - 1
            assert out[: max(m - rank * length, 0)].isnan().all()
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
    """Two ranks wait for two others, one of them for their tokens; MXFP8 by single SMs."""
    _fused_lost(system, 1, 128, SM100_TILE, WeightKind.MXFP8, 2)


sm100_lost_token.ranks, sm100_lost_token.processors = 4, 1  # type: ignore[attr-defined]
sm100_lost_token.arch, sm100_lost_token.checks = "sm_100a", False  # type: ignore[attr-defined]


def sm100_pair_lost(system: Any) -> None:
    """Two ranks with a pair of CTAs each wait for tiles of a third."""
    _fused_lost(system, 400, 128, SM100_PAIR, WeightKind.MXFP8)


sm100_pair_lost.ranks, sm100_pair_lost.processors, sm100_pair_lost.arch = 3, 2, "sm_100a"  # type: ignore[attr-defined]
sm100_pair_lost.checks = False  # type: ignore[attr-defined]


def sm100_pair_lost_token(system: Any) -> None:
    """Two ranks with a pair of CTAs each wait for two others, one of them for their tokens."""
    _fused_lost(system, 1, 128, SM100_PAIR, WeightKind.MXFP8, 2)


sm100_pair_lost_token.ranks, sm100_pair_lost_token.processors = 4, 2  # type: ignore[attr-defined]
sm100_pair_lost_token.arch, sm100_pair_lost_token.checks = "sm_100a", False  # type: ignore[attr-defined]


def fused_lost_token(system: Any) -> None:
    """Two ranks wait for two others, one of them for their tokens."""
    _fused_lost(system, 1, lost=2)


fused_lost_token.ranks, fused_lost_token.processors = 4, 1  # type: ignore[attr-defined]
fused_lost_token.checks = False  # type: ignore[attr-defined]

SHAPE = TileShape(16, 32)
"""Small tiles, so that a CTA has more of them than it may have unpublished."""


def _exchanges(
    system: Any, tokens: int, n: int, deadline: float
) -> tuple[list[LaunchExchange], list[torch.Tensor]]:
    """An exchange on each rank, and the blocks in symmetric memory."""
    size = len(system.devices)
    group = VirtualGroup(size, emulation=system)
    grid = TileGrid(tokens, n, size, SHAPE)
    tiles = grid.owned_tiles(0)
    layout = ExchangeLayout(size, tiles, tiles * grid.tile_elements * BF16_BYTES)
    arenas = group.run(lambda rank: SymmetricArena.create(rank, layout.total_bytes))
    blocks = [arena.allocate((layout.total_bytes,), torch.uint8, "block") for arena in arenas]
    exchanges = [
        LaunchExchange(layout, block, rank, deadline, device)
        for rank, (block, device) in enumerate(zip(blocks, system.accelerators, strict=True))
    ]
    return exchanges, [block.local for block in blocks]


def _reduce_scatter(system: Any, shapes: list[int], n: int, dtype: torch.dtype, grid_size: int) -> None:
    launches, _ = _exchanges(system, max(shapes), n, 1.0)
    size = len(launches)
    generator = torch.Generator().manual_seed(3)
    results = []
    for m in shapes:
        partials = [torch.randint(-8, 9, (m, n), generator=generator).to(dtype) for _ in range(size)]
        length = shard_length(m, size)
        outs = [torch.full((length, n), float("nan"), dtype=torch.bfloat16) for _ in range(size)]
        signature = call_signature(Operation.REDUCE_SCATTER, m, n, SHAPE.m, SHAPE.n)
        for exchange, partial, out in zip(launches, partials, outs, strict=True):
            reduce_scatter_cuda(exchange, partial, out, SHAPE, signature, 1, 1, grid_size)
        results.append((m, partials, outs))
    system.run()
    for exchange in launches:
        exchange.check()
    for m, partials, outs in results:
        total = torch.stack([partial.float() for partial in partials]).sum(0)
        length = shard_length(m, size)
        for rank, out in enumerate(outs):
            # Sums of few small integers are exact.
            rows = total[rank * length : (rank + 1) * length]
            assert torch.equal(out[: len(rows)].float(), rows), f"wrong sum on rank {rank} for m {m}"
            assert not out[len(rows) :].any(), f"rows past the end on rank {rank} for m {m}"


def _all_gather(system: Any, shapes: list[int], reduced: list[int], n: int, grid_size: int) -> None:
    """All-gathers of `shapes`, and behind each of `reduced` a reduce-scatter on the same exchange."""
    launches, _ = _exchanges(system, max(shapes), n, 1.0)
    size = len(launches)
    generator = torch.Generator().manual_seed(3)
    gathered, sums = [], []
    for m in shapes:
        whole = torch.randint(-8, 9, (m, n), generator=generator).bfloat16()
        length = shard_length(m, size)
        outs = [torch.full((m, n), float("nan"), dtype=torch.bfloat16) for _ in range(size)]
        signature = call_signature(Operation.ALL_GATHER, m, n, SHAPE.m, SHAPE.n)
        for rank, (exchange, out) in enumerate(zip(launches, outs, strict=True)):
            shard = torch.zeros(length, n, dtype=torch.bfloat16)
            rows = whole[rank * length : (rank + 1) * length]
            shard[: len(rows)] = rows
            all_gather_cuda(exchange, shard, out, SHAPE, signature, grid_size)
        gathered.append((whole, outs))
        if m in reduced:
            shards = [torch.full((length, n), float("nan"), dtype=torch.bfloat16) for _ in range(size)]
            signature = call_signature(Operation.REDUCE_SCATTER, m, n, SHAPE.m, SHAPE.n)
            for exchange, out, shard in zip(launches, outs, shards, strict=True):
                reduce_scatter_cuda(exchange, out, shard, SHAPE, signature, 1, 1, grid_size)
            sums.append((whole, shards))
    system.run()
    for exchange in launches:
        exchange.check()
    for whole, outs in gathered:
        assert all(torch.equal(out, whole) for out in outs)
    for whole, shards in sums:
        assert torch.equal(torch.cat(shards)[: len(whole)], whole * size)


def all_gather_trio(system: Any) -> None:
    """Three ranks, one CTA each, the last with fewer rows or none: rings come round, banks are used again."""
    _all_gather(system, [200, 2, 0, 48], [2], 32, 1)


all_gather_trio.ranks = 3  # type: ignore[attr-defined]

Start = Callable[[LaunchExchange, int, torch.Tensor], None]
"""Enqueues a call with this M and output."""


def _lost(system: Any, lost: int, sent: int, m: int, start: Start, operation: Operation) -> None:
    """The `lost` last ranks never come, or die after some tiles: the deadline ends the call."""
    n, size = 32, len(system.devices)
    exchanges, blocks = _exchanges(system, m, n, 0.001)
    exchanges = exchanges[: size - lost]
    length = m if operation is Operation.ALL_GATHER else shard_length(m, size)
    outs = [torch.zeros((length, n), dtype=torch.bfloat16) for _ in exchanges]
    signature = call_signature(operation, m, n, SHAPE.m, SHAPE.n)
    for exchange, block in zip(exchanges, blocks, strict=False):
        # The last rank has sent some tiles (of zeros) before.
        for tile in range(sent):
            at = exchange.layout.flag_offset(bank_of(1), size - 1, tile)
            block[at : at + 8].view(torch.int64)[0] = signal(1, signature)
    for exchange, out in zip(exchanges, outs, strict=True):
        start(exchange, signature, out)
    system.run()
    for rank, (exchange, out) in enumerate(zip(exchanges, outs, strict=True)):
        with pytest.raises(ExchangeError) as caught:
            exchange.check()
        assert caught.value.blamed == size - 1
        rows = m if operation is Operation.ALL_GATHER else max(m - rank * length, 0)
        assert out[:rows].isnan().all()


def _all_gather_lost(system: Any, lost: int, m: int, sent: int) -> None:
    shard = torch.zeros(shard_length(m, len(system.devices)), 32, dtype=torch.bfloat16)

    def start(exchange: LaunchExchange, signature: int, out: torch.Tensor) -> None:
        all_gather_cuda(exchange, shard, out, SHAPE, signature, 2)

    _lost(system, lost, sent, m, start, Operation.ALL_GATHER)


def all_gather_lost(system: Any) -> None:
    """Two ranks with two CTAs each wait for tiles of a third, of which some came."""
    _all_gather_lost(system, 1, 96, 1)


def all_gather_lost_token(system: Any) -> None:
    """Two ranks with two CTAs each wait for the tokens of two others without rows, and for a fifth's tile."""
    _all_gather_lost(system, 3, 3, 0)


all_gather_lost.ranks, all_gather_lost_token.ranks = 3, 5  # type: ignore[attr-defined]


def _reduce_scatter_lost(system: Any, lost: int, m: int, sent: int) -> None:
    partial = torch.ones(m, 32, dtype=torch.bfloat16)

    def start(exchange: LaunchExchange, signature: int, out: torch.Tensor) -> None:
        reduce_scatter_cuda(exchange, partial, out, SHAPE, signature, 1, 1, 2)

    _lost(system, lost, sent, m, start, Operation.REDUCE_SCATTER)


def reduce_scatter_lost(system: Any) -> None:
    """Two ranks with two CTAs each wait for tiles of a third, of which some came."""
    _reduce_scatter_lost(system, 1, 96, 1)


reduce_scatter_lost.ranks = 3  # type: ignore[attr-defined]


def reduce_scatter_lost_token(system: Any) -> None:
    """Two ranks wait for two others, one of them for their tokens."""
    _reduce_scatter_lost(system, 2, 1, 0)


reduce_scatter_lost_token.ranks = 4  # type: ignore[attr-defined]


def reduce_scatter_pair(system: Any) -> None:
    """Two ranks, one CTA each: the ring of publications comes round, a bank is used again."""
    _reduce_scatter(system, [150, 1, 150], 32, torch.bfloat16, 1)


reduce_scatter_pair.ranks = 2  # type: ignore[attr-defined]


def reduce_scatter_trio(system: Any) -> None:
    """Three ranks with two CTAs each, three calls of changing length."""
    _reduce_scatter(system, [60, 1, 60], 32, torch.bfloat16, 2)


reduce_scatter_trio.ranks = 3  # type: ignore[attr-defined]
