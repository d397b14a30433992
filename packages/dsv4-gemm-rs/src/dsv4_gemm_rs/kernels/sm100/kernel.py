# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernel: persistent MXFP8 or BF16 GEMM whose tiles are pushed to their owners, who add and store.

Contract: out[rank] [L, N] = bf16(sum over ranks, in rank order, of A_p · W_p^T restricted to the rank's
rows); remote partials rounded once to BF16, sums in FP32, rows past M as zeros. One launch per rank and
call; the epoch comes from and goes back to device memory, so launches replay in graphs. The exchange is that
of the SM90 kernel, word for word, so is the order of tiles; see there for what an aborted call does.

With `Strategy.MULTICAST` owners read sums through NVLink multicast instead (`device.pull`): every partial,
the owner's too, is rounded once to BF16, and the order of the sum is the switch's. The same kernel then
serves an all-reduce, whose output is the whole [M, N], with the same bits on every rank.

A pair decides as one whether it halts: CTA 0's word counts for both. Two CTAs that read the abort word
themselves could disagree, and one would wait for the other's half of a stage for ever.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream
from dsv4_symm_mem.device.exchange import (
    EXAMPLE_ARGUMENTS,
    Exchange,
    ExchangeArguments,
    count_in,
    is_aborted,
    leave,
    report_abort,
)
from dsv4_symm_mem.device.forward import run_forwarder, staging_of
from dsv4_symm_mem.device.order import TileOrder, select
from dsv4_symm_mem.device.roles import PUBLICATIONS, run_publisher
from dsv4_symm_mem.protocol.layout import BANKS
from dsv4_symm_mem.protocol.slots import BOUNCES, STAGED_TILES

from dsv4_gemm_rs.kernels.overlap import prefetch_lines, wait_for_inputs
from dsv4_gemm_rs.kernels.sm100.config import ATOM_BYTES, EPILOGUE_WARPS, PIECES, KernelConfig
from dsv4_gemm_rs.kernels.sm100.mainloop import Operands, Ring, smem_layouts, tma_operands
from dsv4_gemm_rs.kernels.sm100.pair import announce_start, leaders_word, meet, wait_for_start
from dsv4_gemm_rs.kernels.sm100.peers import Pieces, tma_slots
from dsv4_gemm_rs.kernels.sm100.peers import smem_layout as piece_layout
from dsv4_gemm_rs.kernels.sm100.roles import (
    FORWARDER,
    MULTIPLIER,
    OPERANDS,
    PEERS,
    SCALES,
    TIDIER,
    FusedCall,
    PulledFusedCall,
    PushedFusedCall,
    poison_output,
    run_epilogue,
    run_loader,
    run_multiplier,
    run_peer_loader,
    run_readers,
    run_scale_loader,
    zero_rows,
)
from dsv4_gemm_rs.kernels.sm100.tcgen05 import allocate, deallocate, fence_after, fence_before


def example_arguments() -> tuple[Any, ...]:
    """Arguments to compile with, in the order of `GemmReduceScatter.__call__`."""
    operands = (*[Int64(0)] * 8, *[Int32(128)] * 3)
    places = (Int64(0), Int64(0), Int32(0), Int32(0))
    return (*operands, *EXAMPLE_ARGUMENTS, *places, Int32(1), Int32(1), Int32(1), make_fake_stream())


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
        a_scale: Int64,
        w_scale: Int64,
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
        multicast: Int64,
        gathered: Int32,
        early: Int32,
        group_rows: Int32,
        lag: Int32,
        grid: Int32,
        stream: Any,
    ) -> None:
        """Launch on `stream`.

        Args:
            a_address: Address of A [m, k], E4M3 or BF16, a multiple of 16.
            a_stride: Its row stride in elements, a multiple of 16 bytes.
            w_address: Address of W [n, k], likewise.
            w_stride: Its row stride, likewise.
            a_scale: Address of A's E8M0 scales, swizzled 128x4 (`quantize.layout`), a multiple of 16; unused
                with BF16, as the next.
            w_scale: Address of W's.
            out_address: Address of the output [ceil(m / P), n] BF16, [m, n] of an all-reduce, a multiple of
                16.
            out_stride: Its row stride in elements, a multiple of 8.
            m: Rows of A, may be 0.
            n: Rows of W, a multiple of 64.
            k: Summed length: with MXFP8 a multiple of 128, with BF16 of 8; at least that.
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
            staging: Address, a multiple of 128, of `config.staging_bytes` for each CTA, in this GPU's memory;
                unused if P is 1, and where sums are read through multicast.
            multicast: Multicast address of the block; unused if P is 1, and where tiles are pushed, as the
                next.
            gathered: 1 for an all-reduce, 0 for a reduce-scatter. 0 if P is 1.
            early: 1 to begin while the kernel before still runs (`kernels.overlap`), else 0.
            group_rows: See `TileOrder`.
            lag: See `TileOrder`.
            grid: CTAs, all resident at once; a multiple of the cluster.
            stream: CUDA stream.
        """
        config = self.config
        a_layout, w_layout = smem_layouts(config)
        pieces_layout = piece_layout()
        operands = tma_operands(config, a_address, a_stride, w_address, w_stride, m, n, k, a_layout, w_layout)
        slots_atom, slots_tensor = None, None
        if cutlass.const_expr(config.pushes):
            slots = Int64(BANKS) * Int64(world_size - 1) * slot_bytes
            slots_atom, slots_tensor = tma_slots(own_base + slots_offset, slots, pieces_layout)
        stages, barriers = config.stages, config.accumulator_barriers
        buffers = STAGED_TILES if config.pushes else PUBLICATIONS
        # Arrays have at least an element, also where nobody uses it.
        pieces_bytes, bounce_bytes = max(config.piece_bytes, 1), max(config.bounce_bytes, 1)

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            finished: cute.struct.MemRange[Int64, barriers]
            drained: cute.struct.MemRange[Int64, barriers]
            stored: cute.struct.MemRange[Int64, buffers]
            published: cute.struct.MemRange[Int64, buffers]
            loaded: cute.struct.MemRange[Int64, BOUNCES]
            piece_full: cute.struct.MemRange[Int64, PIECES]
            piece_empty: cute.struct.MemRange[Int64, PIECES]
            halted: Int32
            aborted: Int32
            columns: Int32
            a: cute.struct.Align[cute.struct.MemRange[Uint8, cute.cosize(a_layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[Uint8, cute.cosize(w_layout)], 1024]
            pieces: cute.struct.Align[cute.struct.MemRange[Uint8, pieces_bytes], 1024]
            bounce: cute.struct.Align[cute.struct.MemRange[Uint8, bounce_bytes], 128]
            scales: cute.struct.Align[cute.struct.MemRange[Uint8, stages * config.scale_stage_bytes], 128]

        self.storage = Storage
        self.kernel(
            operands.a_atom,
            operands.a,
            operands.w_atom,
            operands.w,
            slots_atom,
            slots_tensor,
            a_layout,
            w_layout,
            pieces_layout,
            a_scale,
            w_scale,
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
            multicast,
            gathered,
            w_address,
            w_stride,
            early,
            group_rows,
            lag,
        ).launch(
            grid=(grid, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=early,
        )

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        a_tensor: cute.Tensor,
        w_atom: cute.CopyAtom,
        w_tensor: cute.Tensor,
        slots_atom: cute.CopyAtom | None,
        slots_tensor: cute.Tensor | None,
        a_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
        pieces_layout: cute.ComposedLayout,
        a_scale: Int64,
        w_scale: Int64,
        out_address: Int64,
        out_stride: Int64,
        m: Int32,
        n: Int32,
        k: Int32,
        arguments: ExchangeArguments,
        staging: Int64,
        multicast: Int64,
        gathered: Int32,
        w_address: Int64,
        w_stride: Int64,
        early: Int32,
        group_rows: Int32,
        lag: Int32,
    ) -> None:
        """One CTA; see the module for its warps."""
        config = self.config
        announce_start(config)
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()

        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        world_size = arguments.world_size
        order = TileOrder(
            m, n, world_size, arguments.rank, group_rows, lag, config.tile_m, config.tile_n, config.cluster
        )
        row_in_cluster = block % config.cluster
        leads = row_in_cluster == 0
        halted_word, columns_word = storage.halted.ptr, storage.columns.ptr

        if warp == OPERANDS:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(w_atom)
        if cutlass.const_expr(config.pushes):  # noqa: SIM102 - decided while tracing, apart from what is not
            if warp == PEERS:
                cpasync.prefetch_descriptor(slots_atom)
        if thread == 0:
            for stage in cutlass.range_constexpr(config.stages):
                # The bytes' expectation, and each CTA's scales.
                producers = cutlass.const_expr(1 + (config.cluster if config.scaled else 0))
                cute.arch.mbarrier_init(storage.full.data_ptr() + stage, producers)
                cute.arch.mbarrier_init(storage.empty.data_ptr() + stage, 1)
            for i in cutlass.range_constexpr(config.accumulator_barriers):
                cute.arch.mbarrier_init(storage.finished.data_ptr() + i, 1)
                cute.arch.mbarrier_init(storage.drained.data_ptr() + i, EPILOGUE_WARPS * config.cluster)
            buffers = cutlass.const_expr(STAGED_TILES if config.pushes else PUBLICATIONS)
            for i in cutlass.range_constexpr(buffers):
                cute.arch.mbarrier_init(storage.stored.data_ptr() + i, EPILOGUE_WARPS)
                cute.arch.mbarrier_init(storage.published.data_ptr() + i, 1)
            for i in cutlass.range_constexpr(BOUNCES if config.pushes else 0):
                cute.arch.mbarrier_init(storage.loaded.data_ptr() + i, 1)
            for i in cutlass.range_constexpr(PIECES if config.pushes else 0):
                cute.arch.mbarrier_init(storage.piece_full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(storage.piece_empty.data_ptr() + i, EPILOGUE_WARPS)
        cute.arch.mbarrier_init_fence()
        wait_for_start(config)
        if warp == MULTIPLIER:
            allocate(config, columns_word)
        if warp == TIDIER and early != 0:
            row_bytes = k * config.element_bytes
            prefetch_lines(
                w_address, w_stride * config.element_bytes, row_bytes, n, Int32(block), Int32(blocks)
            )
            if cutlass.const_expr(config.scaled):
                atoms_bytes = (k + 127) // 128 * ATOM_BYTES
                prefetch_lines(
                    w_scale, Int64(atoms_bytes), atoms_bytes, (n + 127) // 128, Int32(block), Int32(blocks)
                )
        wait_for_inputs()
        exchange = Exchange(arguments)
        if thread == 0:
            word = Int32(0)
            if leads and is_aborted(exchange):
                word = Int32(1)
                report_abort(exchange)
            cute.arch.store(halted_word, word)
            # A halted CTA counts as aborted: others may have started before the abort and store tiles yet.
            cute.arch.store(storage.aborted.ptr, word)
        fence_before()
        meet(config)
        fence_after()
        halted = leaders_word(config, halted_word) != 0
        ring = Ring(
            full=storage.full.data_ptr(),
            empty=storage.empty.data_ptr(),
            finished=storage.finished.data_ptr(),
            drained=storage.drained.data_ptr(),
            a=storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner),
            w=storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner),
            a_address=Int32(storage.a.data_ptr().toint()),
            w_address=Int32(storage.w.data_ptr().toint()),
            scale_address=Int32(storage.scales.data_ptr().toint()),
            columns=cute.arch.load(columns_word, Int32),
        )
        shared = dict(
            exchange=exchange,
            order=order,
            out=out_address,
            out_stride=out_stride,
            n=n,
            worker=block // config.cluster,
            workers=blocks // config.cluster,
            row_in_cluster=row_in_cluster,
            stored=storage.stored.data_ptr(),
            published=storage.published.data_ptr(),
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            config=config,
            ring=ring,
            operands=Operands(a_atom, a_tensor, w_atom, w_tensor),
            a_scale=a_scale,
            w_scale=w_scale,
            k_tiles=(k + config.stage_k - 1) // config.stage_k,
            leads=leads,
            aborted=storage.aborted.ptr,
        )
        call: FusedCall
        if cutlass.const_expr(config.pushes):
            call = PushedFusedCall(
                **shared,
                pacing=staging,
                staging=staging_of(staging, block, config.staging_bytes),
                bounce=storage.bounce.data_ptr(),
                loaded=storage.loaded.data_ptr(),
                pieces=Pieces(
                    atom=slots_atom,
                    slots=slots_tensor,
                    shared=storage.pieces.get_tensor(pieces_layout.outer, swizzle=pieces_layout.inner),
                    address=Int32(storage.pieces.data_ptr().toint()),
                    full=storage.piece_full.data_ptr(),
                    empty=storage.piece_empty.data_ptr(),
                ),
            )
        else:
            call = PulledFusedCall(**shared, multicast=multicast, gathered=gathered != 0)

        if warp < EPILOGUE_WARPS:
            if halted:
                poison_output(call, block * EPILOGUE_WARPS + warp, blocks * EPILOGUE_WARPS)
            else:
                run_epilogue(call, thread)
        if warp == OPERANDS and not halted:
            run_loader(call)
        if cutlass.const_expr(config.scaled) and warp == SCALES and not halted:
            run_scale_loader(call)
        if warp == MULTIPLIER and leads and not halted:
            run_multiplier(call)
        if cutlass.const_expr(config.pushes):
            if warp == PEERS and not halted:
                run_peer_loader(call)
            if warp == FORWARDER and not halted:
                run_forwarder(call)
        else:
            if warp == FORWARDER and not halted:
                run_publisher(call, multicast=True)
            if (warp == PEERS or warp > TIDIER) and not halted:
                reader = select(warp == PEERS, 0, warp - TIDIER)
                run_readers(call, reader, Int32(block), Int32(blocks))
        if warp == TIDIER:
            if thread == TIDIER * 32:
                count_in(exchange, blocks)
            zero_rows(call, Int32(block), Int32(blocks))
        # A CTA's shared and tensor memory must outlive the other's last arrival and last MMA in it.
        fence_before()
        meet(config)
        if warp == MULTIPLIER:
            fence_after()
            deallocate(config, ring.columns)
        if warp == 0 and world_size > 1:
            aborted = cute.arch.load(storage.aborted.ptr, Int32) != 0
            if leave(exchange, blocks, aborted):
                poison_output(call, Int32(0), Int32(1))
