# SPDX-License-Identifier: Apache-2.0
"""Scenarios for mutation testing: the stand-alone reduce-scatter and all-gather in small, with exact answers.

See `emulated_scenarios`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import forked_workers  # noqa: F401
import pytest
import torch
from dsv4_symm_mem import SymmetricArena, VirtualGroup
from dsv4_symm_mem.collectives.cuda import all_gather_cuda, reduce_scatter_cuda
from dsv4_symm_mem.errors import ExchangeError
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.layout import BF16_BYTES, ExchangeLayout, shard_length
from dsv4_symm_mem.protocol.tiles import TileGrid, TileShape
from dsv4_symm_mem.protocol.words import Operation, bank_of, call_signature, signal

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
"""Enqueues a call with this signature and output."""


def _lost(
    system: Any,
    lost: int,
    sent: int,
    m: int,
    start: Start,
    operation: Operation,
    mismatched: int | None = None,
) -> None:
    """The `lost` last ranks never come, or die after some tiles: the deadline ends the call.

    All blame the last one, or the rank `mismatched`, one of them, which has been in the call with another
    shape: it has raised a flag that nobody awaits.
    """
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
        if mismatched is not None:
            at = exchange.layout.flag_offset(bank_of(1), mismatched, exchange.layout.max_tiles)
            block[at : at + 8].view(torch.int64)[0] = signal(1, signature ^ 1)
    for exchange, out in zip(exchanges, outs, strict=True):
        start(exchange, signature, out)
    system.run()
    for rank, (exchange, out) in enumerate(zip(exchanges, outs, strict=True)):
        with pytest.raises(ExchangeError) as caught:
            exchange.check()
        assert caught.value.blamed == (size - 1 if mismatched is None else mismatched)
        rows = m if operation is Operation.ALL_GATHER else max(m - rank * length, 0)
        assert out[:rows].isnan().all()


def _all_gather_lost(
    system: Any, lost: int, m: int, sent: int, grid_size: int, mismatched: int | None = None
) -> None:
    shard = torch.zeros(shard_length(m, len(system.devices)), 32, dtype=torch.bfloat16)

    def start(exchange: LaunchExchange, signature: int, out: torch.Tensor) -> None:
        all_gather_cuda(exchange, shard, out, SHAPE, signature, grid_size)

    _lost(system, lost, sent, m, start, Operation.ALL_GATHER, mismatched)


def all_gather_lost(system: Any) -> None:
    """Two ranks wait for tiles of a third, of which some came, each with three CTAs for another tile."""
    _all_gather_lost(system, 1, 192, 1, 3)


def all_gather_lost_token(system: Any) -> None:
    """Two ranks with two CTAs each wait for the tokens of two others without rows, and for a fifth's tile."""
    _all_gather_lost(system, 3, 3, 0, 2)


def all_gather_lost_mismatch(system: Any) -> None:
    """A rank waits for the tokens of two others, and in its other CTA for a fourth's tile.

    That one's call is found to have another shape, which outweighs the silence of the two.
    """
    _all_gather_lost(system, 3, 2, 0, 2, mismatched=1)


all_gather_lost.ranks, all_gather_lost_token.ranks = 3, 5  # type: ignore[attr-defined]
all_gather_lost_mismatch.ranks = 4  # type: ignore[attr-defined]


def _reduce_scatter_lost(system: Any, lost: int, m: int, sent: int) -> None:
    partial = torch.ones(m, 32, dtype=torch.bfloat16)

    def start(exchange: LaunchExchange, signature: int, out: torch.Tensor) -> None:
        reduce_scatter_cuda(exchange, partial, out, SHAPE, signature, 1, 1, 2)

    _lost(system, lost, sent, m, start, Operation.REDUCE_SCATTER)


def reduce_scatter_lost(system: Any) -> None:
    """Two ranks wait for tiles of a third, of which some came, each with two CTAs for another tile."""
    _reduce_scatter_lost(system, 1, 192, 1)


reduce_scatter_lost.ranks = 3  # type: ignore[attr-defined]


def reduce_scatter_lost_token(system: Any) -> None:
    """Two ranks wait for four others, one of them for their tokens."""
    _reduce_scatter_lost(system, 4, 1, 0)


reduce_scatter_lost_token.ranks = 6  # type: ignore[attr-defined]


def reduce_scatter_pair(system: Any) -> None:
    """Two ranks, one CTA each: the ring of publications comes round, a bank is used again."""
    _reduce_scatter(system, [150, 1, 150], 32, torch.bfloat16, 1)


reduce_scatter_pair.ranks = 2  # type: ignore[attr-defined]


def reduce_scatter_trio(system: Any) -> None:
    """Three ranks with two CTAs each, three calls of changing length."""
    _reduce_scatter(system, [60, 1, 60], 32, torch.bfloat16, 2)


reduce_scatter_trio.ranks = 3  # type: ignore[attr-defined]
