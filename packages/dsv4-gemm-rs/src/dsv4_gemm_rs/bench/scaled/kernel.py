# SPDX-License-Identifier: Apache-2.0
"""out = x · Wᵀ in E4M3 on SM90: sums of 32 products by the tensor cores, promoted to FP32 by the others.

Contract: out [M, N] BF16, x [M, K] and W [N, K] E4M3 with E8M0 scales, x's for 1 x 32 elements, W's for
32 x 32, as DeepSeek-V4.1 has them. One rank, no exchange: this is to measure by.

A math warpgroup has 64 rows of a tile of 128. For each 32 of K and `piece_n` columns it multiplies into an
accumulator of its own (wgmma m64nXk32), then adds that, times the row's and the column block's scale, to the
tile's FP32 accumulators. While one warpgroup does that the other's product runs; with `temps` two a
warpgroup's own next product runs beside it as well. Scales travel with the operands: x's swizzled 128x4, an
atom for a stage, W's as floats in the order of `packing`.

Trap: a stage's scales are read with ordinary loads, and the copy that refills the stage is the async proxy's.
Each lane fences before its warp hands the stage back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Constexpr, Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90
from dsv4_symm_mem.compiled import Kernel, compiled
from dsv4_symm_mem.device.bulk import bulk_load
from dsv4_symm_mem.device.fences import fence_proxy_async_shared
from dsv4_symm_mem.device.roles import advance

from dsv4_gemm_rs.bench.scaled.config import (
    GROUP_ROWS,
    STEPS,
    TILE_K,
    TILE_M,
    ScaledConfig,
)
from dsv4_gemm_rs.kernels.sm90.config import MATH_GROUPS, THREADS_PER_GROUP, WARPS_PER_GROUP
from dsv4_gemm_rs.kernels.sm90.epilogue import accumulator_index, store_rows
from dsv4_gemm_rs.quantize.layout import ATOM_BYTES
from dsv4_gemm_rs.quantize.rule import BLOCK

K_MAJOR = cute.nvgpu.OperandMajorMode.K
EXPONENT = 0x7F800000


@dataclass(frozen=True)
class Stages:
    """The ring in shared memory.

    Attributes:
        full, empty: An mbarrier for each stage.
        x, w: Staged operands.
        x_scales, w_scales: Shared-memory addresses of the first stage's scales.
    """

    full: cute.Pointer
    empty: cute.Pointer
    x: cute.Tensor
    w: cute.Tensor
    x_scales: Int32
    w_scales: Int32


@dataclass(frozen=True)
class Sources:
    """What the ring is filled from: copy atoms and coordinate tensors, and addresses of scales."""

    x_atom: cute.CopyAtom
    x: cute.Tensor
    w_atom: cute.CopyAtom
    w: cute.Tensor
    x_scales: Int64
    w_scales: Int64


def scaled_product_kernel(config: ScaledConfig) -> Kernel:
    """The compiled product; its arguments are those of `ScaledProduct.__call__`."""

    def build(options: str) -> Any:
        numbers = (*[Int64(0)] * 5, *[Int32(128)] * 4)
        return cute.compile(ScaledProduct(config), *numbers, make_fake_stream(), options=options)

    return compiled(("scaled_product", config), build, "dsv4_gemm_rs")


class ScaledProduct:
    """The kernel for one `ScaledConfig`."""

    def __init__(self, config: ScaledConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        x_address: Int64,
        x_scales: Int64,
        w_address: Int64,
        w_scales: Int64,
        out_address: Int64,
        m: Int32,
        n: Int32,
        k: Int32,
        grid: Int32,
        stream: Any,
    ) -> None:
        """Launch on `stream`.

        Args:
            x_address: Address of x [m, k], contiguous, a multiple of 16.
            x_scales: Address of its scales, swizzled 128x4.
            w_address: Address of W [n, k], contiguous, a multiple of 16.
            w_scales: Address of the result of `packing.packed_scales`.
            out_address: Address of the output [m, n], contiguous, a multiple of 16.
            m: Rows of x, at least 1.
            n: Rows of W, a multiple of 32.
            k: Summed length, a multiple of 128.
            grid: CTAs, at most one a multiprocessor.
            stream: CUDA stream.
        """
        config = self.config
        tiler = (TILE_M, config.tile_n, TILE_K)
        x_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tiler, Float8E4M3FN, config.stages)
        w_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tiler, Float8E4M3FN, config.stages)
        stride = cute.assume(Int64(k), 16)
        x = cute.make_tensor(
            cute.make_ptr(Float8E4M3FN, x_address, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((m, k), stride=(stride, 1)),
        )
        # The rows of 32 columns are permuted as in the BF16 kernel, see its main loop.
        w = cute.make_tensor(
            cute.make_ptr(Float8E4M3FN, w_address, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout(
                ((2, 4, 4, n // 32), k), stride=((stride, 8 * stride, 2 * stride, 32 * stride), 1)
            ),
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        x_atom, x_tensor = cpasync.make_tiled_tma_atom(
            load, x, cute.slice_(x_layout, (None, None, 0)), (TILE_M, TILE_K)
        )
        w_atom, w_tensor = cpasync.make_tiled_tma_atom(
            load, w, cute.slice_(w_layout, (None, None, 0)), (config.tile_n, TILE_K)
        )
        mma = sm90.make_trivial_tiled_mma(
            *(Float8E4M3FN, Float8E4M3FN, K_MAJOR, K_MAJOR, Float32),
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(GROUP_ROWS, config.piece_n),
        )
        stages = config.stages

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            x_scales: cute.struct.Align[cute.struct.MemRange[Uint8, stages * ATOM_BYTES], 128]
            w_scales: cute.struct.Align[cute.struct.MemRange[Uint8, stages * config.w_scale_bytes], 128]
            x: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(x_layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(w_layout)], 1024]

        self.storage = Storage
        self.kernel(
            *(x_atom, x_tensor, w_atom, w_tensor, x_scales, w_scales, mma, x_layout, w_layout),
            *(out_address, m, n, k),
        ).launch(grid=(grid, 1, 1), block=(config.rows.threads, 1, 1), min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        x_atom: cute.CopyAtom,
        x_tensor: cute.Tensor,
        w_atom: cute.CopyAtom,
        w_tensor: cute.Tensor,
        x_scales: Int64,
        w_scales: Int64,
        mma: cute.TiledMma,
        x_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
        out: Int64,
        m: Int32,
        n: Int32,
        k: Int32,
    ) -> None:
        """One CTA: two math warpgroups, then a warp that loads."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        worker, _, _ = cute.arch.block_idx()
        workers, _, _ = cute.arch.grid_dim()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        ring = Stages(
            full=storage.full.data_ptr(),
            empty=storage.empty.data_ptr(),
            x=storage.x.get_tensor(x_layout.outer, swizzle=x_layout.inner),
            w=storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner),
            x_scales=Int32(storage.x_scales.data_ptr().toint()),
            w_scales=Int32(storage.w_scales.data_ptr().toint()),
        )
        if thread == 0:
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(ring.full + stage, 1)
                cute.arch.mbarrier_init(ring.empty + stage, MATH_GROUPS * WARPS_PER_GROUP)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        row_tiles = (m + TILE_M - 1) // TILE_M
        column_tiles = (n + config.tile_n - 1) // config.tile_n
        k_tiles = k // TILE_K
        if warp >= MATH_GROUPS * WARPS_PER_GROUP:
            cute.arch.warpgroup_reg_dealloc(config.rows.service_registers)
            if warp == MATH_GROUPS * WARPS_PER_GROUP:
                sources = Sources(x_atom, x_tensor, w_atom, w_tensor, x_scales, w_scales)
                stage, phase = Int32(0), Int32(0)
                tile = Int32(worker)
                while tile < row_tiles * column_tiles:
                    row_tile, column_tile = tile_at(tile, row_tiles, column_tiles)
                    stage, phase = load_tile(
                        config, ring, sources, row_tile, column_tile, column_tiles, k_tiles, stage, phase
                    )
                    tile += workers
        else:
            cute.arch.warpgroup_reg_alloc(config.rows.math_registers)
            group = cute.arch.make_warp_uniform(thread // THREADS_PER_GROUP)
            stage, phase = Int32(0), Int32(0)
            tile = Int32(worker)
            accumulators = cute.make_rmem_tensor(GROUP_ROWS * config.tile_n // THREADS_PER_GROUP, Float32)
            while tile < row_tiles * column_tiles:
                row_tile, column_tile = tile_at(tile, row_tiles, column_tiles)
                stage, phase = multiply(
                    config, ring, mma, accumulators, group, thread % THREADS_PER_GROUP, k_tiles, stage, phase
                )
                store_rows(
                    config.rows,
                    accumulators,
                    out,
                    Int64(n),
                    thread % THREADS_PER_GROUP,
                    row_tile * TILE_M + group * GROUP_ROWS,
                    column_tile * config.tile_n,
                    m,
                    m,
                    n,
                )
                tile += workers


@cute.jit
def tile_at(tile: Int32, row_tiles: Int32, column_tiles: Int32) -> tuple[Int32, Int32]:
    """Row and column of a tile: bands of eight rows, column by column, so that waves share operands in L2."""
    band = tile // (8 * column_tiles)
    inside = tile - band * 8 * column_tiles
    rows = cutlass.min(row_tiles - band * 8, 8)
    return band * 8 + inside % rows, inside // rows


@cute.jit
def load_tile(
    config: Constexpr[ScaledConfig],
    ring: Constexpr[Stages],
    sources: Constexpr[Sources],
    row_tile: Int32,
    column_tile: Int32,
    column_tiles: Int32,
    k_tiles: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    """Issue one tile's loads, as the loading warp; the ring's next place."""
    x_tiles = cute.local_tile(sources.x, (TILE_M, TILE_K), (row_tile, None))
    w_tiles = cute.local_tile(sources.w, (config.tile_n, TILE_K), (column_tile, None))
    x_shared, x_global = cpasync.tma_partition(
        sources.x_atom,
        0,
        cute.make_layout(1),
        cute.group_modes(ring.x, 0, 2),
        cute.group_modes(x_tiles, 0, 2),
    )
    w_shared, w_global = cpasync.tma_partition(
        sources.w_atom,
        0,
        cute.make_layout(1),
        cute.group_modes(ring.w, 0, 2),
        cute.group_modes(w_tiles, 0, 2),
    )
    x_scales = sources.x_scales + Int64(row_tile * k_tiles) * ATOM_BYTES
    w_scales = sources.w_scales + Int64(column_tile) * config.w_scale_bytes
    for k_tile in cutlass.range(k_tiles, unroll=1):
        full = ring.full + stage
        cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, config.stage_bytes)
            arrival = Int32(full.toint())
            bulk_load(
                ring.x_scales + stage * ATOM_BYTES,
                x_scales + Int64(k_tile) * ATOM_BYTES,
                Int32(ATOM_BYTES),
                arrival,
            )
            bulk_load(
                ring.w_scales + stage * config.w_scale_bytes,
                w_scales + Int64(k_tile * column_tiles) * config.w_scale_bytes,
                Int32(config.w_scale_bytes),
                arrival,
            )
        cute.copy(sources.x_atom, x_global[(None, k_tile)], x_shared[(None, stage)], tma_bar_ptr=full)
        cute.copy(sources.w_atom, w_global[(None, k_tile)], w_shared[(None, stage)], tma_bar_ptr=full)
        stage, phase = advance(stage, phase, config.stages)
    return stage, phase


@cute.jit
def multiply(
    config: Constexpr[ScaledConfig],
    ring: Constexpr[Stages],
    mma: cute.TiledMma,
    accumulators: cute.Tensor,
    group: Int32,
    member: Int32,
    k_tiles: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    """A warpgroup's 64 rows of one tile into `accumulators`, overwriting them; the ring's next place."""
    slice_ = mma.get_slice(0)
    x_rows = cute.local_tile(ring.x, (GROUP_ROWS, TILE_K), (group, 0, None))
    x_fragments = mma.make_fragment_A(slice_.partition_A(x_rows))
    w_fragments = [
        mma.make_fragment_B(
            slice_.partition_B(cute.local_tile(ring.w, (config.piece_n, TILE_K), (piece, 0, None)))
        )
        for piece in range(config.pieces)
    ]
    shape = mma.partition_shape_C((GROUP_ROWS, config.piece_n))
    products = [cute.make_rmem_tensor(shape, Float32) for _ in range(config.temps)]
    pieces = [(step, piece) for step in range(STEPS) for piece in range(config.pieces)]
    row = group * GROUP_ROWS + member // 32 * 16 + member % 32 // 4
    line = row % 32 * 16 + row // 32 * 4
    mma.set(warpgroup.Field.ACCUMULATE, False)
    accumulators.fill(0.0)
    for _ in cutlass.range(k_tiles, unroll=1):
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        # The atom of scales: rows r and r + 8 of a quad lie 128 bytes apart, four steps in a word each.
        x_scales = ring.x_scales + stage * ATOM_BYTES + line
        words = [load_shared_4(x_scales), load_shared_4(x_scales + 128)]
        w_scales = ring.w_scales + stage * config.w_scale_bytes
        for index in cutlass.range_constexpr(len(pieces)):
            step, piece = pieces[index]
            product = products[index % config.temps]
            warpgroup.fence()
            cute.gemm(
                mma,
                product,
                x_fragments[(None, None, step, stage)],
                w_fragments[piece][(None, None, step, stage)],
                product,
            )
            warpgroup.commit_group()
            if cutlass.const_expr(index >= config.temps - 1):
                warpgroup.wait_group(config.temps - 1)
                done = cutlass.const_expr(index - config.temps + 1)
                promote(config, accumulators, products[done % config.temps], words, w_scales, *pieces[done])
        for late in cutlass.range_constexpr(config.temps - 1):
            warpgroup.wait_group(config.temps - 2 - late)
            done = cutlass.const_expr(len(pieces) - config.temps + 1 + late)
            promote(config, accumulators, products[done % config.temps], words, w_scales, *pieces[done])
        fence_proxy_async_shared()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(ring.empty + stage)
        stage, phase = advance(stage, phase, config.stages)
    return stage, phase


def promote(
    config: ScaledConfig,
    accumulators: cute.Tensor,
    product: cute.Tensor,
    words: list[Uint32],
    w_scales: Int32,
    step: int,
    piece: int,
) -> None:
    """Add a piece's sums, times their scales, to the accumulators."""
    blocks = config.piece_n // BLOCK
    first = step * config.column_blocks + piece * blocks
    factors = [load_shared_4(w_scales + (first + block) * 4).bitcast(Float32) for block in range(blocks)]
    for half in range(2):
        row_factor = exponent(words[half], step)
        for block in range(blocks):
            factor = row_factor * factors[block]
            for element in range(8):
                held = accumulator_index(config.rows, 0, block, half, element)
                kept = accumulator_index(config.rows, 0, piece * blocks + block, half, element)
                accumulators[kept] = accumulators[kept] + product[held] * factor


def exponent(word: Uint32, step: int) -> Float32:
    """Byte `step` of four E8M0 bytes as a float: 2^-127 becomes zero, a NaN infinite."""
    shifted = word << Uint32(23 - 8 * step) if step < 3 else word >> Uint32(1)
    return (shifted & Uint32(EXPONENT)).bitcast(Float32)


def load_shared_4(address: Int32) -> Uint32:
    """A word of shared memory."""
    pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]
