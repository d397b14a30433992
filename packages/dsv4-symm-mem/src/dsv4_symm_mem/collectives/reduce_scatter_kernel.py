# SPDX-License-Identifier: Apache-2.0
"""The stand-alone push reduce-scatter on CUDA: the exchange of the fused kernels without their GEMM.

Contract: out [L, N] BF16 = the rows of this rank of the sum, in rank order and FP32, of all ranks' partials
[M, N]; rows past M as zeros. Tiles, their order, slots, flags and signature are those of the fused kernels,
so ranks that run this and ranks that run a fused kernel with the same tile shape meet in one call. A partial
in FP32 is rounded once to BF16 where it leaves the rank and not at all where it stays, like a fused
kernel's; a BF16 partial is taken as it is.

Some data warps push remote tiles, the others reduce own ones, each kind at its own pace: the link never waits
for a peer's flag or for the sums, which only memory limits. All are independent: each moves strips of 8 rows
by 128 columns (64 of an FP32 partial), 256 contiguous bytes of each row; before an own tile each
reducing warp waits for the peers' flags itself, so no barrier joins them. A publishing warp raises flags
(`device.roles`).

Rejected: every data warp for both, in the order of tiles. The link stood idle while own tiles were reduced.
Rejected: the copy engine through shared memory. The partial's rows and a slot's blocks differ in
layout, so the data would pass through registers anyway, and enough 16-byte loads are in flight without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream

from dsv4_symm_mem.device.exchange import (
    EXAMPLE_ARGUMENTS,
    Exchange,
    ExchangeArguments,
    base_of,
    count_in,
    enter,
    leave,
    slot_address,
    wait_for_peers,
)
from dsv4_symm_mem.device.order import TileOrder, place, rows_of
from dsv4_symm_mem.device.roles import (
    PUBLICATIONS,
    Call,
    advance,
    note_abort,
    poison_output,
    run_publisher,
    zero_uncovered_rows,
)
from dsv4_symm_mem.device.strips import ROW_MAJOR_STEP, load_strip, store_strip
from dsv4_symm_mem.device.vectors import add_bf16, load_16, pack_bf16, store_16
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES

PUSHING_WARPS = 7
REDUCING_WARPS = 8
DATA_WARPS = PUSHING_WARPS + REDUCING_WARPS
THREADS = 32 * (DATA_WARPS + 1)
"""Sixteen warps, so that a thread may have 128 registers; with seventeen it is 96, and the sums spill."""


@dataclass(frozen=True)
class UnfusedCall(Call):
    """A call of the stand-alone kernel.

    Attributes:
        from_float: Whether the partial is FP32.
        strip_blocks: Blocks that a warp moves at a time.
        partial, partial_stride: The partial's address and row stride in elements.
        tile_m, tile_n: Tile shape.
        aborted: Shared-memory word, 1 once a reducing warp has given up.
    """

    from_float: bool
    strip_blocks: int
    partial: Int64
    partial_stride: Int64
    tile_m: Int32
    tile_n: Int32
    aborted: cute.Pointer


def example_arguments() -> tuple[Any, ...]:
    """Arguments to compile with, in the order of `ReduceScatter.__call__`."""
    operands = (*[Int64(0)] * 4, *[Int32(1)] * 4)
    return (*operands, *EXAMPLE_ARGUMENTS, Int32(1), Int32(1), Int32(1), make_fake_stream())


class ReduceScatter:
    """The kernel for one type of partial; compile an instance once, launch it for any shape, tile and rank.

    Args:
        from_float: Whether partials are FP32 rather than BF16.
    """

    def __init__(self, from_float: bool) -> None:
        self.from_float = from_float
        # An FP32 strip of the same width would need twice the registers.
        self.strip_blocks = 2 if from_float else 4

    @cute.jit
    def __call__(
        self,
        partial: Int64,
        partial_stride: Int64,
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
        group_rows: Int32,
        lag: Int32,
        grid: Int32,
        stream: Any,
    ) -> None:
        """Launch on `stream`.

        Args:
            partial: Address of the partial [m, n], rows 16-byte aligned.
            partial_stride: Its row stride in elements.
            out: Address of the output [ceil(m / P), n] BF16, likewise.
            out_stride: Its row stride in elements.
            m: Rows of the partial, may be 0.
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
            group_rows: See `TileOrder`.
            lag: See `TileOrder`.
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
            partial,
            partial_stride,
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
            group_rows,
            lag,
        ).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        partial: Int64,
        partial_stride: Int64,
        out: Int64,
        out_stride: Int64,
        m: Int32,
        n: Int32,
        tile_m: Int32,
        tile_n: Int32,
        arguments: ExchangeArguments,
        group_rows: Int32,
        lag: Int32,
    ) -> None:
        """One CTA; see the module for its warps."""
        rank, world_size = arguments.rank, arguments.world_size
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        exchange = Exchange(arguments)
        order = TileOrder(m, n, world_size, rank, group_rows, lag, tile_m, tile_n, 1)
        call = UnfusedCall(
            exchange=exchange,
            order=order,
            out=out,
            out_stride=out_stride,
            n=n,
            worker=block,
            workers=blocks,
            row_in_cluster=Int32(0),
            stored=storage.stored.data_ptr(),
            published=storage.published.data_ptr(),
            from_float=self.from_float,
            strip_blocks=self.strip_blocks,
            partial=partial,
            partial_stride=partial_stride,
            tile_m=tile_m,
            tile_n=tile_n,
            aborted=storage.aborted.ptr,
        )
        if thread == 0:
            for i in cutlass.range_constexpr(PUBLICATIONS):
                cute.arch.mbarrier_init(call.stored + i, PUSHING_WARPS)
                cute.arch.mbarrier_init(call.published + i, 1)
            enter(exchange, storage.halted.ptr, storage.aborted.ptr)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        halted = cute.arch.load(storage.halted.ptr, Int32) != 0
        if warp == DATA_WARPS:
            if thread == DATA_WARPS * 32:
                count_in(exchange, blocks)
            zero_uncovered_rows(call, block, blocks)
            if not halted:
                run_publisher(call)
                if block == 0 and order.own == 0 and world_size > 1:
                    wait_for_peers(exchange, exchange.token, Int64(0))
        elif halted:
            poison_output(call, block * DATA_WARPS + warp, blocks * DATA_WARPS)
        elif warp < PUSHING_WARPS:
            run_pusher(call, warp)
        else:
            run_reducer(call, warp - PUSHING_WARPS)
        cute.arch.sync_threads()
        if warp == 0 and world_size > 1:
            aborted = cute.arch.load(storage.aborted.ptr, Int32) != 0
            if leave(exchange, blocks, aborted):
                poison_output(call, Int32(0), Int32(1))


@cute.jit
def strips_of(call: Constexpr[UnfusedCall]) -> Int32:
    """Strips of a tile; strip i is block row i % (tile_m / 8) of strip column i // (tile_m / 8)."""
    columns = (call.tile_n // 32 + call.strip_blocks - 1) // call.strip_blocks
    return call.tile_m // 8 * columns


@cute.jit
def run_pusher(call: Constexpr[UnfusedCall], warp: Int32) -> None:
    """A pushing warp: its share of every remote tile's strips."""
    exchange, order = call.exchange, call.order
    block_rows = call.tile_m // 8
    strips = strips_of(call)
    step, slot, phase = Int32(0), Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row_tile, column, step = place(order, position, step)
        if owner != exchange.rank:
            tile = row_tile * order.columns + column
            first_row = row_tile * call.tile_m
            rows = rows_of(order, owner) - first_row
            cute.arch.mbarrier_wait(call.published + slot, phase ^ 1)
            target = slot_address(exchange, base_of(exchange, owner), owner, exchange.rank)
            target += Int64(tile) * tile_bytes_of(call)
            strip = Int32(warp)
            while strip < strips:
                block_row = strip % block_rows
                if block_row * 8 < rows:
                    push_strip(
                        call, owner * order.shard + first_row, block_row, column, strip // block_rows, target
                    )
                strip += PUSHING_WARPS
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(call.stored + slot)
            slot, phase = advance(slot, phase, PUBLICATIONS)
        position += call.workers


@cute.jit
def run_reducer(call: Constexpr[UnfusedCall], warp: Int32) -> None:
    """A reducing warp: its share of every own tile's strips."""
    exchange, order = call.exchange, call.order
    block_rows = call.tile_m // 8
    strips = strips_of(call)
    step = Int32(0)
    aborted = Boolean(False)
    deadline = Int64(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row_tile, column, step = place(order, position, step)
        if owner == exchange.rank:
            tile = row_tile * order.columns + column
            first_row = row_tile * call.tile_m
            if exchange.world_size > 1 and not aborted:
                aborted, deadline = wait_for_peers(exchange, tile, deadline)
                note_abort(call.aborted, aborted)
            strip = Int32(warp)
            while strip < strips and not aborted:
                block_row = strip % block_rows
                if first_row + block_row * 8 < order.covered_rows:
                    in_slot = Int64(tile) * tile_bytes_of(call)
                    reduce_strip(call, first_row, block_row, column, strip // block_rows, in_slot)
                strip += REDUCING_WARPS
        position += call.workers


def tile_bytes_of(call: UnfusedCall) -> Int64:
    """Bytes of a tile in a slot."""
    return Int64(call.tile_m * call.tile_n) * 2


def _load_float(call: UnfusedCall, row: Int32, column: Int32) -> list[Float32]:
    """Eight neighbouring elements of an FP32 partial."""
    address = call.partial + (Int64(row) * call.partial_stride + Int64(column)) * 4
    return [word.bitcast(Float32) for word in (*load_16(address), *load_16(address + 16))]


@cute.jit
def push_strip(
    call: Constexpr[UnfusedCall],
    first_row: Int32,
    block_row: Int32,
    column_tile: Int32,
    strip_column: Int32,
    target: Int64,
) -> None:
    """Store a strip, blocks that are neighbours along a row, into the slot tile at `target`."""
    lane = cute.arch.lane_idx()
    row = cutlass.min(first_row + block_row * 8 + lane // 4, call.order.m - 1)
    column = column_tile * call.tile_n + strip_column * (call.strip_blocks * 32) + (lane % 4) * 8
    columns = cutlass.min(call.n, (column_tile + 1) * call.tile_n) - column
    first_block = strip_column * call.strip_blocks * (call.tile_m // 8) + block_row
    target += Int64(first_block * BLOCK_BYTES + lane * 16)
    step = (call.tile_m // 8) * BLOCK_BYTES
    if cutlass.const_expr(call.from_float):
        for i in cutlass.range_constexpr(call.strip_blocks):
            if 32 * i < columns:
                store_16(target + Int64(step * i), pack_bf16(_load_float(call, row, column + 32 * i)))
    else:
        element = Int64(row) * call.partial_stride + Int64(column)
        source = call.partial + element * 2
        words = load_strip(call.strip_blocks, source, Int32(ROW_MAJOR_STEP), columns)
        store_strip(target, step, columns, words)


@cute.jit
def _add_strip(
    call: Constexpr[UnfusedCall], sums: cute.Tensor, address: Int64, step: Int32, columns: Int32
) -> None:
    """Add a strip of BF16 blocks, `step` bytes apart, of which the lane's part has `columns` columns left."""
    words = load_strip(call.strip_blocks, address, step, columns)
    for i in cutlass.range_constexpr(call.strip_blocks):
        totals = add_bf16([sums[8 * i + element] for element in range(8)], words[i])
        for element in cutlass.range_constexpr(8):
            sums[8 * i + element] = totals[element]


@cute.jit
def _add_float_strip(
    call: Constexpr[UnfusedCall], sums: cute.Tensor, row: Int32, column: Int32, columns: Int32
) -> None:
    """Add a strip of the FP32 partial, of which the lane's part has `columns` columns left."""
    for i in cutlass.range_constexpr(call.strip_blocks):
        if 32 * i < columns:
            values = _load_float(call, row, column + 32 * i)
            for element in cutlass.range_constexpr(8):
                sums[8 * i + element] = sums[8 * i + element] + values[element]


@cute.jit
def reduce_strip(
    call: Constexpr[UnfusedCall],
    first_row: Int32,
    block_row: Int32,
    column_tile: Int32,
    strip_column: Int32,
    tile_offset: Int64,
) -> None:
    """Sum a strip over the sources in rank order and store them into the output."""
    exchange, order = call.exchange, call.order
    lane = cute.arch.lane_idx()
    row = first_row + block_row * 8 + lane // 4
    column = column_tile * call.tile_n + strip_column * (call.strip_blocks * 32) + (lane % 4) * 8
    width = cutlass.min(call.n, (column_tile + 1) * call.tile_n)
    partial_row = cutlass.min(exchange.rank * order.shard + row, order.m - 1)
    sums = cute.make_rmem_tensor(call.strip_blocks * 8, Float32)
    sums.fill(-0.0)
    own_address = call.partial + (Int64(partial_row) * call.partial_stride + Int64(column)) * 2
    first_block = strip_column * call.strip_blocks * (call.tile_m // 8) + block_row
    in_slot = tile_offset + Int64(first_block * BLOCK_BYTES + lane * 16)
    for source in cutlass.range(exchange.world_size, unroll=1):
        address = own_address
        step = Int32(ROW_MAJOR_STEP)
        if source != exchange.rank:
            address = slot_address(exchange, exchange.own_base, exchange.rank, source) + in_slot
            step = (call.tile_m // 8) * BLOCK_BYTES
        if cutlass.const_expr(call.from_float):
            if source == exchange.rank:
                _add_float_strip(call, sums, partial_row, column, width - column)
            else:
                _add_strip(call, sums, address, step, width - column)
        else:
            _add_strip(call, sums, address, step, width - column)
    if row < order.shard:
        target = call.out + (Int64(row) * call.out_stride + Int64(column)) * 2
        keep = Uint32(0xFFFFFFFF)
        if row >= order.own_rows:
            keep = Uint32(0)
        for i in cutlass.range_constexpr(call.strip_blocks):
            if column + 32 * i < width:
                words = pack_bf16([sums[8 * i + element] for element in range(8)])
                store_16(target + ROW_MAJOR_STEP * i, [word & keep for word in words])
