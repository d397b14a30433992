# SPDX-License-Identifier: Apache-2.0
"""NumPy functions that generated code calls, for what is not one NumPy operator.

Arrays of 32 lanes in, fresh arrays out. Floating results are the canonical NaN where PTX says so
(0x7FFFFFFF for f32, 0x7FFF for f16x2 and bf16x2 halves): x86 and NumPy hand payloads through.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_CANONICAL = {
    np.dtype(np.float32): np.uint32(0x7FFF_FFFF),
    np.dtype(np.float64): np.uint64(0x7FFF_FFFF_FFFF_FFFF),
}
_TWICE = {1: np.dtype(np.uint16), 2: np.dtype(np.uint32), 4: np.dtype(np.uint64)}
_SMALLEST_NORMAL = np.float32(2.0**-126)


def canonical(values: Array) -> Array:
    """`values` with every NaN replaced by the canonical one; the same array if there is none."""
    square = values.dot(values)
    if square == square:
        return values
    bits: Any = _CANONICAL[values.dtype]
    fixed: Array = np.where(np.isnan(values), bits, values.view(bits.dtype)).view(values.dtype)
    return fixed


def flush(values: Array) -> Array:
    """Subnormals to zeros of their sign (`.ftz`)."""
    return np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def saturate(values: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes 0 (`.sat`)."""
    clamped: Array = np.where(np.isnan(values) | (values <= 0), 0, np.minimum(values, 1)).astype(values.dtype)
    return clamped


def fma(a: Array, b: Array, c: Array) -> Array:
    """A * b + c with one rounding, f32.

    The product is exact in f64. Rounding the sum to odd in f64 and then to f32 equals one rounding (Boldo and
    Melquiond 2008: f64 has more than 2 * 24 + 2 bits).
    """
    product = a.astype(np.float64) * b
    addend = c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    step = np.where((error > 0) == (total > 0), 1, -1)
    result: Array = (bits + np.where(inexact, step, 0)).view(np.float64).astype(np.float32)
    return result


def truncated_quotient(a: Array, b: Array) -> Array:
    """Integer division towards zero; all ones for a zero divisor, as hardware has it (PTX: open)."""
    zero = b == 0
    if a.dtype.kind == "u":
        quotient = a // np.where(zero, 1, b).astype(a.dtype)
    else:
        safe = np.where(zero, 1, b).astype(a.dtype)
        quotient = a // safe
        quotient += ((quotient * safe != a) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(zero, np.array(-1).astype(a.dtype), quotient)


def remainder(a: Array, b: Array) -> Array:
    """A - (a / b) * b with the sign of a; a for a zero divisor."""
    zero = b == 0
    safe = np.where(zero, 1, b).astype(a.dtype)
    return np.where(zero, a, a - truncated_quotient(a, safe) * safe)


def high_product(a: Array, b: Array) -> Array:
    """Upper half of a product of two integers of equal type."""
    bits = a.dtype.itemsize * 8
    if bits <= 32:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(bits)).astype(a.dtype)
    product = a.astype(object) * b.astype(object)
    mask = (1 << 64) - 1
    high = np.array([(int(value) >> 64) & mask for value in product], np.uint64)
    return high.view(a.dtype)


def shift_left(a: Array, by: Array) -> Array:
    """Shift amounts beyond the width give 0."""
    bits = a.dtype.itemsize * 8
    shifted = a << by.astype(a.dtype)
    return np.where(by < bits, shifted, 0).astype(a.dtype)


def shift_right(a: Array, by: Array) -> Array:
    """Shift amounts beyond the width give 0, or the sign for signed values."""
    bits = a.dtype.itemsize * 8
    return (
        a >> np.minimum(by, bits - 1).astype(a.dtype)
        if a.dtype.kind == "i"
        else np.where(by < bits, a >> by.astype(a.dtype), 0).astype(a.dtype)
    )


def funnel(low: Array, high: Array, by: Array, left: bool, clamp: bool) -> Array:
    """shf: 32 bits of high:low shifted by `by` (wrapped or clamped to 32)."""
    amount = np.minimum(by, 32) if clamp else by & np.uint32(31)
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    wide = amount.astype(np.uint64)
    if left:
        return (both << wide >> np.uint64(32)).astype(np.uint32)
    return (both >> wide).astype(np.uint32)


def lookup3(a: Array, b: Array, c: Array, table: int) -> Array:
    """lop3: bit i of `table` is the result for inputs a, b, c = the bits of i, a highest."""
    result = np.zeros_like(a)
    for entry in range(8):
        if table >> entry & 1:
            part = a if entry & 4 else ~a
            part = part & (b if entry & 2 else ~b)
            result |= part & (c if entry & 1 else ~c)
    return result


def permute(a: Array, b: Array, selector: Array) -> Array:
    """Prmt in its default mode: four nibbles choose bytes of b:a; bit 3 of a nibble replicates the sign."""
    source = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for place in range(4):
        nibble = selector >> np.uint32(4 * place) & np.uint32(15)
        byte = (source >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint32)
        byte &= np.uint32(0xFF)
        sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        result |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * place)
    return result


def population(a: Array) -> Array:
    """Number of ones, uint32."""
    ones: Array = np.bitwise_count(a).astype(np.uint32)
    return ones


def leading_zeros(a: Array) -> Array:
    """Number of zeros above the highest one, uint32."""
    left = a.copy()
    count: Array = np.zeros(a.shape, np.uint32)
    half = a.dtype.itemsize * 4
    width = half * 2
    while half:
        empty = (left >> a.dtype.type(width - half)) == 0
        count += np.where(empty, np.uint32(half), np.uint32(0))
        left = np.where(empty, left << a.dtype.type(half), left)
        half //= 2
    count += (left == 0).astype(np.uint32)
    return count


def highest_one(a: Array) -> Array:
    """bfind: place of the highest one (signed: highest bit unlike the sign); all ones if there is none."""
    bits = a.dtype.itemsize * 8
    if a.dtype.kind == "i":
        a = np.where(a < 0, ~a, a)
    unsigned = np.dtype(f"u{bits // 8}")
    return np.uint32(bits - 1) - leading_zeros(a.view(unsigned))


def reverse(a: Array) -> Array:
    """brev: bits in reverse order."""
    raw = np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)
    bits = np.unpackbits(raw, axis=1, bitorder="little")[:, ::-1]
    packed: Array = np.packbits(bits, axis=1, bitorder="little").reshape(-1).view(a.dtype)
    return packed


def extract(a: Array, start: Array, length: Array) -> Array:
    """bfe: `length` bits from bit `start`; signed ones extend the field's, or the value's, last bit."""
    bits = a.dtype.itemsize * 8
    unsigned = np.dtype(f"u{bits // 8}").type
    raw = a.view(unsigned)
    position = start & np.uint32(0xFF)
    count = length & np.uint32(0xFF)
    field = shift_right(raw, position)
    keep = shift_left(np.full_like(raw, 1), count) - unsigned(1)
    keep = np.where(count >= bits, ~unsigned(0), keep)
    result = field & keep
    if a.dtype.kind == "i":
        last = np.minimum(position + count - np.uint32(1), np.uint32(bits - 1))
        sign = (shift_right(raw, last) & unsigned(1)).astype(np.bool_) & (count > 0)
        result = np.where(sign, result | ~keep, result)
        beyond = (position + count > bits) & (count > 0)
        inside = np.maximum(bits - position.astype(np.int64), 0).astype(np.uint32)
        fill = ~(shift_left(np.full_like(raw, 1), inside) - unsigned(1))
        result = np.where(beyond & sign, result | fill, result)
    extended: Array = result.astype(unsigned)
    return extended


def insert(a: Array, b: Array, start: Array, length: Array) -> Array:
    """bfi: the low `length` bits of a put into b at bit `start`."""
    bits = b.dtype.itemsize * 8
    position = start & np.uint32(0xFF)
    count = length & np.uint32(0xFF)
    ones = np.where(count >= bits, ~b.dtype.type(0), shift_left(np.full_like(b, 1), count) - b.dtype.type(1))
    mask = shift_left(ones.astype(b.dtype), position)
    return shift_left(a, position) & mask | b & ~mask


def saturated_sum(a: Array, b: Array) -> Array:
    """add.sat.s32."""
    return np.clip(a.astype(np.int64) + b, -(2**31), 2**31 - 1).astype(np.int32)


def saturated_difference(a: Array, b: Array) -> Array:
    """sub.sat.s32."""
    return np.clip(a.astype(np.int64) - b, -(2**31), 2**31 - 1).astype(np.int32)


def minimum_float(a: Array, b: Array, nan: bool) -> Array:
    """min: the number if one operand is NaN, or NaN with `.NaN`; -0 is below +0."""
    smaller = np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.minimum(a, b))
    return (
        canonical(smaller) if nan else canonical(np.where(np.isnan(a), b, np.where(np.isnan(b), a, smaller)))
    )


def maximum_float(a: Array, b: Array, nan: bool) -> Array:
    """max, see `minimum_float`."""
    larger = np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.maximum(a, b))
    return canonical(larger) if nan else canonical(np.where(np.isnan(a), b, np.where(np.isnan(b), a, larger)))


def halves(low: Array, high: Array) -> Array:
    """Two arrays of half a width each as one, `low` in the low half."""
    pairs: Array = np.empty((len(low), 2), low.dtype)
    pairs[:, 0] = low
    pairs[:, 1] = high
    wide: Any = _TWICE[low.dtype.itemsize]
    joined: Array = pairs.view(wide).reshape(-1)
    return joined


NAMES: dict[str, Any] = {
    "where": np.where,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "np": np,
    "canonical": canonical,
    "flush": flush,
    "saturate": saturate,
    "fma": fma,
    "truncated_quotient": truncated_quotient,
    "remainder": remainder,
    "high_product": high_product,
    "shift_left": shift_left,
    "shift_right": shift_right,
    "funnel": funnel,
    "lookup3": lookup3,
    "permute": permute,
    "population": population,
    "leading_zeros": leading_zeros,
    "highest_one": highest_one,
    "reverse": reverse,
    "extract": extract,
    "insert": insert,
    "saturated_sum": saturated_sum,
    "saturated_difference": saturated_difference,
    "minimum_float": minimum_float,
    "maximum_float": maximum_float,
    "halves": halves,
    **{f"{kind}{8 * size}": np.dtype(f"{kind}{size}") for kind in "ui" for size in (1, 2, 4, 8)},
    **{f"f{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
}
