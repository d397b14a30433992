# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernel for weights that stay in FP8: the kernel of `sm90.kernel` with its operands swapped.

Contract: as `sm90.kernel`, with W packed (`dsv4_gemm_rs.packing`) and K a multiple of 128. Slots, flags,
deadlines and what becomes of an aborted call are the same. A CTA's warps are two math warpgroups, which share
a tile, and a service warpgroup: one warp loads (and waits for the peers of an own tile, whose chunks come
through the same ring), one forwards staged tiles (`device.forward`), two zero the rows that no tile covers.
Main loop and epilogue are `swapped_mainloop` and `swapped_epilogue`. A chunk of a peer's tile is some tokens
of every math warp's 32 columns, a bulk copy for each, so all of them add at once.

Accumulators leave a math thread few registers, and the service warps have few. The numbers of the tile order
are therefore kept in shared memory and read anew for each tile; otherwise they are spilled.

Products are those of the BF16 copy of the same weight, only the order of their FP32 sum differs.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import BFloat16, Boolean, Constexpr, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.cutlass_dsl import dsl_user_op
from dsv4_symm_mem.device.bulk import bulk_load, bulk_wait
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
from dsv4_symm_mem.device.roles import advance, poison_output, wait_for_own_tile, zero_uncovered_rows
from dsv4_symm_mem.protocol.slots import BLOCK_COLUMNS, BOUNCES, STAGED_TILES

from dsv4_gemm_rs.kernels.sm90.config import THREADS_PER_GROUP, TILE_K
from dsv4_gemm_rs.kernels.sm90.swapped_config import UNITS, SwappedConfig
from dsv4_gemm_rs.kernels.sm90.swapped_epilogue import (
    Leaving,
    add_peers,
    leaving_layout,
    stage_tile,
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
from dsv4_gemm_rs.packing import GROUP_FEATURES


@dataclass(frozen=True)
class SwappedCall(StagedCall):
    """A call of the kernel.

    Attributes:
        config: The tile configuration.
        ring, operands: Where tiles go and come from.
        k_tiles: Steps of K, an even number.
        split: Not 0 where the weight's factors lack 2^120.
        leaving: How own tiles leave.
        kept: Shared-memory address of the order's numbers, see `recall`.
        aborted: Shared-memory word, 1 from the loader's abort on.
    """

    config: SwappedConfig
    ring: SwappedRing
    operands: SwappedOperands
    k_tiles: Int32
    split: Int32
    leaving: Leaving
    kept: Int32
    aborted: cute.Pointer


ORDER_FIELDS = (
    "m",
    "rank",
    "group_rows",
    "lag",
    "shard",
    "last_owner",
    "full",
    "last",
    "own_rows",
    "own",
    "covered_rows",
    "columns",
    "peers_full",
    "last_is_peer",
    "after",
    "first",
    "ahead",
    "positions",
)
"""Numbers of a `TileOrder`; its other attributes are constants."""


@dsl_user_op
def _read_again(address: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Read a word of shared memory, each time that this is executed (PTX ISA, "ld.volatile")."""
    word: Int32 = cute.arch.inline_ptx(
        "ld.volatile.shared.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )
    return word


def recall(call: SwappedCall) -> TileOrder:
    """The call's tile order, read from shared memory."""
    order = copy(call.order)
    for i, name in enumerate(ORDER_FIELDS):
        setattr(order, name, _read_again(call.kept + 4 * i))
    return order


def example_arguments() -> tuple[Any, ...]:
    """Arguments to compile with, in the order of `SwappedGemmReduceScatter.__call__`."""
    operands = (*[Int64(0)] * 3, Int32(0), *[Int64(0)] * 2, *[Int32(128)] * 3)
    return (*operands, *EXAMPLE_ARGUMENTS, Int64(0), Int32(1), Int32(1), Int32(1), make_fake_stream())


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
            staging: `LaunchExchange.staging`, with `config.staging_bytes` for each CTA; unused if P is 1.
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
            stored: cute.struct.MemRange[Int64, STAGED_TILES]
            published: cute.struct.MemRange[Int64, STAGED_TILES]
            loaded: cute.struct.MemRange[Int64, BOUNCES]
            kept: cute.struct.MemRange[Int32, len(ORDER_FIELDS)]
            halted: Int32
            aborted: Int32
            x: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[Uint8, stages * config.w_stage_bytes], 128]
            bounce: cute.struct.Align[cute.struct.MemRange[Uint8, config.bounce_bytes], 128]
            leaving: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(out_layout)], 1024]

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
            group_rows,
            lag,
        ).launch(
            grid=(grid, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(1, 1, 1),
            min_blocks_per_mp=1,
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
            x_address=Int32(storage.x.data_ptr().toint()),
            w_address=Int32(storage.w.data_ptr().toint()),
        )
        halted_word = storage.halted.ptr
        aborted_word = storage.aborted.ptr
        stored, published = storage.stored.data_ptr(), storage.published.data_ptr()
        exchange = Exchange(arguments)
        order = TileOrder(m, n, world_size, rank, group_rows, lag, config.tile_m, config.tile_n, 1)
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
            staging=staging_of(staging, block, config.staging_bytes),
            bounce=storage.bounce.data_ptr(),
            loaded=storage.loaded.data_ptr(),
            config=config,
            ring=ring,
            operands=SwappedOperands(x_atom, x_tensor, w_address, (n + GROUP_FEATURES - 1) // GROUP_FEATURES),
            k_tiles=k // TILE_K,
            split=split,
            leaving=Leaving(
                out_atom,
                out_tensor,
                storage.leaving.get_tensor(out_layout.outer, swizzle=out_layout.inner),
                Int32(storage.leaving.data_ptr().toint()) + thread // 32 * (config.leaving_bytes // UNITS),
            ),
            kept=Int32(storage.kept.data_ptr().toint()),
            aborted=aborted_word,
        )

        if warp == UNITS:
            cpasync.prefetch_descriptor(x_atom)
            cpasync.prefetch_descriptor(out_atom)
        if thread == 0:
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(ring.full + stage, 1)
                cute.arch.mbarrier_init(ring.empty + stage, UNITS)
            for i in cutlass.range_constexpr(STAGED_TILES):
                cute.arch.mbarrier_init(stored + i, UNITS)
                cute.arch.mbarrier_init(published + i, 1)
            for i in cutlass.range_constexpr(BOUNCES):
                cute.arch.mbarrier_init(call.loaded + i, 1)
            for i in cutlass.range_constexpr(len(ORDER_FIELDS)):
                cute.arch.store(storage.kept.data_ptr() + i, Int32(getattr(order, ORDER_FIELDS[i])))
            enter(exchange, halted_word, aborted_word)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        halted = cute.arch.load(halted_word, Int32) != 0

        if warp >= UNITS:
            cute.arch.warpgroup_reg_dealloc(config.service_registers)
            if warp == UNITS and not halted:
                run_loader(call)
            if warp == UNITS + 1 and not halted:
                run_forwarder(call)
            if warp > UNITS + 1:
                if thread == (UNITS + 2) * 32:
                    count_in(exchange, blocks)
                zero_uncovered_rows(call, block * 2 + warp - UNITS - 2, blocks * 2)
        if warp < UNITS:
            cute.arch.warpgroup_reg_alloc(config.math_registers)
            if halted:
                poison_output(call, block * UNITS + warp, blocks * UNITS)
            else:
                run_math(call, mma, thread)
        cute.arch.sync_threads()
        if warp == 0 and world_size > 1:
            aborted = cute.arch.load(aborted_word, Int32) != 0
            if leave(exchange, blocks, aborted):
                poison_output(call, Int32(0), Int32(1))


@cute.jit
def run_loader(call: Constexpr[SwappedCall]) -> None:
    """The loading warp: fills the ring for every tile, waits for peers before an own tile's chunks."""
    config, ring, exchange, order = call.config, call.ring, call.exchange, call.order
    stage, phase, step = Int32(0), Int32(0), Int32(0)
    aborted = Boolean(False)
    deadline = Int64(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row_tile, column, step = place(order, position, step)
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
            if exchange.world_size > 1 and not aborted:
                aborted, deadline = wait_for_own_tile(exchange, tile, deadline, call.aborted)
            fence_proxy_async()
            for chunk in cutlass.range(config.chunks, unroll=1):
                for source in cutlass.range(exchange.world_size, unroll=1):
                    if source != exchange.rank:
                        cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
                        if not aborted:
                            slot = slot_address(exchange, exchange.own_base, exchange.rank, source)
                            load_chunk(config, ring, slot + Int64(tile) * config.tile_bytes, chunk, stage)
                        else:
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive(ring.full + stage)
                        stage, phase = advance(stage, phase, config.stages)
        position += call.workers
    if call.worker == 0 and order.own == 0 and exchange.world_size > 1:
        aborted, deadline = wait_for_peers(exchange, exchange.token, deadline)


@cute.jit
def load_chunk(
    config: Constexpr[SwappedConfig],
    ring: Constexpr[SwappedRing],
    tile: Int64,
    chunk: Int32,
    stage: Int32,
) -> None:
    """Bring chunk `chunk` of the slot's tile at that address into `stage`: a copy for each math warp.

    One lane issues them in a loop that is not unrolled: the loading warp has few registers.
    """
    size = cutlass.const_expr(config.chunk_tokens * BLOCK_COLUMNS * 2)
    across = cutlass.const_expr(config.tile_m * BLOCK_COLUMNS * 2)
    with cute.arch.elect_one():
        barrier = ring.full + stage
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, config.chunk_bytes)
        target = ring.x_address + stage * config.x_stage_bytes
        for group in cutlass.range_constexpr(config.token_groups):
            source = tile + Int64(chunk * size + group * (across // config.token_groups))
            for _ in cutlass.range(UNITS // config.token_groups, unroll=1):
                bulk_load(target, source, Int32(size), Int32(barrier.toint()))
                target += size
                source += across


@cute.jit
def run_math(call: Constexpr[SwappedCall], mma: cute.TiledMma, thread: Int32) -> None:
    """A math warpgroup: multiply, then stage a remote tile, or add the peers and store an own one."""
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
    slot, slot_phase = Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < recall(call).positions:
        owner, row_tile, column, step = place(recall(call), position, step)
        first_row = row_tile * config.tile_m
        if call.split != 0:
            stage, phase = multiply(
                config, ring, mma, accumulators, x_fragments, thread, call.k_tiles, stage, phase, True
            )
        else:
            stage, phase = multiply(
                config, ring, mma, accumulators, x_fragments, thread, call.k_tiles, stage, phase, False
            )
        order = recall(call)
        if owner == exchange.rank:
            stage, phase = add_peers(
                config, ring, accumulators, thread, exchange.rank, exchange.world_size, stage, phase
            )
            store_rows(
                config,
                call.leaving,
                accumulators,
                thread,
                first_row,
                column * config.tile_n,
                order.own_rows,
            )
        elif row_tile < row_tiles(order, owner):
            cute.arch.mbarrier_wait(call.published + slot, slot_phase ^ 1)
            stage_tile(
                config,
                accumulators,
                call.leaving.address,
                call.staging + Int64(slot) * config.tile_bytes,
                thread,
                rows_of(order, owner) - first_row,
            )
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(call.stored + slot)
            slot, slot_phase = advance(slot, slot_phase, STAGED_TILES)
        position += call.workers
    # Complete before the CTA's end is counted: an aborted call's output is then overwritten.
    bulk_wait(0)
