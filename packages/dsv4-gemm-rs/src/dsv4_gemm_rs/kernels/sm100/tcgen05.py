# SPDX-License-Identifier: Apache-2.0
"""The fifth-generation tensor core's instructions, as the main loop and the epilogue use them.

One function per instruction, with its PTX; section numbers are those of PTX ISA 9.4. The
DSL's own atoms were not used: they carry every layout in the type system, where this kernel has three, all
fixed, and addresses that are sums (a stage's columns, two overlapping accumulators).

Who is the pair's CTA 0 issues for both: a shared-memory descriptor and a tensor-memory address then mean the
same offsets in both CTAs, so both lay out their memories alike.

Tensor memory is read only after `fence_after` of a wait that follows the commit of what wrote it, and written
again only after its readers' `fence_before` and arrival.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from dsv4_gemm_rs.kernels.sm100.config import MMA_K_BYTES, TILE_M, KernelConfig

_DESCRIPTOR_VERSION = 1 << 46
_SWIZZLE_128B = 2 << 61
_UNIT = 16
"""Descriptors count shared memory in units of 16 bytes."""


def swizzled_descriptor(address: Int32) -> Int64:
    """Matrix of rows of 128 bytes in the 128-byte swizzle at a shared address that is a multiple of 1024.

    Eight rows are 1024 bytes from the next eight (the stride); along K the rows are one swizzle wide, so the
    leading offset is not used. K steps within the row by adding to the address, since hardware swizzles
    addresses, not offsets (9.7.18.4.1).
    """
    return _descriptor(address, _SWIZZLE_128B, 8 * 128)


def atom_descriptor(address: Int32) -> Int64:
    """A scale atom: 32 rows of 16 bytes, one after the other, unswizzled; eight rows take 128 bytes."""
    return _descriptor(address, 0, 8 * 16)


def _descriptor(address: Int32, swizzle: int, stride: int) -> Int64:
    fixed = _DESCRIPTOR_VERSION | swizzle | (stride // _UNIT) << 32
    return Int64((address >> 4) & 0x3FFF) | Int64(fixed - (1 << 64) if fixed >> 63 else fixed)


def instruction_descriptor(config: KernelConfig) -> int:
    """The MMA's shape and types, without scale data IDs (9.7.18.4.2).

    Both operands K-major. With scales: E4M3 (0) from both sides, scales UE8M0 (bit 23). BF16 (1) from both
    sides, FP32 (1) accumulator. N / 8 from bit 17 on, M / 16 from bit 24 on.
    """
    shape = config.tile_n // 8 << 17 | TILE_M * config.cluster // 16 << 24
    types = 1 << 23 if config.scaled else 1 << 4 | 1 << 7 | 1 << 10
    return shape | types


def scale_ids(step: int) -> int:
    """Which byte of the scales' words an MMA takes, for both operands: bits 29 and 4 of the descriptor."""
    return step << 29 | step << 4


def k_step(step: int) -> int:
    """What to add to an operand's descriptor for the `step`-th MMA of a stage."""
    return step * MMA_K_BYTES // _UNIT


@dsl_user_op
def multiply_scaled(
    config: Constexpr[KernelConfig],
    accumulator: Int32,
    a: Int64,
    w: Int64,
    instruction: Int32,
    a_scale: Int32,
    w_scale: Int32,
    accumulate: Int32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Start accumulator (+)= (A · scales) · (W · scales)^T over 32 elements of K, as one thread.

    `accumulate` 0 overwrites. Asynchronous: tracked by `commit`.

    PTX: `tcgen05.mma.cta_group::g.kind::mxf8f6f4.block_scale.scale_vec::1X [d], a, b, i, [sa], [sb], p;`
    (9.7.18.10.10.1)
    """
    cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, {$r6}, 0;\n\t"
        f"tcgen05.mma.cta_group::{config.cluster}.kind::mxf8f6f4.block_scale.scale_vec::1X "
        "[{$r0}], {$r1}, {$r2}, {$r3}, [{$r4}], [{$r5}], p;\n\t}",
        read_only_args=[accumulator, a, w, instruction, a_scale, w_scale, accumulate],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def multiply_plain(
    config: Constexpr[KernelConfig],
    accumulator: Int32,
    a: Int64,
    w: Int64,
    instruction: Int32,
    accumulate: Int32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Start accumulator (+)= A · W^T over 16 elements of K in BF16, as one thread; else `multiply_scaled`.

    PTX: `tcgen05.mma.cta_group::g.kind::f16 [d], a, b, i, p;` (9.7.18.10.10.1)
    """
    cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, {$r4}, 0;\n\t"
        f"tcgen05.mma.cta_group::{config.cluster}.kind::f16 "
        "[{$r0}], {$r1}, {$r2}, {$r3}, p;\n\t}",
        read_only_args=[accumulator, a, w, instruction, accumulate],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def copy_scales(
    config: Constexpr[KernelConfig], column: Int32, atom: Int64, *, loc: Any = None, ip: Any = None
) -> None:
    """Start copying a scale atom into four columns of tensor memory, for each of the four warps' lanes.

    Ordered before MMAs that this thread issues later (9.7.18.6.2); tracked by `commit`.

    PTX: `tcgen05.cp.cta_group::g.32x128b.warpx4 [t], d;` (9.7.18.9.1)
    """
    cute.arch.inline_ptx(
        f"tcgen05.cp.cta_group::{config.cluster}.32x128b.warpx4 [{{$r0}}], {{$r1}};",
        read_only_args=[column, atom],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def commit(
    config: Constexpr[KernelConfig], barrier: cute.Pointer, *, loc: Any = None, ip: Any = None
) -> None:
    """Arrive on `barrier`, in both CTAs of a pair, when all this thread started before is complete.

    Implies `fence_before`. The mask of CTAs is put into a register by hand: as an immediate, which is what
    the compiler makes of a constant operand, the assembler of CUDA 12.9 refuses it ("Arguments mismatch").

    PTX: `tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [b];` or, for a pair,
    `tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [b], mask;`
    (9.7.18.12.1)
    """
    head = f"tcgen05.commit.cta_group::{config.cluster}.mbarrier::arrive::one.shared::cluster"
    address = Int32(barrier.toint(loc=loc, ip=ip))
    if config.cluster == 1:
        cute.arch.inline_ptx(f"{head}.b64 [{{$r0}}];", read_only_args=[address], loc=loc, ip=ip)
    else:
        cute.arch.inline_ptx(
            "{\n\t.reg .b16 mask;\n\tmov.b16 mask, 3;\n\t"
            f"{head}.multicast::cluster.b64 [{{$r0}}], mask;\n\t}}",
            read_only_args=[address],
            loc=loc,
            ip=ip,
        )


@dsl_user_op
def load_columns(address: Int32, count: int, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """`count` (64) columns of this warp's 32 lanes, as a whole warp: lane i gets row i of its quarter.

    `address` is that of the first column, with the warp's first lane in its upper half; a warp reaches lanes
    32 · (warp % 4) and on. Load and wait are one block of text, so that no compiler moves a use of the values
    between them.

    PTX: `tcgen05.ld.sync.aligned.32x32b.x64.b32 {...}, [t];` and `tcgen05.wait::ld.sync.aligned;`
    (9.7.18.8.1 and 9.7.18.8.3)
    """
    values = ", ".join(f"{{$w{i}}}" for i in range(count))
    loaded = cute.arch.inline_ptx(
        f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{values}}}, [{{$r0}}];\n\t"
        "tcgen05.wait::ld.sync.aligned;",
        write_only_types=[Float32] * count,
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )
    return tuple(loaded)


@dsl_user_op
def fence_before(*, loc: Any = None, ip: Any = None) -> None:
    """Order what this thread did in tensor memory before its next arrival or barrier.

    PTX: `tcgen05.fence::before_thread_sync;` (9.7.18.11.1)
    """
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;", loc=loc, ip=ip)


@dsl_user_op
def fence_after(*, loc: Any = None, ip: Any = None) -> None:
    """Order what this thread does in tensor memory after its last wait or barrier.

    PTX: `tcgen05.fence::after_thread_sync;` (9.7.18.11.1)
    """
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;", loc=loc, ip=ip)


@dsl_user_op
def allocate(config: Constexpr[KernelConfig], word: cute.Pointer, *, loc: Any = None, ip: Any = None) -> None:
    """Allocate the kernel's columns as one whole warp (of each CTA of a pair); their address goes to `word`.

    Waits while another kernel on the SM holds them. Nothing else is allocated here, so the permit is given
    back at once. CTAs of a pair agree on the columns through each other's shared memory, so both must be
    running: after `wait_for_start`.

    PTX: `tcgen05.alloc.cta_group::g.sync.aligned.shared::cta.b32 [w], n;` and
    `tcgen05.relinquish_alloc_permit.cta_group::g.sync.aligned;` (9.7.18.7.1)
    """
    cute.arch.inline_ptx(
        f"tcgen05.alloc.cta_group::{config.cluster}.sync.aligned.shared::cta.b32 "
        f"[{{$r0}}], {config.tensor_columns};\n\t"
        f"tcgen05.relinquish_alloc_permit.cta_group::{config.cluster}.sync.aligned;",
        read_only_args=[Int32(word.toint(loc=loc, ip=ip))],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def deallocate(config: Constexpr[KernelConfig], address: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Give `allocate`'s columns back, as the same warp, when nobody uses them any more.

    PTX: `tcgen05.dealloc.cta_group::g.sync.aligned.b32 t, n;` (9.7.18.7.1)
    """
    cute.arch.inline_ptx(
        f"tcgen05.dealloc.cta_group::{config.cluster}.sync.aligned.b32 {{$r0}}, {config.tensor_columns};",
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )
