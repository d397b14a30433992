# SPDX-License-Identifier: Apache-2.0
"""The SM90 epilogue: a remote tile goes to the send buffer; an own one takes its peers' and is stored.

Contract: one math warpgroup has a tile's accumulators. A thread holds, for each 64 rows a of the tile, each
32 columns b and each h in 0, 1, eight neighbouring columns of one row (see the main loop's permutation):

    row    = 64·a + 16·warp + 8·h + lane // 4        column = 32·b + 8·(lane % 4) + 0..7

so one warp's (a, b, h) is exactly one 8 x 32 block of the slot layout (`protocol.slots`) and one 16-byte
access per lane moves it.

Sums run in rank order in FP32: ((p0 + p1) + p2) + ..., the own partial at its own rank's place, unrounded,
the others rounded once to BF16 by their senders. Sums start from -0.0, the only value that leaves every
addend's bits alone. The terms below the own rank are summed apart, a chunk at a time, since the own
accumulators may only join when their turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32
from dsv4_symm_mem.device.fences import fence_proxy_async_shared
from dsv4_symm_mem.device.roles import advance
from dsv4_symm_mem.device.vectors import (
    Words,
    add_bf16,
    load_shared_16,
    pack_bf16,
    store_16,
    store_shared_16,
)
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES

from dsv4_gemm_rs.kernels.sm90.config import MAX_MMA_COLUMNS, KernelConfig


@dataclass(frozen=True)
class Gathered:
    """The ring of peers' chunks in shared memory; own tiles take theirs from it one after the other.

    Attributes:
        full, empty: `KernelConfig.ring_chunks` mbarriers each.
        address: Shared-memory address of the first chunk.
    """

    full: cute.Pointer
    empty: cute.Pointer
    address: Int32


def accumulator_index(config: KernelConfig, atom: int, block: int, half: int, element: int) -> int:
    """Where (a, b, h, element) of the contract lies in the fragment ((2, 2, tile_n/8), row atoms, 1)."""
    assert config.tile_n <= MAX_MMA_COLUMNS
    return element % 2 + 2 * half + 4 * (4 * block + element // 2) + config.tile_n // 2 * atom


def _packed(config: KernelConfig, accumulators: cute.Tensor, atom: int, block: int, half: int) -> Words:
    return pack_bf16([accumulators[accumulator_index(config, atom, block, half, i)] for i in range(8)])


def _block_offset(config: KernelConfig, atom: int, block: int, half: int) -> int:
    """Bytes from warp 0's first block of the tile, or of a chunk, to block (a, b, h)."""
    return (block * (config.tile_m // 8) + atom * 8 + half) * BLOCK_BYTES


@cute.jit
def fill_buffer(
    config: Constexpr[KernelConfig], accumulators: cute.Tensor, buffer: Int32, thread: Int32, rows: Int32
) -> None:
    """Round to BF16 and store, in the layout of slots, into the shared memory at `buffer`.

    Blocks of eight rows at or past `rows` are left out; they are not sent. What is sent goes through the
    async proxy: each lane's fence comes before the barrier that its lane 0 arrives on.
    """
    warp, lane = thread // 32, thread % 32
    target = buffer + warp * 2 * BLOCK_BYTES + lane * 16
    for atom in cutlass.range_constexpr(config.row_atoms):
        for half in cutlass.range_constexpr(2):
            if atom * 64 + warp * 16 + half * 8 < rows:
                for block in cutlass.range_constexpr(config.tile_n // 32):
                    store_shared_16(
                        target + _block_offset(config, atom, block, half),
                        _packed(config, accumulators, atom, block, half),
                    )
    fence_proxy_async_shared()
    cute.arch.sync_warp()


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
    for atom in cutlass.range_constexpr(config.row_atoms):
        for half in cutlass.range_constexpr(2):
            row = first_row + atom * 64 + warp * 16 + half * 8 + lane // 4
            if row < out_rows:
                target = out + (Int64(row) * out_stride + Int64(column)) * 2
                keep = Uint32(0xFFFFFFFF)
                if row >= valid_rows:
                    keep = Uint32(0)
                for block in cutlass.range_constexpr(config.tile_n // 32):
                    if column + 32 * block < columns:
                        words = _packed(config, accumulators, atom, block, half)
                        store_16(target + 64 * block, [word & keep for word in words])


@cute.jit
def add_peers(
    config: Constexpr[KernelConfig],
    gathered: Constexpr[Gathered],
    accumulators: cute.Tensor,
    thread: Int32,
    rank: Int32,
    world_size: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    """Add the peers' partials of an own tile, as they are gathered: by column chunk, then by source."""
    thread_offset = (thread // 32) * 2 * BLOCK_BYTES + (thread % 32) * 16
    for chunk in cutlass.range_constexpr(config.chunks):
        first = cutlass.const_expr(chunk * (config.chunk_columns // 32))
        places = cutlass.const_expr(
            [
                (atom, block, half)
                for block in range(config.chunk_width(chunk) // 32)
                for atom in range(config.row_atoms)
                for half in range(2)
            ]
        )
        if rank > 0:
            sums = cute.make_rmem_tensor(len(places) * 8, Float32)
            sums.fill(-0.0)
            for _ in cutlass.range(rank, unroll=1):
                cute.arch.mbarrier_wait(gathered.full + stage, phase)
                for index in cutlass.range_constexpr(len(places)):
                    at = [index * 8 + element for element in range(8)]
                    _add_block(sums, at, _chunk_words(config, gathered, stage, thread_offset, *places[index]))
                release_chunk(gathered, stage)
                stage, phase = advance(stage, phase, config.ring_chunks)
            for index in cutlass.range_constexpr(len(places)):
                atom, block, half = places[index]
                for element in cutlass.range_constexpr(8):
                    own = accumulator_index(config, atom, first + block, half, element)
                    accumulators[own] = sums[index * 8 + element] + accumulators[own]
        for _ in cutlass.range(rank + 1, world_size, unroll=1):
            cute.arch.mbarrier_wait(gathered.full + stage, phase)
            for index in cutlass.range_constexpr(len(places)):
                atom, block, half = places[index]
                at = [accumulator_index(config, atom, first + block, half, element) for element in range(8)]
                _add_block(
                    accumulators, at, _chunk_words(config, gathered, stage, thread_offset, *places[index])
                )
            release_chunk(gathered, stage)
            stage, phase = advance(stage, phase, config.ring_chunks)
    return stage, phase


@cute.jit
def skip_peers(
    config: Constexpr[KernelConfig], world_size: Int32, stage: Int32, phase: Int32
) -> tuple[Int32, Int32]:
    """The ring's place after an own tile that the other warpgroup finishes."""
    stage += config.chunks * (world_size - 1)
    return stage % config.ring_chunks, phase ^ (stage // config.ring_chunks & 1)


@cute.jit
def release_chunk(gathered: Constexpr[Gathered], stage: Int32) -> None:
    """Give back a chunk that this warp has read with ordinary loads.

    One lane arrives for all, so all have to have read; what is written next comes through the async proxy.
    """
    fence_proxy_async_shared()
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(gathered.empty + stage)


def _add_block(values: cute.Tensor, at: Sequence[int], words: Words) -> None:
    for index, total in zip(at, add_bf16([values[i] for i in at], words), strict=True):
        values[index] = total


def _chunk_words(
    config: KernelConfig,
    gathered: Gathered,
    stage: Int32,
    thread_offset: Int32,
    atom: int,
    block: int,
    half: int,
) -> Words:
    offset = _block_offset(config, atom, block, half)
    return load_shared_16(gathered.address + stage * config.chunk_bytes(0) + thread_offset + offset)
