# SPDX-License-Identifier: Apache-2.0
"""Sending a CTA's finished tiles from its shared memory: the math warps go on, one thread moves them.

Contract: math warps write a finished remote tile, in the slot layout, into the CTA's one tile buffer; the
sending warp copies it into the peer's slot with the bulk copy engine and raises the flag. Only rows and
columns that exist travel. Pieces take turns so that the link never backs up into the loads of others
(`protocol.pacing`).

Why not straight from the math warps' registers: a wave of tiles ends everywhere at once, and the link takes
about as long for its tiles as the tensor cores for the next wave; stores that it cannot take yet hold up the
warps that issue them. Why not through device memory (`device.forward`): a tile would cross L2 twice more, and
on SM90 L2 is what limits the product; it is right where shared memory has no room for a tile.

Ordering (PTX ISA, memory consistency model): a math warp's stores -> its lanes'
fence.proxy.async.shared::cta -> bar.warp.sync -> its lane 0's mbarrier.arrive -> the sending thread's wait ->
bulk store -> cp.async.bulk.wait_group 0 (not .read) -> fence.proxy.async -> st.release.sys of the flag. The
buffer is handed back once it has been read.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

from dsv4_symm_mem.device.bulk import bulk_commit, bulk_store, bulk_wait, bulk_wait_read
from dsv4_symm_mem.device.exchange import base_of, raise_flag, slot_address
from dsv4_symm_mem.device.fences import fence_proxy_async
from dsv4_symm_mem.device.order import rows_of
from dsv4_symm_mem.device.pacing import hold_until, take_turn
from dsv4_symm_mem.device.roles import Call
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_ROWS


@dataclass(frozen=True)
class SentCall(Call):
    """A call whose remote tiles are sent from shared memory.

    `stored` and `published` are one mbarrier each: the buffer is full, the buffer has been read.

    Attributes:
        tile_m, tile_n: Tile shape, constants.
        pacing: Address of the words of `protocol.pacing`.
        buffer: Shared memory, one tile.
    """

    tile_m: int
    tile_n: int
    pacing: Int64
    buffer: cute.Pointer


@cute.jit
def send_tile(
    call: Constexpr[SentCall],
    owner: Int32,
    row_tile: Int32,
    column_tile: Int32,
    block_ps: Int32,
    phase: Int32,
) -> None:
    """Wait for the buffer, send it as tile (row_tile, column_tile) of `owner`, hand it back, raise the flag.

    Executed by the whole sending warp. `phase` is the parity of the buffer's use.
    """
    exchange, order = call.exchange, call.order
    tile_bytes = cutlass.const_expr(call.tile_m * call.tile_n * 2)
    piece_bytes = cutlass.const_expr(call.tile_m * BLOCK_COLUMNS * 2)
    tile = row_tile * order.columns + column_tile
    owner_base = base_of(exchange, owner)
    target = slot_address(exchange, owner_base, owner, exchange.rank) + Int64(tile) * tile_bytes
    rows = cutlass.min(rows_of(order, owner) - row_tile * call.tile_m, call.tile_m)
    size = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_BYTES
    width = cutlass.min(call.n - column_tile * call.tile_n, call.tile_n)
    pieces = (width + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    cute.arch.mbarrier_wait(call.stored, phase)
    if cute.arch.lane_idx() == 0:
        for piece in cutlass.range(pieces, unroll=1):
            hold_until(take_turn(call.pacing, block_ps, size))
            bulk_store(target + Int64(piece * piece_bytes), call.buffer + piece * piece_bytes, size)
        bulk_commit()
        bulk_wait_read(0)
        cute.arch.mbarrier_arrive(call.published)
        bulk_wait(0)
        fence_proxy_async()
        raise_flag(exchange, owner_base, tile)
    cute.arch.sync_warp()
