# SPDX-License-Identifier: Apache-2.0
"""The scale warp: brings the scales of A's and W's tiles into the stages of the ring.

Contract: scales are taken as they are stored, swizzled 128x4 (`quantize.layout`), for matrices that begin at
a row of an atom, and copied into a stage as whole atoms: A's 128 rows, then those of W's columns. W's tiles
begin at multiples of 64 columns, so its atoms are copied as they are, and the MMA addresses the half of one
that a 64-column tile wants. A's tiles begin anywhere, since shards are ceil(M / P) rows: a tile's scales then
straddle two atoms, shifted by some rows within them.

Hence not the copy engine, which moves 16 bytes at least, while neighbours within 16 bytes are rows that are
32 apart: lane i copies the words (four scales of one row) of rows i, i + 32, i + 64 and i + 96 with
asynchronous copies of four bytes, and any shift is right. Rejected: another layout for A whose shards are
padded to 128 rows (operands are taken as given), tiles that ignore shards (a tile would have two owners), the
copy engine for shards that are multiples of 128 and this for others (two paths where one is fast enough: an
SM copies 1 KiB here for every 33 KiB of operands).

Words past the last row are zero-filled, 2^-127, beside operands that are zero.

Order: copies are in the generic proxy and the tensor core reads in the async one. Each lane waits for its own
copies, fences, the warp meets, and one lane arrives on `full` of the CTA that multiplies. A stage is
announced when `KernelConfig.scales_ahead` later ones have been started. That number must be below the number
of stages, since a stage only becomes free after all before it have been announced; it is two less, so that a
stage is announced while the one before it is being multiplied, and its copies have had all the time until
then.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op
from dsv4_symm_mem.device.fences import fence_proxy_async_shared
from dsv4_symm_mem.device.roles import advance

from dsv4_gemm_rs.kernels.sm100.config import ATOM_BYTES, KernelConfig
from dsv4_gemm_rs.kernels.sm100.mainloop import Ring
from dsv4_gemm_rs.kernels.sm100.pair import arrive_at_leader

LANES = 32
LINE_BYTES = 16
"""Bytes of an atom that belong to one lane: four scales of each of four rows."""


@dsl_user_op
def copy_word(target: Int32, address: Int64, valid: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Start copying 4 bytes from global to shared memory, or zeros where `valid` is 0 and not 4.

    PTX: `cp.async.ca.shared.global [s], [a], 4, n;` (ISA 9.4, 9.7.10.28.3.1)
    """
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};",
        read_only_args=[target, address, valid],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def copy_line(target: Int32, address: Int64, valid: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Start copying 16 bytes from global to shared memory, or zeros where `valid` is 0 and not 16.

    PTX: `cp.async.cg.shared.global [s], [a], 16, n;` (ISA 9.4, 9.7.10.28.3.1)
    """
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[target, address, valid],
        loc=loc,
        ip=ip,
    )


@cute.jit
def load_scales(
    config: Constexpr[KernelConfig],
    ring: Constexpr[Ring],
    a_scale: Int64,
    w_scale: Int64,
    first_row: Int32,
    rows: Int32,
    first_column: Int32,
    columns: Int32,
    k_tiles: Int32,
    stage: Int32,
    phase: Int32,
    waiting: Int32,
    oldest: Int32,
) -> tuple[Int32, Int32, Int32, Int32]:
    """Start one tile's scale copies and announce those that have landed, as a whole warp.

    Args:
        config: The tile configuration.
        ring: Where to.
        a_scale: Address of A's scales.
        w_scale: Address of W's.
        first_row: The tile's first row of A, any.
        rows: Rows of A.
        first_column: The tile's first row of W, a multiple of 64.
        columns: Rows of W.
        k_tiles: Stages of the tile, which is also the atoms of a row of atoms.
        stage: The ring's next stage.
        phase: Its parity.
        waiting: Stages under way.
        oldest: The first of them.

    Returns:
        The new `stage`, `phase`, `waiting` and `oldest`.
    """
    lane = cute.arch.lane_idx()
    row_of_atoms = Int64(k_tiles) * ATOM_BYTES
    sources = []
    for quarter in cutlass.range_constexpr(4):
        row = first_row + lane + quarter * LANES
        valid = Int32(cutlass.select_(row < rows, Int32(4), Int32(0)))
        row = Int32(cutlass.select_(row < rows, row, Int32(0)))
        at = (row % LANES) * LINE_BYTES + row % 128 // LANES * 4
        sources.append((a_scale + Int64(row // 128) * row_of_atoms + Int64(at), valid))
    lines = []
    for atom in cutlass.range_constexpr(config.w_atoms):
        index = first_column // 128 + atom
        exists = index * 128 < columns
        valid = Int32(cutlass.select_(exists, Int32(LINE_BYTES), Int32(0)))
        index = Int32(cutlass.select_(exists, index, Int32(0)))
        lines.append((w_scale + Int64(index) * row_of_atoms + Int64(lane * LINE_BYTES), valid))
    line = ring.scale_address + lane * LINE_BYTES
    for k_tile in cutlass.range(k_tiles, unroll=1):
        cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
        target = line + stage * config.scale_stage_bytes
        offset = Int64(k_tile) * ATOM_BYTES
        for quarter in cutlass.range_constexpr(4):
            source, valid = sources[quarter]
            copy_word(target + quarter * 4, source + offset, valid)
        for atom in cutlass.range_constexpr(config.w_atoms):
            source, valid = lines[atom]
            copy_line(target + (1 + atom) * ATOM_BYTES, source + offset, valid)
        cute.arch.cp_async_commit_group()
        if waiting == config.scales_ahead:
            cute.arch.cp_async_wait_group(config.scales_ahead)
            oldest = _announce(config, ring, oldest)
        else:
            waiting += 1
        stage, phase = advance(stage, phase, config.stages)
    return stage, phase, waiting, oldest


@cute.jit
def announce_rest(
    config: Constexpr[KernelConfig], ring: Constexpr[Ring], waiting: Int32, oldest: Int32
) -> None:
    """Announce the stages still under way when no more tiles come."""
    cute.arch.cp_async_wait_group(0)
    for _ in cutlass.range(waiting, unroll=1):
        oldest = _announce(config, ring, oldest)


@cute.jit
def _announce(config: Constexpr[KernelConfig], ring: Constexpr[Ring], stage: Int32) -> Int32:
    fence_proxy_async_shared()
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        arrive_at_leader(config, ring.full + stage)
    stage, _ = advance(stage, Int32(0), config.stages)
    return stage
