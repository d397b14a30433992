# SPDX-License-Identifier: Apache-2.0
"""The SM100 main loop: copy engine -> ring of shared-memory stages -> tensor core -> tensor memory.

Contract: a stage holds 128 bytes of K of A [128 rows] and of W [the tile's columns, or the CTA's half of
them], both in the 128-byte swizzle, and with MXFP8 their scale atoms (see `scales`). `full[s]` completes when
a stage is there, in both CTAs of a pair, `empty[s]` when its MMAs are done. The ring never drains between
tiles. `finished[i]` completes when an accumulator holds a tile, `drained[i]` when the epilogue gives it back.

A pair: CTA 0 issues all MMAs. Its `full` alone is used: CTA 1's copies complete there too (`.cta_group::2`
lets a copy signal the barrier at the same offset in the pair's even CTA, ISA 9.4, 9.7.10.28.5.3), and CTA 0
expects the bytes of both. They may land before it expects them: a phase cannot end before its arrivals, and
`empty`, on which commits arrive in both CTAs, keeps CTA 1 from being a phase ahead.

Operands are described to the copy engine as bytes, whatever they are: rows past the end, and K past its end,
read as zero.

Every wait that guards a use of tensor memory, the ring's included, is followed by `fence_after`.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as layouts
from dsv4_symm_mem.device.roles import advance

from dsv4_gemm_rs.kernels.sm100.config import (
    ATOM_BYTES,
    ATOM_COLUMNS,
    MMA_K_BYTES,
    STAGE_K_BYTES,
    TILE_M,
    KernelConfig,
)
from dsv4_gemm_rs.kernels.sm100.tcgen05 import (
    atom_descriptor,
    commit,
    copy_scales,
    fence_after,
    instruction_descriptor,
    k_step,
    multiply_plain,
    multiply_scaled,
    scale_ids,
    swizzled_descriptor,
)

MMAS = STAGE_K_BYTES // MMA_K_BYTES
"""MMAs of a stage."""


@dataclass(frozen=True)
class Ring:
    """The ring of stages in shared memory, and the accumulators in tensor memory.

    Attributes:
        full, empty: One mbarrier per stage each.
        finished, drained: One mbarrier per accumulator each, see `KernelConfig.accumulator_barriers`.
        a, w: Staged byte tensors of A and W in the layouts of `smem_layouts`.
        a_address, w_address, scale_address: Shared-memory addresses of their first stages.
        columns: Address of the first allocated column of tensor memory.
    """

    full: cute.Pointer
    empty: cute.Pointer
    finished: cute.Pointer
    drained: cute.Pointer
    a: cute.Tensor
    w: cute.Tensor
    a_address: Int32
    w_address: Int32
    scale_address: Int32
    columns: Int32


@dataclass(frozen=True)
class Operands:
    """Copy atoms and coordinate tensors that load tiles of A and W, both in bytes."""

    a_atom: cute.CopyAtom
    a: cute.Tensor
    w_atom: cute.CopyAtom
    w: cute.Tensor


def smem_layouts(config: KernelConfig) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
    """Staged shared-memory layouts of A and W: rows of 128 bytes, swizzled, the same as on SM90."""
    tiler = (TILE_M, config.w_rows, STAGE_K_BYTES)
    row_major = LayoutEnum.ROW_MAJOR
    return (
        layouts.make_smem_layout_a(row_major, tiler, Uint8, config.stages),
        layouts.make_smem_layout_b(row_major, tiler, Uint8, config.stages),
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
    """The operands of a launch; strides in elements, rows starting at multiples of 16 bytes."""
    group = tcgen05.CtaGroup.TWO if config.cluster == 2 else tcgen05.CtaGroup.ONE
    load = cpasync.CopyBulkTensorTileG2SOp(group)
    atoms = []
    for address, stride, rows, layout, tile_rows in (
        (a_address, a_stride, cutlass.max(m, 1), a_layout, TILE_M),
        (w_address, w_stride, n, w_layout, config.w_rows),
    ):
        matrix = cute.make_tensor(
            cute.make_ptr(Uint8, address, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout(
                (rows, k * config.element_bytes),
                stride=(cute.assume(stride * config.element_bytes, 16), 1),
            ),
        )
        stage = cute.slice_(layout, (None, None, 0))
        atoms += cpasync.make_tiled_tma_atom(load, matrix, stage, (tile_rows, STAGE_K_BYTES))
    return Operands(*atoms)


@cute.jit
def load_tile(
    config: Constexpr[KernelConfig],
    ring: Constexpr[Ring],
    operands: Constexpr[Operands],
    first_row: Int32,
    first_w_tile: Int32,
    leads: cutlass.Boolean,
    k_tiles: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    """Issue one tile's copies, as a whole warp: rows of A from `first_row`, and a tile of `w_rows` of W.

    Rows may lie past A's end. `leads` says whether this is the CTA that issues the MMAs.
    """
    a_rows = cute.domain_offset((first_row, 0), operands.a)
    a_tiles = cute.local_tile(a_rows, (TILE_M, STAGE_K_BYTES), (0, None))
    w_tiles = cute.local_tile(operands.w, (config.w_rows, STAGE_K_BYTES), (first_w_tile, None))
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
    both = cutlass.const_expr(config.cluster * (config.a_stage_bytes + config.w_stage_bytes))
    for k_tile in cutlass.range(k_tiles, unroll=1):
        cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
        full = ring.full + stage
        if leads:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, both)
        cute.copy(operands.a_atom, a_global[(None, k_tile)], a_shared[(None, stage)], tma_bar_ptr=full)
        cute.copy(operands.w_atom, w_global[(None, k_tile)], w_shared[(None, stage)], tma_bar_ptr=full)
        stage, phase = advance(stage, phase, config.stages)
    return stage, phase


@cute.jit
def wait_until_consumed(
    config: Constexpr[KernelConfig], ring: Constexpr[Ring], stage: Int32, phase: Int32
) -> None:
    """Wait until every stage that was loaded is consumed, so that no arrival is still on its way here."""
    for _ in cutlass.range(config.stages, unroll=1):
        cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
        stage, phase = advance(stage, phase, config.stages)


@cute.jit
def multiply_tile(
    config: Constexpr[KernelConfig],
    ring: Constexpr[Ring],
    accumulator: Int32,
    finished: cute.Pointer,
    column_tile: Int32,
    k_tiles: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    """Multiply one tile into the accumulator at that address; k_tiles at least 1. As a whole warp of CTA 0.

    Only the elected lane issues; it is the same one each time, as commits cover what their thread started.
    """
    base = cutlass.const_expr(instruction_descriptor(config))
    for k_tile in cutlass.range(k_tiles, unroll=1):
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        fence_after()
        with cute.arch.elect_one():
            a = swizzled_descriptor(ring.a_address + stage * config.a_stage_bytes)
            w = swizzled_descriptor(ring.w_address + stage * config.w_stage_bytes)
            if cutlass.const_expr(config.scaled):
                scales = ring.scale_address + stage * config.scale_stage_bytes
                columns = ring.columns + config.scale_column + stage * config.scale_stage_columns
                for atom in cutlass.range_constexpr(1 + config.w_atoms):
                    copy_scales(
                        config, columns + atom * ATOM_COLUMNS, atom_descriptor(scales + atom * ATOM_BYTES)
                    )
                w_columns = columns + ATOM_COLUMNS
                if cutlass.const_expr(config.tile_n == 64):
                    # An atom has the scales of two tiles' columns, 32 of them to a column of tensor memory.
                    w_columns = w_columns + (column_tile & 1) * 2
            for step in cutlass.range_constexpr(MMAS):
                accumulate = Int32(1)
                if cutlass.const_expr(step == 0):
                    accumulate = Int32(cutlass.select_(k_tile == 0, Int32(0), Int32(1)))
                if cutlass.const_expr(config.scaled):
                    multiply_scaled(
                        config,
                        accumulator,
                        a + k_step(step),
                        w + k_step(step),
                        Int32(base | scale_ids(step)),
                        columns,
                        w_columns,
                        accumulate,
                    )
                else:
                    multiply_plain(
                        config, accumulator, a + k_step(step), w + k_step(step), Int32(base), accumulate
                    )
            commit(config, ring.empty + stage)
        stage, phase = advance(stage, phase, config.stages)
    with cute.arch.elect_one():
        commit(config, finished)
    return stage, phase
