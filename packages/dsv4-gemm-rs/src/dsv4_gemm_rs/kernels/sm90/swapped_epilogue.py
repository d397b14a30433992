# SPDX-License-Identifier: Apache-2.0
"""The epilogue with operands swapped: accumulators are features by tokens, slots and output the reverse.

Contract: a math warp holds 32 features by `group_tokens` tokens. Of 8 tokens, two MMAs leave it four
8 x 8 matrices, rounded to BF16 one register each. Stored transposed into shared memory of the warp's own
(`stmatrix.trans`) they are rows of 32 features, a whole 8 x 32 block of the slot layout (`protocol.slots`).
An own tile leaves for the output from there, a copy of the copy engine for each warp, while the next tile is
multiplied. A remote one is read back, sixteen bytes a lane, and staged as without the swap.

A peer's blocks come the other way: read transposed (`ldmatrix.trans`), they lie as the accumulators do,
which are added to in FP32 and in rank order, see `sm90.epilogue`. So FP32 never has to be transposed.

A block's rows are 64 bytes, so that the eight rows of a matrix, 16 bytes of each, would meet in an eighth of
the banks. In the warp's memory, 16-byte pieces are therefore exchanged within a row, piece g of token t at
g xor t // 2, which is the copy engine's 64-byte swizzle; of a peer's block, which lies as it came, a lane's
matrices are read in an order that depends on the token, and put in order with selects.

Rejected: ordinary stores to the output. All SMs end a tile at about the same time, and L2 took their stores
at 4.3 TB/s on an H200: 4,700 cycles after each tile of 160 x 256, in which nothing was multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import dsl_user_op
from dsv4_symm_mem.device.bulk import bulk_commit, bulk_wait_read
from dsv4_symm_mem.device.fences import fence_proxy_async_shared
from dsv4_symm_mem.device.roles import advance
from dsv4_symm_mem.device.vectors import Words, add_bf16, load_shared_16, pack_bf16, store_16
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_ROWS

from dsv4_gemm_rs.kernels.sm90.config import WARPS_PER_GROUP
from dsv4_gemm_rs.kernels.sm90.swapped_config import UNITS, SwappedConfig
from dsv4_gemm_rs.kernels.sm90.swapped_mainloop import SwappedRing, release

Accumulators = Sequence[cute.Tensor]
TOGETHER = 2
"""Blocks of a remote tile that are transposed at a time."""


@dataclass(frozen=True)
class Leaving:
    """How own tiles leave.

    Attributes:
        atom, out: Copy atom and coordinate tensor of the output [rows, columns].
        memory: The math warps' shared memory, in the layout of `leaving_layout`.
        address: Where this warp's part of it begins.
    """

    atom: cute.CopyAtom
    out: cute.Tensor
    memory: cute.Tensor
    address: Int32


def leaving_layout(config: SwappedConfig) -> cute.ComposedLayout:
    """Parts of math warps' tiles, [tokens, 32 features, parts of all warps], in the 64-byte swizzle."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, BFloat16)
    shape = (config.leaving_tokens, BLOCK_COLUMNS, UNITS * config.leaving_parts)
    return cute.tile_to_shape(atom, shape, order=(0, 1, 2))


def tma_output(
    config: SwappedConfig,
    address: Int64,
    stride: Int64,
    rows: Int32,
    columns: Int32,
    layout: cute.ComposedLayout,
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Copy atom and coordinates of the output [rows, columns]; `stride` in elements, a multiple of 8."""
    out = cute.make_tensor(
        cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16),
        cute.make_layout((cutlass.max(rows, 1), columns), stride=(cute.assume(stride, 8), 1)),
    )
    made: tuple[cute.CopyAtom, cute.Tensor] = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(),
        out,
        cute.slice_(layout, (None, None, 0)),
        (config.leaving_tokens, BLOCK_COLUMNS),
    )
    return made


@dsl_user_op
def _store_transposed(address: Int32, words: Words, *, loc: Any = None, ip: Any = None) -> None:
    """Store four 8 x 8 matrices of 16-bit elements transposed (PTX ISA, "stmatrix"); a lane's row address."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _load_transposed(address: Int32, *, loc: Any = None, ip: Any = None) -> Words:
    """Load four 8 x 8 matrices of 16-bit elements transposed (PTX ISA, "ldmatrix"); a lane's row address."""
    words = cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )
    return tuple(words)


def _row_offset(lane: Int32) -> Int32:
    """Where, in a block, the row lies that lane 8·m + t names: of token t, matrix m in exchanged order."""
    token = lane % 8
    return token * 64 + ((lane // 8) ^ (token // 2)) * 16


def _piece_offset(lane: Int32) -> Int32:
    """Where lane 4·t + q finds its piece in a block: features 8·q to 8·q + 7 of token t."""
    token = lane // 4
    return token * 64 + ((lane % 4) ^ (token // 2)) % 4 * 16


def _pair(row: int, block: int) -> int:
    """Where the first of two tokens lies in an accumulator: matrix row `row` of 2, tokens from 8·block."""
    return 2 * row + 4 * block


def _packed(accumulators: Accumulators, block: int) -> Words:
    """The four matrices of 8 tokens, BF16: tokens 8·block + 2·(lane % 4) and the next of a feature."""
    return pack_bf16(
        [
            accumulator[_pair(row, block) + e]
            for accumulator in accumulators
            for row in range(2)
            for e in range(2)
        ]
    )


def _transposed(accumulators: Accumulators, memory: Int32, lane: Int32, block: int) -> tuple[Words, ...]:
    """Of each of `TOGETHER` blocks from `block` on: features 8·q to 8·q + 7 of token t, for lane 4·t + q.

    Two halves of `memory` take turns: what one holds has been read when the warp meets for the other.
    """
    half = memory + block // TOGETHER % 2 * (TOGETHER * BLOCK_BYTES)
    for i in range(TOGETHER):
        _store_transposed(half + i * BLOCK_BYTES + _row_offset(lane), _packed(accumulators, block + i))
    cute.arch.sync_warp()
    return tuple(load_shared_16(half + i * BLOCK_BYTES + _piece_offset(lane)) for i in range(TOGETHER))


def _placed(config: SwappedConfig, thread: Int32) -> tuple[Int32, Int32]:
    """A thread's block of 32 columns in the tile, and its warpgroup's first token."""
    warp = thread // 32
    if config.token_groups == 1:
        return warp, Int32(0)
    return warp % WARPS_PER_GROUP, warp // WARPS_PER_GROUP * config.group_tokens


@cute.jit
def stage_tile(
    config: Constexpr[SwappedConfig],
    accumulators: Constexpr[Accumulators],
    memory: Int32,
    buffer: Int64,
    thread: Int32,
    rows: Int32,
) -> None:
    """Round to BF16 and store, in the layout of slots, into the buffer at that address, by way of `memory`.

    Blocks of eight rows at or past `rows` are left out; they are not sent.
    """
    column_block, first = _placed(config, thread)
    place = column_block * (config.tile_m // BLOCK_ROWS) + first // BLOCK_ROWS
    # An own tile may still be leaving.
    bulk_wait_read(0)
    cute.arch.sync_warp()
    target = buffer + Int64(place * BLOCK_BYTES + (thread % 32) * 16)
    for block in cutlass.range_constexpr(0, config.group_tokens // BLOCK_ROWS, TOGETHER):
        if first + block * BLOCK_ROWS < rows:
            pieces = _transposed(accumulators, memory, thread % 32, block)
            for i in cutlass.range_constexpr(TOGETHER):
                if first + (block + i) * BLOCK_ROWS < rows:
                    store_16(target + (block + i) * BLOCK_BYTES, pieces[i])
    # The next tile's first blocks go where this one's last may still be read.
    cute.arch.sync_warp()


@cute.jit
def store_rows(
    config: Constexpr[SwappedConfig],
    leaving: Constexpr[Leaving],
    accumulators: Constexpr[Accumulators],
    thread: Int32,
    first_row: Int32,
    first_column: Int32,
    valid_rows: Int32,
) -> None:
    """Round to BF16 and have it stored into the output; its rows at or past `valid_rows` become zeros.

    What lies outside of the output is left out by the copy engine. Returns before it has read the memory.
    """
    lane = thread % 32
    column_block, first = _placed(config, thread)
    row = first_row + first
    rows = cute.domain_offset((row, 0), leaving.out)
    tiles = cute.local_tile(rows, (config.leaving_tokens, BLOCK_COLUMNS), (None, None))
    shared, target = cpasync.tma_partition(
        leaving.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(leaving.memory, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    first_part = cute.arch.make_warp_uniform(thread // 32) * config.leaving_parts
    column = cute.arch.make_warp_uniform(first_column // BLOCK_COLUMNS + column_block)
    blocks = cutlass.const_expr(config.leaving_tokens // BLOCK_ROWS)
    for part in cutlass.range_constexpr(config.parts):
        place = cutlass.const_expr(part % config.leaving_parts)
        bulk_wait_read(0 if part == 0 else config.leaving_parts - 1)
        cute.arch.sync_warp()
        address = leaving.address + place * blocks * BLOCK_BYTES + _row_offset(lane)
        for i in cutlass.range_constexpr(blocks):
            block = cutlass.const_expr(part * blocks + i)
            token = row + block * BLOCK_ROWS + lane % 4 * 2
            keep = Uint32(cutlass.select_(token < valid_rows, Uint32(0xFFFF), Uint32(0)))
            keep |= Uint32(cutlass.select_(token + 1 < valid_rows, Uint32(0xFFFF0000), Uint32(0)))
            words = tuple(word & keep for word in _packed(accumulators, block))
            _store_transposed(address + i * BLOCK_BYTES, words)
        fence_proxy_async_shared()
        cute.arch.sync_warp()
        cute.copy(leaving.atom, shared[(None, first_part + place)], target[(None, part, column)])
        bulk_commit()


@cute.jit
def add_peers(
    config: Constexpr[SwappedConfig],
    ring: Constexpr[SwappedRing],
    accumulators: Constexpr[Accumulators],
    thread: Int32,
    rank: Int32,
    world_size: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    """Add the peers' partials of an own tile, from the ring's chunks: by chunk of tokens, then by source."""
    blocks = cutlass.const_expr(config.chunk_tokens // BLOCK_ROWS)
    offset = (thread // 32) * (blocks * BLOCK_BYTES) + _row_offset(thread % 32)
    for chunk in cutlass.range_constexpr(config.chunks):
        first = cutlass.const_expr(chunk * blocks)
        if rank > 0:
            sums = [cute.make_rmem_tensor(blocks * 4, Float32) for _ in accumulators]
            for total in sums:
                total.fill(-0.0)
            for _ in cutlass.range(rank, unroll=1):
                cute.arch.mbarrier_wait(ring.full + stage, phase)
                _add(sums, 0, blocks, ring.x_address + stage * config.x_stage_bytes + offset, thread)
                release_chunk(ring, stage)
                stage, phase = advance(stage, phase, config.stages)
            for total, accumulator in zip(sums, accumulators, strict=True):
                for i in cutlass.range_constexpr(blocks * 4):
                    accumulator[first * 4 + i] = total[i] + accumulator[first * 4 + i]
        for _ in cutlass.range(rank + 1, world_size, unroll=1):
            cute.arch.mbarrier_wait(ring.full + stage, phase)
            _add(accumulators, first, blocks, ring.x_address + stage * config.x_stage_bytes + offset, thread)
            release_chunk(ring, stage)
            stage, phase = advance(stage, phase, config.stages)
    return stage, phase


@cute.jit
def release_chunk(ring: Constexpr[SwappedRing], stage: Int32) -> None:
    """Give back a stage whose chunk this warp has read with ordinary loads.

    One lane arrives for all, so all have to have read; what is written next comes through the async proxy.
    """
    fence_proxy_async_shared()
    cute.arch.sync_warp()
    release(ring, stage)


def _add(values: Accumulators, first: int, blocks: int, address: Int32, thread: Int32) -> None:
    """Add the warp's blocks, whose row of this lane is at `address`, to those of `values` from `first` on."""
    odd, high = thread % 2 != 0, thread % 4 >= 2
    for block in range(blocks):
        # Register i holds matrix i xor q.
        words = _load_transposed(address + block * BLOCK_BYTES)
        words = tuple(Uint32(cutlass.select_(odd, words[i ^ 1], words[i])) for i in range(4))
        words = tuple(Uint32(cutlass.select_(high, words[i ^ 2], words[i])) for i in range(4))
        for matrix, word in enumerate(words):
            value, at = values[matrix // 2], _pair(matrix % 2, first + block)
            totals = add_bf16([value[at], value[at + 1]], [word])
            value[at], value[at + 1] = totals
