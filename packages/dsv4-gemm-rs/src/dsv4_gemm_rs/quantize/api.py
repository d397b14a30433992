# SPDX-License-Identifier: Apache-2.0
"""Quantise a matrix to MXFP8 and back: check the call, choose the kernel or the torch path, fill the outputs.

A CUDA tensor on a device of compute capability 8.9 or newer goes to the kernel, everything else to `rule.py`;
the bits are the same. Everything that can be wrong with a call is found here, before anything is launched.

Rejected: copying rows that are strided or not 16-byte aligned (the kernel reads them in place; a copy would
allocate, and cost more than the quantisation); asserting finite input (a host synchronisation).
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeVar

import torch
from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs.quantize import rule as _rule
from dsv4_gemm_rs.quantize.layout import (
    ScaleLayout,
    infer_layout,
    scale_as_bytes,
    scale_shape,
    swizzle_scales,
    unswizzle_scales,
)
from dsv4_gemm_rs.quantize.rule import BLOCK, ScaleRule

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUTPUT_ALIGNMENT = 16
"""Bytes; of `out` on a GPU. What torch allocates always satisfies it, and whatever TMA reads must."""

MIN_CAPABILITY = (8, 9)
"""First compute capability with `cvt.rn.satfinite.e4m3x2.f32` (PTX ISA, cvt)."""


class Mxfp8(NamedTuple):
    """A matrix in MXFP8.

    Attributes:
        data: [M, K] float8_e4m3fn, contiguous.
        scale: uint8, E8M0: one byte per 32 elements of a row, value 2^(byte - 127).
        layout: `swizzled`: `scale` is 1-D, ceil(M/128)*128 * ceil(K/32/4)*4 bytes, padding zero.
            `row_major`: `scale` is [M, K/32].
    """

    data: torch.Tensor
    scale: torch.Tensor
    layout: ScaleLayout


Choice = TypeVar("Choice", ScaleLayout, ScaleRule)


def choice(kind: type[Choice], argument: str, value: str) -> Choice:
    """The member of `kind` that `value` names; ArgumentError for `argument` when there is none."""
    try:
        return kind(value)
    except ValueError:
        raise ArgumentError(argument, value, "one of " + ", ".join(repr(str(one)) for one in kind)) from None


def check_input(x: torch.Tensor) -> None:
    """Raise ArgumentError unless `x` is a [M, K] matrix that `quantize_mxfp8` accepts."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError("x", type(x).__name__, "a torch.Tensor")
    if x.dtype not in INPUT_DTYPES:
        raise ArgumentError("x.dtype", x.dtype, "torch.bfloat16, torch.float16 or torch.float32")
    if x.dim() != 2:
        raise ArgumentError("x", tuple(x.shape), "a matrix [M, K]")
    if x.shape[1] % BLOCK:
        raise ArgumentError("x.shape[1]", x.shape[1], f"K, a multiple of {BLOCK}")
    if x.stride(1) != 1 and x.numel():
        raise ArgumentError("x.stride()", tuple(x.stride()), "the last dimension contiguous, (any, 1)")


def _check_output(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], x: torch.Tensor
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(name, type(tensor).__name__, "a torch.Tensor")
    if tensor.dtype not in dtypes:
        raise ArgumentError(f"{name}.dtype", tensor.dtype, " or ".join(str(one) for one in dtypes))
    if tuple(tensor.shape) != shape:
        raise ArgumentError(name, tuple(tensor.shape), f"shape {shape} for x of shape {tuple(x.shape)}")
    if tensor.device != x.device:
        raise ArgumentError(f"{name}.device", tensor.device, f"{x.device}, the device of x")
    if not tensor.is_contiguous():
        raise ArgumentError(f"{name}.stride()", tuple(tensor.stride()), "contiguous")
    if tensor.is_cuda and tensor.data_ptr() % OUTPUT_ALIGNMENT:
        raise ArgumentError(f"{name}.data_ptr()", tensor.data_ptr(), f"{OUTPUT_ALIGNMENT}-byte aligned")


def _check_out(out: Mxfp8, x: torch.Tensor, layout: ScaleLayout) -> None:
    if not isinstance(out, Mxfp8):
        raise ArgumentError("out", type(out).__name__, "an Mxfp8")
    if out.layout != layout:
        raise ArgumentError("out.layout", str(out.layout), f"{str(layout)!r}, the layout asked for")
    rows, k = x.shape
    _check_output("out.data", out.data, (torch.float8_e4m3fn,), (rows, k), x)
    scale_dtypes = (torch.uint8, torch.float8_e8m0fnu)
    _check_output("out.scale", out.scale, scale_dtypes, scale_shape(rows, k, layout), x)


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def quantize_mxfp8(
    x: torch.Tensor,
    *,
    layout: ScaleLayout | str = ScaleLayout.SWIZZLED,
    rule: ScaleRule | str = ScaleRule.VLLM,
    out: Mxfp8 | None = None,
) -> Mxfp8:
    """Quantise a matrix to MXFP8: E4M3 elements, one E8M0 scale per 32 of them along K.

    Formulas, sources and the treatment of NaN, Inf, zeros and subnormals: `dsv4_gemm_rs.quantize.rule`. On a
    GPU this is one kernel on torch's current stream, without a synchronisation; with `out` also without an
    allocation. The first call for a dtype and a layout compiles it (about a second): call `compile_quantizer`
    before a CUDA graph capture. Inside `torch.compile` use `torch.ops.dsv4.quantize_mxfp8`.

    Args:
        x: [M, K] bfloat16, float16 or float32; K a multiple of 32, M >= 0, last dimension contiguous, any row
            stride and any alignment. (Rows that are not 16-byte aligned are read element by element, more
            slowly.)
        layout: Layout of the scales, `swizzled` or `row_major`.
        rule: `vllm` (no element saturates) or `ocp` (OCP MX v1.0; the largest elements may saturate).
        out: Written instead of a new result: contiguous tensors of the right shapes on x's device, 16-byte
            aligned on a GPU, not overlapping x; `scale` may be uint8 or float8_e8m0fnu. Every byte is
            written, padding too.

    Returns:
        `out`, or a new Mxfp8 on x's device.

    Raises:
        ArgumentError: A dtype, shape, stride, alignment, device or name that is not among the above.
        UnsupportedError: The kernel is not compiled yet and the stream is being captured, or cannot be
            compiled.
    """
    layout, rule = choice(ScaleLayout, "layout", layout), choice(ScaleRule, "rule", rule)
    check_input(x)
    if out is None:
        rows, k = x.shape
        out = Mxfp8(
            torch.empty((rows, k), dtype=torch.float8_e4m3fn, device=x.device),
            torch.empty(scale_shape(rows, k, layout), dtype=torch.uint8, device=x.device),
            layout,
        )
    else:
        _check_out(out, x, layout)
    if not x.numel():
        return out
    if _has_kernel(x.device):
        from dsv4_gemm_rs.quantize import kernel

        kernel.launch(x, out.data, out.scale, layout, rule)
        return out
    scale = scale_as_bytes(out.scale)
    if layout is ScaleLayout.ROW_MAJOR:
        _rule.quantize_rows(x, rule, out.data, scale)
    else:
        rows_of_scales = scale.new_empty(x.shape[0], x.shape[1] // BLOCK)
        _rule.quantize_rows(x, rule, out.data, rows_of_scales)
        scale.copy_(swizzle_scales(rows_of_scales))
    return out


def round_trip_mxfp8(
    x: torch.Tensor, *, rule: ScaleRule | str = ScaleRule.VLLM, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantise a matrix to MXFP8 and write its values back as BF16: the operand of a plain BF16 GEMM.

    Equal to `dequantize_mxfp8(quantize_mxfp8(x, rule=rule)).to(torch.bfloat16)`, bit for bit except that a
    NaN is always 0x7FFF. BF16 holds the values of every code under the scale bytes 3 to 246 exactly; tinier
    ones round to nearest even, and finite |x| of 1.9375 * 2^127 and more becomes infinite under `vllm`
    (`dsv4_gemm_rs.quantize.rule` says what exactly). On a GPU this is one kernel on torch's current stream,
    without a synchronisation; with `out` also without an allocation. The first call for a dtype compiles it
    (about a second): call `compile_quantizer(..., round_trip=True)` before a CUDA graph capture.

    Args:
        x: As for `quantize_mxfp8`.
        rule: `vllm` (no element saturates) or `ocp` (OCP MX v1.0; the largest elements may saturate).
        out: Written instead of a new result: [M, K] bfloat16 on x's device, contiguous, 16-byte aligned on a
            GPU, not overlapping x.

    Returns:
        `out`, or a new contiguous [M, K] bfloat16 tensor on x's device.

    Raises:
        ArgumentError: A dtype, shape, stride, alignment, device or name that is not among the above.
        UnsupportedError: The kernel is not compiled yet and the stream is being captured, or cannot be
            compiled.
    """
    rule = choice(ScaleRule, "rule", rule)
    check_input(x)
    if out is None:
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    else:
        _check_output("out", out, (torch.bfloat16,), tuple(x.shape), x)
    if not x.numel():
        return out
    if _has_kernel(x.device):
        from dsv4_gemm_rs.quantize import kernel

        kernel.launch(x, out, None, None, rule)
    else:
        _rule.round_trip_rows(x, rule, out)
    return out


def compile_quantizer(
    device: torch.device | str | int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: ScaleLayout | str = ScaleLayout.SWIZZLED,
    round_trip: bool = False,
) -> None:
    """Compile and load a kernel for `dtype` on `device`, unless that is done already.

    It is the one that `quantize_mxfp8` uses for `layout` or, with `round_trip`, that of `round_trip_mxfp8`,
    which writes no scales: `layout` has no effect then. One kernel serves both rules and every M, K and row
    stride. Does nothing when the device has no kernel (CPU, capability below 8.9). Call it before a CUDA
    graph capture.

    Raises:
        ArgumentError: A dtype or a layout that `quantize_mxfp8` does not take.
        UnsupportedError: The stream is being captured, or the kernel cannot be compiled.
    """
    layout = choice(ScaleLayout, "layout", layout)
    if dtype not in INPUT_DTYPES:
        raise ArgumentError("dtype", dtype, "torch.bfloat16, torch.float16 or torch.float32")
    where = torch.device(device)
    if _has_kernel(where):
        from dsv4_gemm_rs.quantize import kernel

        with torch.cuda.device(where):  # an index left out means the current device
            kernel.ready(torch.cuda.current_device(), dtype, None if round_trip else layout)


def dequantize_mxfp8(
    q: Mxfp8 | torch.Tensor, scale: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The values of an MXFP8 matrix: data * 2^(scale - 127), NaN where the scale byte is 255.

    Exact in float64. Exact in float32 up to FLT_MAX, infinite above (reachable from scale byte 247).

    Args:
        q: An Mxfp8, or its [M, K] float8_e4m3fn data alone (any strides).
        scale: Scales of `q` when that is a tensor, uint8 or float8_e8m0fnu: [M, K/32] is row-major, 1-D is
            swizzled.
        dtype: float32 or float64.

    Returns:
        New contiguous [M, K] tensor of `dtype` on the device of the data.

    Raises:
        ArgumentError: Dtype, shape or device of the data or the scales, both or no scales given, another
            `dtype`.
    """
    if isinstance(q, Mxfp8):
        if scale is not None:
            raise ArgumentError("scale", "a tensor", "None when q is an Mxfp8")
        data, scale = q.data, q.scale
    else:
        data = q
    if not isinstance(data, torch.Tensor):
        raise ArgumentError("q", type(data).__name__, "an Mxfp8, or a torch.Tensor and its scales")
    if data.dtype != torch.float8_e4m3fn:
        raise ArgumentError("q.dtype", data.dtype, "torch.float8_e4m3fn")
    if dtype not in (torch.float32, torch.float64):
        raise ArgumentError("dtype", dtype, "torch.float32 or torch.float64")
    scale = scale_as_bytes(scale)  # type: ignore[arg-type]  # None is refused there, by name
    found = infer_layout(data, scale)
    if isinstance(q, Mxfp8) and found != q.layout:
        raise ArgumentError("q.layout", str(q.layout), f"{str(found)!r}, as the shape of its scales says")
    if scale.device != data.device:
        raise ArgumentError("scale.device", scale.device, f"{data.device}, the device of the data")
    rows = unswizzle_scales(scale, *data.shape) if found is ScaleLayout.SWIZZLED else scale
    return _rule.dequantize_rows(data, rows, dtype)
