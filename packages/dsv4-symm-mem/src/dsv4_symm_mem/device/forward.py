# SPDX-License-Identifier: Apache-2.0
"""Forwarding staged tiles: the data warps store a tile next door, one thread moves it over the link.

Contract: data warps write a finished remote tile, in the slot layout, into one of this CTA's `STAGED_TILES`
buffers in its own device's memory and go on; the forwarding warp copies it into the peer's slot with the bulk
copy engine, through a small ring of shared memory, and raises the flag. Only rows and columns that exist
travel.

Why not straight to the peer: a wave of tiles ends everywhere at once, and the link takes about as long for
its tiles as the tensor cores for the next wave. Stores that the link cannot take yet hold up the warps that
issue them; here these have nothing else to do. The buffers stay in L2. Pieces take turns so that the link
never backs up into the loads of others (`protocol.pacing`).

Ordering (PTX ISA, memory consistency model): a data warp's stores -> its lane 0's mbarrier.arrive -> the
forwarding thread's wait -> fence.proxy.async -> bulk load, complete on an mbarrier -> bulk store ->
cp.async.bulk.wait_group 0 (not .read) -> fence.proxy.async -> st.release.sys of the flag. The buffer is
handed back after that, and the loads from it were complete long before.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

from dsv4_symm_mem.device.bulk import bulk_commit, bulk_load, bulk_store, bulk_wait, bulk_wait_read
from dsv4_symm_mem.device.exchange import base_of, raise_flag, slot_address
from dsv4_symm_mem.device.fences import fence_proxy_async
from dsv4_symm_mem.device.order import place, row_tiles, rows_of
from dsv4_symm_mem.device.pacing import block_duration_of, hold_until, take_turn
from dsv4_symm_mem.device.roles import Call, advance, send_tokens
from dsv4_symm_mem.protocol.pacing import PACING_BYTES
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_ROWS, BOUNCES, STAGED_TILES

AHEAD = 1
"""Pieces that are loaded ahead of the one being stored."""


@dataclass(frozen=True)
class StagedCall(Call):
    """A call whose remote tiles are staged.

    Attributes:
        tile_m, tile_n: Tile shape, constants.
        pacing: Address of the words of `protocol.pacing`.
        staging: Address of this CTA's `STAGED_TILES` tile buffers.
        bounce: Shared memory, `BOUNCES` pieces of `tile_m` rows by 32 columns.
        loaded: An mbarrier for each of them.
    """

    tile_m: int
    tile_n: int
    pacing: Int64
    staging: Int64
    bounce: cute.Pointer
    loaded: cute.Pointer


def staging_of(memory: Int64, block: Int32, staging_bytes: int) -> Int64:
    """Address of the buffers of CTA `block`, `staging_bytes` of them, in `LaunchExchange.staging`."""
    return memory + PACING_BYTES + Int64(block) * staging_bytes


@cute.jit
def run_forwarder(call: Constexpr[StagedCall]) -> None:
    """The forwarding warp: tokens for peers without tiles, then this CTA's remote tiles and their flags."""
    exchange, order = call.exchange, call.order
    lane = cute.arch.lane_idx()
    tile_bytes = cutlass.const_expr(call.tile_m * call.tile_n * 2)
    send_tokens(call)
    block_ps = block_duration_of(call.pacing)
    step, slot, phase = Int32(0), Int32(0), Int32(0)
    load, store, parity = Int32(0), Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row, column, step = place(order, position, step)
        row_tile = row * order.cluster + call.row_in_cluster
        if owner != exchange.rank and row_tile < row_tiles(order, owner):
            tile = row_tile * order.columns + column
            owner_base = base_of(exchange, owner)
            target = slot_address(exchange, owner_base, owner, exchange.rank) + Int64(tile) * tile_bytes
            rows = cutlass.min(rows_of(order, owner) - row_tile * call.tile_m, call.tile_m)
            size = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_BYTES
            columns = cutlass.min(call.n - column * call.tile_n, call.tile_n)
            cute.arch.mbarrier_wait(call.stored + slot, phase)
            load, store, parity = forward_tile(
                call,
                call.staging + Int64(slot) * tile_bytes,
                target,
                size,
                (columns + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS,
                block_ps,
                load,
                store,
                parity,
            )
            if lane == 0:
                bulk_wait(0)
                fence_proxy_async()
                raise_flag(exchange, owner_base, tile)
                cute.arch.mbarrier_arrive(call.published + slot)
            slot, phase = advance(slot, phase, STAGED_TILES)
        position += call.workers


@cute.jit
def forward_tile(
    call: Constexpr[StagedCall],
    source: Int64,
    target: Int64,
    size: Int32,
    pieces: Int32,
    block_ps: Int32,
    load: Int32,
    store: Int32,
    parity: Int32,
) -> tuple[Int32, Int32, Int32]:
    """Copy `pieces` pieces, `size` bytes of each, from `source` to `target`; does not wait for the last ones.

    Returns the ring's next place to load to, to store from, and the latter's parity.
    """
    piece_bytes = cutlass.const_expr(call.tile_m * BLOCK_COLUMNS * 2)
    first = cute.arch.lane_idx() == 0
    if first:
        fence_proxy_async()
    for piece in cutlass.range(pieces + AHEAD, unroll=1):
        if piece < pieces:
            if first:
                # All but the latest of the stores committed so far have read their piece.
                bulk_wait_read(BOUNCES - AHEAD - 1)
                barrier = call.loaded + load
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
                bulk_load(
                    Int32((call.bounce + load * piece_bytes).toint()),
                    source + Int64(piece * piece_bytes),
                    size,
                    Int32(barrier.toint()),
                )
            load += 1
            if load == BOUNCES:
                load = Int32(0)
        if piece >= AHEAD:
            if first:
                due = take_turn(call.pacing, block_ps, size)
                cute.arch.mbarrier_wait(call.loaded + store, parity)
                hold_until(due)
                bulk_store(
                    target + Int64((piece - AHEAD) * piece_bytes), call.bounce + store * piece_bytes, size
                )
                bulk_commit()
            store, parity = advance(store, parity, BOUNCES)
    return load, store, parity
