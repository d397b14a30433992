# SPDX-License-Identifier: Apache-2.0
"""The SM90 epilogue: a remote tile is staged for its owner; an own one takes its peers' and is stored.

Contract: a math thread holds, for each 32 columns b of the tile and each h in 0, 1, eight neighbouring
columns of one row (see the main loop's permutation):

    row    = 64·group + 16·warp + 8·h + lane // 4        column = 32·b + 8·(lane % 4) + 0..7

so one warp's (b, h) is exactly one 8 x 32 block of the slot layout (`protocol.slots`) and one 16-byte
access per lane moves it.

Sums run in rank order in FP32: ((p0 + p1) + p2) + ..., the own partial at its own rank's place, unrounded,
the others rounded once to BF16 by their senders. Sums start from -0.0, the only value that leaves every
addend's bits alone. The terms below the own rank are summed apart, a chunk at a time, since the own
accumulators may only join when their turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32
from dsv4_symm_mem.device.fences import fence_proxy_async_shared
from dsv4_symm_mem.device.roles import advance
from dsv4_symm_mem.device.vectors import Words, add_bf16, load_shared_16, pack_bf16, store_16
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES

from dsv4_gemm_rs.kernels.sm90.config import KernelConfig
from dsv4_gemm_rs.kernels.sm90.mainloop import Ring, release


def accumulator_index(config: KernelConfig, block: int, half: int, element: int) -> int:
    """Where (b, h, element) of the contract lies in the fragment ((2, 2, mma_n/8), 1, tile_n/mma_n)."""
    atom, block = divmod(block, config.mma_columns // 32)
    return element % 2 + 2 * half + 4 * (4 * block + element // 2) + config.mma_columns // 2 * atom


def _packed(config: KernelConfig, accumulators: cute.Tensor, block: int, half: int) -> Words:
    return pack_bf16([accumulators[accumulator_index(config, block, half, i)] for i in range(8)])


@cute.jit
def stage_tile(
    config: Constexpr[KernelConfig], accumulators: cute.Tensor, buffer: Int64, thread: Int32, rows: Int32
) -> None:
    """Round to BF16 and store, in the layout of slots, into the buffer at that address.

    Blocks of eight rows at or past `rows` are left out; they are not sent.
    """
    warp, lane = thread // 32, thread % 32
    target = buffer + Int64(warp * 2 * BLOCK_BYTES + lane * 16)
    for half in cutlass.range_constexpr(2):
        if warp * 16 + half * 8 < rows:
            for block in cutlass.range_constexpr(config.tile_n // 32):
                offset = block * (config.tile_m // 8) * BLOCK_BYTES + half * BLOCK_BYTES
                store_16(target + offset, _packed(config, accumulators, block, half))


@cute.jit
def store_rows(
    config: Constexpr[KernelConfig],
    accumulators: cute.Tensor,
    out: Int64,
    out_stride: Int64,
    thread: Int32,
    first_row: Int32,
    first_column: Int32,
    valid_rows: Int32,
    out_rows: Int32,
    columns: Int32,
) -> None:
    """Round to BF16 and store into out [out_rows, columns]; rows at or past `valid_rows` become zeros."""
    warp, lane = thread // 32, thread % 32
    column = first_column + (lane % 4) * 8
    for half in cutlass.range_constexpr(2):
        row = first_row + warp * 16 + half * 8 + lane // 4
        if row < out_rows:
            target = out + (Int64(row) * out_stride + Int64(column)) * 2
            keep = Uint32(0xFFFFFFFF)
            if row >= valid_rows:
                keep = Uint32(0)
            for block in cutlass.range_constexpr(config.tile_n // 32):
                if column + 32 * block < columns:
                    words = _packed(config, accumulators, block, half)
                    store_16(target + 64 * block, [word & keep for word in words])


@cute.jit
def add_peers(
    config: Constexpr[KernelConfig],
    ring: Constexpr[Ring],
    accumulators: cute.Tensor,
    thread: Int32,
    rank: Int32,
    world_size: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    """Add the peers' partials of an own tile, from the ring's chunks: by column chunk, then by source."""
    thread_offset = (thread // 32) * 2 * BLOCK_BYTES + (thread % 32) * 16
    for chunk in cutlass.range_constexpr(config.chunks):
        first = cutlass.const_expr(chunk * (config.chunk_columns // 32))
        blocks = cutlass.const_expr(config.chunk_width(chunk) // 32)
        if rank > 0:
            sums = cute.make_rmem_tensor(blocks * 16, Float32)
            sums.fill(-0.0)
            for _ in cutlass.range(rank, unroll=1):
                cute.arch.mbarrier_wait(ring.full + stage, phase)
                for block in cutlass.range_constexpr(blocks):
                    for half in cutlass.range_constexpr(2):
                        at = [block * 16 + half * 8 + element for element in range(8)]
                        _add_block(sums, at, _chunk_words(config, ring, stage, thread_offset, block, half))
                release_chunk(config, ring, stage)
                stage, phase = advance(stage, phase, config.stages)
            for block in cutlass.range_constexpr(blocks):
                for half in cutlass.range_constexpr(2):
                    for element in cutlass.range_constexpr(8):
                        own = accumulator_index(config, first + block, half, element)
                        accumulators[own] = sums[block * 16 + half * 8 + element] + accumulators[own]
        for _ in cutlass.range(rank + 1, world_size, unroll=1):
            cute.arch.mbarrier_wait(ring.full + stage, phase)
            for block in cutlass.range_constexpr(blocks):
                for half in cutlass.range_constexpr(2):
                    at = [accumulator_index(config, first + block, half, element) for element in range(8)]
                    _add_block(
                        accumulators, at, _chunk_words(config, ring, stage, thread_offset, block, half)
                    )
            release_chunk(config, ring, stage)
            stage, phase = advance(stage, phase, config.stages)
    return stage, phase


def release_chunk(config: KernelConfig, ring: Ring, stage: Int32) -> None:
    """Give back a stage whose chunk this warp has read with ordinary loads.

    One lane arrives for all, so all have to have read; what is written next comes through the async proxy.
    """
    fence_proxy_async_shared()
    cute.arch.sync_warp()
    release(config, ring, stage)


def _add_block(values: cute.Tensor, at: Sequence[int], words: Words) -> None:
    for index, total in zip(at, add_bf16([values[i] for i in at], words), strict=True):
        values[index] = total


def _chunk_words(
    config: KernelConfig, ring: Ring, stage: Int32, thread_offset: Int32, block: int, half: int
) -> Words:
    offset = block * (config.tile_m // 8) * BLOCK_BYTES + half * BLOCK_BYTES
    return load_shared_16(ring.w_address + stage * config.w_stage_bytes + thread_offset + offset)
