# SPDX-License-Identifier: Apache-2.0
"""The SM90 main loop: a producer warp fills a ring of shared-memory stages, two warpgroups multiply from it.

Contract: a stage holds an A tile [tile_m, 64] and a W tile [tile_n, 64] of BF16 in the 128-byte swizzle.
`full[s]` completes when the stage's bytes have landed, `empty[s]` when every warp that multiplies from it is
done. The ring never drains between tiles.

The warpgroups take turns tile by tile, so one's epilogue runs beside the other's multiplication. A warpgroup
begins a tile when the other has issued the last step of the tile before (`turn`): the tensor cores then have
work for another step, so nothing idles. The turn also makes the ring's parities unambiguous: who waits for a
stage's use knows that the use before has landed, since the other warpgroup has seen it.

W's rows are permuted by its tensor map: within 32 columns of the output, shared-memory row
e + 2·q + 8·j (e < 2, q, j < 4) holds row e + 2·j + 8·q of W. An MMA accumulator gives lane q of a quad the
columns 8·j + 2·q + e, so with the permutation each lane holds eight neighbouring columns of the output,
sixteen bytes of BF16. The rows cost the copy engine the same in any order. Rejected: exchanging
registers within quads (about 200 instructions a tile), staging through shared memory (64 KiB that the
ring needs), permuting W in memory (a plain BF16 weight would have to be copied).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90
from dsv4_symm_mem.device.roles import advance

from dsv4_gemm_rs.kernels.sm90.config import TILE_K, KernelConfig


@dataclass(frozen=True)
class Ring:
    """The ring of stages in shared memory.

    Attributes:
        full, empty: One mbarrier per stage each.
        turn: One mbarrier per math warpgroup.
        a, w: Staged tensors of A and W in the layouts of `smem_layouts`.
    """

    full: cute.Pointer
    empty: cute.Pointer
    turn: cute.Pointer
    a: cute.Tensor
    w: cute.Tensor


@dataclass(frozen=True)
class Operands:
    """Copy atoms and coordinate tensors that load tiles of A [m, k] and, with permuted rows, of W [n, k]."""

    a_atom: cute.CopyAtom
    a: cute.Tensor
    w_atom: cute.CopyAtom
    w: cute.Tensor


def smem_layouts(config: KernelConfig) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
    """Staged shared-memory layouts of A and W."""
    tiler = (config.tile_m, config.tile_n, TILE_K)
    row_major = LayoutEnum.ROW_MAJOR
    return (
        sm90.make_smem_layout_a(row_major, tiler, BFloat16, config.stages),
        sm90.make_smem_layout_b(row_major, tiler, BFloat16, config.stages),
    )


def tiled_mma(config: KernelConfig) -> cute.TiledMma:
    """BF16 MMA of one warpgroup over the tile, 64 rows at a time, FP32 accumulators."""
    k_major = cute.nvgpu.OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        k_major,
        k_major,
        cutlass.Float32,
        atom_layout_mnk=(1, 1, 1),
        tiler_mn=(64, config.tile_n),
    )


def tma_operands(
    config: KernelConfig,
    a_address: Int64,
    a_stride: Int64,
    w_address: Int64,
    w_stride: Int64,
    m: Int32,
    n: Int32,
    k: Int32,
    a_layout: cute.ComposedLayout,
    w_layout: cute.ComposedLayout,
) -> Operands:
    """The operands of a launch; strides in elements, multiples of 8."""
    a = cute.make_tensor(
        cute.make_ptr(BFloat16, a_address, cute.AddressSpace.gmem, assumed_align=16),
        cute.make_layout((cutlass.max(m, 1), k), stride=(cute.assume(a_stride, 8), 1)),
    )
    w_stride = cute.assume(w_stride, 8)
    w = cute.make_tensor(
        cute.make_ptr(BFloat16, w_address, cute.AddressSpace.gmem, assumed_align=16),
        cute.make_layout(
            ((2, 4, 4, n // 32), k),
            stride=((w_stride, 8 * w_stride, 2 * w_stride, 32 * w_stride), 1),
        ),
    )
    load = cpasync.CopyBulkTensorTileG2SOp()
    a_atom, a_tensor = cpasync.make_tiled_tma_atom(
        load, a, cute.slice_(a_layout, (None, None, 0)), (config.tile_m, TILE_K)
    )
    w_atom, w_tensor = cpasync.make_tiled_tma_atom(
        load, w, cute.slice_(w_layout, (None, None, 0)), (config.tile_n, TILE_K)
    )
    return Operands(a_atom, a_tensor, w_atom, w_tensor)


@cute.jit
def load_tile(
    config: Constexpr[KernelConfig],
    ring: Constexpr[Ring],
    operands: Constexpr[Operands],
    first_row: Int32,
    column_tile: Int32,
    k_tiles: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    """Issue one tile's loads: rows from `first_row` of A, which may lie past its end and then read as zero.

    Executed by the whole producer warp. Returns the ring's next stage and phase.
    """
    a_rows = cute.domain_offset((first_row, 0), operands.a)
    a_tiles = cute.local_tile(a_rows, (config.tile_m, TILE_K), (0, None))
    w_tiles = cute.local_tile(operands.w, (config.tile_n, TILE_K), (column_tile, None))
    a_shared, a_global = cpasync.tma_partition(
        operands.a_atom,
        0,
        cute.make_layout(1),
        cute.group_modes(ring.a, 0, 2),
        cute.group_modes(a_tiles, 0, 2),
    )
    w_shared, w_global = cpasync.tma_partition(
        operands.w_atom,
        0,
        cute.make_layout(1),
        cute.group_modes(ring.w, 0, 2),
        cute.group_modes(w_tiles, 0, 2),
    )
    for k_tile in cutlass.range(k_tiles, unroll=1):
        cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, config.stage_bytes)
        barrier = ring.full + stage
        cute.copy(operands.a_atom, a_global[(None, k_tile)], a_shared[(None, stage)], tma_bar_ptr=barrier)
        cute.copy(operands.w_atom, w_global[(None, k_tile)], w_shared[(None, stage)], tma_bar_ptr=barrier)
        stage, phase = advance(stage, phase, config.stages)
    return stage, phase


def skip(config: KernelConfig, k_tiles: Int32, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The ring's place after a tile that the other warpgroup multiplies."""
    stage += k_tiles
    return stage % config.stages, phase ^ (stage // config.stages & 1)


@cute.jit
def release(ring: Constexpr[Ring], stage: Int32) -> None:
    """Tell the producer that this warp is done with `stage`."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(ring.empty + stage)


@cute.jit
def multiply(
    config: Constexpr[KernelConfig],
    ring: Constexpr[Ring],
    mma: cute.TiledMma,
    accumulators: cute.Tensor,
    a_fragments: cute.Tensor,
    w_fragments: cute.Tensor,
    k_tiles: Int32,
    group: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    """Multiply one tile into `accumulators`, overwriting them, as warpgroup `group`; k_tiles at least 1.

    One wgmma group stays in flight: a stage is released once the group after it has been issued.
    """
    k_blocks = cutlass.const_expr(cute.size(a_fragments, mode=[2]))
    cute.arch.mbarrier_wait(ring.full + stage, phase)
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, False)
    for k_block in cutlass.range_constexpr(k_blocks):
        at = (None, None, k_block, stage)
        cute.gemm(mma, accumulators, a_fragments[at], w_fragments[at], accumulators)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    previous = stage
    stage, phase = advance(stage, phase, config.stages)
    for _ in cutlass.range(1, k_tiles, unroll=1):
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        warpgroup.fence()
        for k_block in cutlass.range_constexpr(k_blocks):
            at = (None, None, k_block, stage)
            cute.gemm(mma, accumulators, a_fragments[at], w_fragments[at], accumulators)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        release(ring, previous)
        previous = stage
        stage, phase = advance(stage, phase, config.stages)
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(ring.turn + (group ^ 1))
    warpgroup.wait_group(0)
    release(ring, previous)
    return stage, phase
