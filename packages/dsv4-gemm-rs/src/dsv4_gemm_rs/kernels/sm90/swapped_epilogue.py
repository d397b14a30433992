# SPDX-License-Identifier: Apache-2.0
"""The epilogue with operands swapped: accumulators are features by tokens, slots and output the reverse.

Contract: a math warp holds 32 features by `group_tokens` tokens. Of 8 tokens, two MMAs leave it four
8 x 8 matrices, rounded to BF16 one register each. Stored transposed into its part of the CTA's tile buffer
(`stmatrix.trans`) they are rows of 32 features, a whole 8 x 32 block of the slot layout (`protocol.slots`).
From there a tile leaves while the next is multiplied: an own one for the output, a copy of the copy engine
for each warp, a remote one for its owner (`device.send`).

A peer's blocks come the other way: read transposed (`ldmatrix.trans`), they lie as the accumulators do,
which are added to in FP32 and in rank order, see `sm90.epilogue`. So FP32 never has to be transposed.

A block's rows are 64 bytes, so that the eight rows of a matrix, 16 bytes of each, would meet in an eighth of
the banks. Of an own tile, 16-byte pieces are therefore exchanged within a row, piece g of token t at
g xor t // 2, which is the copy engine's 64-byte swizzle. Blocks that are sent or come from peers lie as slots
have them: of these a lane's matrices are written and read in an order that depends on the token, for which
eight selects put them in order.

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
from dsv4_symm_mem.device.vectors import Words, add_bf16, pack_bf16
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_ROWS

from dsv4_gemm_rs.kernels.sm90.config import WARPS_PER_GROUP
from dsv4_gemm_rs.kernels.sm90.epilogue import Gathered, release_chunk
from dsv4_gemm_rs.kernels.sm90.swapped_config import UNITS, SwappedConfig

Accumulators = Sequence[cute.Tensor]


@dataclass(frozen=True)
class Leaving:
    """How tiles leave.

    Attributes:
        atom, out: Copy atom and coordinate tensor of the output [rows, columns].
        memory: The tile buffer, in the layout of `leaving_layout`.
        address: Its shared-memory address.
    """

    atom: cute.CopyAtom
    out: cute.Tensor
    memory: cute.Tensor
    address: Int32


def leaving_layout(config: SwappedConfig) -> cute.ComposedLayout:
    """The math warps' parts of an own tile, [tokens, 32 features, warps], in the 64-byte swizzle."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, BFloat16)
    shape = (config.group_tokens, BLOCK_COLUMNS, UNITS)
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
        (config.group_tokens, BLOCK_COLUMNS),
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


def _exchanged(words: Words, lane: Int32) -> Words:
    """Word i xor q of four at place i, in lane 4·t + q: from a block's order to the lanes' and back."""
    odd, high = lane % 2 != 0, lane % 4 >= 2
    words = tuple(Uint32(cutlass.select_(odd, words[i ^ 1], words[i])) for i in range(4))
    return tuple(Uint32(cutlass.select_(high, words[i ^ 2], words[i])) for i in range(4))


def _placed(config: SwappedConfig, thread: Int32) -> tuple[Int32, Int32]:
    """A thread's block of 32 columns in the tile, and its warpgroup's first token."""
    warp = thread // 32
    if config.token_groups == 1:
        return warp, Int32(0)
    return warp % WARPS_PER_GROUP, warp // WARPS_PER_GROUP * config.group_tokens


def part_of(config: SwappedConfig, thread: Int32) -> Int32:
    """Which part of the buffer is its warp's: parts of a block of columns follow each other, as in a slot."""
    column_block, first = _placed(config, thread)
    return column_block * config.token_groups + first // config.group_tokens


@cute.jit
def fill_buffer(
    config: Constexpr[SwappedConfig],
    accumulators: Constexpr[Accumulators],
    leaving: Constexpr[Leaving],
    thread: Int32,
    rows: Int32,
) -> None:
    """Round to BF16 and store, in the layout of slots, into the warp's part of the buffer.

    Blocks of eight rows at or past `rows` are left out; they are not sent. What is sent goes through the
    async proxy: each lane's fence comes before the barrier that its lane 0 arrives on.
    """
    lane = thread % 32
    _, first = _placed(config, thread)
    address = leaving.address + part_of(config, thread) * config.part_bytes + _row_offset(lane)
    # An own tile may still be leaving.
    bulk_wait_read(0)
    cute.arch.sync_warp()
    for block in cutlass.range_constexpr(config.group_tokens // BLOCK_ROWS):
        if first + block * BLOCK_ROWS < rows:
            _store_transposed(address + block * BLOCK_BYTES, _exchanged(_packed(accumulators, block), lane))
    fence_proxy_async_shared()
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

    What lies outside of the output is left out by the copy engine. Returns before it has read the buffer.
    """
    lane = thread % 32
    column_block, first = _placed(config, thread)
    row = first_row + first
    rows = cute.domain_offset((row, 0), leaving.out)
    tiles = cute.local_tile(rows, (config.group_tokens, BLOCK_COLUMNS), (0, None))
    shared, target = cpasync.tma_partition(
        leaving.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(leaving.memory, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    part = cute.arch.make_warp_uniform(part_of(config, thread))
    column = cute.arch.make_warp_uniform(first_column // BLOCK_COLUMNS + column_block)
    address = leaving.address + part_of(config, thread) * config.part_bytes + _row_offset(lane)
    # The tile before may still be leaving.
    bulk_wait_read(0)
    cute.arch.sync_warp()
    for block in cutlass.range_constexpr(config.group_tokens // BLOCK_ROWS):
        token = row + block * BLOCK_ROWS + lane % 4 * 2
        keep = Uint32(cutlass.select_(token < valid_rows, Uint32(0xFFFF), Uint32(0)))
        keep |= Uint32(cutlass.select_(token + 1 < valid_rows, Uint32(0xFFFF0000), Uint32(0)))
        words = tuple(word & keep for word in _packed(accumulators, block))
        _store_transposed(address + block * BLOCK_BYTES, words)
    fence_proxy_async_shared()
    cute.arch.sync_warp()
    # The DSL elects a lane for tensor loads, not for stores.
    with cute.arch.elect_one():
        cute.copy(leaving.atom, shared[(None, part)], target[(None, column)])
    bulk_commit()


@cute.jit
def add_peers(
    config: Constexpr[SwappedConfig],
    gathered: Constexpr[Gathered],
    accumulators: Constexpr[Accumulators],
    thread: Int32,
    rank: Int32,
    world_size: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    """Add the peers' partials of an own tile, from the ring's chunks: by chunk of tokens, then by source."""
    blocks = cutlass.const_expr(config.chunk_tokens // BLOCK_ROWS)
    address = gathered.address + (thread // 32) * (blocks * BLOCK_BYTES) + _row_offset(thread % 32)
    for chunk in cutlass.range_constexpr(config.chunks):
        first = cutlass.const_expr(chunk * blocks)
        if rank > 0:
            sums = [cute.make_rmem_tensor(blocks * 4, Float32) for _ in accumulators]
            for total in sums:
                total.fill(-0.0)
            for _ in cutlass.range(rank, unroll=1):
                cute.arch.mbarrier_wait(gathered.full + stage, phase)
                _add(sums, 0, blocks, address + stage * config.chunk_bytes, thread)
                release_chunk(gathered, stage)
                stage, phase = advance(stage, phase, config.ring_chunks)
            for total, accumulator in zip(sums, accumulators, strict=True):
                for i in cutlass.range_constexpr(blocks * 4):
                    accumulator[first * 4 + i] = total[i] + accumulator[first * 4 + i]
        for _ in cutlass.range(rank + 1, world_size, unroll=1):
            cute.arch.mbarrier_wait(gathered.full + stage, phase)
            _add(accumulators, first, blocks, address + stage * config.chunk_bytes, thread)
            release_chunk(gathered, stage)
            stage, phase = advance(stage, phase, config.ring_chunks)
    return stage, phase


def _add(values: Accumulators, first: int, blocks: int, address: Int32, thread: Int32) -> None:
    """Add the warp's blocks, whose row of this lane is at `address`, to those of `values` from `first` on."""
    for block in range(blocks):
        words = _load_transposed(address + block * BLOCK_BYTES)
        for matrix, word in enumerate(_exchanged(words, thread)):
            value, at = values[matrix // 2], _pair(matrix % 2, first + block)
            totals = add_bf16([value[at], value[at + 1]], [word])
            value[at], value[at + 1] = totals
