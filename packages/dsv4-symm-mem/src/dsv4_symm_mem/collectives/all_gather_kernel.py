# SPDX-License-Identifier: Apache-2.0
"""The push all-gather on CUDA: every rank's shard into every rank's output.

Contract: out [M, N] BF16 = the ranks' shards [L, N], L = ceil(M / P), one below the other and cut at M. Bits
are copied, so all ranks end with the same. It is a call of the exchange like a reduce-scatter, with the same
slots and flags: a rank's slot for a source takes the source's shard, flag by flag, and a source without rows
raises its token. Everything that a rank sends, it sends before it waits, and waits for nothing else.

Data warps are independent, as in the reduce-scatter. One reading of a strip serves all peers and the own
output; the publishing warp raises a tile's flag at all peers at once.

Rejected: storing straight into the peers' outputs. These would have to be symmetric memory, and a peer may
still read its output of the call before, which only one more exchange could tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Boolean, Constexpr, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from dsv4_symm_mem.device.exchange import (
    EXAMPLE_ARGUMENTS,
    Exchange,
    ExchangeArguments,
    base_of,
    count_in,
    enter,
    leave,
    raise_flag,
    slot_address,
    wait_for_sources,
)
from dsv4_symm_mem.device.order import TileOrder, row_tiles, rows_of
from dsv4_symm_mem.device.roles import NAN_PAIR, PUBLICATIONS, Call, advance, fill_rows, note_abort
from dsv4_symm_mem.device.strips import ROW_MAJOR_STEP, load_strip, store_strip
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES

DATA_WARPS = 15
THREADS = 32 * (DATA_WARPS + 1)
STRIP_BLOCKS = 4
"""Blocks of 32 columns that a warp moves at a time."""


@dataclass(frozen=True)
class GatherCall(Call):
    """A call of this kernel; its output is [M, n].

    Attributes:
        shard, shard_stride: Address and row stride in elements of this rank's shard.
        tile_m, tile_n: Tile shape.
        aborted: Shared-memory word, 1 once a warp has given up.
    """

    shard: Int64
    shard_stride: Int64
    tile_m: Int32
    tile_n: Int32
    aborted: cute.Pointer


def example_arguments() -> tuple[Any, ...]:
    """Arguments to compile with, in the order of `AllGather.__call__`."""
    operands = (*[Int64(0)] * 4, *[Int32(1)] * 4)
    return (*operands, *EXAMPLE_ARGUMENTS, Int32(1), make_fake_stream())


class AllGather:
    """The kernel; compile an instance once, launch it for any shape, tile and rank."""

    @cute.jit
    def __call__(
        self,
        shard: Int64,
        shard_stride: Int64,
        out: Int64,
        out_stride: Int64,
        m: Int32,
        n: Int32,
        tile_m: Int32,
        tile_n: Int32,
        own_base: Int64,
        bases: Int64,
        report: Int64,
        rank: Int32,
        world_size: Int32,
        max_tiles: Int32,
        flag_row_bytes: Int64,
        slots_offset: Int64,
        slot_bytes: Int64,
        signature: Int32,
        timeout: Int64,
        grid: Int32,
        stream: Any,
    ) -> None:
        """Launch on `stream`.

        Args:
            shard: Address of this rank's shard [ceil(m / P), n] BF16, rows 16-byte aligned.
            shard_stride: Its row stride in elements.
            out: Address of the output [m, n] BF16, likewise.
            out_stride: Its row stride in elements.
            m: Rows of the output, may be 0.
            n: Columns, a multiple of 8.
            tile_m: Rows of the call's tiles, a multiple of 8.
            tile_n: Columns of the call's tiles, a multiple of 32.
            own_base: Address of this rank's block.
            bases: See `ExchangeArguments`, as all up to `timeout`.
            report: See `ExchangeArguments`.
            rank: See `ExchangeArguments`.
            world_size: See `ExchangeArguments`.
            max_tiles: See `ExchangeArguments`.
            flag_row_bytes: See `ExchangeArguments`.
            slots_offset: See `ExchangeArguments`.
            slot_bytes: See `ExchangeArguments`.
            signature: See `ExchangeArguments`.
            timeout: See `ExchangeArguments`.
            grid: CTAs, all resident at once.
            stream: CUDA stream.
        """

        @cute.struct
        class Storage:
            stored: cute.struct.MemRange[Int64, PUBLICATIONS]
            published: cute.struct.MemRange[Int64, PUBLICATIONS]
            halted: Int32
            aborted: Int32

        self.storage = Storage
        self.kernel(
            shard,
            shard_stride,
            out,
            out_stride,
            m,
            n,
            tile_m,
            tile_n,
            ExchangeArguments(
                own_base,
                bases,
                report,
                rank,
                world_size,
                max_tiles,
                flag_row_bytes,
                slots_offset,
                slot_bytes,
                signature,
                timeout,
            ),
        ).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        shard: Int64,
        shard_stride: Int64,
        out: Int64,
        out_stride: Int64,
        m: Int32,
        n: Int32,
        tile_m: Int32,
        tile_n: Int32,
        arguments: ExchangeArguments,
    ) -> None:
        """One CTA; see the module for its warps."""
        rank, world_size = arguments.rank, arguments.world_size
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        exchange = Exchange(arguments)
        call = GatherCall(
            exchange=exchange,
            order=TileOrder(m, n, world_size, rank, Int32(1), Int32(0), tile_m, tile_n, 1),
            out=out,
            out_stride=out_stride,
            n=n,
            worker=block,
            workers=blocks,
            row_in_cluster=Int32(0),
            stored=storage.stored.data_ptr(),
            published=storage.published.data_ptr(),
            shard=shard,
            shard_stride=shard_stride,
            tile_m=tile_m,
            tile_n=tile_n,
            aborted=storage.aborted.ptr,
        )
        if thread == 0:
            for i in cutlass.range_constexpr(PUBLICATIONS):
                cute.arch.mbarrier_init(call.stored + i, DATA_WARPS)
                cute.arch.mbarrier_init(call.published + i, 1)
            enter(exchange, storage.halted.ptr, storage.aborted.ptr)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        halted = cute.arch.load(storage.halted.ptr, Int32) != 0
        if warp == DATA_WARPS:
            if thread == DATA_WARPS * 32:
                count_in(exchange, blocks)
            if not halted:
                run_gather_publisher(call)
        elif halted:
            fill_rows(call, Int32(0), m, NAN_PAIR, block * DATA_WARPS + warp, blocks * DATA_WARPS)
        else:
            run_data(call, warp)
        cute.arch.sync_threads()
        if warp == 0 and world_size > 1:
            aborted = cute.arch.load(storage.aborted.ptr, Int32) != 0
            if leave(exchange, blocks, aborted):
                fill_rows(call, Int32(0), m, NAN_PAIR, Int32(0), Int32(1))


@cute.jit
def run_gather_publisher(call: Constexpr[GatherCall]) -> None:
    """The publishing warp: the flags of stored tiles, or the token of a rank without rows, at all peers."""
    exchange, order = call.exchange, call.order
    own_tiles = row_tiles(order, exchange.rank) * order.columns
    slot, phase = Int32(0), Int32(0)
    tile = Int32(call.worker)
    while tile < own_tiles:
        cute.arch.mbarrier_wait(call.stored + slot, phase)
        raise_everywhere(exchange, tile)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(call.published + slot)
        slot, phase = advance(slot, phase, PUBLICATIONS)
        tile += call.workers
    if call.worker == 0:
        if own_tiles == 0:
            raise_everywhere(exchange, exchange.token)
        aborted, _ = wait_for_sources(
            exchange, order.last_owner + 1, exchange.world_size, exchange.token, Int64(0)
        )
        note_abort(call.aborted, aborted)


@cute.jit
def raise_everywhere(exchange: Constexpr[Exchange], tile: Int32) -> None:
    """Raise this rank's flag `tile` at every peer, as one whole warp."""
    peer = cute.arch.lane_idx()
    while peer < exchange.world_size:
        if peer != exchange.rank:
            raise_flag(exchange, base_of(exchange, peer), tile)
        peer += 32


@cute.jit
def run_data(call: Constexpr[GatherCall], warp: Int32) -> None:
    """A data warp: its share of every own tile, sent, then of every peer's tile, received."""
    exchange, order = call.exchange, call.order
    strips = (call.tile_m // 8) * ((call.tile_n // 32 + STRIP_BLOCKS - 1) // STRIP_BLOCKS)
    own_tiles = row_tiles(order, exchange.rank) * order.columns
    slot, phase = Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < own_tiles:
        cute.arch.mbarrier_wait(call.published + slot, phase ^ 1)
        strip = Int32(warp)
        while strip < strips:
            send_strip(call, position, strip)
            strip += DATA_WARPS
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(call.stored + slot)
        slot, phase = advance(slot, phase, PUBLICATIONS)
        position += call.workers
    # Peers send level with each other, so their tiles are taken in turn.
    position -= own_tiles
    peers = exchange.world_size - 1
    positions = row_tiles(order, Int32(0)) * order.columns * peers
    aborted = Boolean(False)
    deadline = Int64(0)
    while position < positions and not aborted:
        tile = position // peers
        source = (exchange.rank + 1 + position % peers) % exchange.world_size
        if tile < row_tiles(order, source) * order.columns:
            aborted, deadline = wait_for_sources(exchange, source, source + 1, tile, deadline)
            note_abort(call.aborted, aborted)
            strip = Int32(warp)
            while strip < strips and not aborted:
                receive_strip(call, source, tile, strip)
                strip += DATA_WARPS
        position += call.workers


@cute.jit
def _strip_place(call: Constexpr[GatherCall], tile: Int32, strip: Int32) -> tuple[Int32, Int32, Int32, Int64]:
    """A strip of a tile: first row within the shard, the lane's column, columns left, place in the slot."""
    block_rows = call.tile_m // 8
    block_row, strip_column = strip % block_rows, strip // block_rows
    row_tile, column_tile = tile // call.order.columns, tile % call.order.columns
    lane = cute.arch.lane_idx()
    column = column_tile * call.tile_n + strip_column * (STRIP_BLOCKS * 32) + (lane % 4) * 8
    columns = cutlass.min(call.n, (column_tile + 1) * call.tile_n) - column
    first_block = strip_column * STRIP_BLOCKS * block_rows + block_row
    tile_bytes = Int64(call.tile_m * call.tile_n) * 2
    offset = Int64(tile) * tile_bytes + Int64(first_block * BLOCK_BYTES + lane * 16)
    return row_tile * call.tile_m + block_row * 8, column, columns, offset


@cute.jit
def send_strip(call: Constexpr[GatherCall], tile: Int32, strip: Int32) -> None:
    """Store a strip of the shard into this rank's slot at every peer, and into the own output."""
    exchange, order = call.exchange, call.order
    first_row, column, columns, offset = _strip_place(call, tile, strip)
    if first_row < order.own_rows:
        row = first_row + cute.arch.lane_idx() // 4
        read = cutlass.min(row, order.own_rows - 1)
        source = call.shard + (Int64(read) * call.shard_stride + Int64(column)) * 2
        words = load_strip(STRIP_BLOCKS, source, Int32(ROW_MAJOR_STEP), columns)
        for distance in cutlass.range(1, exchange.world_size, unroll=1):
            peer = (exchange.rank + distance) % exchange.world_size
            target = slot_address(exchange, base_of(exchange, peer), peer, exchange.rank) + offset
            store_strip(target, call.tile_m // 8 * BLOCK_BYTES, columns, words)
        if row < order.own_rows:
            store_strip(_output(call, exchange.rank, row, column), Int32(ROW_MAJOR_STEP), columns, words)


@cute.jit
def receive_strip(call: Constexpr[GatherCall], source: Int32, tile: Int32, strip: Int32) -> None:
    """Copy a strip of `source`'s shard from its slot here into the output."""
    exchange, order = call.exchange, call.order
    first_row, column, columns, offset = _strip_place(call, tile, strip)
    rows = rows_of(order, source)
    if first_row < rows:
        slot = slot_address(exchange, exchange.own_base, exchange.rank, source) + offset
        words = load_strip(STRIP_BLOCKS, slot, call.tile_m // 8 * BLOCK_BYTES, columns)
        row = first_row + cute.arch.lane_idx() // 4
        if row < rows:
            store_strip(_output(call, source, row, column), Int32(ROW_MAJOR_STEP), columns, words)


def _output(call: GatherCall, owner: Int32, row: Int32, column: Int32) -> Int64:
    """Address of the lane's first element of `owner`'s row `row` in the output."""
    return call.out + (Int64(owner * call.order.shard + row) * call.out_stride + Int64(column)) * 2
