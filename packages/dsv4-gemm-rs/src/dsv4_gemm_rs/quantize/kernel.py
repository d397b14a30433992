# SPDX-License-Identifier: Apache-2.0
"""The quantiser on a GPU, in CuTe DSL: one pass over x, bit-equal to `rule.py`.

Four lanes share a block of 32: each loads 8 elements, the four agree on amax with two shuffles, and each
stores 8 codes. Sixteen lanes share a *strip*, 128 elements of one row, which is the four blocks whose scale
bytes are adjacent in both layouts: in the swizzled one they are one 32-bit word, stored by the strip's first
lane. The kernel visits every strip of the padded scale matrix, so the same store writes the padding (an
absent strip has amax 0, hence byte 0), and no memset precedes it. M, K, the row stride, the alignment of the
rows and the rule are arguments: ceil(log2(amax / 448)) and floor(log2(amax)) - 8 differ only in what is added
to amax's bits before its exponent is taken (2^21 - 1 carries into the exponent exactly when the fraction is
above that of 448).

The round trip is the same kernel with another store: the codes are converted back (`cvt.rn.f16x2.e4m3x2`,
exact), multiplied by the scale in FP32 and rounded to BF16, 16 bytes a lane, and no scale is written. Its
`layout` is None.

Infinities become NaN before the conversion, because `cvt.rn.satfinite.e4m3x2.f32` turns Inf into 448 (PTX
ISA, cvt, .satfinite); it turns NaN into 0x7F, as the rule wants. Its first source operand lands in the upper
half. x * 0 + x does that: it is x where x is finite, the sign of zeros included, and NaN elsewhere; `max.f32`
then passes over NaN, so amax is that of the finite elements. Neither it nor `mul.rn.f32` has `.ftz`: elements
may be subnormal. Comparing and selecting element by element took twenty instructions more a lane and strip.

Rejected for the round trip: rounding x without E4M3, by adding and subtracting a power of two (it differs by
element, and saturation and subnormal codes are cases of their own); products in BF16 pairs (`mul.rn.bf16x2`
needs SM90).

Codes are stored with `.cs`, which made the quantiser faster by 5 to 10 % from 2048 rows on (an H200, rotating
outputs: 0.90 to 0.95 of the bandwidth of a copy of as many bytes). The round trip gains half of that and has
0.91 or more without: its values are left in L2 for the product that follows.

Rejected: one strip a lane and four, CTAs of 128 and of 512 threads, prefetches of 256 bytes into L2 (within a
few percent of this); one row per warp in a loop (32 warps for M = 32 leave the machine idle); dividing a flat
index by K (a long sequence per lane; the grid's second axis and a power of two chosen on the host do it for
nothing); hardware conversion of amax to E8M0 (`cvt.rp.satfinite.ue8m0x2.f32` needs SM100 and divides first);
tensor arguments (they pin dtypes that DLPack must know, and stream and device would come from them: raw
addresses cost the host less).

Traps: whether rows are aligned is asked once for all strips. Asked strip by strip, both kinds of loads become
predicated instructions of one block, and what joins halves of words there waits for the vectors of the first
strip before the second one's loads are issued, though it never runs. Shuffles need all 32 lanes, so
out-of-range strips take part with zeros instead of leaving. For FP32 inputs two 16-byte loads of a lane share
a 32-byte sector, so those loads must stay in L1. The kernel object loads its module at its first launch,
which must not happen in a capture: `ready` launches an empty grid.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_fake_stream
from dsv4_symm_mem.compiled import gpu_arch
from dsv4_symm_mem.errors import UnsupportedError

from dsv4_gemm_rs.kernels.cache import quantizer_kernel
from dsv4_gemm_rs.quantize.layout import ATOM_BLOCKS, ATOM_BYTES, ScaleLayout, k_tiles, padded_rows
from dsv4_gemm_rs.quantize.rule import (
    BLOCK,
    E4M3_EMAX,
    E4M3_MAX_FRACTION,
    EXPONENT_BIAS,
    FRACTION_BITS,
    FRACTION_MASK,
    ScaleRule,
)

THREADS = 256
PER_LANE = 8
"""Elements of one lane: 16 bytes of BF16 in, 8 bytes of E4M3 out."""

BLOCK_LANES = BLOCK // PER_LANE
STRIP_LANES = BLOCK_LANES * ATOM_BLOCKS
STRIPS = THREADS // STRIP_LANES
"""Strips that a CTA works on at a time."""

UNROLL = 2
"""Strips per lane, all loaded before the first is used: 2 x 16 bytes x 2048 threads an SM are 64 KiB in
flight, about twice what 4.8 TB/s over 132 SMs and a latency of 0.8 us ask for."""

MAX_GRID_Y = 65535

ROUND_UP = {
    ScaleRule.VLLM: FRACTION_MASK - E4M3_MAX_FRACTION,
    ScaleRule.OCP: 0,
}
"""Added to the bits of amax before its exponent is read."""

HIGH_HALF = 0xFFFF_0000


@functools.lru_cache(maxsize=64)
def strips_across(tiles: int) -> int:
    """log2 of the number of strips along K in a CTA, for rows of `tiles` strips.

    Of the powers of two up to `STRIPS`, the one that leaves the fewest lanes beyond the row's end, and of
    those the widest, within the limit on the grid's second axis.
    """

    def cost(log2: int) -> tuple[bool, int, int]:
        ctas = -(-tiles // (1 << log2))
        return ctas > MAX_GRID_Y, ctas << log2, -log2

    return min(range(STRIPS.bit_length()), key=cost)


def grid(rows: int, tiles: int) -> tuple[int, int, int]:
    """Grid (x along M, y along K) and log2 of a CTA's width in strips, for `rows` rows of `tiles` strips."""
    log2 = strips_across(tiles)
    rows_per_cta = UNROLL * (STRIPS >> log2)
    return -(-rows // rows_per_cta), -(-tiles // (1 << log2)), log2


def _load_vectors(address: Int64, words: int, present: Boolean) -> list[Uint32]:
    """A lane's words, zeros where not `present`; no branch, so that the next strip's loads follow at once."""
    load = "ld.global.nc.L1::no_allocate.v4.b32" if words == 4 else "ld.global.nc.v4.b32"
    zeros = "".join(f"mov.b32 {{$w{index}}}, 0; " for index in range(4))
    loaded: list[Uint32] = []
    for first in range(0, words, 4):
        loaded += cute.arch.inline_ptx(
            "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; "
            + zeros
            + "@p "
            + load
            + " {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
            write_only_types=[Uint32] * 4,
            read_only_args=[address + 4 * first, Uint32(present)],
        )
    return loaded


def _load_scalars(address: Int64, words: int) -> list[Uint32]:
    if words == PER_LANE:
        return [_load_scalar(address + 4 * index, "b32") for index in range(words)]
    halves = [_load_scalar(address + 2 * index, "u16") for index in range(PER_LANE)]
    return [halves[2 * index] | (halves[2 * index + 1] << 16) for index in range(words)]


def _load_scalar(address: Int64, kind: str) -> Uint32:
    return cute.arch.inline_ptx(
        "ld.global.nc." + kind + " {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


def _as_float_bits(words: list[Uint32], dtype: torch.dtype) -> list[Uint32]:
    if dtype == torch.float32:
        return words
    bits: list[Uint32] = []
    for word in words:
        if dtype == torch.bfloat16:
            bits += [word << 16, word & Uint32(HIGH_HALF)]
        else:
            low, high = cute.arch.inline_ptx(
                "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
                "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
                write_only_types=[Float32, Float32],
                read_only_args=[word],
            )
            bits += [low.bitcast(Uint32), high.bitcast(Uint32)]
    return bits


def _without_infinities(words: list[Uint32], dtype: torch.dtype) -> list[Uint32]:
    """Each x as x * 0 + x: itself where it is finite, else a NaN."""
    kind = {torch.bfloat16: "bf16x2", torch.float16: "f16x2", torch.float32: "f32"}[dtype]
    return [
        cute.arch.inline_ptx(
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn." + kind + " {$w0}, {$r0}, zero, {$r0}; }",
            write_only_types=[Uint32],
            read_only_args=[word],
        )
        for word in words
    ]


def _largest(bits: list[Uint32]) -> Uint32:
    """Bits of the largest magnitude, 0 where all are NaN."""
    text = "{ .reg .f32 a; mov.f32 {$w0}, 0f00000000; "
    for index in range(PER_LANE):
        text += f"abs.f32 a, {{$r{index}}}; max.f32 {{$w0}}, {{$w0}}, a; "
    amax: Float32 = cute.arch.inline_ptx(
        text + "}", write_only_types=[Float32], read_only_args=[one.bitcast(Float32) for one in bits]
    )
    return amax.bitcast(Uint32)


def _convert(bits: list[Uint32], factor: Uint32) -> tuple[Uint32, Uint32]:
    words = []
    for first in range(0, PER_LANE, 4):
        words.append(
            cute.arch.inline_ptx(
                "{ .reg .f32 a, b, c, d; .reg .b16 low, high; "
                "mul.rn.f32 a, {$r0}, {$r4}; mul.rn.f32 b, {$r1}, {$r4}; "
                "mul.rn.f32 c, {$r2}, {$r4}; mul.rn.f32 d, {$r3}, {$r4}; "
                "cvt.rn.satfinite.e4m3x2.f32 low, b, a; cvt.rn.satfinite.e4m3x2.f32 high, d, c; "
                "mov.b32 {$w0}, {low, high}; }",
                write_only_types=[Uint32],
                read_only_args=[one.bitcast(Float32) for one in [*bits[first : first + 4], factor]],
            )
        )
    return words[0], words[1]


def _values(codes: tuple[Uint32, Uint32], byte: Uint32) -> list[Uint32]:
    """The BF16 pairs that eight codes and their scale stand for."""
    # 2^(byte - 127); for byte 0 that is FP32's subnormal with only the fraction's top bit set.
    factor = cutlass.max(byte << FRACTION_BITS, Uint32(1 << (FRACTION_BITS - 1)))
    pairs: list[Uint32] = []
    for four in codes:
        pairs += cute.arch.inline_ptx(
            "{ .reg .b16 low, high, p, q, r, s; .reg .b32 pq, rs; .reg .f32 a, b, c, d; "
            "mov.b32 {low, high}, {$r0}; "
            "cvt.rn.f16x2.e4m3x2 pq, low; cvt.rn.f16x2.e4m3x2 rs, high; "
            "mov.b32 {p, q}, pq; mov.b32 {r, s}, rs; "
            "cvt.f32.f16 a, p; cvt.f32.f16 b, q; cvt.f32.f16 c, r; cvt.f32.f16 d, s; "
            "mul.rn.f32 a, a, {$r1}; mul.rn.f32 b, b, {$r1}; "
            "mul.rn.f32 c, c, {$r1}; mul.rn.f32 d, d, {$r1}; "
            "cvt.rn.bf16x2.f32 {$w0}, b, a; cvt.rn.bf16x2.f32 {$w1}, d, c; }",
            write_only_types=[Uint32, Uint32],
            read_only_args=[four, factor.bitcast(Float32)],
        )
    return pairs


@cute.kernel
def quantize_kernel(
    x: Int64,
    data: Int64,
    scale: Int64,
    rows: Int32,
    scale_rows: Int32,
    blocks: Int32,
    row_bytes: Int64,
    aligned: Int32,
    round_up: Uint32,
    across_log2: Int32,
    dtype: cutlass.Constexpr,
    layout: cutlass.Constexpr,
    announces: cutlass.Constexpr,
) -> None:
    """Quantise one CTA's strips; arguments as in `launch_grid`, grid from `grid`."""
    element_bytes = dtype.itemsize
    words = PER_LANE * element_bytes // 4

    if cutlass.const_expr(announces):
        # Every CTA runs by then, or has ended: nothing that begins early can take the place of one.
        cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    cta_m, cta_k, _ = cute.arch.block_idx()
    lane = thread % STRIP_LANES
    strip = thread // STRIP_LANES
    tile = (cta_k << across_log2) + (strip & ((1 << across_log2) - 1))
    rows_down = Int32(STRIPS) >> across_log2
    first_row = cta_m * (UNROLL * rows_down) + (strip >> across_log2)
    block = tile * ATOM_BLOCKS + lane // BLOCK_LANES
    column = tile * (ATOM_BLOCKS * BLOCK) + lane * PER_LANE
    k = blocks * BLOCK

    raw = [[Uint32(0) for _ in range(words)] for _ in range(UNROLL)]
    address = x + Int64(first_row) * row_bytes + Int64(column) * element_bytes
    step = Int64(rows_down) * row_bytes
    if aligned != 0:
        for turn in cutlass.range_constexpr(UNROLL):
            present = first_row + turn * rows_down < rows and block < blocks
            raw[turn] = _load_vectors(address + turn * step, words, present)
    else:
        for turn in cutlass.range_constexpr(UNROLL):
            if first_row + turn * rows_down < rows and block < blocks:
                raw[turn] = _load_scalars(address + turn * step, words)

    for turn in cutlass.range_constexpr(UNROLL):
        row = first_row + turn * rows_down
        present = row < rows and block < blocks
        bits = _as_float_bits(_without_infinities(raw[turn], dtype), dtype)
        amax = _largest(bits)
        for distance in (1, 2):
            amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, distance))
        exponent = (amax + round_up) >> FRACTION_BITS
        byte = cutlass.max(exponent, Uint32(E4M3_EMAX)) - Uint32(E4M3_EMAX)
        factor = (Uint32(2 * EXPONENT_BIAS) - byte) << FRACTION_BITS
        codes = _convert(bits, factor)
        element = Int64(row) * k + Int64(column)
        if cutlass.const_expr(layout is None):
            values = _values(codes, byte)
            if present:
                cute.arch.inline_ptx(
                    "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[data + 2 * element, *values],
                )
        elif present:
            cute.arch.inline_ptx(
                "st.global.cs.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[data + element, *codes]
            )
        if cutlass.const_expr(layout == ScaleLayout.SWIZZLED):
            word = byte << (8 * (lane // BLOCK_LANES)).to(Uint32)
            word = word | cute.arch.shuffle_sync_bfly(word, BLOCK_LANES)
            word = word | cute.arch.shuffle_sync_bfly(word, 2 * BLOCK_LANES)
            tiles = (blocks + (ATOM_BLOCKS - 1)) >> 2
            if row < scale_rows and tile < tiles and lane == 0:
                # layout.py's offset in shifts: // and % of a signed number cost five instructions each.
                atom = Int64(row >> 7) * tiles + Int64(tile)
                line = ((row & 31) << 4) + ((row >> 5 & 3) << 2)
                cute.arch.inline_ptx(
                    "st.global.b32 [{$r0}], {$r1};",
                    read_only_args=[scale + atom * ATOM_BYTES + Int64(line), word],
                )
        elif cutlass.const_expr(layout == ScaleLayout.ROW_MAJOR):
            own = scale + Int64(row) * blocks + Int64(block)
            if present and lane % BLOCK_LANES == 0:
                cute.arch.inline_ptx("st.global.u8 [{$r0}], {$r1};", read_only_args=[own, byte])


@cute.jit
def launch_grid(
    x: Int64,
    data: Int64,
    scale: Int64,
    rows: Int32,
    scale_rows: Int32,
    blocks: Int32,
    row_bytes: Int64,
    aligned: Int32,
    round_up: Uint32,
    across_log2: Int32,
    grid_x: Int32,
    grid_y: Int32,
    stream: cuda.CUstream,
    dtype: cutlass.Constexpr,
    layout: cutlass.Constexpr,
    announces: cutlass.Constexpr,
) -> None:
    """Launch the kernel.

    Args:
        x: Address of element (0, 0).
        data: Address of the E4M3 matrix or, in a round trip, of the BF16 one, 16-byte aligned.
        scale: Address of the scales, 16-byte aligned; not used in a round trip.
        rows: M.
        scale_rows: Rows of the scale layout: M, or M rounded up to 128.
        blocks: K / 32.
        row_bytes: Row stride of x in bytes.
        aligned: Not 0 when x and its row stride are multiples of 16 bytes.
        round_up: `ROUND_UP` of the rule.
        across_log2: log2 of a CTA's width in strips, from `grid`.
        grid_x: CTAs along M.
        grid_y: CTAs along K.
        stream: Stream handle.
        dtype: torch dtype of x.
        layout: Layout of the scales; None for a round trip.
        announces: Let a launch with the attribute for it begin when all CTAs run.
    """
    numbers = (rows, scale_rows, blocks, row_bytes, aligned, round_up, across_log2)
    quantize_kernel(x, data, scale, *numbers, dtype, layout, announces).launch(
        grid=(grid_x, grid_y, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_kernel(arch: str, dtype: torch.dtype, layout: ScaleLayout | None, *, options: str = "") -> Any:
    """Compile `launch_grid` for `arch` (as `sm_90a`); needs no GPU.

    Args:
        arch: Target.
        dtype: dtype of x.
        layout: Layout of the scales; None for a round trip.
        options: Further options of `cute.compile`, as `--keep-ptx`.

    Returns:
        As `compile_launch`.
    """
    return compile_launch(dtype, layout, f"--enable-tvm-ffi --gpu-arch {arch} {options}".strip())


def compile_launch(dtype: torch.dtype, layout: ScaleLayout | None, options: str) -> Any:
    """Compile `launch_grid`; needs no GPU.

    Args:
        dtype: dtype of x.
        layout: Layout of the scales; None for a round trip.
        options: Options of `cute.compile`.

    Returns:
        The compiled function; takes the arguments of `launch_grid` up to `stream`, all of them integers.
    """
    return cute.compile(
        launch_grid,
        *(Int64(0), Int64(0), Int64(0)),
        *(Int32(0), Int32(0), Int32(0), Int64(0), Int32(0), Uint32(0)),
        *(Int32(0), Int32(1), Int32(1)),
        make_fake_stream(),
        dtype,
        layout,
        announces_itself(layout, options),
        options=options,
    )


def announces_itself(layout: ScaleLayout | None, options: str) -> bool:
    """Whether a kernel that takes what this one writes may begin while it runs (`kernels.overlap`).

    That is the fused kernel: SM100's takes swizzled scales, SM90's the activations of a round trip. The
    instruction exists from SM90 on, the quantiser from capability 8.9 on.
    """
    arch = re.search(r"--gpu-arch sm_(\d+)", options)
    return layout is not ScaleLayout.ROW_MAJOR and (arch is None or int(arch[1]) >= 90)


_Compiled = Callable[..., None]
_lock = threading.Lock()
_ready: dict[tuple[int, torch.dtype, ScaleLayout | None], _Compiled] = {}


def ready(device: int, dtype: torch.dtype, layout: ScaleLayout | None) -> _Compiled:
    """The kernel for a CUDA device, ready to be launched; from a table after the first call. Thread-safe.

    `layout` is that of the scales, None for a round trip.

    Raises:
        UnsupportedError: It is not in the table and the current stream is being captured, or it does not
            compile or load.
    """
    found = _ready.get((device, dtype, layout))
    if found is not None:
        return found
    with _lock:
        return _ready.get((device, dtype, layout)) or _make_ready(device, dtype, layout)


def _make_ready(device: int, dtype: torch.dtype, layout: ScaleLayout | None) -> _Compiled:
    kernel = f"quantiser for {dtype} and " + ("BF16 output" if layout is None else f"{layout} scales")
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"the {kernel} is used for the first time on cuda:{device} inside a CUDA graph capture, "
                "where it cannot be loaded; call compile_quantizer before it"
            )
        arch = gpu_arch(torch.cuda.get_device_capability(device))
        try:
            function: _Compiled = quantizer_kernel(dtype, layout).function(arch)
            # No strip of an empty matrix is present, so no address is used.
            function(0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, torch.cuda.current_stream().cuda_stream)
        except Exception as error:
            reason = f"the {kernel} cannot be compiled and loaded for {arch} on cuda:{device}: {error}"
            raise UnsupportedError(reason) from error
    _ready[device, dtype, layout] = function
    return function


def launch(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    layout: ScaleLayout | None,
    rule: ScaleRule,
) -> None:
    """Quantise `x` into `data` and `scale`, or there and back, on torch's current stream of x's device.

    Nothing is checked here; `quantize_mxfp8` and `round_trip_mxfp8` have done so.

    Args:
        x: [M, K] BF16, FP16 or FP32 CUDA tensor with M, K > 0, last dimension contiguous.
        data: [M, K] float8_e4m3fn, or bfloat16 for a round trip; contiguous, 16-byte aligned.
        scale: One byte per element, in `layout`, contiguous, 16-byte aligned; None for a round trip.
        layout: Layout of the scales; None for a round trip.
        rule: Rule for the scales.

    Raises:
        UnsupportedError: See `ready`.
    """
    device = x.device.index
    function = ready(device, x.dtype, layout)
    rows, k = x.shape
    scale_rows = padded_rows(rows) if layout is ScaleLayout.SWIZZLED else rows
    grid_x, grid_y, across_log2 = grid(scale_rows, k_tiles(k))
    row_bytes = x.stride(0) * x.element_size()
    address = x.data_ptr()
    arguments = (
        *(address, data.data_ptr(), 0 if scale is None else scale.data_ptr()),
        *(rows, scale_rows, k // BLOCK, row_bytes, int((address | row_bytes) % 16 == 0), ROUND_UP[rule]),
        *(across_log2, grid_x, grid_y),
        torch.cuda.current_stream(x.device).cuda_stream,
    )
    if device == torch.cuda.current_device():
        function(*arguments)
    else:
        with torch.cuda.device(device):
            function(*arguments)
