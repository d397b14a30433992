# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernel: persistent BF16 GEMM whose tiles are pushed to their owners, who add and store them.

Contract: out[rank] [L, N] = bf16(sum over ranks, in rank order, of A_p · W_p^T restricted to the rank's
rows); remote partials rounded once to BF16, sums in FP32, rows past M as zeros. One launch per rank and
call; the epoch comes from and goes back to device memory, so launches replay in graphs.

Roles of a CTA's warps: math warpgroups (64 rows each), then one service warpgroup whose first warp loads (A,
W and, for own tiles, the peers' chunks, so it is also the one that waits for flags), whose second publishes,
and whose other two zero the output rows that no tile covers.

Remote tiles are staged in this GPU's memory and sent by `device.forward`: the math warps wait neither for the
link nor for a flag's round trip.

An aborted call runs to its end: the loader stops waiting and hands out chunks without loading them, so roles
and clusters never disagree on how many stages a tile takes. The last CTA to leave then fills the output with
NaN, as no CTA can know what others still store. A call that finds the abort word set when it starts only
does that.

Rejected: staging remote tiles in shared memory, which would take 64 KiB and more that the ring needs. Adding
peers with global loads from the math warps: 16 KiB in flight per SM at a microsecond's latency, where the
ring has 128 KiB and needs no registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import BFloat16, Boolean, Constexpr, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream
from dsv4_symm_mem.device.bulk import bulk_load
from dsv4_symm_mem.device.exchange import (
    EXAMPLE_ARGUMENTS,
    Exchange,
    ExchangeArguments,
    count_in,
    enter,
    leave,
    slot_address,
    wait_for_peers,
)
from dsv4_symm_mem.device.fences import fence_proxy_async
from dsv4_symm_mem.device.forward import StagedCall, run_forwarder, staging_of
from dsv4_symm_mem.device.order import TileOrder, place, row_tiles, rows_of
from dsv4_symm_mem.device.roles import advance, poison_output, zero_uncovered_rows
from dsv4_symm_mem.protocol.slots import BOUNCES, STAGED_TILES

from dsv4_gemm_rs.kernels.sm90.config import THREADS_PER_GROUP, TILE_K, WARPS_PER_GROUP, KernelConfig
from dsv4_gemm_rs.kernels.sm90.epilogue import add_peers, stage_tile, store_rows
from dsv4_gemm_rs.kernels.sm90.mainloop import (
    Operands,
    Ring,
    load_tile,
    multiply,
    smem_layouts,
    tiled_mma,
    tma_operands,
)


@dataclass(frozen=True)
class FusedCall(StagedCall):
    """A call of the fused kernel.

    Attributes:
        config: The tile configuration.
        ring, operands: Where tiles go and come from.
        k_tiles: Steps of K.
        aborted: Shared-memory word, 1 from the loader's abort on.
    """

    config: KernelConfig
    ring: Ring
    operands: Operands
    k_tiles: Int32
    aborted: cute.Pointer


def example_arguments() -> tuple[Any, ...]:
    """Arguments to compile with, in the order of `GemmReduceScatter.__call__`."""
    operands = (*[Int64(0)] * 6, *[Int32(128)] * 3)
    return (*operands, *EXAMPLE_ARGUMENTS, Int64(0), Int32(1), Int32(1), Int32(1), make_fake_stream())


class GemmReduceScatter:
    """The kernel for one `KernelConfig`; compile an instance once, launch it for any M, N, K, rank and P."""

    def __init__(self, config: KernelConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        a_address: Int64,
        a_stride: Int64,
        w_address: Int64,
        w_stride: Int64,
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
        group_rows: Int32,
        lag: Int32,
        grid: Int32,
        stream: Any,
    ) -> None:
        """Launch on `stream`.

        Args:
            a_address: Address of A [m, k] BF16, a multiple of 16.
            a_stride: Its row stride in elements, a multiple of 8.
            w_address: Address of W [n, k] BF16, likewise.
            w_stride: Its row stride, likewise.
            out_address: Address of the output [ceil(m / P), n] BF16, likewise.
            out_stride: Its row stride, likewise.
            m: Rows of A, may be 0.
            n: Rows of W, a multiple of 32.
            k: Summed length, a multiple of 8, at least 8.
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
            staging: `LaunchExchange.staging`, with `config.staging_bytes` for each CTA; unused if P is 1.
            group_rows: See `TileOrder`.
            lag: See `TileOrder`.
            grid: CTAs, all resident at once; a multiple of the cluster.
            stream: CUDA stream.
        """
        config = self.config
        a_layout, w_layout = smem_layouts(config)
        operands = tma_operands(config, a_address, a_stride, w_address, w_stride, m, n, k, a_layout, w_layout)
        stages = config.stages

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            stored: cute.struct.MemRange[Int64, STAGED_TILES]
            published: cute.struct.MemRange[Int64, STAGED_TILES]
            loaded: cute.struct.MemRange[Int64, BOUNCES]
            halted: Int32
            aborted: Int32
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(a_layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(w_layout)], 1024]
            bounce: cute.struct.Align[cute.struct.MemRange[Uint8, config.bounce_bytes], 128]

        self.storage = Storage
        self.kernel(
            operands.a_atom,
            operands.a,
            operands.w_atom,
            operands.w,
            tiled_mma(config),
            a_layout,
            w_layout,
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
            group_rows,
            lag,
        ).launch(
            grid=(grid, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        a_tensor: cute.Tensor,
        w_atom: cute.CopyAtom,
        w_tensor: cute.Tensor,
        mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
        out_address: Int64,
        out_stride: Int64,
        m: Int32,
        n: Int32,
        k: Int32,
        arguments: ExchangeArguments,
        staging: Int64,
        group_rows: Int32,
        lag: Int32,
    ) -> None:
        """One CTA; see the module for its warps."""
        config = self.config
        math_warps = config.math_groups * WARPS_PER_GROUP
        rank, world_size = arguments.rank, arguments.world_size
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()

        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        ring = Ring(
            full=storage.full.data_ptr(),
            empty=storage.empty.data_ptr(),
            a=storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner),
            w=storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner),
            w_address=Int32(storage.w.data_ptr().toint()),
            cluster_rank=cute.arch.block_idx_in_cluster() if config.cluster > 1 else 0,
        )
        halted_word = storage.halted.ptr
        aborted_word = storage.aborted.ptr
        stored, published = storage.stored.data_ptr(), storage.published.data_ptr()
        exchange = Exchange(arguments)
        order = TileOrder(
            m, n, world_size, rank, group_rows, lag, config.tile_m, config.tile_n, config.cluster
        )
        call = FusedCall(
            exchange=exchange,
            order=order,
            out=out_address,
            out_stride=out_stride,
            n=n,
            worker=block // config.cluster,
            workers=blocks // config.cluster,
            row_in_cluster=block % config.cluster,
            stored=stored,
            published=published,
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            pacing=staging,
            staging=staging_of(staging, block, config.staging_bytes),
            bounce=storage.bounce.data_ptr(),
            loaded=storage.loaded.data_ptr(),
            config=config,
            ring=ring,
            operands=Operands(a_atom, a_tensor, w_atom, w_tensor),
            k_tiles=(k + TILE_K - 1) // TILE_K,
            aborted=aborted_word,
        )

        if warp == math_warps:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(w_atom)
        if thread == 0:
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(ring.full + stage, 1)
                cute.arch.mbarrier_init(ring.empty + stage, math_warps * config.cluster)
            for i in cutlass.range_constexpr(STAGED_TILES):
                cute.arch.mbarrier_init(stored + i, math_warps)
                cute.arch.mbarrier_init(published + i, 1)
            for i in cutlass.range_constexpr(BOUNCES):
                cute.arch.mbarrier_init(call.loaded + i, 1)
            enter(exchange, halted_word, aborted_word)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        halted = cute.arch.load(halted_word, Int32) != 0

        if warp >= math_warps:
            if cutlass.const_expr(config.service_registers > 0):
                cute.arch.warpgroup_reg_dealloc(config.service_registers)
            if warp == math_warps and not halted:
                run_loader(call)
            if warp == math_warps + 1 and not halted:
                run_forwarder(call)
            if warp > math_warps + 1:
                if thread == (math_warps + 2) * 32:
                    count_in(exchange, blocks)
                zero_uncovered_rows(call, block * 2 + warp - math_warps - 2, blocks * 2)
        if warp < math_warps:
            if cutlass.const_expr(config.math_registers > 0):
                cute.arch.warpgroup_reg_alloc(config.math_registers)
            if halted:
                poison_output(call, block * math_warps + warp, blocks * math_warps)
            else:
                run_math(call, mma, thread)
        if cutlass.const_expr(config.cluster > 1):
            # A CTA's shared memory must outlive its peer's last multicast and last arrival in it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp == 0 and world_size > 1:
            aborted = cute.arch.load(aborted_word, Int32) != 0
            if leave(exchange, blocks, aborted):
                poison_output(call, Int32(0), Int32(1))


@cute.jit
def run_loader(call: Constexpr[FusedCall]) -> None:
    """The loading warp: fills the ring for every tile, waits for peers before an own tile's chunks."""
    config, ring, exchange, order = call.config, call.ring, call.exchange, call.order
    stage, phase, step = Int32(0), Int32(0), Int32(0)
    aborted = Boolean(False)
    deadline = Int64(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row, column, step = place(order, position, step)
        row_tile = row * config.cluster + call.row_in_cluster
        stage, phase = load_tile(
            config,
            ring,
            call.operands,
            owner * order.shard + row_tile * config.tile_m,
            column,
            call.k_tiles,
            stage,
            phase,
        )
        if owner == exchange.rank:
            tile = row_tile * order.columns + column
            exists = row_tile < row_tiles(order, owner)
            if exists and exchange.world_size > 1 and not aborted:
                aborted, deadline = wait_for_peers(exchange, tile, deadline)
                if aborted:
                    with cute.arch.elect_one():
                        cute.arch.store(call.aborted, Int32(1))
                    cute.arch.sync_warp()
            load = exists and not aborted
            fence_proxy_async()
            for chunk in cutlass.range_constexpr(config.chunks):
                chunk_bytes = config.chunk_bytes(chunk)
                for source in cutlass.range(exchange.world_size, unroll=1):
                    if source != exchange.rank:
                        cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
                        if load:
                            slot = slot_address(exchange, exchange.own_base, exchange.rank, source)
                            piece = slot + Int64(tile) * config.tile_bytes + chunk * config.chunk_bytes(0)
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, chunk_bytes)
                                bulk_load(
                                    ring.w_address + stage * config.w_stage_bytes,
                                    piece,
                                    Int32(chunk_bytes),
                                    Int32((ring.full + stage).toint()),
                                )
                        else:
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive(ring.full + stage)
                        stage, phase = advance(stage, phase, config.stages)
        position += call.workers
    if call.worker == 0 and call.row_in_cluster == 0 and order.own == 0 and exchange.world_size > 1:
        aborted, deadline = wait_for_peers(exchange, exchange.token, deadline)


@cute.jit
def run_math(call: Constexpr[FusedCall], mma: cute.TiledMma, thread: Int32) -> None:
    """A math warpgroup: multiply, then stage a remote tile, or add the peers and store an own one."""
    config, ring, exchange, order = call.config, call.ring, call.exchange, call.order
    slice_ = mma.get_slice(cute.arch.make_warp_uniform(thread // THREADS_PER_GROUP) * THREADS_PER_GROUP)
    a_fragments = mma.make_fragment_A(slice_.partition_A(ring.a))
    w_fragments = mma.make_fragment_B(slice_.partition_B(ring.w))
    accumulators = cute.make_rmem_tensor(mma.partition_shape_C((config.tile_m, config.tile_n)), Float32)
    stage, phase, step = Int32(0), Int32(0), Int32(0)
    slot, slot_phase = Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row, column, step = place(order, position, step)
        row_tile = row * config.cluster + call.row_in_cluster
        first_row = row_tile * config.tile_m
        stage, phase = multiply(
            config, ring, mma, accumulators, a_fragments, w_fragments, call.k_tiles, stage, phase
        )
        if owner == exchange.rank:
            stage, phase = add_peers(
                config, ring, accumulators, thread, exchange.rank, exchange.world_size, stage, phase
            )
            store_rows(
                config,
                accumulators,
                call.out,
                call.out_stride,
                thread,
                first_row,
                column * config.tile_n,
                order.own_rows,
                order.covered_rows,
                call.n,
            )
        elif row_tile < row_tiles(order, owner):
            cute.arch.mbarrier_wait(call.published + slot, slot_phase ^ 1)
            stage_tile(
                config,
                accumulators,
                call.staging + Int64(slot) * config.tile_bytes,
                thread,
                rows_of(order, owner) - first_row,
            )
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(call.stored + slot)
            slot, slot_phase = advance(slot, slot_phase, STAGED_TILES)
        position += call.workers
