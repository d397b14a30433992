# SPDX-License-Identifier: Apache-2.0
"""The SM100 epilogue: accumulators leave tensor memory, remote tiles for staging, own ones for the output.

Contract: epilogue warp w holds rows 32·w .. 32·w + 31 of the tile, one to a lane, 64 columns at a time. Of
the slot layout's blocks (8 rows by 32 columns, `protocol.slots`) a thread therefore has 64-byte rows, and a
warp's 32 columns are four whole blocks, 2 KiB that follow each other.

Staging writes them from registers, two 32-byte stores a thread and 32 columns. Every store covers whole
32-byte sectors, and a warp's two instructions fill their 2 KiB completely, so the L2 sees no partial write,
which is all that another route could gain. Rejected: through shared memory (32 KiB and a barrier for the same
sectors), exchanging units between lanes so that an instruction writes one dense KiB (24 selections and
shuffles per 32 columns, for fewer lines per instruction), bulk stores from shared memory straight to the peer
(the link would hold up the epilogue, see `device.forward`).

Own tiles: sums run in rank order in FP32 as on SM90, ((p0 + p1) + p2) + ..., the own partial unrounded at its
own rank's place. Sums start from -0.0, the only value that leaves every addend's bits alone. Rows of the
output are written 16 bytes at a time, since that is all that their alignment promises.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32
from dsv4_symm_mem.device.fences import fence_proxy_async_shared
from dsv4_symm_mem.device.roles import advance
from dsv4_symm_mem.device.vectors import add_bf16, pack_bf16, store_16, store_32
from dsv4_symm_mem.protocol.slots import BLOCK_COLUMNS, BLOCK_ROWS

from dsv4_gemm_rs.kernels.sm100.config import CHUNK_COLUMNS, PIECE_BYTES, PIECES
from dsv4_gemm_rs.kernels.sm100.peers import ROW_BYTES, Pieces, row_units

HALVES = CHUNK_COLUMNS // BLOCK_COLUMNS
"""Pieces of 32 columns in a chunk."""


@cute.jit
def stage_chunk(values: cute.Tensor, buffer: Int64, chunk: Int32, row: Int32, rows: Int32) -> None:
    """Round a chunk's row to BF16 and store it, in the layout of slots, into the tile buffer at that address.

    Blocks of eight rows at or past `rows` are left out; they are not sent.
    """
    if row // BLOCK_ROWS * BLOCK_ROWS < rows:
        line = buffer + Int64(chunk * (HALVES * PIECE_BYTES) + row * ROW_BYTES)
        for half in cutlass.range_constexpr(HALVES):
            words = pack_bf16([values[half * BLOCK_COLUMNS + i] for i in range(BLOCK_COLUMNS)])
            for part in cutlass.range_constexpr(2):
                store_32(line + half * PIECE_BYTES + part * 32, words[8 * part : 8 * part + 8])


@cute.jit
def store_chunk(values: cute.Tensor, target: Int64, keep: Uint32) -> None:
    """Round a chunk's row to BF16 and store it at `target`, a multiple of 16; `keep` masks every word."""
    for unit in cutlass.range_constexpr(CHUNK_COLUMNS // 8):
        words = pack_bf16([values[8 * unit + i] for i in range(8)])
        store_16(target + unit * 16, [word & keep for word in words])


@cute.jit
def add_peers(
    pieces: Constexpr[Pieces],
    values: cute.Tensor,
    row: Int32,
    rank: Int32,
    world_size: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    """Add the peers' partials to a chunk's row, by 32 columns, then by source."""
    for half in cutlass.range_constexpr(HALVES):
        first = cutlass.const_expr(half * BLOCK_COLUMNS)
        if rank > 0:
            sums = cute.make_rmem_tensor(BLOCK_COLUMNS, Float32)
            sums.fill(-0.0)
            for _ in cutlass.range(rank, unroll=1):
                stage, phase = _add_piece(pieces, sums, 0, row, stage, phase)
            for i in cutlass.range_constexpr(BLOCK_COLUMNS):
                values[first + i] = sums[i] + values[first + i]
        for _ in cutlass.range(rank + 1, world_size, unroll=1):
            stage, phase = _add_piece(pieces, values, first, row, stage, phase)
    return stage, phase


@cute.jit
def _add_piece(
    pieces: Constexpr[Pieces],
    values: cute.Tensor,
    first: Constexpr[int],
    row: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    cute.arch.mbarrier_wait(pieces.full + stage, phase)
    for unit, words in enumerate(row_units(pieces, stage, row)):
        at = [first + 8 * unit + i for i in range(8)]
        for index, total in zip(at, add_bf16([values[i] for i in at], words), strict=True):
            values[index] = total
    # Every lane has read its row, by ordinary loads, before the copy engine may write the next piece over it.
    fence_proxy_async_shared()
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(pieces.empty + stage)
    return advance(stage, phase, PIECES)
