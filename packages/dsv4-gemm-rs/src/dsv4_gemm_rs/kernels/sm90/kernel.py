# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernel: persistent BF16 GEMM whose tiles are pushed to their owners, who add and store them.

Contract: out[rank] [L, N] = bf16(sum over ranks, in rank order, of A_p · W_p^T restricted to the rank's
rows); remote partials rounded once to BF16, sums in FP32, rows past M as zeros. One launch per rank and
call; the epoch comes from and goes back to device memory, so launches replay in graphs.

Roles of a CTA's warps: two math warpgroups, which take its tiles in turn, then four service warps: one loads
A and W, one sends remote tiles, one waits for peers and gathers their chunks for own tiles, one zeroes the
output rows that no tile covers.

A remote tile waits for the link in shared memory (`device.send`), so the math warps wait neither for the link
nor for a flag's round trip. Own tiles take their peers' partials while the other warpgroup multiplies.

An aborted call runs to its end: the gathering warp stops waiting and hands out chunks that it did not load,
so roles never disagree on how many a tile takes. The last CTA to leave then fills the output with NaN, as no
CTA can know what others still store. A call that finds the abort word set when it starts only does that.

Rejected: both warpgroups on one tile of twice the width, so that the tensor cores idle in every epilogue.
Staging remote tiles in device memory: they cross L2 twice more. Adding peers with global loads from the
math warps: a microsecond's latency for each, and the registers are taken.
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
    slot_address,
)
from dsv4_symm_mem.device.order import TileOrder, place, rows_of
from dsv4_symm_mem.device.roles import advance, poison_output

from dsv4_gemm_rs.kernels.overlap import prefetch_lines, wait_for_inputs
from dsv4_gemm_rs.kernels.sm90.config import (
    MATH_GROUPS,
    THREADS_PER_GROUP,
    TILE_K,
    WARPS_PER_GROUP,
    KernelConfig,
)
from dsv4_gemm_rs.kernels.sm90.epilogue import Gathered, add_peers, fill_buffer, skip_peers, store_rows
from dsv4_gemm_rs.kernels.sm90.frame import (
    GatheringCall,
    begin,
    end,
    prepare,
    run_gatherer,
    run_sender,
    run_tidier,
)
from dsv4_gemm_rs.kernels.sm90.mainloop import (
    Operands,
    Ring,
    load_tile,
    multiply,
    skip,
    smem_layouts,
    tiled_mma,
    tma_operands,
)


@dataclass(frozen=True)
class FusedCall(GatheringCall):
    """A call of the fused kernel.

    Attributes:
        config: The tile configuration.
        ring, operands: Where tiles go and come from.
        gathered: The ring of peers' chunks.
        added: An mbarrier, a phase of which ends when an own tile has taken its last chunk.
        k_tiles: Steps of K.
    """

    config: KernelConfig
    ring: Ring
    operands: Operands
    gathered: Gathered
    added: cute.Pointer
    k_tiles: Int32


def example_arguments() -> tuple[Any, ...]:
    """Arguments to compile with, in the order of `GemmReduceScatter.__call__`."""
    operands = (*[Int64(0)] * 6, *[Int32(128)] * 3)
    return (*operands, *EXAMPLE_ARGUMENTS, Int64(0), *[Int32(1)] * 4, make_fake_stream())


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
        early: Int32,
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
            staging: `LaunchExchange.staging`, of which the words in front are used; unused if P is 1.
            early: 1 to begin while the kernel before still runs (`kernels.overlap`), else 0.
            group_rows: See `TileOrder`.
            lag: See `TileOrder`.
            grid: CTAs, all resident at once.
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
            turn: cute.struct.MemRange[Int64, MATH_GROUPS]
            stored: cute.struct.MemRange[Int64, 1]
            published: cute.struct.MemRange[Int64, 1]
            gathered: cute.struct.MemRange[Int64, config.ring_chunks]
            taken: cute.struct.MemRange[Int64, config.ring_chunks]
            added: cute.struct.MemRange[Int64, 1]
            halted: Int32
            aborted: Int32
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(a_layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(w_layout)], 1024]
            buffer: cute.struct.Align[cute.struct.MemRange[Uint8, config.tile_bytes], 128]
            chunks: cute.struct.Align[cute.struct.MemRange[Uint8, config.gather_bytes], 128]

        self.storage = Storage
        self.kernel(
            operands.a_atom,
            operands.a,
            operands.w_atom,
            operands.w,
            w_address,
            w_stride,
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
            early,
            group_rows,
            lag,
        ).launch(
            grid=(grid, 1, 1),
            block=(config.threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=early,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        a_tensor: cute.Tensor,
        w_atom: cute.CopyAtom,
        w_tensor: cute.Tensor,
        w_address: Int64,
        w_stride: Int64,
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
        early: Int32,
        group_rows: Int32,
        lag: Int32,
    ) -> None:
        """One CTA; see the module for its warps."""
        config = self.config
        math_warps = MATH_GROUPS * WARPS_PER_GROUP
        rank, world_size = arguments.rank, arguments.world_size
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()

        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        ring = Ring(
            full=storage.full.data_ptr(),
            empty=storage.empty.data_ptr(),
            turn=storage.turn.data_ptr(),
            a=storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner),
            w=storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner),
        )
        stored, published = storage.stored.data_ptr(), storage.published.data_ptr()
        gathered = Gathered(
            storage.gathered.data_ptr(),
            storage.taken.data_ptr(),
            Int32(storage.chunks.data_ptr().toint()),
        )
        added = storage.added.data_ptr()

        if warp == math_warps:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(w_atom)
        barriers = (
            (ring.full, config.stages, 1),
            (ring.empty, config.stages, WARPS_PER_GROUP),
            (ring.turn, MATH_GROUPS, WARPS_PER_GROUP),
            (stored, 1, WARPS_PER_GROUP),
            (published, 1, 1),
            (gathered.full, config.ring_chunks, 1),
            (gathered.empty, config.ring_chunks, WARPS_PER_GROUP),
            (added, 1, WARPS_PER_GROUP),
        )
        prepare(barriers, thread)
        if warp == math_warps + 3 and early != 0:
            prefetch_lines(w_address, w_stride * 2, k * 2, n, Int32(block), Int32(blocks))
        wait_for_inputs()
        exchange = Exchange(arguments)
        order = TileOrder(
            m, n, world_size, rank, group_rows, lag, config.tile_m, config.tile_n, 1, by_column=True
        )
        call = FusedCall(
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
            buffer=storage.buffer.data_ptr(),
            config=config,
            ring=ring,
            operands=Operands(a_atom, a_tensor, w_atom, w_tensor),
            gathered=gathered,
            added=added,
            k_tiles=(k + TILE_K - 1) // TILE_K,
            aborted=storage.aborted.ptr,
        )

        halted = begin(exchange, storage.halted.ptr, call.aborted, thread)

        if warp >= math_warps:
            cute.arch.warpgroup_reg_dealloc(config.service_registers)
            if warp == math_warps and not halted:
                run_loader(call)
            if warp == math_warps + 1 and not halted:
                run_sender(call)
            if warp == math_warps + 2 and not halted:
                run_gatherer(call, gather_tile)
            if warp == math_warps + 3:
                run_tidier(call, thread == (math_warps + 3) * 32)
        if warp < math_warps:
            cute.arch.warpgroup_reg_alloc(config.math_registers)
            if halted:
                poison_output(call, block * math_warps + warp, blocks * math_warps)
            else:
                run_math(call, mma, thread)
        end(call, warp)


@cute.jit
def run_loader(call: Constexpr[FusedCall]) -> None:
    """The loading warp: fills the ring for every tile."""
    config, order = call.config, call.order
    stage, phase, step = Int32(0), Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row_tile, column_tile, step = place(order, position, step)
        stage, phase = load_tile(
            config,
            call.ring,
            call.operands,
            owner * order.shard + row_tile * config.tile_m,
            column_tile,
            call.k_tiles,
            stage,
            phase,
        )
        position += call.workers


@cute.jit
def gather_tile(
    call: Constexpr[FusedCall], tile: Int32, aborted: Boolean, stage: Int32, phase: Int32
) -> tuple[Int32, Int32]:
    """See `frame.Gather`."""
    config, exchange = call.config, call.exchange
    for chunk in cutlass.range_constexpr(config.chunks):
        chunk_bytes = config.chunk_bytes(chunk)
        for source in cutlass.range(exchange.world_size, unroll=1):
            if source != exchange.rank:
                full = call.gathered.full + stage
                cute.arch.mbarrier_wait(call.gathered.empty + stage, phase ^ 1)
                if aborted:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(full)
                else:
                    slot = slot_address(exchange, exchange.own_base, exchange.rank, source)
                    piece = slot + Int64(tile) * config.tile_bytes + chunk * config.chunk_bytes(0)
                    target = call.gathered.address + stage * config.chunk_bytes(0)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, chunk_bytes)
                        bulk_load(target, piece, Int32(chunk_bytes), Int32(full.toint()))
                stage, phase = advance(stage, phase, config.ring_chunks)
    return stage, phase


@cute.jit
def run_math(call: Constexpr[FusedCall], mma: cute.TiledMma, thread: Int32) -> None:
    """A math warpgroup: of every second tile, multiply, then hand on a remote one or finish an own one."""
    config, ring, exchange, order = call.config, call.ring, call.exchange, call.order
    group = cute.arch.make_warp_uniform(thread // THREADS_PER_GROUP)
    member = thread % THREADS_PER_GROUP
    slice_ = mma.get_slice(0)
    a_fragments = mma.make_fragment_A(slice_.partition_A(ring.a))
    w_fragments = mma.make_fragment_B(slice_.partition_B(ring.w))
    accumulators = cute.make_rmem_tensor(mma.partition_shape_C((config.tile_m, config.tile_n)), Float32)
    buffer = Int32(call.buffer.toint())
    stage, phase, step = Int32(0), Int32(0), Int32(0)
    chunk_stage, chunk_phase = Int32(0), Int32(0)
    turn, sent, added, turn_phase = Int32(0), Int32(0), Int32(0), group ^ 1
    position = Int32(call.worker)
    while position < order.positions:
        owner, row_tile, column_tile, step = place(order, position, step)
        remote = owner != exchange.rank
        if turn == group:
            cute.arch.mbarrier_wait(ring.turn + group, turn_phase)
            turn_phase = turn_phase ^ 1
            stage, phase = multiply(
                config, ring, mma, accumulators, a_fragments, w_fragments, call.k_tiles, group, stage, phase
            )
            first_row = row_tile * config.tile_m
            if remote:
                # The tile before is in the buffer, so it is known which of the buffer's uses is waited for.
                cute.arch.mbarrier_wait(call.stored, sent ^ 1)
                cute.arch.mbarrier_wait(call.published, sent ^ 1)
                fill_buffer(config, accumulators, buffer, member, rows_of(order, owner) - first_row)
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive(call.stored)
            else:
                if exchange.world_size > 1:
                    # Parity tells two uses of a chunk's place apart, so nobody may wait for one further on.
                    # The other warpgroup is at most one own tile behind: its turn to multiply has passed.
                    cute.arch.mbarrier_wait(call.added, added ^ 1)
                    chunk_stage, chunk_phase = add_peers(
                        config,
                        call.gathered,
                        accumulators,
                        member,
                        exchange.rank,
                        exchange.world_size,
                        chunk_stage,
                        chunk_phase,
                    )
                    if cute.arch.lane_idx() == 0:
                        cute.arch.mbarrier_arrive(call.added)
                store_rows(
                    config,
                    accumulators,
                    call.out,
                    call.out_stride,
                    member,
                    first_row,
                    column_tile * config.tile_n,
                    order.own_rows,
                    order.covered_rows,
                    call.n,
                )
        else:
            stage, phase = skip(config, call.k_tiles, stage, phase)
            if not remote:
                chunk_stage, chunk_phase = skip_peers(config, exchange.world_size, chunk_stage, chunk_phase)
        if remote:
            sent = sent ^ 1
        else:
            added = added ^ 1
        turn = turn ^ 1
        position += call.workers
