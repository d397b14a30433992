# SPDX-License-Identifier: Apache-2.0
"""How 32 numbers become one E8M0 scale byte and 32 E4M3 codes, in torch operations on any device.

This module defines the result; the GPU kernel must equal it bit for bit. It is also the CPU path.

A block is 32 consecutive elements of a row. Its `amax` is the largest magnitude among its *finite* elements
(0 if there are none). With b and f the exponent field and the fraction bits of amax as FP32, the scale
byte is

* `vllm`: max(b - 8 + (f > 0x600000), 0). This is ceil(log2(amax / 448)) + 127 clamped to [0, 254], the
  formula in vLLM's `mxfp8_utils.py` (amax floored at the smallest normal FP32 there, which the clamp at 0
  absorbs), because 448 = 1.75 * 2^8 and 1.75 has the fraction bits 0x600000. No element ever saturates.
* `ocp`: max(b - 8, 0), floor(log2(amax)) - emax with emax = 8 for E4M3: section 6.3 (conversion from vectors
  of scalars to MX formats) of the OCP Microscaling Formats specification v1.0. Elements above 448 * scale
  saturate.

and an element is RNE(x * 2^(127 - byte)) in E4M3, saturated to +-448. The byte never exceeds 247 (amax is
finite), so the factor 2^(127 - byte) is always a normal FP32 number and the product is exact, except below
2^-126, where every value is a zero in E4M3 whatever its last bits are.

Special values:

* NaN and +-Inf elements become the code 0x7F (NaN). E4M3 has no infinity, and 448 in place of an overflow
  would hide it. They do not touch the scale, so the finite elements of their block keep their precision.
* A block without a finite element has amax 0 and therefore the scale byte 0. No special case is made: any
  scale leaves its elements NaN, and byte 0 is one that every consumer meets anyway, in blocks of zeros.
* Zeros keep their sign, as do elements that round to zero. A block of zeros has the scale byte 0.
* Byte 255 (NaN in E8M0, OCP MX v1.0 section 5.4.1) is never produced.

Where this differs from the float formula: for BF16 and FP16 inputs, nowhere (tested for every value). For
FP32, torch rounds amax / 448 and its logarithm, so that just above 448 * 2^n the logarithm can come out as n
itself and the float formula returns one less than the true ceiling. The fraction bits of such an amax are
0x600001 to at most 0x600028 (2, 4, 9, 20, 39 or 40 values, more the larger |n| is; torch 2.13 on a CPU). Its
block then holds an element a hair above 448, which rounds to 448. The rule here is the exact one.

Where FlashInfer's `mxfp8_quantize` differs (from a public re-implementation that states it follows
FlashInfer's conversion exactly; not confirmed against FlashInfer here): finite blocks with amax > 448 *
2^-127 get equal bytes and data. A block with a scale byte of 0 gets zero data, where ours keeps the elements.
With an Inf in the block, the byte is 254 and the finite elements become 0. What it does to the scale on NaN
is not known.

The round trip x̂ = BF16(FP32(code * 2^(byte - 127))) is the operand of an MMA without block scaling. A code
is a multiple of 2^-9 with four significant bits; BF16 has eight, and 2^-133 is its smallest subnormal. So

* bytes 3 to 246: exact for all 256 codes.
* bytes 0, 1 and 2: exact unless the code's multiple of 2^-9 is no multiple of 8, 4 or 2. What is then rounded
  (to nearest even) lies below 2^-130, in BF16's subnormals.
* byte 247: codes of magnitude 256 and more are 2^128 and more, and become +-Inf. The `vllm` rule alone gives
  this byte, and x̂ is infinite exactly for finite |x| >= 1.9375 * 2^127 (248 * 2^120, the tie that rounds to
  256). `ocp` stops at byte 246 and at 1.75 * 2^127.
* NaN, hence every NaN and Inf of x, is 0x7FFF, CUDA's canonical NaN (CUDA Math API, `CUDART_NAN_BF16`).
  torch's conversion to BF16 is no guide: it gives 0x7FC0 or 0xFFFF, depending on the CPU's vector unit.

Rejected: `torch.ldexp` and `frexp` (several passes and an FP32 detour that overflows at 2^128); float8
conversion without the clamp (whether torch's conversion saturates or gives NaN above 464 depends on its
version); a branch that skips the non-finite handling when there is none (a host synchronisation on a GPU).

Trap: the arithmetic is FP32 and needs subnormals. `torch.set_flush_denormal(True)`, or a library linked with
-ffast-math that sets the same CPU mode, zeroes inputs below 2^-126.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import torch

BLOCK = 32
"""Elements along K that share one scale (OCP MX v1.0, table 1)."""

E4M3_MAX = 448.0
E4M3_EMAX = 8

FRACTION_BITS = 23
EXPONENT_BIAS = 127
FRACTION_MASK = 0x007F_FFFF
MAGNITUDE_MASK = 0x7FFF_FFFF
INFINITY_BITS = 0x7F80_0000
E4M3_MAX_FRACTION = 0x0060_0000
"""Fraction bits of 448 as FP32."""

BF16_NAN = 0x7FFF
"""The NaN of a round trip."""

_CHUNK_ELEMENTS = 1 << 18
"""Elements handled at a time on a CPU: the FP32 copies of a chunk stay in the cache."""


class ScaleRule(StrEnum):
    """How a block's scale follows from its largest magnitude; see the module's text."""

    VLLM = "vllm"
    OCP = "ocp"


def scale_bytes(amax_bits: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """E8M0 scale bytes of blocks, from the FP32 bits of their largest finite magnitude.

    Args:
        amax_bits: INT32 tensor of any shape; bit patterns of non-negative finite FP32 numbers.
        rule: `vllm` or `ocp`; formulas and sources in the module's text.

    Returns:
        INT32 tensor of the same shape with values in [0, 247].
    """
    exponent = (amax_bits >> FRACTION_BITS) - E4M3_EMAX
    if rule is ScaleRule.VLLM:
        exponent += (amax_bits & FRACTION_MASK) > E4M3_MAX_FRACTION
    return exponent.clamp_(min=0)


def _quantize_rows(x: torch.Tensor, rule: ScaleRule, data: torch.Tensor, scale: torch.Tensor) -> None:
    rows, k = x.shape
    blocks = x.to(torch.float32).view(rows, k // BLOCK, BLOCK)
    magnitude = blocks.view(torch.int32) & MAGNITUDE_MASK
    finite = magnitude < INFINITY_BITS
    amax_bits = (magnitude * finite).amax(-1)
    byte = scale_bytes(amax_bits, rule)
    factor = ((2 * EXPONENT_BIAS - byte) << FRACTION_BITS).view(torch.float32)
    scaled = (blocks * factor.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
    scaled.masked_fill_(~finite, float("nan"))
    data.copy_(scaled.view(rows, k))
    scale.copy_(byte)


def _parts(x: torch.Tensor) -> Iterator[slice]:
    rows, k = x.shape
    step = max(1, _CHUNK_ELEMENTS // max(k, 1)) if x.device.type == "cpu" else max(rows, 1)
    return (slice(start, start + step) for start in range(0, rows, step))


@torch.no_grad()
def quantize_rows(x: torch.Tensor, rule: ScaleRule, data: torch.Tensor, scale: torch.Tensor) -> None:
    """Quantise every block of `x` into `data` and `scale`.

    Args:
        x: [M, K] BF16, FP16 or FP32, K a multiple of 32, last dimension contiguous, any row stride.
        rule: Rule for the scale.
        data: Written. [M, K] float8_e4m3fn.
        scale: Written. [M, K/32] uint8, row-major.
    """
    for part in _parts(x):
        _quantize_rows(x[part], rule, data[part], scale[part])


@torch.no_grad()
def dequantize_rows(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`data * 2^(scale - 127)` per block, NaN where the scale byte is 255 (OCP MX v1.0 section 5.4.1).

    Args:
        data: [M, K] float8_e4m3fn.
        scale: [M, K/32] uint8, row-major.
        dtype: float32 or float64. Float64 is always exact. Float32 is exact up to FLT_MAX; from scale byte
            247 on, a product can reach 2^128 and becomes infinite.

    Returns:
        [M, K] contiguous tensor of `dtype`.
    """
    fraction_bits, bias, word = {
        torch.float32: (FRACTION_BITS, EXPONENT_BIAS, torch.int32),
        torch.float64: (52, 1023, torch.int64),
    }[dtype]
    byte = scale.to(word)
    exponent = byte + (bias - EXPONENT_BIAS)
    # Byte 0 is 2^-127, half of FP32's smallest normal: a subnormal with only the fraction's top bit set.
    bits = torch.where(exponent > 0, exponent << fraction_bits, 1 << (fraction_bits - 1))
    factor = bits.view(dtype).masked_fill(byte == 255, float("nan"))
    blocks = data.to(dtype).reshape(*scale.shape, BLOCK)
    return (blocks * factor.unsqueeze(-1)).view(data.shape)


@torch.no_grad()
def round_trip_rows(x: torch.Tensor, rule: ScaleRule, out: torch.Tensor) -> None:
    """Quantise every block of `x` and write the values back: `dequantize_rows(quantize_rows(x))` in BF16.

    Args:
        x: [M, K] BF16, FP16 or FP32, K a multiple of 32, last dimension contiguous, any row stride.
        rule: Rule for the scale.
        out: Written. [M, K] BF16. Where this is not exact, and its NaN: the module's text.
    """
    for part in _parts(x):
        rows, k = x[part].shape
        data = x.new_empty((rows, k), dtype=torch.float8_e4m3fn)
        scale = x.new_empty((rows, k // BLOCK), dtype=torch.uint8)
        _quantize_rows(x[part], rule, data, scale)
        values = dequantize_rows(data, scale, torch.float32)
        out[part].copy_(values)
        out[part].view(torch.int16).masked_fill_(values.isnan(), BF16_NAN)
