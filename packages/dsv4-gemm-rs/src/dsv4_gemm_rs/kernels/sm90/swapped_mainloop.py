# SPDX-License-Identifier: Apache-2.0
"""The main loop with operands swapped: W goes from FP8 in shared memory to BF16 in registers, as the MMA's A.

Contract: a stage holds a tile of tokens [tile_m, 64] of BF16 in the 128-byte swizzle and a block of packed
weights (`dsv4_gemm_rs.packing`) for each 128 features. `full[s]` completes when the stage's bytes have
landed, `empty[s]` when every math warp is done with it.

Registers. `wgmma` reads A from registers while it executes, and a warp that issues one cannot go on before
the tensor cores have taken those before it. So weights are converted for one MMA (64 features by 16 of K) at
a time, while the MMA before it and the other warpgroup's run. Converting for four or eight MMAs at a time was
measured on an H200: 18 and 35 % slower than the BF16 kernel in the same tiles.

Conversion, for four elements: two masks, a shift, two byte permutations, two multiplications of pairs
(`packing` says why that is right for subnormals and NaN too). Rejected: `cvt` from FP8, which gives F16 and
needs three more instructions for BF16; converting through shared memory, whose bandwidth does not allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90
from dsv4_symm_mem.device.bulk import bulk_load
from dsv4_symm_mem.device.fences import fence_proxy_async_shared
from dsv4_symm_mem.device.roles import advance
from dsv4_symm_mem.device.vectors import Words, load_shared_16

from dsv4_gemm_rs.kernels.sm90.config import TILE_K
from dsv4_gemm_rs.kernels.sm90.swapped_config import SwappedConfig
from dsv4_gemm_rs.packing import BLOCK_BYTES, CODE_BYTES

MMA_K = 16
"""K of a wgmma."""
MMAS = 2
"""MMAs of 64 features in a warpgroup's 128."""
STEPS = TILE_K // MMA_K
"""Steps along K in a stage."""
SETS = 2
"""Sets of registers for A: one that an MMA is reading, one that is written."""
HIGH_BITS = 0x87878787
"""Of a code: what is in the upper byte of its BF16."""
LOW_BITS = 0xF0F0F0F0
"""Of a code shifted left by one: what is in the lower byte."""
_STEP_BYTES = CODE_BYTES // STEPS
_FACTOR_STEP_BYTES = 256


@dataclass(frozen=True)
class SwappedRing:
    """The ring of stages in shared memory.

    Attributes:
        full, empty: One mbarrier per stage each.
        x: Staged tensor of the tokens, in the layout of `smem_layout`.
        w_address: Shared-memory address of the first stage of W.
    """

    full: cute.Pointer
    empty: cute.Pointer
    x: cute.Tensor
    w_address: Int32


@dataclass(frozen=True)
class SwappedOperands:
    """What loads tiles: of the tokens [m, k] a copy atom and a coordinate tensor, of W the packed blocks.

    Attributes:
        x_atom, x: Of the tokens.
        w: Address of the first block.
        w_groups: Groups of 128 features.
    """

    x_atom: cute.CopyAtom
    x: cute.Tensor
    w: Int64
    w_groups: Int32


def smem_layout(config: SwappedConfig) -> cute.ComposedLayout:
    """Staged shared-memory layout of the tokens."""
    tiler = (64, config.tile_m, TILE_K)
    return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tiler, BFloat16, config.stages)


def tiled_mma(config: SwappedConfig) -> cute.TiledMma:
    """BF16 MMA of one warpgroup: 64 features, whose A comes from registers, by its tokens."""
    k_major = cute.nvgpu.OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        k_major,
        k_major,
        Float32,
        atom_layout_mnk=(1, 1, 1),
        tiler_mn=(64, config.group_tokens),
        a_source=warpgroup.OperandSource.RMEM,
    )


def tma_tokens(
    config: SwappedConfig, address: Int64, stride: Int64, m: Int32, k: Int32, layout: cute.ComposedLayout
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Copy atom and coordinates of the tokens [m, k]; `stride` in elements, a multiple of 8."""
    x = cute.make_tensor(
        cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16),
        cute.make_layout((cutlass.max(m, 1), k), stride=(cute.assume(stride, 8), 1)),
    )
    atom: tuple[cute.CopyAtom, cute.Tensor] = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), x, cute.slice_(layout, (None, None, 0)), (config.tile_m, TILE_K)
    )
    return atom


@cute.jit
def load_tile(
    config: Constexpr[SwappedConfig],
    ring: Constexpr[SwappedRing],
    operands: Constexpr[SwappedOperands],
    first_row: Int32,
    column_tile: Int32,
    k_tiles: Int32,
    stage: Int32,
    phase: Int32,
) -> tuple[Int32, Int32]:
    """Issue one tile's loads: tokens from `first_row`, which may lie past the end and then read as zero.

    Executed by the whole producer warp. Returns the ring's next stage and phase.
    """
    rows = cute.domain_offset((first_row, 0), operands.x)
    tiles = cute.local_tile(rows, (config.tile_m, TILE_K), (0, None))
    x_shared, x_global = cpasync.tma_partition(
        operands.x_atom,
        0,
        cute.make_layout(1),
        cute.group_modes(ring.x, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    for k_tile in cutlass.range(k_tiles, unroll=1):
        cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            barrier = ring.full + stage
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, config.stage_bytes)
            for group in cutlass.range_constexpr(config.feature_groups):
                # Past the last group its columns are not stored; which weights they get is all the same.
                at = cutlass.min(column_tile * config.feature_groups + group, operands.w_groups - 1)
                bulk_load(
                    ring.w_address + stage * config.w_stage_bytes + group * BLOCK_BYTES,
                    operands.w + (Int64(at) * k_tiles + k_tile) * BLOCK_BYTES,
                    Int32(BLOCK_BYTES),
                    Int32(barrier.toint()),
                )
        cute.copy(
            operands.x_atom, x_global[(None, k_tile)], x_shared[(None, stage)], tma_bar_ptr=ring.full + stage
        )
        stage, phase = advance(stage, phase, config.stages)
    return stage, phase


@cute.jit
def release(ring: Constexpr[SwappedRing], stage: Int32) -> None:
    """Tell the producer that this warp is done with `stage`, of which it has read codes with ordinary loads.

    One lane arrives for all, so all have to have read; what is written next comes through the async proxy.
    """
    fence_proxy_async_shared()
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(ring.empty + stage)


@dsl_user_op
def _permute(a: Uint32, b: Uint32, selector: int, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Bytes of `a` (0 to 3) and `b` (4 to 7) as `selector` names them (PTX ISA, "prmt")."""
    word: Uint32 = cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
        loc=loc,
        ip=ip,
    )
    return word


@dsl_user_op
def _multiply(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The products of two pairs of BF16, subnormals included (PTX ISA, "mul" of half precision)."""
    word: Uint32 = cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
        loc=loc,
        ip=ip,
    )
    return word


@dsl_user_op
def _times_2_to_120(a: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """A pair of BF16 times 2^120; the instruction takes no constant."""
    word: Uint32 = cute.arch.inline_ptx(
        "{{.reg .b32 factor; mov.b32 factor, 0x7B807B80; mul.rn.bf16x2 {$w0}, {$r0}, factor;}}",
        write_only_types=[Uint32],
        read_only_args=[a],
        loc=loc,
        ip=ip,
    )
    return word


@dsl_user_op
def load_shared_8(address: Int32, *, loc: Any = None, ip: Any = None) -> Words:
    """Read 8 bytes of shared memory; `address` a multiple of 8."""
    words = cute.arch.inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Uint32] * 2,
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )
    return tuple(words)


def to_bf16(codes: Uint32, factor: Uint32, split: bool) -> tuple[Uint32, Uint32]:
    """Four codes of one row and block, times the row's factor (a pair of the same BF16), as two pairs."""
    high = codes & Uint32(HIGH_BITS)
    low = (codes << Uint32(1)) & Uint32(LOW_BITS)
    pairs = (_permute(high, low, 0x1504), _permute(high, low, 0x3726))
    if split:
        pairs = (_times_2_to_120(pairs[0]), _times_2_to_120(pairs[1]))
    return _multiply(pairs[0], factor), _multiply(pairs[1], factor)


def load_codes(codes: cute.Tensor, factors: cute.Tensor, address: Int32, thread: Int32, step: int) -> None:
    """Read a thread's codes of a step, 4 words, and with every other step the factors of two, 2 words."""
    for i, word in enumerate(load_shared_16(address + step * _STEP_BYTES + thread * 16)):
        codes[step % 2 * 4 + i] = word
    if step % 2 == 0:
        half = step // 2
        pairs = load_shared_8(address + (CODE_BYTES + half * _FACTOR_STEP_BYTES) + (thread // 4) * 8)
        for i, word in enumerate(pairs):
            factors[half * 2 + i] = word


def convert(
    fragment: cute.Tensor, codes: cute.Tensor, factors: cute.Tensor, step: int, mma: int, split: bool
) -> None:
    """Make the A of one MMA, 4 words, from what `load_codes` read."""
    pair = factors[step // 2 * 2 + mma]
    for half in range(2):
        factor = _permute(pair, pair, (0x1010, 0x3232)[half])
        near, far = to_bf16(codes[step % 2 * 4 + 2 * mma + half], factor, split)
        fragment[half] = near
        fragment[2 + half] = far


@cute.jit
def multiply(
    config: Constexpr[SwappedConfig],
    ring: Constexpr[SwappedRing],
    mma: cute.TiledMma,
    accumulators: Constexpr[Sequence[cute.Tensor]],
    x_fragments: cute.Tensor,
    thread: Int32,
    k_tiles: Int32,
    stage: Int32,
    phase: Int32,
    split: Constexpr[bool],
) -> tuple[Int32, Int32]:
    """Multiply one tile into `accumulators`, overwriting them; k_tiles at least 1.

    Args:
        config: The tile configuration.
        ring: Where operands come from.
        mma: See `tiled_mma`; it adds.
        accumulators: One of each MMA.
        x_fragments: The warpgroup's tokens, by step and stage.
        thread: Of the math warpgroups.
        k_tiles: Stages of the tile.
        stage: The ring's next.
        phase: Its parity.
        split: Whether the factors of the weights lack 2^120.

    Returns:
        The ring's next stage and phase.
    """
    shape = mma.partition_shape_A((64, MMA_K))
    fragments = [cute.make_rmem_tensor(shape, BFloat16) for _ in range(SETS)]
    words = [cute.recast_tensor(fragment, Uint32) for fragment in fragments]
    codes = cute.make_rmem_tensor(8, Uint32)
    factors = cute.make_rmem_tensor(4, Uint32)
    in_group = thread % 128
    block = ring.w_address
    if cutlass.const_expr(config.feature_groups > 1):
        block += cute.arch.make_warp_uniform(thread // 128) * BLOCK_BYTES
    for accumulator in accumulators:
        accumulator.fill(0.0)
    cute.arch.mbarrier_wait(ring.full + stage, phase)
    load_codes(codes, factors, block + stage * config.w_stage_bytes, in_group, 0)
    convert(words[0], codes, factors, 0, 0, split)
    previous = stage
    for k_tile in cutlass.range(k_tiles, unroll=1):
        address = block + stage * config.w_stage_bytes
        following, following_phase = advance(stage, phase, config.stages)
        for unit in cutlass.range_constexpr(STEPS * MMAS):
            step, each = cutlass.const_expr(unit // MMAS), cutlass.const_expr(unit % MMAS)
            warpgroup.fence()
            cute.gemm(
                mma,
                accumulators[each],
                fragments[unit % SETS][(None, None, 0)],
                x_fragments[(None, None, step, stage)],
                accumulators[each],
            )
            warpgroup.commit_group()
            if cutlass.const_expr(each == 0 and step + 1 < STEPS):
                load_codes(codes, factors, address, in_group, step + 1)
            if cutlass.const_expr(each == 0 and step + 1 == STEPS):  # noqa: SIM102 - decided while tracing
                if k_tile + 1 < k_tiles:
                    cute.arch.mbarrier_wait(ring.full + following, following_phase)
                    load_codes(codes, factors, block + following * config.w_stage_bytes, in_group, 0)
            # ptxas serialises MMAs whose registers are written before such a wait.
            warpgroup.wait_group(1)
            if cutlass.const_expr(unit == 0):  # noqa: SIM102 - decided while tracing
                # All MMAs of the stage before are done.
                if k_tile > 0:
                    release(ring, previous)
            after = cutlass.const_expr((unit + 1) % (STEPS * MMAS))
            convert(words[after % SETS], codes, factors, after // MMAS, after % MMAS, split)
        previous = stage
        stage, phase = following, following_phase
    warpgroup.wait_group(0)
    release(ring, previous)
    return stage, phase


__all__ = [
    "MMAS",
    "SwappedOperands",
    "SwappedRing",
    "convert",
    "load_codes",
    "load_shared_8",
    "load_tile",
    "multiply",
    "release",
    "smem_layout",
    "tiled_mma",
    "tma_tokens",
    "to_bf16",
]
