# SPDX-License-Identifier: Apache-2.0
"""Probes of integer arithmetic, carries, logic, shifts and bit fields (PTX ISA 9.7.1, 9.7.2, 9.7.9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from core_rows import Departure, Group, Row, crossed, each, pairs, signed

EDGES = (
    *(0, 1, 2, 3, 5, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF),
    *(0x1_0000, 0x7FFF_FFFF, 0x8000_0000, 0x8000_0001, -1, -2, -7, -32, 0x5555_AAAA),
)
FEW = (0, 1, 2, 7, 8, 31, 32, 33, 63, 100, 255, 0x7FFF_FFFF, 0x8000_0000, -1, -2, 0x1234_5678)
NARROW = tuple(e if -0x8000 <= e <= 0xFFFF else e >> 16 ^ e & 0x7FFF for e in EDGES)
WIDE = tuple(e << 32 | 9 if abs(e) > 0xFFFF else e for e in EDGES)
FEW_WIDE = (*(0, 1, 2, 7, 8, 31, 32, 63, 64, 65, 255, (1 << 63) - 1), 1 << 63, -1, -2, 0x1234_5678_9ABC_DEF0)
_ALL = 0xFFFF_FFFF
FEW_NARROW = (0, 1, 2, 7, 8, 15, 16, 31, 100, 255, 0x7FFF, 0x8000, 0x8001, -1, -2, 0x1234)


def quotient(a: int, b: int) -> int:
    """Towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _row(
    name: str, operands: int, function: Callable[..., int | None], size: int, code: str | None = None
) -> Row:
    """A plain instruction on a, b, c whose result is cut to `size` bytes."""
    text = f"{name} $$o{''.join(f', $${letter}' for letter in 'abc'[:operands])};" if code is None else code
    return Row(name, text.replace("$$", "$"), size, each(_cut(function, operands, 8 * size)))


def _cut(function: Callable[..., int | None], operands: int, bits: int) -> Callable[..., int | None]:
    def cut(*codes: int) -> int | None:
        result = function(*codes)
        return None if result is None else result & (1 << bits) - 1

    if operands == 1:
        return lambda a: cut(a)
    if operands == 2:
        return lambda a, b: cut(a, b)
    return lambda a, b, c: cut(a, b, c)


def _clamped(value: int) -> int:
    return max(min(value, 2**31 - 1), -(2**31))


def _two(bits: int) -> Iterator[Row]:
    size = bits // 8
    for letter in "us":
        # `k`: an operand as the type reads it.
        k: Callable[[int], int] = (lambda v: signed(v, bits)) if letter == "s" else (lambda v: v)
        kind = f"{letter}{bits}"
        yield _row(f"add.{kind}", 2, lambda a, b: a + b, size)
        yield _row(f"sub.{kind}", 2, lambda a, b: a - b, size)
        yield _row(f"mul.lo.{kind}", 2, lambda a, b: a * b, size)
        yield _row(f"mul.hi.{kind}", 2, lambda a, b, k=k: k(a) * k(b) >> bits, size)
        if bits < 64:
            yield _row(f"mul.wide.{kind}", 2, lambda a, b, k=k: k(a) * k(b), 2 * size)
        # The result for a zero divisor is open.
        yield _row(f"div.{kind}", 2, lambda a, b, k=k: quotient(k(a), k(b)) if b else None, size)
        yield _row(
            f"rem.{kind}", 2, lambda a, b, k=k: k(a) - quotient(k(a), k(b)) * k(b) if b else None, size
        )
        yield _row(f"min.{kind}", 2, lambda a, b, k=k: min(k(a), k(b)), size)
        yield _row(f"max.{kind}", 2, lambda a, b, k=k: max(k(a), k(b)), size)
    yield _row(f"abs.s{bits}", 1, lambda a: abs(signed(a, bits)), size)
    yield _row(f"neg.s{bits}", 1, lambda a: -a, size)
    for name, function in (("and", int.__and__), ("or", int.__or__), ("xor", int.__xor__)):
        yield _row(f"{name}.b{bits}", 2, lambda a, b, f=function: f(a, b), size)
    yield _row(f"not.b{bits}", 1, lambda a: ~a, size)
    yield _row(f"cnot.b{bits}", 1, lambda a: int(a == 0), size)
    yield from _shifts(bits)


def _shifts(bits: int) -> Iterator[Row]:
    size = bits // 8
    amount = {16: "cvt.u32.u16 %r20, $b;", 32: "mov.b32 %r20, $b;", 64: "cvt.u32.u64 %r20, $b;"}[bits]
    low: Callable[[int], int] = lambda b: b & 0xFFFF_FFFF  # noqa: E731
    shifts: dict[str, Callable[[int, int], int]] = {
        f"shl.b{bits}": lambda a, b: a << min(low(b), bits),
        f"shr.b{bits}": lambda a, b: a >> min(low(b), bits),
        f"shr.u{bits}": lambda a, b: a >> min(low(b), bits),
        f"shr.s{bits}": lambda a, b: signed(a, bits) >> min(low(b), bits),
    }
    for name, function in shifts.items():
        yield _row(name, 2, function, size, f"{amount} {name} $o, $a, %r20;")
        yield _row(f"{name}-by-5", 1, lambda a, f=function: f(a, 5), size, f"{name} $o, $a, 5;")


def _highest(value: int, bits: int, letter: str) -> int:
    if letter == "s" and value >> bits - 1:
        value = ~value & (1 << bits) - 1
    return value.bit_length() - 1


def _unary(bits: int) -> Iterator[Row]:
    yield _row(f"popc.b{bits}", 1, lambda a: a.bit_count(), 4)
    yield _row(f"clz.b{bits}", 1, lambda a: bits - a.bit_length(), 4)
    yield _row(f"brev.b{bits}", 1, lambda a: int(f"{a:0{bits}b}"[::-1], 2), bits // 8)
    for letter in "us":
        yield _row(f"bfind.{letter}{bits}", 1, lambda a, x=letter: _highest(a, bits, x), 4)
        yield _row(
            f"bfind.shiftamt.{letter}{bits}",
            1,
            lambda a, x=letter: bits - 1 - _highest(a, bits, x) if _highest(a, bits, x) >= 0 else -1,
            4,
        )


def _saturating() -> Iterator[Row]:
    yield _row("add.sat.s32", 2, lambda a, b: _clamped(signed(a, 32) + signed(b, 32)), 4)
    yield _row("sub.sat.s32", 2, lambda a, b: _clamped(signed(a, 32) - signed(b, 32)), 4)
    yield _row("min.relu.s32", 2, lambda a, b: max(min(signed(a, 32), signed(b, 32)), 0), 4)
    yield _row("max.relu.s32", 2, lambda a, b: max(signed(a, 32), signed(b, 32), 0), 4)


def _products(bits: int) -> Iterator[Row]:
    for letter in "us":
        k: Callable[[int], int] = (lambda v: signed(v, bits)) if letter == "s" else (lambda v: v)
        kind = f"{letter}{bits}"
        yield _row(f"mad.lo.{kind}", 3, lambda a, b, c: a * b + c, bits // 8)
        yield _row(f"mad.hi.{kind}", 3, lambda a, b, c, k=k: (k(a) * k(b) >> bits) + c, bits // 8)
        if bits == 64:
            continue
        wide = "mov.b32 %r20, {$c, $a};" if bits == 16 else "mov.b64 %d30, {$c, $a};"
        code = f"{wide} mad.wide.{kind} $o, $a, $b, {'%r20' if bits == 16 else '%d30'};"
        yield _row(f"mad.wide.{kind}", 3, lambda a, b, c, k=k: k(a) * k(b) + (c | a << bits), bits // 4, code)


def _extract(letter: str, bits: int, used: int = 0xFF) -> Callable[[int, int, int], int]:
    """The bits of PTX ISA 9.7.1.19, one by one; `used` says which bits of start and length count."""

    def extract(a: int, start: int, length: int) -> int:
        position, count = start & used, length & used
        sign = 0 if letter == "u" or not count else a >> min(position + count - 1, bits - 1) & 1
        result = 0
        for place in range(bits):
            inside = place < count and position + place < bits
            result |= (a >> position + place & 1 if inside else sign) << place
        return result

    return extract


def _insert(bits: int, used: int = 0xFF) -> Callable[[int, int, int, int], int]:
    def insert(a: int, b: int, start: int, length: int) -> int:
        position, count = start & used, length & used
        for place in range(min(count, bits)):
            if position + place < bits:
                b = b & ~(1 << position + place) | (a >> place & 1) << position + place
        return b

    return insert


def _beyond(function: Callable[[int, int, int], int]) -> Departure:
    """Of 64-bit fields, which the driver's compiler expands: of what is beyond 8 bits in start or length."""

    def results(a: int, b: int, c: int) -> int | None:
        start, length = b & 0xFFFF_FFFF, c & 0xFFFF_FFFF
        return function(a, b, c) & (1 << 64) - 1 if max(start, length) > 0xFF else None

    reason = "The ISA takes start and length modulo 256 (9.7.1.19, 9.7.1.20), the GPU all 32 bits of them."
    return Departure(reason, each(results))


def _fields(bits: int) -> Iterator[Row]:
    low = (
        "mov.b32 %r20, {}; mov.b32 %r21, {};" if bits == 32 else "cvt.u32.u64 %r20, {}; cvt.u32.u64 %r21, {};"
    )
    for letter in "us":
        code = f"{low.format('$b', '$c')} bfe.{letter}{bits} $o, $a, %r20, %r21;"
        row = _row(f"bfe.{letter}{bits}", 3, _extract(letter, bits), bits // 8, code)
        departure = _beyond(_extract(letter, bits, _ALL)) if bits == 64 else None
        yield replace(row, departure=departure)
    insert = _insert(bits)
    for start, length in ((0, 8), (5, 27), (bits - 3, 7), (12, 0), (3, 200)):
        code = f"bfi.b{bits} $o, $a, $b, {start}, {length};"
        row = _row(
            f"bfi.b{bits}-{start}-{length}", 2, lambda a, b, s=start, n=length: insert(a, b, s, n), 4, code
        )
        departure = None
        if bits == 32 and length > 31:
            reason = "The ISA takes the length modulo 256 (9.7.1.20), the GPU an immediate one modulo 32."
            departure = Departure(reason, each(lambda a, b, s=start, n=length & 31: insert(a, b, s, n)))
        yield Row(
            row.name,
            row.code,
            bits // 8,
            each(lambda a, b, s=start, n=length: insert(a, b, s, n)),
            departure=departure,
        )
    code = f"{low.format('$b', '$c')} bfi.b{bits} $o, $a, $b, %r20, %r21;"
    every = _insert(bits, _ALL)
    departure = _beyond(lambda a, b, c: every(a, b, b & _ALL, c & _ALL)) if bits == 64 else None
    yield replace(
        _row(f"bfi.b{bits}", 3, lambda a, b, c: insert(a, b, b, c), bits // 8, code), departure=departure
    )


def _permuted(a: int, b: int, selector: int) -> int:
    source, result = a | b << 32, 0
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = source >> 8 * (nibble & 7) & 255
        result |= ((255 if byte >> 7 else 0) if nibble & 8 else byte) << 8 * place
    return result


def _table(table: int) -> Callable[[int, int, int], int]:
    def function(a: int, b: int, c: int) -> int:
        return sum(
            (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32)
        )

    return function


def _words() -> Iterator[Row]:
    yield _row("prmt.b32", 3, _permuted, 4)
    for table in (0x00, 0x1B, 0x80, 0x96, 0xCA, 0xE8, 0xFE):
        yield _row(f"lop3.b32-{table:#04x}", 3, _table(table), 4, f"lop3.b32 $o, $a, $b, $c, {table};")
    for mode, most in (("clamp", lambda n: min(n, 32)), ("wrap", lambda n: n & 31)):
        yield _row(f"shf.l.{mode}.b32", 3, lambda a, b, c, m=most: (a | b << 32) << m(c) >> 32, 4)
        yield _row(f"shf.r.{mode}.b32", 3, lambda a, b, c, m=most: (a | b << 32) >> m(c), 4)


def _carries(bits: int) -> Iterator[Row]:
    """Chains as compilers write them for numbers of two and three words; results side by side."""
    one, two, three = ("%r20", "%r21", "%r22") if bits == 32 else ("%d30", "%d31", "%d32")
    whole = (1 << bits) - 1
    if bits == 32:
        pack = f"mov.b64 $o, {{{one}, {two}}};"
        pack_three = f"mov.b64 $o, {{{one}, {two}}}; cvt.u64.u32 $q, {three};"
    else:
        pack = f"mov.b64 $o, {one}; mov.b64 $q, {two};"
        pack_three = f"xor.b64 $o, {one}, {three}; mov.b64 $q, {two};"

    def packed_three(value: int) -> int:
        low, middle, high = value & whole, value >> bits & whole, value >> 2 * bits & whole
        return low | middle << 32 | high << 64 if bits == 32 else low ^ high | middle << 64

    for letter in "us":
        kind = f"{letter}{bits}"
        double = 2 * bits // 8
        yield _row(
            f"add.cc-addc.{kind}",
            3,
            lambda a, b, c: (a | c << bits) + (b | a << bits),
            double,
            f"add.cc.{kind} {one}, $a, $b; addc.{kind} {two}, $c, $a; {pack}",
        )
        yield _row(
            f"sub.cc-subc.{kind}",
            3,
            lambda a, b, c: (a | c << bits) - (b | a << bits),
            double,
            f"sub.cc.{kind} {one}, $a, $b; subc.{kind} {two}, $c, $a; {pack}",
        )
        yield _row(
            f"add.cc-addc.cc-addc.{kind}",
            3,
            lambda a, b, c: packed_three((a | b << bits | c << 2 * bits) + (b | c << bits | a << 2 * bits)),
            16,
            f"add.cc.{kind} {one}, $a, $b; addc.cc.{kind} {two}, $b, $c; addc.{kind} {three}, $c, $a; "
            f"{pack_three}",
        )
        yield _row(
            f"sub.cc-subc.cc-subc.{kind}",
            3,
            lambda a, b, c: packed_three((a | b << bits | c << 2 * bits) - (b | c << bits | a << 2 * bits)),
            16,
            f"sub.cc.{kind} {one}, $a, $b; subc.cc.{kind} {two}, $b, $c; subc.{kind} {three}, $c, $a; "
            f"{pack_three}",
        )
    kind = f"u{bits}"
    # a * b + c:a, the carry of the low half going into the high one.
    yield _row(
        f"mad.lo.cc-madc.hi.{kind}",
        3,
        lambda a, b, c: a * b + (c | a << bits),
        2 * bits // 8,
        f"mad.lo.cc.{kind} {one}, $a, $b, $c; madc.hi.{kind} {two}, $a, $b, $a; {pack}",
    )
    yield _row(
        f"mad.lo.cc-madc.hi.cc-addc.{kind}",
        3,
        lambda a, b, c: packed_three(a * b + (c | a << bits) + (b << 2 * bits)),
        16,
        f"mad.lo.cc.{kind} {one}, $a, $b, $c; madc.hi.cc.{kind} {two}, $a, $b, $a; "
        f"addc.{kind} {three}, $b, 0; "
        f"{pack_three}",
    )
    yield _row(
        f"mad.hi.cc-madc.lo.{kind}",
        3,
        lambda a, b, c: (
            ((a * b >> bits) + c & whole) | ((a * b) + c + ((a * b >> bits) + c >> bits) & whole) << bits
        ),
        2 * bits // 8,
        f"mad.hi.cc.{kind} {one}, $a, $b, $c; madc.lo.{kind} {two}, $a, $b, $c; {pack}",
    )


def groups() -> Iterator[Group]:
    """All of them."""
    yield Group("integer-16", pairs(NARROW, 16, 1, 2048), tuple(_two(16)))
    yield Group("integer-32", pairs(EDGES, 32, 2, 2048), (*_two(32), *_unary(32), *_saturating()))
    yield Group("integer-64", pairs(WIDE, 64, 3, 2048), (*_two(64), *_unary(64)))
    yield Group("integer-16-three", crossed(FEW_NARROW, 16, 4, 4096, 3), tuple(_products(16)))
    yield Group(
        "integer-32-three",
        crossed(FEW, 32, 5, 6144, 3),
        (*_products(32), *_fields(32), *_words(), *_carries(32)),
    )
    yield Group(
        "integer-64-three", crossed(FEW_WIDE, 64, 6, 6144, 3), (*_products(64), *_fields(64), *_carries(64))
    )
