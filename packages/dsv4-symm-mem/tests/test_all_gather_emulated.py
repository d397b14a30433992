# SPDX-License-Identifier: Apache-2.0
"""The compiled all-gather kernel in the PTX emulator: awkward shapes, beside reduce-scatters, a lost rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsv4_symm_mem import SymmetricArena, VirtualGroup
from dsv4_symm_mem.collectives.cuda import all_gather_cuda, reduce_scatter_cuda
from dsv4_symm_mem.errors import PeerAbortError, PeerTimeoutError
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.layout import BF16_BYTES, ExchangeLayout, shard_length
from dsv4_symm_mem.protocol.tiles import TileGrid, TileShape
from dsv4_symm_mem.protocol.words import Operation, call_signature

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

SHAPE = TileShape(16, 64)
N = 160
MAX_TOKENS = 70


class Ranks:
    """P emulated ranks with an exchange each."""

    def __init__(self, emulation: Any, size: int, deadline: float = 1.0) -> None:
        self.emulation, self.size = emulation, size
        grid = TileGrid(MAX_TOKENS, N, size, SHAPE)
        tiles = grid.owned_tiles(0)
        layout = ExchangeLayout(size, tiles, tiles * grid.tile_elements * BF16_BYTES)
        group = VirtualGroup(size, emulation=emulation)
        arenas = group.run(lambda rank: SymmetricArena.create(rank, layout.total_bytes))
        self.blocks = [arena.allocate((layout.total_bytes,), torch.uint8, "block") for arena in arenas]
        for block in self.blocks:
            block.local[layout.slots_offset :].fill_(0xFF)
        self.exchanges = [
            LaunchExchange(layout, block, rank, deadline, device)
            for rank, (block, device) in enumerate(zip(self.blocks, emulation.accelerators, strict=True))
        ]

    def gather(self, rank: int, shard: torch.Tensor, m: int, grid: int) -> torch.Tensor:
        """Queue one rank's part of a call."""
        out = torch.full((m, N), float("nan"), dtype=torch.bfloat16)
        signature = call_signature(Operation.ALL_GATHER, m, N, SHAPE.m, SHAPE.n)
        all_gather_cuda(self.exchanges[rank], shard, out, SHAPE, signature, grid)
        return out


def shards(size: int, m: int, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The whole, and each rank's shard of it, NaN where no row is."""
    whole = torch.randn(m, N, generator=torch.Generator().manual_seed(seed)).bfloat16()
    length = shard_length(m, size)
    padded = torch.full((size * length, N), float("nan"), dtype=torch.bfloat16)
    padded[:m] = whole
    return whole, list(padded.split(length)) if length else [padded] * size


@pytest.mark.parametrize("grid", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_gets_every_shard(size: int, grid: int, emulator: Callable[..., Any]) -> None:
    ranks = Ranks(emulator(size), size)
    cases = []
    for m in (MAX_TOKENS, 1, 0, 37, MAX_TOKENS):
        whole, parts = shards(size, m, m)
        cases.append((whole, [ranks.gather(rank, part, m, grid) for rank, part in enumerate(parts)]))
    ranks.emulation.run()
    for exchange in ranks.exchanges:
        exchange.check()
    for whole, outs in cases:
        assert all(torch.equal(out, whole) for out in outs)


def test_with_a_reduce_scatter_it_makes_an_all_reduce(emulator: Callable[..., Any]) -> None:
    size, m = 3, 37
    ranks = Ranks(emulator(size), size)
    generator = torch.Generator().manual_seed(1)
    partials = [torch.randint(-8, 9, (m, N), generator=generator).bfloat16() for _ in range(size)]
    outs = []
    for rank, partial in enumerate(partials):
        shard = torch.full((shard_length(m, size), N), float("nan"), dtype=torch.bfloat16)
        signature = call_signature(Operation.REDUCE_SCATTER, m, N, SHAPE.m, SHAPE.n)
        reduce_scatter_cuda(ranks.exchanges[rank], partial, shard, SHAPE, signature, 1, 1, 2)
        outs.append(ranks.gather(rank, shard, m, 2))
    ranks.emulation.run()
    total = torch.stack(partials).float().sum(0).bfloat16()
    assert all(torch.equal(out, total) for out in outs)


@pytest.mark.parametrize("m", [37, 1])
def test_a_missing_rank_is_blamed_and_outputs_are_nan(m: int, emulator: Callable[..., Any]) -> None:
    size, missing = 3, 0
    ranks = Ranks(emulator(size), size, deadline=0.001)
    _, parts = shards(size, m, 0)
    outs = {rank: ranks.gather(rank, parts[rank], m, 2) for rank in (1, 2)}
    ranks.emulation.run()
    for rank, out in outs.items():
        with pytest.raises((PeerTimeoutError, PeerAbortError)) as caught:
            ranks.exchanges[rank].check()
        assert caught.value.blamed == missing
        assert out.isnan().all()
