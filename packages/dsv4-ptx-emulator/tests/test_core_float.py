# SPDX-License-Identifier: Apache-2.0
"""Floating-point arithmetic and comparison against exact rational arithmetic, special values included."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray
from probe import evaluate

SPECIAL = [
    0x0000_0000,
    0x8000_0000,
    0x7F80_0000,
    0xFF80_0000,
    0x7FC0_1234,
    0xFFC0_0001,
    0x0000_0001,
    0x8000_0001,
    0x007F_FFFF,
    0x0080_0000,
    0x7F7F_FFFF,
    0xFF7F_FFFF,
    0x3F80_0000,
    0xBF80_0000,
    0x3F80_0001,
    0x4B80_0000,
]
NAN = 0x7FFF_FFFF


def floats(seed: int) -> NDArray[np.uint32]:
    rng = np.random.default_rng(seed)
    near = rng.normal(size=8).astype(np.float32).view(np.uint32)
    wild = rng.integers(0, 2**32, 8, dtype=np.uint32)
    return rng.permutation(np.concatenate([np.array(SPECIAL, np.uint32), near, wild]))


def value(bits: int) -> float:
    return float(np.array([bits], np.uint32).view(np.float32)[0])


def rounded(exact: Fraction) -> int:
    """The f32 nearest to a rational, ties to even, found among neighbours without arithmetic on floats."""
    if exact == 0:
        return 0
    magnitude = abs(exact)
    guess = np.array([min(float(magnitude), 3.4028234663852886e38)], np.float32).view(np.uint32)[0]
    limit = Fraction(2) ** 128
    candidates = []
    for bits in (int(guess) - 1, int(guess), int(guess) + 1):
        if 0 <= bits < 0x7F80_0000:
            candidates.append((abs(Fraction(value(bits)) - magnitude), bits & 1, bits))
    overflows = magnitude >= limit - Fraction(2) ** 103
    best = 0x7F80_0000 if overflows else min(candidates)[2]
    return best | (0x8000_0000 if exact < 0 else 0)


@pytest.mark.parametrize(
    ("opcode", "symbol"), [("add.f32", "+"), ("add.rn.f32", "+"), ("sub.f32", "-"), ("mul.rn.f32", "*")]
)
def test_rounded_exactly(opcode: str, symbol: str) -> None:
    a, b = floats(1), floats(2)
    got = evaluate(f"{opcode} %r2, %r0, %r1;", {"%r0": a, "%r1": b}, {"%r2": 4})["%r2"]
    checked = 0
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        left, right = value(x), value(y)
        if np.isnan(left) or np.isnan(right):
            assert z == NAN
        elif np.isfinite(left) and np.isfinite(right):
            exact = {
                "+": Fraction(left) + Fraction(right),
                "-": Fraction(left) - Fraction(right),
                "*": Fraction(left) * Fraction(right),
            }[symbol]
            if exact:
                assert z == rounded(exact), (hex(x), hex(y))
                checked += 1
    assert checked > 8


def test_infinities_and_zeros() -> None:
    inf, zero, minus = 0x7F80_0000, 0, 0x8000_0000
    a = np.array([inf, inf, minus, zero, inf] + [0] * 27, np.uint32)
    b = np.array([0xFF80_0000, inf, minus, minus, zero] + [0] * 27, np.uint32)
    got = evaluate(
        "add.f32 %r2, %r0, %r1; mul.f32 %r3, %r0, %r1;", {"%r0": a, "%r1": b}, {"%r2": 4, "%r3": 4}
    )
    assert got["%r2"][:5].tolist() == [NAN, inf, minus, zero, inf]
    assert got["%r3"][:5].tolist() == [0xFF80_0000, inf, zero, minus, NAN]


def test_payloads_of_doubles() -> None:
    """Which of two NaN it is comes from recordings whose payloads differ in their lowest bits."""
    a, b = np.zeros((2, 32), np.uint64)
    infinity, invalid = 0x7FF0 << 48, 0xFFF8 << 48
    a[:5] = [0x7FF1_2345_6789_ABCD, 0x7FF1_2345_6789_ABCD, 1 << 62, infinity, infinity]
    b[:5] = [0xFFFE_DCBA_9876_5432, 1 << 62, 0xFFF0_0000_0000_0003, 0, infinity]
    names = ("add", "sub", "mul", "div.rn", "min", "abs", "neg")
    body = "".join(f"{name}.f64 %d{k}, %d0, %d1;" for k, name in enumerate(names[:5], 2))
    body += "abs.f64 %d7, %d0; neg.f64 %d8, %d0;"
    outputs = {f"%d{k}": 8 for k in range(2, 9)}
    results = evaluate(body, {"%d0": a, "%d1": b}, outputs).values()
    got = {name: result[:5].tolist() for name, result in zip(names, results, strict=True)}
    first, second, third = 0x7FF9_2345_6789_ABCD, 0xFFFE_DCBA_9876_5432, 0xFFF8_0000_0000_0003
    assert got["add"] == [second, first, third, infinity, infinity]
    assert got["sub"] == [second, first, third, infinity, invalid]
    assert got["mul"] == [second, first, third, invalid, infinity]
    assert got["div.rn"] == [first, first, third, infinity, invalid]
    assert got["min"] == [second, 1 << 62, 1 << 62, 0, infinity]
    assert got["abs"] == a[:5].tolist()
    assert got["neg"] == [first, first, 0xC << 60, infinity | 1 << 63, infinity | 1 << 63]


def test_results_are_flushed_by_their_exact_value() -> None:
    smallest, below_one, half = 0x0080_0000, 0x3F7F_FFFF, 0x3F00_0000
    a = np.array([smallest, below_one, 0x00FF_FFFF, 0x80FF_FFFF, 0x0100_0000] + [0] * 27, np.uint32)
    b = np.array([below_one, smallest | 1 << 31, half, half, half] + [0] * 27, np.uint32)
    c = np.array([0, 0, 0, 0x8000_0001, 0] + [0] * 27, np.uint32)
    want = [0, 1 << 31, 0, 1 << 31, smallest]
    body = """mul.ftz.f32 %r3, %r0, %r1; fma.rn.ftz.f32 %r4, %r0, %r1, %r2; mul.f32 %r5, %r0, %r1;
    rcp.rn.f32 %r6, %r1; div.rn.ftz.f32 %r7, %r0, %r6; mul.ftz.f32 %r8, %r0, %r0;"""
    got = evaluate(body, {"%r0": a, "%r1": b, "%r2": c}, {f"%r{k}": 4 for k in (3, 4, 5, 7, 8)})
    assert got["%r3"][:5].tolist() == want
    assert got["%r4"][:5].tolist() == want
    assert got["%r7"][2:5].tolist() == want[2:]
    assert [bits & 0x7FFF_FFFF for bits in got["%r5"][:5].tolist()] == [smallest] * 5
    assert got["%r8"][1] == 0x3F7F_FFFE


def test_signs_of_nan_in_pairs() -> None:
    a = np.array([0xFC01_7E05, 0x7C00_BC00, 0xFFC1_3F80, 0xFF80_7F81] + [0] * 28, np.uint32)
    body = "neg.f16x2 %r1, %r0; abs.f16x2 %r2, %r0; neg.bf16x2 %r3, %r0; abs.bf16x2 %r4, %r0;"
    got = evaluate(body, {"%r0": a}, {f"%r{k}": 4 for k in range(1, 5)})
    assert got["%r1"][:2].tolist() == [0x7FFF_7FFF, 0xFC00_3C00]
    assert got["%r2"][:2].tolist() == [0x7FFF_7FFF, 0x7C00_3C00]
    assert got["%r3"][2:4].tolist() == [0x7FFF_BF80, 0x7F80_7FFF]
    assert got["%r4"][2:4].tolist() == [0x7FFF_3F80, 0x7F80_7FFF]


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(3)
    one = 0x3F80_0000
    # (1 + 2^-12)^2 - (1 + 2^-11) = 2^-24 and halfway cases that a product rounded first would miss.
    a = rng.integers(one, one + 0x0080_0000, 32, dtype=np.uint32)
    b = rng.integers(one, one + 0x0080_0000, 32, dtype=np.uint32)
    product = a.view(np.float32) * b.view(np.float32)
    c = (-product).view(np.uint32)
    c[16:] = rng.integers(0, 2**32, 16, dtype=np.uint32) & 0xBFFF_FFFF
    # The product decides a tie that f64 cannot tell: 1 + 2^-23 + 2^-24 -+ 2^-70, of both signs.
    for lane, (sign, more) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)], 20):
        a[lane] = 0x3980_0001 | sign << 31
        b[lane] = 0x397F_FFFE if not more else 0x3980_0001
        c[lane] = 0x3F80_0001 | sign << 31
    # A product that is a tie, and an addend far below it.
    a[24:26] = b[24:26] = 0x3F80_0800
    c[24:26] = 1, 0x8000_0001
    c[30] = 1
    c[31] = 0x8000_0001
    got = evaluate("fma.rn.f32 %r3, %r0, %r1, %r2;", {"%r0": a, "%r1": b, "%r2": c}, {"%r3": 4})["%r3"]
    for x, y, z, w in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        exact = Fraction(value(x)) * Fraction(value(y)) + Fraction(value(z))
        assert w == rounded(exact), (hex(x), hex(y), hex(z))


def test_ftz_and_sat() -> None:
    a = np.array([1, 0x8000_0001, 0x4000_0000, 0xC000_0000, 0x7FC0_0000, 0x3F00_0000] + [0] * 26, np.uint32)
    zero = np.zeros(32, np.uint32)
    got = evaluate(
        "add.ftz.f32 %r2, %r0, %r1; add.sat.f32 %r3, %r0, %r1;", {"%r0": a, "%r1": zero}, {"%r2": 4, "%r3": 4}
    )
    assert got["%r2"][:2].tolist() == [0, 0]
    assert got["%r3"][2:6].tolist() == [0x3F80_0000, 0, 0, 0x3F00_0000]


@pytest.mark.parametrize("opcode", ["min.f32", "max.f32", "min.NaN.f32", "max.NaN.f32"])
def test_extremes(opcode: str) -> None:
    a, b = floats(4), floats(5)
    a[0], b[0] = 0, 0x8000_0000
    a[1], b[1] = 0x8000_0000, 0
    got = evaluate(f"{opcode} %r2, %r0, %r1;", {"%r0": a, "%r1": b}, {"%r2": 4})["%r2"]
    smaller = opcode.startswith("min")
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        left, right = value(x), value(y)
        if np.isnan(left) or np.isnan(right):
            only = (
                NAN
                if "NaN" in opcode or (np.isnan(left) and np.isnan(right))
                else (y if np.isnan(left) else x)
            )
            assert z == only
        elif left == right == 0:
            assert z == ((x | y) if smaller else (x & y))
        else:
            assert value(z) == (min if smaller else max)(left, right)


@pytest.mark.parametrize(
    "name", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
)
def test_comparisons(name: str) -> None:
    a, b = floats(6), floats(7)
    b[:8] = a[:8]
    got = evaluate(f"setp.{name}.f32 %p1, %r0, %r1;", {"%r0": a, "%r1": b}, {"%p1": 1})["%p1"]
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        left, right = value(x), value(y)
        unordered = np.isnan(left) or np.isnan(right)
        if name in ("num", "nan"):
            want = unordered == (name == "nan")
        else:
            ordered = {
                "eq": left == right,
                "ne": left != right,
                "lt": left < right,
                "le": left <= right,
                "gt": left > right,
                "ge": left >= right,
            }[name[:2]]
            want = name.endswith("u") if unordered else ordered
        assert z == want, (name, left, right)


def test_pairs_and_narrow_types() -> None:
    rng = np.random.default_rng(8)
    low, high = rng.normal(size=(2, 32)).astype(np.float32), rng.normal(size=(2, 32)).astype(np.float32)
    wide = [
        low[k].view(np.uint32).astype(np.uint64) | high[k].view(np.uint32).astype(np.uint64) << 32
        for k in (0, 1)
    ]
    got = evaluate(
        "add.rn.f32x2 %d2, %d0, %d1; mul.rn.f32x2 %d3, %d0, %d1; fma.rn.f32x2 %d4, %d0, %d1, %d0;",
        {"%d0": wide[0], "%d1": wide[1]},
        {"%d2": 8, "%d3": 8, "%d4": 8},
        arch="sm_100a",
    )
    assert np.array_equal(got["%d2"].view(np.float32)[::2], low[0] + low[1])
    assert np.array_equal(got["%d3"].view(np.float32)[1::2], high[0] * high[1])
    fused = (low[0].astype(np.float64) * low[1] + low[0]).astype(np.float32)
    assert np.array_equal(got["%d4"].view(np.float32)[::2], fused)
    a, b = rng.normal(size=(2, 64)).astype(np.float16)
    got = evaluate(
        "add.f16x2 %r2, %r0, %r1; mul.rn.f16x2 %r3, %r0, %r1; max.f16x2 %r4, %r0, %r1;",
        {"%r0": a.view(np.uint32), "%r1": b.view(np.uint32)},
        {"%r2": 4, "%r3": 4, "%r4": 4},
    )
    assert np.array_equal(got["%r2"].view(np.float16), a + b)
    assert np.array_equal(got["%r3"].view(np.float16), a * b)
    assert np.array_equal(got["%r4"].view(np.float16), np.maximum(a, b))


def test_functions() -> None:
    rng = np.random.default_rng(9)
    a = rng.uniform(0.1, 4, 32).astype(np.float32)
    wide = a.astype(np.float64)
    body = """rcp.rn.f32 %r1, %r0; sqrt.rn.f32 %r2, %r0; rsqrt.approx.f32 %r3, %r0;
        ex2.approx.ftz.f32 %r4, %r0;
    lg2.approx.f32 %r5, %r0; neg.f32 %r6, %r0; abs.f32 %r7, %r6; div.rn.f32 %r8, %r0, %r1;
    copysign.f32 %r9, %r6, %r0;"""
    got = evaluate(body, {"%r0": a.view(np.uint32)}, {f"%r{k}": 4 for k in range(1, 10)})
    wants = [1 / wide, np.sqrt(wide), 1 / np.sqrt(wide), np.exp2(wide), np.log2(wide), -wide, wide]
    for number, want in enumerate(wants, 1):
        assert np.array_equal(got[f"%r{number}"].view(np.float32), want.astype(np.float32)), number
    inverse = got["%r1"].view(np.float32)
    assert np.array_equal(got["%r8"].view(np.float32), a / inverse)
    assert np.array_equal(got["%r9"].view(np.float32), -a)


def test_integer_comparisons_and_selection() -> None:
    rng = np.random.default_rng(10)
    a, b = rng.integers(0, 2**32, (2, 32), dtype=np.uint32)
    b[:8] = a[:8]
    body = """setp.lt.s32 %p1, %r0, %r1; setp.lt.u32 %p2, %r0, %r1; setp.hs.u32 %p3, %r0, %r1;
    setp.eq.and.b32 %p4|%p5, %r0, %r1, %p1; setp.ne.or.b32 %p6, %r0, %r1, !%p2; selp.b32 %r2, %r0, %r1, %p1;
    slct.b32.s32 %r3, %r0, %r1, %r0; set.lt.u32.s32 %r4, %r0, %r1; xor.pred %p7, %p1, %p2;
    not.pred %p8, %p1;"""
    outputs = {f"%p{k}": 1 for k in range(1, 9)} | {"%r2": 4, "%r3": 4, "%r4": 4}
    got = evaluate(body, {"%r0": a, "%r1": b}, outputs)
    sa, sb = a.view(np.int32), b.view(np.int32)
    signed, unsigned, same = sa < sb, a < b, a == b
    assert np.array_equal(got["%p1"], signed)
    assert np.array_equal(got["%p2"], unsigned)
    assert np.array_equal(got["%p3"], ~unsigned)
    assert np.array_equal(got["%p4"], same & signed)
    assert np.array_equal(got["%p5"], ~same & signed)
    assert np.array_equal(got["%p6"], ~same | ~unsigned)
    assert np.array_equal(got["%r2"], np.where(signed, a, b))
    assert np.array_equal(got["%r3"], np.where(sa >= 0, a, b))
    assert np.array_equal(got["%r4"], np.where(signed, 0xFFFF_FFFF, 0))
    assert np.array_equal(got["%p7"], signed ^ unsigned)
    assert np.array_equal(got["%p8"], ~signed)
