# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernel for weights that stay in FP8: the kernel of `sm90.kernel` with its operands swapped.

Contract: as `sm90.kernel`, with W packed (`dsv4_gemm_rs.packing`) and K a multiple of 128. Slots, flags,
deadlines and what becomes of an aborted call are the same, and so are the warps' roles, but that both math
warpgroups share a tile. Main loop and epilogue are `swapped_mainloop` and `swapped_epilogue`. A chunk of a
peer's tile is some tokens of every math warp's 32 columns, a bulk copy for each, so all of them add at once.

Finished tiles leave from one buffer in shared memory, own ones for the output, remote ones for their owner. A
math warp fills its part when it has left, and goes on.

Products are those of the BF16 copy of the same weight, only the order of their FP32 sum differs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import BFloat16, Boolean, Constexpr, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from dsv4_symm_mem.device.bulk import bulk_load, bulk_wait
from dsv4_symm_mem.device.exchange import (
    EXAMPLE_ARGUMENTS,
    Exchange,
    ExchangeArguments,
    slot_address,
)
from dsv4_symm_mem.device.order import TileOrder, place, rows_of
from dsv4_symm_mem.device.roles import advance, poison_output

from dsv4_gemm_rs.kernels.overlap import prefetch_lines, wait_for_inputs
from dsv4_gemm_rs.kernels.sm90.config import THREADS_PER_GROUP, TILE_K
from dsv4_gemm_rs.kernels.sm90.epilogue import Gathered
from dsv4_gemm_rs.kernels.sm90.frame import (
    GatheringCall,
    begin,
    end,
    prepare,
    run_gatherer,
    run_sender,
    run_tidier,
)
from dsv4_gemm_rs.kernels.sm90.kept_order import ORDER_FIELDS, keep, recall
from dsv4_gemm_rs.kernels.sm90.swapped_config import UNITS, SwappedConfig
from dsv4_gemm_rs.kernels.sm90.swapped_epilogue import (
    Leaving,
    add_peers,
    fill_buffer,
    leaving_layout,
    part_of,
    store_rows,
    tma_output,
)
from dsv4_gemm_rs.kernels.sm90.swapped_mainloop import (
    MMAS,
    SwappedOperands,
    SwappedRing,
    load_tile,
    multiply,
    smem_layout,
    tiled_mma,
    tma_tokens,
)
from dsv4_gemm_rs.packing import BLOCK_BYTES, BLOCK_K, GROUP_FEATURES


@dataclass(frozen=True)
class SwappedCall(GatheringCall):
    """A call of the kernel.

    Attributes:
        config: The tile configuration.
        ring, operands: Where tiles go and come from.
        gathered: The ring of peers' chunks.
        k_tiles: Steps of K, an even number.
        split: Not 0 where the weight's factors lack 2^120.
        leaving: How tiles leave.
        kept: Shared-memory address of the order's numbers, see `kept_order`.
    """

    config: SwappedConfig
    ring: SwappedRing
    operands: SwappedOperands
    gathered: Gathered
    k_tiles: Int32
    split: Int32
    leaving: Leaving
    kept: Int32


def example_arguments() -> tuple[Any, ...]:
    """Arguments to compile with, in the order of `SwappedGemmReduceScatter.__call__`."""
    operands = (*[Int64(0)] * 3, Int32(0), *[Int64(0)] * 2, *[Int32(128)] * 3)
    return (*operands, *EXAMPLE_ARGUMENTS, Int64(0), *[Int32(1)] * 4, make_fake_stream())


class SwappedGemmReduceScatter:
    """The kernel for one `SwappedConfig`; compile an instance once, launch it for any M, N, K, rank and P."""

    def __init__(self, config: SwappedConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        x_address: Int64,
        x_stride: Int64,
        w_address: Int64,
        split: Int32,
        out_address: Int64,
        out_stride: Int64,
        m: Int32,
        n: Int32,
        k: Int32,
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
        staging: Int64,
        early: Int32,
        group_rows: Int32,
        lag: Int32,
        grid: Int32,
        stream: Any,
    ) -> None:
        """Launch on `stream`.

        Args:
            x_address: Address of the activations [m, k] BF16, a multiple of 16.
            x_stride: Their row stride in elements, a multiple of 8.
            w_address: Address of the packed weight [n, k], a multiple of 16.
            split: Not 0 where its factors lack 2^120.
            out_address: Address of the output [ceil(m / P), n] BF16, a multiple of 16.
            out_stride: Its row stride in elements, a multiple of 8.
            m: Rows of the activations, may be 0.
            n: Rows of the weight, a multiple of 32.
            k: Summed length, a multiple of 128.
            own_base: Address of this rank's block; where P is 1 it needs its control words only.
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
            staging: `LaunchExchange.staging`, of which the words in front are used; unused if P is 1.
            early: 1 to begin while the kernel before still runs (`kernels.overlap`), else 0.
            group_rows: See `TileOrder`.
            lag: See `TileOrder`.
            grid: CTAs, all resident at once.
            stream: CUDA stream.
        """
        config = self.config
        layout = smem_layout(config)
        out_layout = leaving_layout(config)
        rows = (m + world_size - 1) // world_size
        out_atom, out_tensor = tma_output(config, out_address, out_stride, rows, n, out_layout)
        atom, tokens = tma_tokens(config, x_address, x_stride, m, k, layout)
        stages = config.stages

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            stored: cute.struct.MemRange[Int64, 1]
            published: cute.struct.MemRange[Int64, 1]
            gathered: cute.struct.MemRange[Int64, config.ring_chunks]
            taken: cute.struct.MemRange[Int64, config.ring_chunks]
            kept: cute.struct.MemRange[Int32, len(ORDER_FIELDS)]
            halted: Int32
            aborted: Int32
            x: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[Uint8, stages * config.w_stage_bytes], 128]
            buffer: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(out_layout)], 1024]
            chunks: cute.struct.Align[cute.struct.MemRange[Uint8, config.gather_bytes], 128]

        self.storage = Storage
        self.kernel(
            atom,
            tokens,
            w_address,
            split,
            tiled_mma(config),
            layout,
            out_atom,
            out_tensor,
            out_layout,
            out_address,
            out_stride,
            m,
            n,
            k,
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
            staging,
            early,
            group_rows,
            lag,
        ).launch(
            grid=(grid, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(1, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=early,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x_atom: cute.CopyAtom,
        x_tensor: cute.Tensor,
        w_address: Int64,
        split: Int32,
        mma: cute.TiledMma,
        layout: cute.ComposedLayout,
        out_atom: cute.CopyAtom,
        out_tensor: cute.Tensor,
        out_layout: cute.ComposedLayout,
        out_address: Int64,
        out_stride: Int64,
        m: Int32,
        n: Int32,
        k: Int32,
        arguments: ExchangeArguments,
        staging: Int64,
        early: Int32,
        group_rows: Int32,
        lag: Int32,
    ) -> None:
        """One CTA; see `sm90.kernel` for its warps."""
        config = self.config
        rank, world_size = arguments.rank, arguments.world_size
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()

        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        ring = SwappedRing(
            full=storage.full.data_ptr(),
            empty=storage.empty.data_ptr(),
            x=storage.x.get_tensor(layout.outer, swizzle=layout.inner),
            w_address=Int32(storage.w.data_ptr().toint()),
        )
        stored, published = storage.stored.data_ptr(), storage.published.data_ptr()
        gathered = Gathered(
            storage.gathered.data_ptr(),
            storage.taken.data_ptr(),
            Int32(storage.chunks.data_ptr().toint()),
        )

        order = TileOrder(m, n, world_size, rank, group_rows, lag, config.tile_m, config.tile_n, 1)
        if warp == UNITS:
            cpasync.prefetch_descriptor(x_atom)
            cpasync.prefetch_descriptor(out_atom)
        if thread == 0:
            keep(order, storage.kept.data_ptr())
        barriers = (
            (ring.full, config.stages, 1),
            (ring.empty, config.stages, UNITS),
            (stored, 1, UNITS),
            (published, 1, 1),
            (gathered.full, config.ring_chunks, 1),
            (gathered.empty, config.ring_chunks, UNITS),
        )
        prepare(barriers, thread)
        groups = (n + GROUP_FEATURES - 1) // GROUP_FEATURES
        if warp == UNITS + 3 and early != 0:
            blocks_of_weight = groups * (k // BLOCK_K)
            prefetch_lines(
                w_address,
                Int64(BLOCK_BYTES),
                Int32(BLOCK_BYTES),
                blocks_of_weight,
                Int32(block),
                Int32(blocks),
            )
        wait_for_inputs()
        exchange = Exchange(arguments)
        call = SwappedCall(
            exchange=exchange,
            order=order,
            out=out_address,
            out_stride=out_stride,
            n=n,
            worker=block,
            workers=blocks,
            row_in_cluster=Int32(0),
            stored=stored,
            published=published,
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            pacing=staging,
            buffer=cute.recast_ptr(storage.buffer.data_ptr(), dtype=Uint8),
            config=config,
            ring=ring,
            operands=SwappedOperands(x_atom, x_tensor, w_address, groups),
            gathered=gathered,
            k_tiles=k // TILE_K,
            split=split,
            leaving=Leaving(
                out_atom,
                out_tensor,
                storage.buffer.get_tensor(out_layout.outer, swizzle=out_layout.inner),
                Int32(storage.buffer.data_ptr().toint()),
            ),
            kept=Int32(storage.kept.data_ptr().toint()),
            aborted=storage.aborted.ptr,
        )

        halted = begin(exchange, storage.halted.ptr, call.aborted, thread)

        if warp >= UNITS:
            cute.arch.warpgroup_reg_dealloc(config.service_registers)
            if warp == UNITS and not halted:
                run_loader(call)
            if warp == UNITS + 1 and not halted:
                run_sender(call)
            if warp == UNITS + 2 and not halted:
                run_gatherer(call, gather_tile)
            if warp == UNITS + 3:
                run_tidier(call, thread == (UNITS + 3) * 32)
        else:
            cute.arch.warpgroup_reg_alloc(config.math_registers)
            if halted:
                poison_output(call, block * UNITS + warp, blocks * UNITS)
            else:
                run_math(call, mma, thread)
        end(replace(call, order=recall(order, call.kept)), warp)


@cute.jit
def run_loader(call: Constexpr[SwappedCall]) -> None:
    """The loading warp: fills the ring for every tile."""
    config, order = call.config, call.order
    stage, phase, step = Int32(0), Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row_tile, column, step = place(order, position, step)
        stage, phase = load_tile(
            config,
            call.ring,
            call.operands,
            owner * order.shard + row_tile * config.tile_m,
            column,
            call.k_tiles,
            stage,
            phase,
        )
        position += call.workers


@cute.jit
def gather_tile(
    call: Constexpr[SwappedCall], tile: Int32, aborted: Boolean, stage: Int32, phase: Int32
) -> tuple[Int32, Int32]:
    """See `frame.Gather`: a lane copies for each math warp, its next tokens in its 32 columns."""
    config, exchange, gathered = call.config, call.exchange, call.gathered
    size = cutlass.const_expr(config.chunk_bytes // UNITS)
    lane = cute.arch.lane_idx()
    source_part = part_of(config, lane * 32) * config.part_bytes
    for chunk in cutlass.range(config.chunks, unroll=1):
        for source in cutlass.range(exchange.world_size, unroll=1):
            if source != exchange.rank:
                full = gathered.full + stage
                cute.arch.mbarrier_wait(gathered.empty + stage, phase ^ 1)
                with cute.arch.elect_one():
                    if aborted:
                        cute.arch.mbarrier_arrive(full)
                    else:
                        cute.arch.mbarrier_arrive_and_expect_tx(full, config.chunk_bytes)
                cute.arch.sync_warp()
                if lane < UNITS and not aborted:
                    slot = slot_address(exchange, exchange.own_base, exchange.rank, source)
                    bulk_load(
                        gathered.address + stage * config.chunk_bytes + lane * size,
                        slot + Int64(tile) * config.tile_bytes + Int64(source_part + chunk * size),
                        Int32(size),
                        Int32(full.toint()),
                    )
                stage, phase = advance(stage, phase, config.ring_chunks)
    return stage, phase


@cute.jit
def run_math(call: Constexpr[SwappedCall], mma: cute.TiledMma, thread: Int32) -> None:
    """A math warpgroup: multiply, then hand on a remote tile, or add the peers and store an own one."""
    config, ring, exchange = call.config, call.ring, call.exchange
    # Once and for all: the DSL's atom is mutable, and branches must not disagree on it.
    mma.set(warpgroup.Field.ACCUMULATE, True)
    tokens = ring.x
    if cutlass.const_expr(config.token_groups > 1):
        group = cute.arch.make_warp_uniform(thread // THREADS_PER_GROUP)
        tokens = cute.local_tile(ring.x, (config.group_tokens, TILE_K, config.stages), (group, 0, 0))
    x_fragments = mma.make_fragment_B(mma.get_slice(0).partition_B(tokens))
    shape = mma.partition_shape_C((64, config.group_tokens))
    accumulators = [cute.make_rmem_tensor(shape, Float32) for _ in range(MMAS)]
    stage, phase, step = Int32(0), Int32(0), Int32(0)
    chunk_stage, chunk_phase, sent = Int32(0), Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < recall(call.order, call.kept).positions:
        if call.split != 0:
            stage, phase = multiply(
                config, ring, mma, accumulators, x_fragments, thread, call.k_tiles, stage, phase, True
            )
        else:
            stage, phase = multiply(
                config, ring, mma, accumulators, x_fragments, thread, call.k_tiles, stage, phase, False
            )
        # What the epilogue needs is found now: what is found before takes registers beside the accumulators.
        order = recall(call.order, call.kept)
        owner, row_tile, column, step = place(order, position, step)
        first_row = row_tile * config.tile_m
        if owner == exchange.rank:
            chunk_stage, chunk_phase = add_peers(
                config,
                call.gathered,
                accumulators,
                thread,
                exchange.rank,
                exchange.world_size,
                chunk_stage,
                chunk_phase,
            )
        # The last tile that was sent has been read out of the buffer.
        cute.arch.mbarrier_wait(call.published, sent ^ 1)
        if owner == exchange.rank:
            store_rows(
                config,
                call.leaving,
                accumulators,
                thread,
                first_row,
                column * config.tile_n,
                order.own_rows,
            )
        else:
            fill_buffer(config, accumulators, call.leaving, thread, rows_of(order, owner) - first_row)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(call.stored)
            sent = sent ^ 1
        position += call.workers
    # Complete before the CTA's end is counted: an aborted call's output is then overwritten.
    bulk_wait(0)
