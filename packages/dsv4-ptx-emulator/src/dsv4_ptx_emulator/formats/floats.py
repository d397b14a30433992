# SPDX-License-Identifier: Apache-2.0
"""Bit patterns of PTX's floating-point types to values and back, for whole arrays at once.

One description (`FloatFormat`) and one rounding routine serve every narrow type, because a routine per pair
of types is where conversions of emulators disagree with each other. The routine works on float64: each source
that PTX converts to a narrow type is exact in it, scaling by a power of two is exact, and so the only
rounding is the one that is asked for. BF16, F16 and TF32 with round-to-nearest-even, the ones that a kernel
executes by the million, take shorter ways that the tests compare with the general one.

Rounding modes are spelled as in PTX ISA 9.4, section 9.7.10.24 (`cvt`): `rn` nearest even, `rna` nearest with
ties away from zero, `rz`, `rm`, `rp` towards zero, minus and plus infinity. Stochastic
rounding (`rs`, sm_100a) is refused: nothing here uses it.

Traps. An E8M0 scale has no sign and no zero: conversions take the magnitude, `rp` rounds the magnitude up,
and the smallest value 2^-127 is what every smaller magnitude becomes (as `cuda_fp8.hpp` of CUDA 13.0 computes
it on the host). The NaN that a conversion yields is canonical, 0x7FFF for BF16 and F16 and 0x7F for both FP8
formats; the host code of `cuda_fp8.hpp` keeps mantissa bits of a NaN in E5M2, the instruction doesn't.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bits: TypeAlias = "npt.NDArray[np.unsignedinteger[Any]]"
Floats: TypeAlias = "npt.NDArray[np.floating[Any]]"

_SMALLEST_NORMAL = np.float32(2.0**-126)

ROUNDINGS = ("rn", "rna", "rz", "rm", "rp")
"""Rounding modifiers that `encode` knows."""


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point type of PTX (section 5.2.1 and 5.2.3).

    Attributes:
        name: As in PTX modifiers, such as "e4m3" or "bf16".
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the fraction field.
        bias: What is subtracted from the exponent field.
        maximum: Bits of the largest finite value.
        infinity: Bits of plus infinity; None where the type has none.
        nan: Bits of the NaN that conversions yield; None where the type has none.
        padding: Bits below the fraction that a container wider than the type leaves zero (TF32: 13).
        signed: Whether a sign bit sits above the exponent.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    maximum: int
    infinity: int | None
    nan: int | None
    padding: int = 0
    signed: bool = True

    @cached_property
    def width(self) -> int:
        """Bits of the container: sign, exponent, fraction and padding."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits + self.padding

    @cached_property
    def storage(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The unsigned NumPy type that holds one value's bits."""
        return np.dtype(np.uint8 if self.width <= 8 else np.uint16 if self.width == 16 else np.uint32)


E4M3 = FloatFormat("e4m3", 4, 3, 7, maximum=0x7E, infinity=None, nan=0x7F)
E5M2 = FloatFormat("e5m2", 5, 2, 15, maximum=0x7B, infinity=0x7C, nan=0x7F)
E2M1 = FloatFormat("e2m1", 2, 1, 1, maximum=0x7, infinity=None, nan=None)
E2M3 = FloatFormat("e2m3", 2, 3, 1, maximum=0x1F, infinity=None, nan=None)
E3M2 = FloatFormat("e3m2", 3, 2, 3, maximum=0x1F, infinity=None, nan=None)
UE8M0 = FloatFormat("ue8m0", 8, 0, 127, maximum=0xFE, infinity=None, nan=0xFF, signed=False)
F16 = FloatFormat("f16", 5, 10, 15, maximum=0x7BFF, infinity=0x7C00, nan=0x7FFF)
BF16 = FloatFormat("bf16", 8, 7, 127, maximum=0x7F7F, infinity=0x7F80, nan=0x7FFF)
TF32 = FloatFormat("tf32", 8, 10, 127, maximum=0x7F7FE000, infinity=0x7F800000, nan=0x7FC00000, padding=13)
F32 = FloatFormat("f32", 8, 23, 127, maximum=0x7F7FFFFF, infinity=0x7F800000, nan=0x7FFFFFFF)

FORMATS = {f.name: f for f in (E4M3, E5M2, E2M1, E2M3, E3M2, UE8M0, F16, BF16, TF32, F32)}
"""Every format by its PTX name."""


def decode(fmt: FloatFormat, bits: Bits) -> npt.NDArray[np.float32]:
    """Values of bit patterns, exact in float32.

    Args:
        fmt: The type of the patterns.
        bits: Unsigned integers of any shape; bits above the type's width must be zero.

    Returns:
        float32 of the same shape. A NaN of a 16-bit type keeps its payload; others become NumPy's NaN.
    """
    if fmt is BF16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if fmt is F16:
        return bits.astype(np.uint16, copy=False).view(np.float16).astype(np.float32)
    if fmt is F32:
        return bits.astype(np.uint32, copy=False).view(np.float32)
    if fmt is TF32:
        return (bits.astype(np.uint32, copy=False) & np.uint32(0xFFFFE000)).view(np.float32)
    values: npt.NDArray[np.float32] = _table(fmt)[bits]
    return values


@cache
def _table(fmt: FloatFormat) -> npt.NDArray[np.float32]:
    codes = np.arange(1 << fmt.width, dtype=np.int64)
    if not fmt.signed:
        values = np.ldexp(np.ones(codes.shape, np.float64), codes - fmt.bias)
    else:
        sign = np.where(codes >> (fmt.width - 1), -1.0, 1.0)
        exponent = codes >> fmt.mantissa_bits & (1 << fmt.exponent_bits) - 1
        fraction = codes & (1 << fmt.mantissa_bits) - 1
        significand = fraction + np.where(exponent > 0, 1 << fmt.mantissa_bits, 0)
        values = sign * np.ldexp(significand, np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits)
    magnitude = codes & (1 << fmt.width - int(fmt.signed)) - 1
    if fmt.infinity is not None:
        values = np.where(magnitude == fmt.infinity, np.copysign(np.inf, values), values)
    values[magnitude > (fmt.maximum if fmt.infinity is None else fmt.infinity)] = np.nan
    table = values.astype(np.float32)
    table.setflags(write=False)
    return table


def flush(values: Floats) -> Floats:
    """Numbers that are subnormal in float32 to zeros of their sign (`.ftz`); a fresh array of the type."""
    return np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def encode(
    fmt: FloatFormat,
    values: Floats,
    rounding: str = "rn",
    *,
    saturate: bool = False,
    relu: bool = False,
) -> Bits:
    """Round values to a format and return their bits (PTX ISA 9.4, section 9.7.10.24).

    Args:
        fmt: Target type.
        values: float16, float32 or float64 of any shape.
        rounding: One of `ROUNDINGS`. UE8M0 takes `rz` and `rp` only, both on the magnitude.
        saturate: `.satfinite`: what would overflow becomes the largest finite value of its sign. A type
            without infinity yields NaN on overflow if this is off, or its maximum if it has no NaN either.
        relu: `.relu`: negative results become +0, NaN becomes the canonical NaN.

    Returns:
        Unsigned integers of `fmt.storage`, same shape. NaN becomes `fmt.nan`, or +maximum where there is
        none.

    Raises:
        ValueError: The rounding is none of the target's.
    """
    if rounding == "rn" and not saturate and not relu:
        if fmt is BF16 and values.dtype == np.float32:
            return _bf16_nearest_even(values)
        if fmt is F16 and values.dtype != np.float64:
            return _f16_nearest_even(values)
    if fmt is UE8M0:
        return _encode_scale(values, rounding, saturate)
    return _encode_general(fmt, values, rounding, saturate, relu)


def _bf16_nearest_even(values: Floats) -> Bits:
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, np.uint32(0x7FFF), rounded).astype(np.uint16)


def _f16_nearest_even(values: Floats) -> Bits:
    with np.errstate(over="ignore"):
        bits = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


def _encode_scale(values: Floats, rounding: str, saturate: bool) -> Bits:
    if rounding not in ("rz", "rp"):
        raise ValueError(f"ue8m0 rounds with rz or rp, not {rounding!r}")
    bits = np.abs(values).astype(np.float32).view(np.uint32)
    field = bits >> np.uint32(23)
    if rounding == "rp":
        # A magnitude between 2^-127 and 2^-126 is a subnormal float32 (exponent field 0): it rounds up.
        above = (bits & np.uint32(0x7FFFFF)) != 0
        field = field + (above & (bits > np.uint32(0x400000)) & (bits < np.uint32(0x7F800000)))
    nan = bits > np.uint32(0x7F800000)
    if saturate:
        field = np.where(nan, field, np.minimum(field, np.uint32(0xFE)))
    return np.where(nan, np.uint32(0xFF), field).astype(np.uint8)


def _encode_general(fmt: FloatFormat, values: Floats, rounding: str, saturate: bool, relu: bool) -> Bits:
    wide = values.astype(np.float64)
    nan = np.isnan(wide)
    negative = np.signbit(wide)
    magnitude = np.abs(np.where(nan, 0.0, wide))
    infinite = np.isinf(magnitude)
    magnitude[infinite] = 0.0
    smallest = 1 - fmt.bias
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, smallest), smallest)
    steps = np.ldexp(magnitude, fmt.mantissa_bits - exponent)
    whole = _round_magnitude(steps, negative, rounding)
    # A carry out of the significand runs into the exponent field, which is what the encoding wants.
    codes = whole.astype(np.int64) + ((exponent - smallest).astype(np.int64) << fmt.mantissa_bits)
    codes <<= fmt.padding
    overflow = codes > fmt.maximum
    towards_zero = np.where(negative, rounding in ("rz", "rp"), rounding in ("rz", "rm"))
    if saturate:
        codes[overflow | infinite] = fmt.maximum
    else:
        beyond = fmt.infinity if fmt.infinity is not None else fmt.nan if fmt.nan is not None else fmt.maximum
        codes[overflow] = np.where(towards_zero, fmt.maximum, beyond)[overflow]
        codes[infinite] = beyond
    codes |= negative.astype(np.int64) << fmt.width - 1
    if relu:
        codes[negative] = 0
    if fmt is TF32:
        # Seen on an H200: a NaN is truncated, so that one whose payload is in the low bits becomes infinity.
        codes[nan] = values.astype(np.float32).view(np.uint32)[nan] & 0xFFFFE000
    else:
        codes[nan] = fmt.maximum if fmt.nan is None else fmt.nan
    return codes.astype(fmt.storage)


def _round_magnitude(steps: Floats, negative: npt.NDArray[np.bool_], rounding: str) -> Floats:
    match rounding:
        case "rn":
            return np.rint(steps)
        case "rz":
            return np.floor(steps)
        case "rna":
            # Not floor(steps + 0.5): the addition rounds where the fraction is just below one half.
            whole = np.floor(steps)
            return whole + (steps - whole >= 0.5)
        case "rm":
            return np.where(negative, np.ceil(steps), np.floor(steps))
        case "rp":
            return np.where(negative, np.floor(steps), np.ceil(steps))
        case _:
            raise ValueError(f"rounding {rounding!r} is none of {', '.join(ROUNDINGS)}")
