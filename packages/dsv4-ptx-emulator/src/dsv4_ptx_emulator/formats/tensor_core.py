# SPDX-License-Identifier: Apache-2.0
"""Descriptors of the fifth-generation tensor cores: what the bits of tcgen05.mma's operands say.

Instruction descriptor, 32 bits (PTX ISA 9.4, section 9.7.18.4.2). Two layouts, by kind: those without block
scaling have the type of D in bits 4 and 5, those with it the scale-factor ids in bits 4 and 5 (B) and 29
and 30 (A), and the scales' type in bit 23. Both: types of A and B in bits 7 to 12, negation in 13 and 14,
transposition ("major") in 15 and 16, N / 8 in bits 17 to 22, M / 16 in bits 24 to 28.

Shared-memory descriptor, 64 bits (section 9.7.18.4.1): start address, LBO and SBO as for wgmma
(formats/matrix.py), in units of 16 bytes; bits 46 to 48 hold the constant 0b001, which tells it from a
wgmma descriptor; the swizzle is in bits 61 to 63. The layouts that they describe are those of wgmma.

Refused by name: sparsity, saturation, weight-stationary shifts, 128-byte swizzling with atoms of 32 bytes,
base offsets, absolute leading-dimension strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dsv4_ptx_emulator.errors import AsyncMisuseError
from dsv4_ptx_emulator.formats import swizzle
from dsv4_ptx_emulator.formats.floats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, TF32, FloatFormat
from dsv4_ptx_emulator.formats.matrix import MatrixDescriptor

_FIELD = (1 << 14) - 1
_SWIZZLES = {0: swizzle.NONE, 2: swizzle.S128, 4: swizzle.S64, 6: swizzle.S32}
_NARROW = {0: E4M3, 1: E5M2, 3: E2M3, 4: E3M2, 5: E2M1}
_TYPES: dict[str, dict[int, FloatFormat]] = {
    "f16": {0: F16, 1: BF16},
    "tf32": {2: TF32},
    "f8f6f4": _NARROW,
    "mxf8f6f4": _NARROW,
}
DEPTHS = {"f16": 16, "tf32": 8, "f8f6f4": 32, "mxf8f6f4": 32}
"""K of a dense instruction by kind (section 9.7.18.2.1); always 32 bytes of shared memory per row."""


@dataclass(frozen=True, slots=True)
class InstructionDescriptor:
    """A decoded instruction descriptor.

    Attributes:
        rows: M.
        columns: N.
        a: Type of A's elements.
        b: Type of B's elements.
        half: Whether D's elements are float16 rather than float32.
        negate: Whether exactly one of A and B is negated.
        a_transposed: Whether A in shared memory is M major.
        b_transposed: Whether B is N major.
        a_scale: Byte of the 32-bit cells that holds A's scale factors; 0 without block scaling.
        b_scale: The same for B.
    """

    rows: int
    columns: int
    a: FloatFormat
    b: FloatFormat
    half: bool
    negate: bool
    a_transposed: bool
    b_transposed: bool
    a_scale: int
    b_scale: int


@lru_cache(maxsize=4096)
def decode_instruction(bits: int, kind: str, ctas: int) -> InstructionDescriptor:
    """Read an instruction descriptor.

    Args:
        bits: The 32 bits.
        kind: "f16", "tf32", "f8f6f4" or "mxf8f6f4".
        ctas: 1 or 2, by `.cta_group`.

    Raises:
        AsyncMisuseError: A field's value is not valid for the kind, or asks for what is not emulated.
    """
    scaled = kind == "mxf8f6f4"

    def wrong(what: str) -> AsyncMisuseError:
        return AsyncMisuseError(f"instruction descriptor 0x{bits:08x} of .kind::{kind}: {what}")

    if bits & 0b111:
        raise wrong("sparsity is not emulated")
    reserved = 1 << 3 | 1 << 6 | (1 << 31 if scaled else 1 << 23 | 0b111 << 29)
    if bits & reserved:
        raise wrong(f"bits 0x{bits & reserved:08x} must be zero")
    types = _TYPES[kind]
    a, b = types.get(bits >> 7 & 0b111), types.get(bits >> 10 & 0b111)
    if a is None or b is None:
        raise wrong(f"types {bits >> 7 & 0b111} and {bits >> 10 & 0b111}")
    half = False
    if scaled:
        if not bits >> 23 & 1:
            raise wrong("scale factors of type UE4M3")
    else:
        result = bits >> 4 & 0b11
        if result > 1 or (result == 0 and (BF16 in (a, b) or kind == "tf32")):
            raise wrong(f"type {result} of D")
        half = result == 0
    if kind == "f16" and a is not b:
        raise wrong(f"types {a.name} and {b.name} together")
    rows, columns = (bits >> 24 & 0b11111) << 4, (bits >> 17 & 0b111111) << 3
    allowed, step = _shapes(scaled, ctas)
    if rows not in allowed or not step <= columns <= 256 or columns % step:
        raise wrong(f"the shape {rows}x{columns} with .cta_group::{ctas}")
    a_transposed, b_transposed = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    for fmt, transposed in ((a, a_transposed), (b, b_transposed)):
        if transposed and fmt.width not in (8, 16):
            raise wrong(f"a transposed matrix of type {fmt.name}")
    return InstructionDescriptor(
        rows,
        columns,
        a,
        b,
        half,
        bool((bits >> 13 ^ bits >> 14) & 1),
        a_transposed,
        b_transposed,
        bits >> 29 & 0b11 if scaled else 0,
        bits >> 4 & 0b11 if scaled else 0,
    )


def _shapes(scaled: bool, ctas: int) -> tuple[tuple[int, ...], int]:
    """M and the step of N (section 9.7.18.2.1, dense). A pair's block scaling with M = 128 is left out."""
    if ctas == 2:
        return ((256,) if scaled else (128, 256)), 16
    if scaled:
        return (128,), 8
    return (64, 128), 8


@lru_cache(maxsize=4096)
def decode_shared(bits: int) -> MatrixDescriptor:
    """Read a 64-bit shared-memory descriptor of tcgen05.

    Raises:
        AsyncMisuseError: A reserved bit is set, the constant is missing, or something is not emulated.
    """

    def wrong(what: str) -> AsyncMisuseError:
        return AsyncMisuseError(f"shared-memory descriptor 0x{bits:016x}: {what}")

    if bits >> 46 & 0b111 != 0b001:
        raise wrong(f"bits 46 to 48 are 0b{bits >> 46 & 0b111:03b}, not 0b001")
    if bits >> 49 & 0b111:
        raise wrong("a base offset, for a start off the swizzle's period, is not emulated")
    if bits >> 52 & 1:
        raise wrong("an absolute leading-dimension stride is not emulated")
    reserved = bits & (0b11 << 14 | 0b11 << 30 | 0xFF << 53)
    if reserved:
        raise wrong(f"bits 0x{reserved:x} must be zero")
    pattern = _SWIZZLES.get(bits >> 61)
    if pattern is None:
        raise wrong(f"swizzling mode {bits >> 61} is not emulated")
    return MatrixDescriptor(
        (bits & _FIELD) << 4, (bits >> 16 & _FIELD) << 4, (bits >> 32 & _FIELD) << 4, pattern
    )
