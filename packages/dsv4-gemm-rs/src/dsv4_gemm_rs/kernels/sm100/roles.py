# SPDX-License-Identifier: Apache-2.0
"""What each warp of the SM100 kernel does with the tiles of its CTA.

Contract: four warps are the epilogue (each reaches a quarter of tensor memory's lanes), then one each loads A
and W (`OPERANDS`), loads scales (`SCALES`), multiplies (`MULTIPLIER`, of a pair's CTA 0 only), waits for
peers and loads their pieces (`PEERS`), forwards staged tiles and raises flags (`FORWARDER`), and counts in
and zeroes rows (`TIDIER`). All walk the same positions. Where one waits, the others go on: the one that waits
for peers holds up the epilogue of that own tile only, while the next tile is multiplied, and never a
publication.

Where sums are read through multicast (`device.pull`), the epilogue stores every tile into this rank's own
bank, the forwarding warp only raises flags, and the readers (the warp at `PEERS` and those behind `TIDIER`)
walk the own shard by themselves. They hold up no other warp.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32
from dsv4_symm_mem.device import roles
from dsv4_symm_mem.device.exchange import slot_address, wait_for_peers
from dsv4_symm_mem.device.fences import fence_proxy_async
from dsv4_symm_mem.device.forward import StagedCall
from dsv4_symm_mem.device.order import place, row_tiles, rows_of, select
from dsv4_symm_mem.device.pull import PulledCall, partial_address, run_gatherer, run_reducer
from dsv4_symm_mem.device.roles import PUBLICATIONS, Call, advance, wait_for_own_tile
from dsv4_symm_mem.protocol.slots import STAGED_TILES

from dsv4_gemm_rs.kernels.sm100.config import (
    CHUNK_COLUMNS,
    EPILOGUE_WARPS,
    GATHERERS,
    READERS,
    TILE_M,
    KernelConfig,
)
from dsv4_gemm_rs.kernels.sm100.epilogue import HALVES, add_peers, stage_chunk, store_chunk
from dsv4_gemm_rs.kernels.sm100.mainloop import (
    Operands,
    Ring,
    load_tile,
    multiply_tile,
    wait_until_consumed,
)
from dsv4_gemm_rs.kernels.sm100.pair import arrive_at_leader
from dsv4_gemm_rs.kernels.sm100.peers import ROW_BYTES, Pieces, load_piece
from dsv4_gemm_rs.kernels.sm100.scales import announce_rest, load_scales
from dsv4_gemm_rs.kernels.sm100.tcgen05 import fence_after, fence_before, load_columns

OPERANDS, SCALES, MULTIPLIER, PEERS, FORWARDER, TIDIER = range(EPILOGUE_WARPS, EPILOGUE_WARPS + 6)


@dataclass(frozen=True)
class FusedCall(Call):
    """A call of the fused kernel.

    Attributes:
        config: The tile configuration.
        ring, operands: Where tiles go and come from.
        a_scale, w_scale: Addresses of the scales.
        k_tiles: Stages of a tile.
        leads: Whether this CTA issues MMAs.
        aborted: Shared-memory word, 1 from a peer-waiting warp's abort on.
    """

    config: KernelConfig
    ring: Ring
    operands: Operands
    a_scale: Int64
    w_scale: Int64
    k_tiles: Int32
    leads: Boolean
    aborted: cute.Pointer


@dataclass(frozen=True)
class PushedFusedCall(FusedCall, StagedCall):
    """A call whose tiles are sent to their owner; `pieces` is where peers' partials go and come from."""

    pieces: Pieces


@dataclass(frozen=True)
class PulledFusedCall(FusedCall, PulledCall):
    """A call whose owners read sums."""


def chunk_at(config: KernelConfig, index: Int32, turn: Int32) -> Int32:
    """The chunk that the epilogue takes as its `index`-th out of accumulator `turn`.

    Of overlapping accumulators the first one's last chunk is the second one's first, and goes first in both.
    """
    if not config.overlapped:
        return index
    return (index + (1 - turn) * (config.chunks - 1)) & (config.chunks - 1)


@cute.jit
def run_loader(call: Constexpr[FusedCall]) -> None:
    """The operands' warp: fills the ring with A and W for every tile."""
    config, order = call.config, call.order
    stage, phase, step = Int32(0), Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row, column, step = place(order, position, step)
        row_tile = row * config.cluster + call.row_in_cluster
        stage, phase = load_tile(
            config,
            call.ring,
            call.operands,
            owner * order.shard + row_tile * TILE_M,
            column * config.cluster + call.row_in_cluster,
            call.leads,
            call.k_tiles,
            stage,
            phase,
        )
        position += call.workers
    wait_until_consumed(config, call.ring, stage, phase)


@cute.jit
def run_scale_loader(call: Constexpr[FusedCall]) -> None:
    """The scales' warp: the same for scales."""
    config, order = call.config, call.order
    stage, phase, step = Int32(0), Int32(0), Int32(0)
    waiting, oldest = Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row, column, step = place(order, position, step)
        row_tile = row * config.cluster + call.row_in_cluster
        stage, phase, waiting, oldest = load_scales(
            config,
            call.ring,
            call.a_scale,
            call.w_scale,
            owner * order.shard + row_tile * TILE_M,
            order.m,
            column * config.tile_n,
            call.n,
            call.k_tiles,
            stage,
            phase,
            waiting,
            oldest,
        )
        position += call.workers
    announce_rest(config, call.ring, waiting, oldest)


@cute.jit
def run_multiplier(call: Constexpr[FusedCall]) -> None:
    """The multiplying warp of the CTA that leads."""
    config, ring, order = call.config, call.ring, call.order
    stage, phase, step = Int32(0), Int32(0), Int32(0)
    turn, index, drained = Int32(0), Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < order.positions:
        _, _, column, step = place(order, position, step)
        cute.arch.mbarrier_wait(ring.drained + index, drained ^ 1)
        fence_after()
        stage, phase = multiply_tile(
            config,
            ring,
            ring.columns + turn * config.accumulator_stride,
            ring.finished + index,
            column,
            call.k_tiles,
            stage,
            phase,
        )
        turn = turn ^ 1
        index, drained = advance(index, drained, config.accumulator_barriers)
        position += call.workers


@cute.jit
def run_peer_loader(call: Constexpr[PushedFusedCall]) -> None:
    """The warp that waits for peers and loads their pieces of own tiles, in the epilogue's order."""
    config, exchange, order = call.config, call.exchange, call.order
    stage, phase, step, turn = Int32(0), Int32(0), Int32(0), Int32(0)
    aborted = Boolean(False)
    deadline = Int64(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row, column, step = place(order, position, step)
        row_tile = row * config.cluster + call.row_in_cluster
        if owner == exchange.rank and row_tile < row_tiles(order, owner) and exchange.world_size > 1:
            tile = row_tile * order.columns + column
            if not aborted:
                aborted, deadline = wait_for_own_tile(exchange, tile, deadline, call.aborted)
            fence_proxy_async()
            first = tile * (config.tile_bytes // ROW_BYTES)
            for i in cutlass.range(config.chunks, unroll=1):
                chunk = chunk_at(config, i, turn)
                if column * config.tile_n + chunk * CHUNK_COLUMNS < call.n:
                    for half in cutlass.range_constexpr(HALVES):
                        for source in cutlass.range(exchange.world_size, unroll=1):
                            if source != exchange.rank:
                                slot = slot_address(exchange, Int64(0), exchange.rank, source)
                                slot_row = Int32((slot - exchange.slots_offset) // ROW_BYTES)
                                stage, phase = load_piece(
                                    call.pieces,
                                    slot_row + first + (chunk * HALVES + half) * TILE_M,
                                    not aborted,
                                    stage,
                                    phase,
                                )
        turn = turn ^ 1
        position += call.workers
    if call.worker == 0 and call.row_in_cluster == 0 and order.own == 0 and exchange.world_size > 1:
        aborted, deadline = wait_for_peers(exchange, exchange.token, deadline)


@cute.jit
def zero_rows(call: Constexpr[FusedCall], worker: Int32, workers: Int32) -> None:
    """Zero the output's rows that nobody else stores, as one of `workers` warps."""
    if cutlass.const_expr(call.config.pushes):
        roles.zero_uncovered_rows(call, worker, workers)
    elif not call.gathered:
        roles.fill_rows(call, call.order.own_rows, call.order.shard, Uint32(0), worker, workers)


@cute.jit
def poison_output(call: Constexpr[FusedCall], worker: Int32, workers: Int32) -> None:
    """Fill the output's rows that have numbers otherwise with NaN, as one of `workers` warps."""
    if cutlass.const_expr(call.config.pushes):
        roles.poison_output(call, worker, workers)
    else:
        rows = select(call.gathered, call.order.m, call.order.own_rows)
        roles.fill_rows(call, Int32(0), rows, Uint32(roles.NAN_PAIR), worker, workers)


@cute.jit
def run_readers(call: Constexpr[PulledFusedCall], reader: Int32, block: Int32, blocks: Int32) -> None:
    """A CTA's reading warp number `reader`: sums of the own shard, or the peers' sums of an all-reduce."""
    reducers = select(call.gathered, READERS - GATHERERS, READERS)
    # Neighbours in order are on different SMs.
    if reader < reducers:
        run_reducer(call, reader * blocks + block, reducers * blocks)
    else:
        run_gatherer(call, (reader - reducers) * blocks + block, GATHERERS * blocks)


@cute.jit
def run_epilogue(call: Constexpr[FusedCall], thread: Int32) -> None:
    """The epilogue's warps: take tiles out of tensor memory, for the output or for others to send or to read.

    Own tiles are added to and stored into the output, remote ones staged; where sums are read, all are kept,
    unless there is but one rank.
    """
    config, ring, exchange, order = call.config, call.ring, call.exchange, call.order
    lane = cute.arch.lane_idx()
    # The upper half of an address is the lane.
    lanes = ring.columns + (thread // 32 * 32 << 16)
    last = cutlass.const_expr(0 if config.overlapped else config.chunks - 1)
    buffers = cutlass.const_expr(STAGED_TILES if config.pushes else PUBLICATIONS)
    values = cute.make_rmem_tensor(CHUNK_COLUMNS, Float32)
    step, stage, phase = Int32(0), Int32(0), Int32(0)
    turn, index, finished = Int32(0), Int32(0), Int32(0)
    slot, slot_phase = Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row, column, step = place(order, position, step)
        row_tile = row * config.cluster + call.row_in_cluster
        first_row = row_tile * TILE_M
        first_column = column * config.tile_n
        rows = rows_of(order, owner) - first_row
        own = owner == exchange.rank
        if cutlass.const_expr(not config.pushes):
            own = exchange.world_size == 1
        handed_on = rows > 0 and not own
        keep = Uint32(0xFFFFFFFF)
        if thread >= rows:
            keep = Uint32(0)
        cute.arch.mbarrier_wait(ring.finished + index, finished)
        fence_after()
        if handed_on:
            cute.arch.mbarrier_wait(call.published + slot, slot_phase ^ 1)
        for i in cutlass.range(config.chunks, unroll=1):
            chunk = chunk_at(config, i, turn)
            loaded = load_columns(
                lanes + turn * config.accumulator_stride + chunk * CHUNK_COLUMNS, CHUNK_COLUMNS
            )
            for j, value in enumerate(loaded):
                values[j] = value
            if i == last:
                fence_before()
                cute.arch.sync_warp()
                if lane == 0:
                    arrive_at_leader(config, ring.drained + index)
            if first_column + chunk * CHUNK_COLUMNS < call.n:
                if own:
                    if cutlass.const_expr(config.pushes):  # noqa: SIM102 - decided while tracing
                        if rows > 0:
                            stage, phase = add_peers(
                                call.pieces, values, thread, exchange.rank, exchange.world_size, stage, phase
                            )
                    if first_row + thread < order.covered_rows:
                        at = Int64(first_row + thread) * call.out_stride
                        at += Int64(first_column + chunk * CHUNK_COLUMNS)
                        store_chunk(values, call.out + at * 2, keep)
                elif handed_on:
                    buffer = Int64(0)
                    if cutlass.const_expr(config.pushes):
                        buffer = call.staging + Int64(slot) * config.tile_bytes
                    else:
                        tile = row_tile * order.columns + column
                        buffer = partial_address(exchange, exchange.own_base, owner)
                        buffer += Int64(tile) * config.tile_bytes
                    stage_chunk(values, buffer, chunk, thread, rows)
        if handed_on:
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(call.stored + slot)
            slot, slot_phase = advance(slot, slot_phase, buffers)
        turn = turn ^ 1
        index, finished = advance(index, finished, config.accumulator_barriers)
        position += call.workers
