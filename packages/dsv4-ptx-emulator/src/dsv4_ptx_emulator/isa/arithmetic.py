# SPDX-License-Identifier: Apache-2.0
"""NumPy functions that generated code calls, for what is not one NumPy operator.

Arrays of 32 lanes in, fresh arrays out. What the ISA leaves open is as an H200 has it, recorded by
tests/support/record_probes.py: the bits of NaN, integer division by zero, results at the edge of `.ftz`.

A NaN that f32, f16 or bf16 arithmetic yields is canonical, 0x7FFFFFFF or 0x7FFF (ISA 9.7.3 and 9.7.4: "an
unspecified NaN"). f64 keeps payloads (9.7.3): `payload` says which. Neither is left to NumPy, which hands
through what the processor below it makes of a NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4_ptx_emulator.formats.floats import flush

Array = NDArray[Any]

_CANONICAL = np.uint32(0x7FFF_FFFF)
_INVALID, _QUIET = np.uint64(0xFFF8 << 48), np.uint64(1 << 51)
_TWICE = {1: np.dtype(np.uint16), 2: np.dtype(np.uint32), 4: np.dtype(np.uint64)}
_SMALLEST_NORMAL = np.float32(2.0**-126)


def canonical(values: Array) -> Array:
    """f32 with every NaN replaced by the canonical one; the same array if there is none."""
    square = values.dot(values)
    if square == square:
        return values
    fixed: Array = np.where(np.isnan(values), _CANONICAL, values.view(np.uint32)).view(np.float32)
    return fixed


def payload(result: Array, *operands: Array) -> Array:
    """f64 with the bits that its NaN have; the same array if there is none.

    A NaN is that of the last of `operands` that is one, made quiet, with its sign. An invalid operation gives
    0xFFF8000000000000. Which operand wins is the H200's choice: the second of add, sub, mul, min and max, the
    first of div.
    """
    square = result.dot(result)
    if square == square:
        return result
    nan = np.isnan(result)
    bits = np.where(nan, _INVALID, result.view(np.uint64))
    for operand in operands:
        bits = np.where(nan & np.isnan(operand), operand.view(np.uint64) | _QUIET, bits)
    return bits.view(np.float64)


def flushed(operate: Callable[..., Array], a: Array, b: Array) -> Array:
    """Product or quotient of f32 with `.ftz`: results below the smallest normal number become zero.

    Below it before they are rounded: 0x3F7FFFFF times 0x00800000 is 0 on an H200, though it rounds to
    0x00800000 (the ISA does not say). The recording does not tell whether a result counts that rounding to 24
    bits alone would lift to the smallest normal number; here it counts. No such quotient was recorded.
    """
    result = operate(a, b)
    magnitude = np.abs(result)
    small = magnitude < _SMALLEST_NORMAL
    edge = magnitude == _SMALLEST_NORMAL
    if edge.any():
        small |= edge & (np.abs(operate(a.astype(np.float64), b.astype(np.float64))) < _SMALLEST_NORMAL)
    return np.where(small, np.copysign(np.float32(0), result), result)


def saturate(values: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes 0 (`.sat`)."""
    clamped: Array = np.where(np.isnan(values) | (values <= 0), 0, np.minimum(values, 1)).astype(values.dtype)
    return clamped


def _fused(a: Array, b: Array, c: Array) -> Array:
    """A * b + c of f32 rounded to odd in f64: rounded to f32, it is rounded once.

    The product is exact in f64, which has more than 2 * 24 + 2 bits (Boldo and Melquiond 2008).
    """
    product = a.astype(np.float64) * b
    addend = c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + np.where(inexact, step, 0)).view(np.float64)


def fma(a: Array, b: Array, c: Array) -> Array:
    """A * b + c with one rounding, f32."""
    return _fused(a, b, c).astype(np.float32)


def flushed_fma(a: Array, b: Array, c: Array) -> Array:
    """`fma` with `.ftz`, see `flushed`."""
    exact = _fused(a, b, c)
    result = exact.astype(np.float32)
    return np.where(np.abs(exact) < _SMALLEST_NORMAL, np.copysign(np.float32(0), result), result)


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
    """A - (a / b) * b with the sign of a; all ones for a zero divisor, as hardware has it (PTX: open)."""
    zero = b == 0
    safe = np.where(zero, 1, b).astype(a.dtype)
    return np.where(zero, np.array(-1).astype(a.dtype), a - truncated_quotient(a, safe) * safe)


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
    return _extreme(a, b, smaller, nan)


def maximum_float(a: Array, b: Array, nan: bool) -> Array:
    """max, see `minimum_float`."""
    larger = np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.maximum(a, b))
    return _extreme(a, b, larger, nan)


def _extreme(a: Array, b: Array, chosen: Array, nan: bool) -> Array:
    result = chosen if nan else np.where(np.isnan(a), b, np.where(np.isnan(b), a, chosen))
    return payload(result, a, b) if result.dtype == np.float64 else canonical(result)


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
    "flushed_product": partial(flushed, np.multiply),
    "flushed_quotient": partial(flushed, np.divide),
    "flushed_fma": flushed_fma,
    "payload": payload,
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
