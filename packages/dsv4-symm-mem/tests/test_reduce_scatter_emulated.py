# SPDX-License-Identifier: Apache-2.0
"""The compiled stand-alone reduce-scatter kernel in the PTX emulator: right for both types, repeatable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsv4_symm_mem import SymmetricArena, VirtualGroup
from dsv4_symm_mem.collectives.cuda import reduce_scatter_cuda
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.layout import BF16_BYTES, ExchangeLayout, shard_length
from dsv4_symm_mem.protocol.tiles import TileGrid, TileShape
from dsv4_symm_mem.protocol.words import Operation, call_signature

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

SHAPE = TileShape(64, 128)
N = 256
MAX_TOKENS = 140


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 3])
def test_the_sum_of_all_ranks_in_rank_order(
    size: int, dtype: torch.dtype, emulator: Callable[..., Any]
) -> None:
    emulation = emulator(size)
    group = VirtualGroup(size, emulation=emulation)
    grid = TileGrid(MAX_TOKENS, N, size, SHAPE)
    tiles = grid.owned_tiles(0)
    layout = ExchangeLayout(size, tiles, tiles * grid.tile_elements * BF16_BYTES)
    arenas = group.run(lambda rank: SymmetricArena.create(rank, layout.total_bytes))
    launches = [
        LaunchExchange(layout, arena.allocate((layout.total_bytes,), torch.uint8, "block"), rank, 1.0, device)
        for rank, (arena, device) in enumerate(zip(arenas, emulation.accelerators, strict=True))
    ]
    generator = torch.Generator().manual_seed(3)
    for m in (MAX_TOKENS, 1, MAX_TOKENS):
        partials = [torch.randn(m, N, generator=generator).to(dtype) for _ in range(size)]
        length = shard_length(m, size)
        outs = [torch.full((length, N), float("nan"), dtype=torch.bfloat16) for _ in range(size)]
        signature = call_signature(Operation.REDUCE_SCATTER, m, N, SHAPE.m, SHAPE.n)
        for exchange, partial, out in zip(launches, partials, outs, strict=True):
            reduce_scatter_cuda(exchange, partial, out, SHAPE, signature, 1, 1, 3)
        emulation.run()
        for rank, (exchange, out) in enumerate(zip(launches, outs, strict=True)):
            exchange.check()
            # Remote partials are rounded once for the wire; sums are FP32 in rank order.
            total = torch.zeros(length, N)
            for source, partial in enumerate(partials):
                own = torch.zeros(length, N)
                rows = partial[rank * length : (rank + 1) * length].float()
                own[: len(rows)] = rows if source == rank else rows.bfloat16().float()
                total = own if source == 0 else total + own
            assert torch.equal(out, total.bfloat16())
    group.run(lambda rank: arenas[rank.rank].close())
