# SPDX-License-Identifier: Apache-2.0
"""Probes of comparison, selection, moves and conversions (PTX ISA 9.7.7, 9.7.8, 9.7.10.3, 9.7.10.24).

Conversions to narrow floats are among the asynchronous groups' probes, where they were needed first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np
from core_float_probes import FORMATS, edges, operands
from core_integer_probes import EDGES, WIDE
from core_rows import Group, Row, crossed, each, pairs, signed
from exact_floats import F16, F32, Format

EQUAL = ("eq", "ne")
ORDER = (*EQUAL, "lt", "le", "gt", "ge")
UNSIGNED = (*ORDER, "lo", "ls", "hi", "hs")
FLOATING = (*ORDER, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_SAME = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
EVERY = 3


def _ordered(name: str, a: float | Fraction | int, b: float | Fraction | int) -> bool:
    return {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[name]


def compared(kind: str, name: str) -> Callable[[int, int], bool]:
    """A comparison of two operands of a type, given as bits."""
    letter = kind.rstrip("0123456789")
    bits = int(kind[len(letter) :])
    name = _SAME.get(name, name)
    if letter in ("f", "bf"):
        fmt = FORMATS[kind]

        def compare(a: int, b: int) -> bool:
            unordered = fmt.is_nan(a) or fmt.is_nan(b)
            if name in ("num", "nan"):
                return unordered == (name == "nan")
            if unordered:
                return name.endswith("u")
            return _ordered(name[:2], fmt.value(a), fmt.value(b))

        return compare
    if letter == "s":
        return lambda a, b: _ordered(name, signed(a, bits), signed(b, bits))
    return lambda a, b: _ordered(name, a, b)


def _names(kind: str) -> tuple[str, ...]:
    letter = kind.rstrip("0123456789")
    return {"b": EQUAL, "u": UNSIGNED, "s": ORDER}.get(letter, FLOATING)


def _comparisons(kinds: Sequence[str]) -> Iterator[Row]:
    """All comparisons of a type are one row; bit k of the result is comparison k."""
    for kind in kinds:
        tests = [compared(kind, name) for name in _names(kind)]
        code = "mov.b32 $o, 0;"
        for place, name in enumerate(_names(kind)):
            code += (
                f" setp.{name}.{kind} %p1, $a, $b; selp.b32 %r20, {1 << place}, 0, %p1; or.b32 $o, $o, %r20;"
            )

        def every(a: int, b: int, tests: list[Callable[[int, int], bool]] = tests) -> int:
            return sum(test(a, b) << place for place, test in enumerate(tests))

        floating = kind[0] in "fb" and kind in FORMATS
        yield Row(f"setp.{kind}", code, 4, each(every, EVERY if floating else 1))


def _combined(kind: str, other: str) -> Iterator[Row]:
    """Comparisons that combine with a third operand's sign, both results, and set."""
    less = compared(kind, "lt")
    for name, function in (("and", bool.__and__), ("or", bool.__or__), ("xor", bool.__xor__)):
        for negated in (False, True):
            code = f"setp.ne.{other} %p3, $a, 0; setp.lt.{name}.{kind} %p1|%p2, $a, $b, {'!' * negated}%p3; "
            code += "selp.b32 $o, 1, 0, %p1; selp.b32 %r20, 2, 0, %p2; or.b32 $o, $o, %r20;"

            def both(
                a: int, b: int, f: Callable[[bool, bool], bool] = function, negated: bool = negated
            ) -> int:
                third = (a != 0) != negated
                return f(less(a, b), third) | f(not less(a, b), third) << 1

            yield Row(f"setp.lt.{name}.{kind}{'-not' * negated}", code, 4, each(both))


def _sets(kind: str, names: Sequence[str]) -> Iterator[Row]:
    for name in names:
        for target, true in (("u32", 0xFFFF_FFFF), ("s32", 0xFFFF_FFFF), ("f32", 0x3F80_0000)):
            word = f"set.{name}.{target}.{kind}"
            test = compared(kind, name)
            yield Row(
                word, f"{word} $o, $a, $b;", 4, each(lambda a, b, t=test, true=true: true if t(a, b) else 0)
            )


def _selections(bits: int) -> Iterator[Row]:
    size = bits // 8
    sign = "mov.b64 {%r21, %r20}, $c;" if bits == 64 else "mov.b32 %r20, $c;"
    top = bits - 32
    kinds = [f"{letter}{bits}" for letter in "busf"]
    for kind in kinds:
        code = f"setp.lt.u{bits} %p1, $a, $c; selp.{kind} $o, $a, $b, %p1;"
        yield Row(f"selp.{kind}", code, size, each(lambda a, b, c: a if a < c else b))
        for letter in ("s32", "f32"):

            def select(a: int, b: int, c: int, letter: str = letter) -> int:
                c >>= top
                if letter == "s32":
                    return b if c >> 31 else a
                return a if not F32.is_nan(c) and F32.value(c) >= 0 else b

            yield Row(
                f"slct.{kind}.{letter}", f"{sign} slct.{kind}.{letter} $o, $a, $b, %r20;", size, each(select)
            )


def _moves() -> Iterator[Row]:
    """Operand a has 64 bits, b 32."""
    low, mask = 0xFFFF_FFFF, 0xFFFF
    rows: dict[str, tuple[str, int, Callable[[int, int], int]]] = {
        "b64": ("mov.b64 $o, $a;", 8, lambda a, b: a),
        "u64": ("mov.u64 $o, $a;", 8, lambda a, b: a),
        "s64": ("mov.s64 $o, $a;", 8, lambda a, b: a),
        "f64": ("mov.f64 $o, $a;", 8, lambda a, b: a),
        "b32": ("mov.b32 $o, $b;", 4, lambda a, b: b),
        "u32": ("mov.u32 $o, $b;", 4, lambda a, b: b),
        "s32": ("mov.s32 $o, $b;", 4, lambda a, b: b),
        "f32": ("mov.f32 $o, $b;", 4, lambda a, b: b),
        "b64-two": (
            "mov.b64 {%r20, %r21}, $a; mov.b64 $o, {%r21, %r20};",
            8,
            lambda a, b: a >> 32 | (a & low) << 32,
        ),
        "b64-high": ("mov.b64 {_, $o}, $a;", 4, lambda a, b: a >> 32),
        "b64-four": (
            "mov.b64 {%h11, %h12, %h13, %h14}, $a; mov.b64 $o, {%h14, %h12, %h11, %h13};",
            8,
            lambda a, b: a >> 48 | (a >> 16 & mask) << 16 | (a & mask) << 32 | (a >> 32 & mask) << 48,
        ),
        "b32-two": (
            "mov.b32 {%h11, %h12}, $b; mov.b32 $o, {%h12, %h11};",
            4,
            lambda a, b: b >> 16 | (b & mask) << 16,
        ),
        "b16": ("mov.b32 {%h11, %h12}, $b; mov.b16 $o, %h12;", 2, lambda a, b: b >> 16),
        "immediate-hex": ("mov.b32 $o, 0xDEADBEEF;", 4, lambda a, b: 0xDEAD_BEEF),
        "immediate-negative": ("mov.s32 $o, -5;", 4, lambda a, b: -5 & low),
        "immediate-b64": ("mov.b64 $o, -5;", 8, lambda a, b: -5 & (1 << 64) - 1),
        "immediate-0f": ("mov.f32 $o, 0fBF800001;", 4, lambda a, b: 0xBF80_0001),
        "immediate-0d": ("mov.f64 $o, 0d3FF0000000000001;", 8, lambda a, b: 0x3FF0_0000_0000_0001),
        "pred": (
            "setp.lt.s32 %p1, $b, 0; mov.pred %p2, %p1; not.pred %p3, %p2; and.pred %p4, %p2, %p1; "
            "xor.pred %p5, %p3, %p4; or.pred %p6, %p3, %p2; selp.b32 $o, 1, 0, %p2; @%p3 add.u32 $o, $o, 2; "
            "@%p4 add.u32 $o, $o, 4; @%p5 add.u32 $o, $o, 8; @!%p6 add.u32 $o, $o, 16;",
            4,
            lambda a, b: 1 + 4 + 8 if b >> 31 else 2 + 8,
        ),
    }
    for name, (code, size, function) in rows.items():
        yield Row(f"mov.{name}", code, size, each(function))


INTEGERS = tuple(f"{letter}{bits}" for letter in "us" for bits in (8, 16, 32, 64))
_UNPACK = {
    8: ("cvt.u16.u64 %h11, $a;", "%h11"),
    16: ("cvt.u16.u64 %h11, $a;", "%h11"),
    32: ("cvt.u32.u64 %r20, $a;", "%r20"),
    64: ("", "$a"),
}


def _read(kind: str, value: int) -> int:
    bits = int(kind[1:])
    return signed(value, bits) if kind[0] == "s" else value & (1 << bits) - 1


def _kept(kind: str, value: int) -> int:
    """What a register of at least 32 bits holds of a result: extended by the type's sign."""
    size = 8 if kind[1:] == "64" else 4
    return _read(kind, value) & (1 << 8 * size) - 1


def _limits(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def _size(kind: str) -> int:
    return 8 if kind.endswith("64") else 4


def _between_integers() -> Iterator[Row]:
    for source in INTEGERS:
        for target in INTEGERS:
            take, register = _UNPACK[int(source[1:])]
            (low, high), (lowest, highest) = _limits(target), _limits(source)
            # The ISA refuses .sat where there is nothing to clamp.
            for flag in ("",) if low <= lowest and highest <= high else ("", "sat."):
                word = f"cvt.{flag}{target}.{source}"

                def convert(a: int, source: str = source, target: str = target, flag: str = flag) -> int:
                    value = _read(source, a)
                    low, high = _limits(target)
                    return _kept(target, min(max(value, low), high) if flag else value)

                yield Row(word, f"{take} {word} $o, {register};", _size(target), each(convert))


def _whole(value: Fraction, rounding: str) -> int:
    functions: dict[str, Callable[[Fraction], int]] = {
        "rni": round,
        "rzi": math.trunc,
        "rmi": math.floor,
        "rpi": math.ceil,
    }
    return functions[rounding](value)


def _of_nan(target: str, source: str) -> int:
    """Zero, or the highest bit alone for a 64-bit integer or a source of f64 (PTX ISA 9.7.10.24)."""
    return 1 << int(target[1:]) - 1 if source == "f64" or target.endswith("64") else 0


def _to_integer(kind: str) -> Iterator[Row]:
    fmt = FORMATS[kind]
    # bf16 converts to whole registers only.
    for target in INTEGERS if kind != "bf16" else ("u32", "s32", "u64", "s64"):
        low, high = _limits(target)
        for rounding in ("rni", "rzi", "rmi", "rpi"):
            for flag in ("", "ftz.") if kind == "f32" and target == "s32" else ("",):
                word = f"cvt.{rounding}.{flag}{target}.{kind}"

                def convert(
                    a: int,
                    low: int = low,
                    high: int = high,
                    target: str = target,
                    r: str = rounding,
                    f: str = flag,
                ) -> int | None:
                    if fmt.is_nan(a):
                        return _kept(target, _of_nan(target, kind))
                    value = fmt.value(fmt.flushed(a) if f else a)
                    if isinstance(value, float):
                        whole = 0 if value == 0 else high if value > 0 else low
                    else:
                        whole = _whole(value, r)
                    return _kept(target, min(max(whole, low), high))

                yield Row(word, f"{word} $o, $a;", _size(target), each(convert, EVERY))


def _from_integer() -> Iterator[Row]:
    for source in INTEGERS:
        take, register = _UNPACK[int(source[1:])]
        for target in ("f16", "bf16", "f32", "f64"):
            for rounding in ("rn", "rz", "rm", "rp"):
                if source.endswith("8") and target == "bf16":
                    continue  # there is no such instruction
                if source.endswith("64") and (target in ("f16", "bf16") or rounding != "rn"):
                    continue
                fmt = FORMATS[target]
                word = f"cvt.{rounding}.{target}.{source}"

                def convert(a: int, source: str = source, fmt: Format = fmt, r: str = rounding) -> int | None:
                    value = _read(source, a)
                    return fmt.code(Fraction(value), r) if value else 0

                yield Row(word, f"{take} {word} $o, {register};", fmt.bits // 8, each(convert, EVERY))


def _between_floats(source: str) -> Iterator[Row]:
    before = FORMATS[source]
    for target, roundings, flags in _FLOATS[source]:
        after = FORMATS[target]
        for rounding in roundings:
            for extra in flags:
                words = [part for part in (rounding, *extra) if part]
                word = ".".join(("cvt", *words, target, source))

                def convert(
                    a: int,
                    after: Format = after,
                    r: str = rounding,
                    extra: tuple[str, ...] = extra,
                ) -> int | None:
                    if before.is_nan(a):
                        return 0 if "sat" in extra else None
                    if "ftz" in extra and after is F16 and before.subnormal(a):
                        return None  # the ISA names other conversions as those that flush
                    value = before.value(before.flushed(a) if "ftz" in extra and before is F32 else a)
                    if r.endswith("i") and isinstance(value, Fraction):
                        sign = -0.0 if value < 0 else 0.0
                        value = Fraction(_whole(value, r)) or sign
                    code = after.code(value, r if r in ("rz", "rm", "rp") else "rn")
                    assert code is not None
                    if "ftz" in extra and after is F32:
                        code = after.flushed(code)
                    if "sat" in extra:
                        one = after.code(Fraction(1))
                        assert one is not None
                        code = 0 if code >> after.bits - 1 else min(code, one)
                    return code

                yield Row(word, f"{word} $o, $a;", after.bits // 8, each(convert, EVERY))


_ANY, _WHOLE = ("rn", "rz", "rm", "rp"), ("rni", "rzi", "rmi", "rpi")
_FLOATS: dict[str, tuple[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]], ...]] = {
    "f16": (("f32", ("",), ((), ("ftz",), ("sat",))), ("f64", ("",), ((),)), ("f16", _WHOLE, ((),))),
    "bf16": (("f32", ("",), ((),)),),
    "f32": (
        ("f32", _WHOLE, ((), ("ftz",), ("sat",), ("ftz", "sat"))),
        ("f16", _ANY, ((), ("ftz",))),
        ("f64", ("",), ((), ("ftz",))),
    ),
    "f64": (("f64", _WHOLE, ((),)), ("f32", _ANY, ((), ("ftz",), ("sat",))), ("f16", _ANY, ((),))),
}


def groups() -> Iterator[Group]:
    """All of them."""
    narrow = tuple(value >> 16 ^ value & 0xFFFF for value in EDGES)
    yield Group("compare-16", pairs(narrow, 16, 70, 2048), tuple(_comparisons(("b16", "u16", "s16"))))
    rows = [*_comparisons(("b32", "u32", "s32")), *_combined("s32", "s32"), *_sets("s32", ("lt", "eq"))]
    yield Group("compare-32", pairs(EDGES, 32, 71, 2048), (*rows, *_sets("u32", ("hi", "le"))))
    rows = [*_comparisons(("b64", "u64", "s64")), *_combined("u64", "s64"), *_sets("s64", ("ge",))]
    yield Group("compare-64", pairs(WIDE, 64, 72, 2048), tuple(rows))
    for number, kind in enumerate(FORMATS):
        rows = [
            *_comparisons((kind,)),
            *(_sets(kind, ("lt", "neu", "nan")) if kind in ("f32", "f64") else ()),
        ]
        yield Group(f"compare-{kind}", operands(FORMATS[kind], 73 + number, 2048, 2), tuple(rows))
    few = tuple(edges(F32))[::2]
    yield Group("select-32", crossed(few, 32, 80, 4096, 3), tuple(_selections(32)))
    yield Group("select-64", crossed([v << 32 for v in few], 64, 81, 4096, 3), tuple(_selections(64)))
    wide, word = pairs(WIDE, 64, 82, 1024)[0], pairs(EDGES, 32, 83, 1024)[1]
    yield Group("move", (wide, word), tuple(_moves()))
    numbers = np.concatenate([pairs(WIDE, 64, 84, 1024)[0], _powers()])
    yield Group("convert-integers", (numbers,), tuple(_between_integers()))
    yield Group("convert-from-integers", (numbers,), tuple(_from_integer()))
    for number, kind in enumerate(FORMATS):
        values = operands(FORMATS[kind], 90 + number, 1024, 2)[0]
        values[256:768] = _near_integers(FORMATS[kind], values[256:768])
        yield Group(f"convert-{kind}", (values,), (*_to_integer(kind), *_between_floats(kind)))


def _powers() -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Powers of two and their neighbours, of both signs, and ties of floats: 1024 of them."""
    values = []
    for place in range(64):
        base = 1 << place
        below = [1 << place - k for k in (11, 12, 24, 25) if place >= k]
        values += [
            base,
            base - 1,
            base + 1,
            *(base + step for step in below),
            *(base + 3 * step for step in below),
        ]
    values += [-value for value in values]
    return np.array([value & (1 << 64) - 1 for value in (values * 2)[:1024]], np.uint64)


def _near_integers(
    fmt: Format, like: np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]:
    """Halves, quarters and whole numbers up to each integer type's limits."""
    values: list[Fraction] = [Fraction(k, 4) for k in range(-64, 64)]
    for place in (7, 8, 15, 16, 31, 32, 63, 64):
        values += [
            sign * (Fraction(1 << place) + step)
            for sign in (1, -1)
            for step in (Fraction(-1), Fraction(-1, 2), Fraction(0), Fraction(1, 2), Fraction(1))
        ]
    codes = [fmt.code(value) if value else 0 for value in values]
    return np.resize(np.array(codes, like.dtype), len(like))
