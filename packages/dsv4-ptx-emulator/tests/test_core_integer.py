# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic, logic, shifts, bit fields and moves against Python integers, lane by lane."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from probe import evaluate

M32, M64 = 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF
EDGES32 = [
    0,
    1,
    2,
    31,
    32,
    33,
    0x7FFF_FFFF,
    0x8000_0000,
    0x8000_0001,
    M32,
    M32 - 1,
    0xFFFF,
    0x1_0000,
    5,
    7,
    100,
]
EDGES64 = [value | value << 32 for value in EDGES32]


def words(seed: int) -> NDArray[np.uint32]:
    rng = np.random.default_rng(seed)
    values = np.concatenate([np.array(EDGES32, np.uint32), rng.integers(0, 2**32, 16, dtype=np.uint32)])
    return rng.permutation(values)


def doubles(seed: int) -> NDArray[np.uint64]:
    rng = np.random.default_rng(seed)
    values = np.concatenate([np.array(EDGES64, np.uint64), rng.integers(0, 2**64, 16, dtype=np.uint64)])
    return rng.permutation(values)


def s(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def quotient(a: int, b: int) -> int:
    return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


TWO_32: dict[str, Callable[[int, int], int]] = {
    "add.s32": lambda a, b: a + b,
    "add.u32": lambda a, b: a + b,
    "add.sat.s32": lambda a, b: max(min(s(a, 32) + s(b, 32), 2**31 - 1), -(2**31)),
    "sub.s32": lambda a, b: a - b,
    "sub.sat.s32": lambda a, b: max(min(s(a, 32) - s(b, 32), 2**31 - 1), -(2**31)),
    "mul.lo.s32": lambda a, b: a * b,
    "mul.lo.u32": lambda a, b: a * b,
    "mul.hi.s32": lambda a, b: s(a, 32) * s(b, 32) >> 32,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "div.s32": lambda a, b: quotient(s(a, 32), s(b, 32)) if b else M32,
    "div.u32": lambda a, b: a // b if b else M32,
    "rem.s32": lambda a, b: s(a, 32) - quotient(s(a, 32), s(b, 32)) * s(b, 32) if b else M32,
    "rem.u32": lambda a, b: a % b if b else M32,
    "min.s32": lambda a, b: min(s(a, 32), s(b, 32)),
    "min.u32": min,
    "max.s32": lambda a, b: max(s(a, 32), s(b, 32)),
    "max.u32": max,
    "min.relu.s32": lambda a, b: max(min(s(a, 32), s(b, 32)), 0),
    "max.relu.s32": lambda a, b: max(s(a, 32), s(b, 32), 0),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.b32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: s(a, 32) >> min(b, 31),
}


@pytest.mark.parametrize("opcode", TWO_32)
def test_two_words(opcode: str) -> None:
    a, b = words(1), words(2)
    if opcode.startswith("sh"):
        b[16:] %= 40
    got = evaluate(f"{opcode} %r2, %r0, %r1;", {"%r0": a, "%r1": b}, {"%r2": 4})["%r2"]
    want = [TWO_32[opcode](int(x), int(y)) & M32 for x, y in zip(a, b, strict=True)]
    assert got.tolist() == want


TWO_64: dict[str, Callable[[int, int], int]] = {
    "add.s64": lambda a, b: a + b,
    "sub.s64": lambda a, b: a - b,
    "mul.lo.s64": lambda a, b: a * b,
    "mul.hi.s64": lambda a, b: s(a, 64) * s(b, 64) >> 64,
    "mul.hi.u64": lambda a, b: a * b >> 64,
    "div.s64": lambda a, b: quotient(s(a, 64), s(b, 64)) if b else M64,
    "div.u64": lambda a, b: a // b if b else M64,
    "rem.s64": lambda a, b: s(a, 64) - quotient(s(a, 64), s(b, 64)) * s(b, 64) if b else M64,
    "min.s64": lambda a, b: min(s(a, 64), s(b, 64)),
    "max.u64": max,
    "and.b64": lambda a, b: a & b,
    "or.b64": lambda a, b: a | b,
    "xor.b64": lambda a, b: a ^ b,
}


@pytest.mark.parametrize("opcode", TWO_64)
def test_two_doublewords(opcode: str) -> None:
    a, b = doubles(3), doubles(4)
    got = evaluate(f"{opcode} %d2, %d0, %d1;", {"%d0": a, "%d1": b}, {"%d2": 8})["%d2"]
    assert got.tolist() == [TWO_64[opcode](int(x), int(y)) & M64 for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("opcode", ["shl.b64", "shr.u64", "shr.s64"])
def test_doubleword_shifts_take_a_word(opcode: str) -> None:
    a, by = doubles(5), words(6)
    by[:20] %= 70
    got = evaluate(f"{opcode} %d2, %d0, %r1;", {"%d0": a, "%r1": by}, {"%d2": 8})["%d2"]
    shift: Callable[[int, int], int] = {
        "shl.b64": lambda x, n: x << n if n < 64 else 0,
        "shr.u64": lambda x, n: x >> n if n < 64 else 0,
        "shr.s64": lambda x, n: s(x, 64) >> min(n, 63),
    }[opcode]
    assert got.tolist() == [shift(int(x), int(n)) & M64 for x, n in zip(a, by, strict=True)]


def test_wide_products_and_sums() -> None:
    a, b, c = words(7), words(8), doubles(9)
    body = """mul.wide.s32 %d1, %r0, %r1; mul.wide.u32 %d2, %r0, %r1;
    mad.wide.s32 %d3, %r0, %r1, %d0; mad.lo.s32 %r2, %r0, %r1, %r0; mad.hi.u32 %r3, %r0, %r1, %r0;
    mad.lo.s64 %d4, %d1, %d2, %d0;"""
    out = {"%d1": 8, "%d2": 8, "%d3": 8, "%d4": 8, "%r2": 4, "%r3": 4}
    got = evaluate(body, {"%r0": a, "%r1": b, "%d0": c}, out)
    for lane in range(32):
        x, y, z = int(a[lane]), int(b[lane]), int(c[lane])
        signed = s(x, 32) * s(y, 32)
        assert got["%d1"][lane] == signed & M64
        assert got["%d2"][lane] == x * y
        assert got["%d3"][lane] == (signed + z) & M64
        assert got["%d4"][lane] == (signed * (x * y) + z) & M64
        assert got["%r2"][lane] == (x * y + x) & M32
        assert got["%r3"][lane] == ((x * y >> 32) + x) & M32


ONE: dict[str, Callable[[int], int]] = {
    "not.b32": lambda a: ~a,
    "cnot.b32": lambda a: int(a == 0),
    "neg.s32": lambda a: -a,
    "abs.s32": lambda a: abs(s(a, 32)),
    "popc.b32": lambda a: a.bit_count(),
    "clz.b32": lambda a: 32 - a.bit_length(),
    "brev.b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "bfind.u32": lambda a: a.bit_length() - 1,
    "bfind.s32": lambda a: (a if a < 1 << 31 else ~a & M32).bit_length() - 1,
    "bfind.shiftamt.u32": lambda a: 32 - a.bit_length() if a else -1,
}


@pytest.mark.parametrize("opcode", ONE)
def test_one_word(opcode: str) -> None:
    a = words(10)
    got = evaluate(f"{opcode} %r2, %r0;", {"%r0": a}, {"%r2": 4})["%r2"]
    assert got.tolist() == [ONE[opcode](int(x)) & M32 for x in a]


def test_doubleword_counts() -> None:
    a = doubles(11)
    got = evaluate(
        "popc.b64 %r1, %d0; clz.b64 %r2, %d0; brev.b64 %d1, %d0;", {"%d0": a}, {"%r1": 4, "%r2": 4, "%d1": 8}
    )
    assert got["%r1"].tolist() == [int(x).bit_count() for x in a]
    assert got["%r2"].tolist() == [64 - int(x).bit_length() for x in a]
    assert got["%d1"].tolist() == [int(f"{int(x):064b}"[::-1], 2) for x in a]


def field(a: int, start: int, length: int, signed: bool) -> int:
    """Bit by bit, as the pseudocode of PTX ISA 9.7.1.19 has it."""
    start, length = start & 255, length & 255
    sign = 0
    if signed and length:
        sign = a >> min(start + length - 1, 31) & 1
    result = 0
    for bit in range(32):
        inside = bit < length and start + bit <= 31
        result |= (a >> start + bit & 1 if inside else sign) << bit
    return result


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_extract(kind: str) -> None:
    rng = np.random.default_rng(12)
    a = words(13)
    start, length = rng.integers(0, 40, 32, dtype=np.uint32), rng.integers(0, 40, 32, dtype=np.uint32)
    got = evaluate(f"bfe.{kind} %r3, %r0, %r1, %r2;", {"%r0": a, "%r1": start, "%r2": length}, {"%r3": 4})[
        "%r3"
    ]
    want = [field(int(x), int(b), int(n), kind == "s32") for x, b, n in zip(a, start, length, strict=True)]
    assert got.tolist() == want


def test_insert() -> None:
    rng = np.random.default_rng(14)
    a, b = words(15), words(16)
    start, length = rng.integers(0, 40, 32, dtype=np.uint32), rng.integers(0, 40, 32, dtype=np.uint32)
    got = evaluate(
        "bfi.b32 %r4, %r0, %r1, %r2, %r3;",
        {"%r0": a, "%r1": b, "%r2": start, "%r3": length},
        {"%r4": 4},
    )["%r4"]
    for lane in range(32):
        mask = ((1 << int(length[lane])) - 1) << int(start[lane]) & M32
        want = int(a[lane]) << int(start[lane]) & mask | int(b[lane]) & ~mask
        assert got[lane] == want & M32


def test_lop3_is_its_table() -> None:
    a, b, c = words(17), words(18), words(19)
    for table in (0x00, 0xFF, 0xE8, 0x96, 0x1B, 0xCA):
        body = f"lop3.b32 %r3, %r0, %r1, %r2, {table};"
        got = evaluate(body, {"%r0": a, "%r1": b, "%r2": c}, {"%r3": 4})["%r3"]
        for lane in range(32):
            want = 0
            for bit in range(32):
                index = (
                    (int(a[lane]) >> bit & 1) << 2 | (int(b[lane]) >> bit & 1) << 1 | int(c[lane]) >> bit & 1
                )
                want |= (table >> index & 1) << bit
            assert got[lane] == want


def test_prmt_and_funnel_shift() -> None:
    a, b, selector = words(20), words(21), words(22)
    body = """prmt.b32 %r3, %r0, %r1, %r2; shf.l.wrap.b32 %r4, %r0, %r1, %r2;
        shf.r.clamp.b32 %r5, %r0, %r1, %r2;
    shf.r.wrap.b32 %r6, %r0, %r1, %r2; shf.l.clamp.b32 %r7, %r0, %r1, %r2;"""
    outputs = {f"%r{number}": 4 for number in range(3, 8)}
    got = evaluate(body, {"%r0": a, "%r1": b, "%r2": selector}, outputs)
    for lane in range(32):
        x, y, by = int(a[lane]), int(b[lane]), int(selector[lane])
        data = (x | y << 32).to_bytes(8, "little")
        want = 0
        for place in range(4):
            nibble = by >> 4 * place & 15
            byte = data[nibble & 7]
            want |= ((0xFF if byte & 0x80 else 0) if nibble & 8 else byte) << 8 * place
        both, wrap, clamp = x | y << 32, by & 31, min(by, 32)
        assert got["%r3"][lane] == want
        assert got["%r4"][lane] == both << wrap >> 32 & M32
        assert got["%r5"][lane] == both >> clamp & M32
        assert got["%r6"][lane] == both >> wrap & M32
        assert got["%r7"][lane] == both << clamp >> 32 & M32


def test_moves_pack_and_unpack() -> None:
    a, b, wide = words(23), words(24), doubles(25)
    body = """mov.b64 %d1, {%r0, %r1}; mov.b64 {%r2, %r3}, %d0; mov.b32 {%h0, %h1}, %r0;
        mov.b32 %r4, {%h1, %h0};
    mov.b64 {_, %r5}, %d0; mov.b32 %r6, -3; mov.b64 %d2, 0x123456789AB;"""
    out = {"%d1": 8, "%r2": 4, "%r3": 4, "%h0": 2, "%h1": 2, "%r4": 4, "%r5": 4, "%r6": 4, "%d2": 8}
    got = evaluate(body, {"%r0": a, "%r1": b, "%d0": wide}, out)
    assert got["%d1"].tolist() == [int(x) | int(y) << 32 for x, y in zip(a, b, strict=True)]
    assert got["%r2"].tolist() == [int(x) & M32 for x in wide]
    assert got["%r3"].tolist() == got["%r5"].tolist() == [int(x) >> 32 for x in wide]
    assert got["%h0"].tolist() == [int(x) & 0xFFFF for x in a]
    assert got["%r4"].tolist() == [int(x) >> 16 | (int(x) & 0xFFFF) << 16 for x in a]
    assert set(got["%r6"].tolist()) == {M32 - 2}
    assert set(got["%d2"].tolist()) == {0x123456789AB}


def test_narrow_types_in_wide_registers() -> None:
    """An instruction type narrower than the register reads its low part and extends the result."""
    a = words(26)
    body = "add.s16 %h1, %h0, 1; cvt.u32.u16 %r1, %h1; cvt.s32.s16 %r2, %h1; mul.wide.u16 %r3, %h0, %h0;"
    halves = (a & 0xFFFF).astype(np.uint16)
    got = evaluate(body, {"%h0": halves}, {"%r1": 4, "%r2": 4, "%r3": 4})
    for lane in range(32):
        value = (int(halves[lane]) + 1) & 0xFFFF
        assert got["%r1"][lane] == value
        assert got["%r2"][lane] == s(value, 16) & M32
        assert got["%r3"][lane] == int(halves[lane]) ** 2


def test_guarded_arithmetic_keeps_the_other_lanes() -> None:
    a = words(27)
    body = """setp.lt.s32 %p1, %r0, 0; mov.b32 %r1, 7; @%p1 mov.b32 %r1, 8; @!%p1 add.s32 %r1, %r1, %r0;
    @%p1 not.b32 %r0, %r0;"""
    got = evaluate(body, {"%r0": a}, {"%r1": 4, "%r0": 4})
    for lane in range(32):
        x = int(a[lane])
        negative = s(x, 32) < 0
        assert got["%r1"][lane] == (8 if negative else (7 + x) & M32)
        assert got["%r0"][lane] == (~x & M32 if negative else x)


def test_carries_chain_words_to_long_numbers() -> None:
    """128-bit sums, differences and a 64 x 64 product out of 32-bit words, with others in between."""
    a, b, c, d = (words(seed) for seed in (28, 29, 30, 31))
    a[0], b[0], c[0], d[0] = M32, M32, 1, 0
    a[1], b[1], c[1], d[1] = 0, 0, 1, M32
    body = """add.cc.u32 %r4, %r0, %r2; mov.b32 %r20, 1; addc.cc.u32 %r5, %r1, %r3; addc.u32 %r6, 0, 0;
    sub.cc.u32 %r7, %r0, %r2; subc.cc.u32 %r8, %r1, %r3; subc.u32 %r9, 0, 0;
    mul.lo.u32 %r10, %r0, %r2; mul.hi.u32 %r11, %r0, %r2; mad.lo.cc.u32 %r11, %r0, %r3, %r11;
    madc.hi.u32 %r12, %r0, %r3, 0; mad.lo.cc.u32 %r11, %r1, %r2, %r11; madc.hi.cc.u32 %r12, %r1, %r2, %r12;
    addc.u32 %r13, 0, 0; mad.lo.cc.u32 %r12, %r1, %r3, %r12; madc.hi.u32 %r13, %r1, %r3, %r13;
    mov.b64 %d0, {%r0, %r1}; mov.b64 %d1, {%r2, %r3}; add.cc.u64 %d2, %d0, %d1; addc.u64 %d3, 0, 0;
    sub.cc.s64 %d4, %d0, %d1; subc.s64 %d5, 0, 0;"""
    outputs = {f"%r{number}": 4 for number in range(4, 14)} | {f"%d{number}": 8 for number in range(2, 6)}
    got = evaluate(body, {"%r0": a, "%r1": b, "%r2": c, "%r3": d}, outputs)
    for lane in range(32):
        x, y = int(a[lane]) | int(b[lane]) << 32, int(c[lane]) | int(d[lane]) << 32
        total = sum(int(got[f"%r{4 + k}"][lane]) << 32 * k for k in range(3))
        difference = sum(int(got[f"%r{7 + k}"][lane]) << 32 * k for k in range(3))
        product = sum(int(got[f"%r{10 + k}"][lane]) << 32 * k for k in range(4))
        assert total == x + y
        assert difference == (x - y) & (1 << 96) - 1
        assert product == x * y
        assert int(got["%d2"][lane]) | int(got["%d3"][lane]) << 64 == x + y
        assert int(got["%d4"][lane]) | int(got["%d5"][lane]) << 64 == (x - y) & (1 << 128) - 1
