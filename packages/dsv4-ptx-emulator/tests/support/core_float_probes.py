# SPDX-License-Identifier: Apache-2.0
"""Probes of floating-point arithmetic (PTX ISA 9.7.3, 9.7.4).

Exact operations are expected bit for bit. The ISA bounds the error of approximate ones; `FUNCTIONS` has the
bounds of PTX ISA 9.7.3.13 to 9.7.3.22, to which half a unit in the last place is added, the rounding of the
value that the emulator gives for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import exact_floats as exact
import numpy as np
from core_rows import Departure, Group, Row, Tolerance, crossed, each, pairs
from exact_floats import BF16, F16, F32, F64, Format
from numpy.typing import NDArray

FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
HALF_ULP = 2.0**-24
EVERY = 3
"""One thread in so many is computed in rational numbers, which takes most of the time."""


def edges(fmt: Format) -> tuple[int, ...]:
    """32 values: zeros, subnormals, ties, neighbours of 1, limits, infinities, NaN."""
    one, infinity = (fmt.top >> 1) << fmt.fraction_bits, fmt.infinity
    ulp_one = fmt.top // 2 - fmt.fraction_bits
    positive = (
        0,
        1,
        2,
        (1 << fmt.fraction_bits) - 1,
        1 << fmt.fraction_bits,
        (1 << fmt.fraction_bits) + 1,
        max(ulp_one - 1, 1) << fmt.fraction_bits,
        one - 1,
        one,
        one + 1,
        one + (1 << fmt.fraction_bits - 1),
        infinity - 1,
        infinity - (1 << fmt.fraction_bits),
        infinity,
        infinity | 1 << fmt.fraction_bits - 1 | 5,
        infinity | 1,
    )
    return (*positive, *(code | 1 << fmt.bits - 1 for code in positive))


def few(fmt: Format) -> tuple[int, ...]:
    """Half of them, for three operands."""
    every = edges(fmt)
    return tuple(every[k] for k in (0, 16, 1, 17, 4, 5, 23, 8, 24, 9, 10, 11, 27, 13, 29, 15))


def operands(fmt: Format, seed: int, count: int, number: int) -> tuple[NDArray[Any], ...]:
    """Edges against edges, random bits, and operands of like magnitude, which round and cancel."""
    chosen = edges(fmt) if number < 3 else few(fmt)
    columns = crossed(chosen, fmt.bits, seed, count, number)
    rng = np.random.default_rng(seed + 1000)
    near = np.arange(count) >= count - count // 4
    one = (fmt.top >> 1) << fmt.fraction_bits
    results = []
    for values in columns:
        spread = rng.integers(-3 << fmt.fraction_bits, 3 << fmt.fraction_bits, count)
        sign = rng.integers(0, 2, count, dtype=np.uint64) << np.uint64(fmt.bits - 1)
        close = ((spread + one).astype(np.uint64) | sign).astype(values.dtype)
        results.append(np.where(near, close, values))
    return tuple(results)


def packed(fmt: Format, seed: int, count: int, number: int) -> tuple[NDArray[Any], ...]:
    """Two 16-bit operands side by side."""
    low = operands(fmt, seed, count, number)
    high = operands(fmt, seed + 1, count, number)
    return tuple(
        x.astype(np.uint32) | y[::-1].astype(np.uint32) << np.uint32(16)
        for x, y in zip(low, high, strict=True)
    )


def _code(name: str, number: int) -> str:
    return f"{name} $o, {', '.join(f'${letter}' for letter in 'abc'[:number])};"


def _row(name: str, fmt: Format, number: int, function: Callable[..., int | None]) -> Row:
    return Row(name, _code(name, number), fmt.bits // 8, each(function, EVERY))


def _arithmetic(kind: str) -> Iterator[Row]:
    fmt = FORMATS[kind]
    variants: tuple[tuple[str, ...], ...] = ((), ("rn",))
    if kind == "f32":
        variants += (("ftz",), ("rn", "ftz"), ("sat",), ("rn", "ftz", "sat"))
    functions: dict[str, Callable[..., Fraction | float]] = {
        "add": exact.add,
        "sub": lambda a, b: exact.add(a, exact.negated(b)),
        "mul": exact.multiply,
    }
    for name, function in functions.items():
        for flags in variants:
            word = ".".join((name, *flags, kind))
            yield _row(word, fmt, 2, exact.operation(fmt, function, 2, flags))
    for name, function in (("min", exact.lesser), ("max", exact.greater)):
        for flags in ((), ("ftz",), ("NaN",), ("ftz", "NaN")) if kind == "f32" else ((),):
            yield _row(".".join((name, *flags, kind)), fmt, 2, exact.extreme(fmt, function, flags))
    yield from _signs(kind)
    if kind not in ("f32", "f64"):
        return
    for flags in ((), ("ftz",)) if kind == "f32" else ((),):
        words = ".".join(("rn", *flags, kind))
        yield _row(f"div.{words}", fmt, 2, exact.operation(fmt, exact.divide, 2, flags))
        yield _row(f"sqrt.{words}", fmt, 1, exact.operation(fmt, exact.root, 1, flags))
        inverse: Callable[..., Fraction | float] = lambda a: exact.divide(Fraction(1), a)  # noqa: E731
        yield _row(f"rcp.{words}", fmt, 1, exact.operation(fmt, inverse, 1, flags))
    sign = 1 << fmt.bits - 1
    yield _row(f"copysign.{kind}", fmt, 2, lambda a, b: a & sign | b & sign - 1)
    for test, function in _classes(fmt).items():
        code = f"testp.{test}.{kind} %p1, $a; selp.b32 $o, 1, 0, %p1;"
        yield Row(f"testp.{test}.{kind}", code, 4, each(function, EVERY))


def _signs(kind: str) -> Iterator[Row]:
    """Absolute value and negation; what they make of a NaN is open but for abs.f64."""
    fmt = FORMATS[kind]
    sign = 1 << fmt.bits - 1
    if kind == "f64":
        quiet = 1 << fmt.fraction_bits - 1
        reason = "The ISA passes a NaN through unchanged (9.7.3.9), the GPU makes a signalling one quiet."
        quieted = each(lambda a: a | quiet if fmt.is_nan(a) and not a & quiet else None)
        row = _row("abs.f64", fmt, 1, lambda a: a if fmt.is_nan(a) else a & sign - 1)
        yield replace(row, departure=Departure(reason, quieted))
        yield _row("neg.f64", fmt, 1, lambda a: None if fmt.is_nan(a) else a ^ sign)
        return
    for flags in ((), ("ftz",)) if kind == "f32" else ((),):
        clear: Callable[[int], int] = fmt.flushed if flags else (lambda a: a)
        yield _row(
            ".".join(("abs", *flags, kind)),
            fmt,
            1,
            lambda a, clear=clear: None if fmt.is_nan(a) else clear(a) & sign - 1,
        )
        yield _row(
            ".".join(("neg", *flags, kind)),
            fmt,
            1,
            lambda a, clear=clear: None if fmt.is_nan(a) else clear(a) ^ sign,
        )


def _classes(fmt: Format) -> dict[str, Callable[[int], int]]:
    magnitude: Callable[[int], int] = lambda a: a & (1 << fmt.bits - 1) - 1  # noqa: E731
    return {
        "finite": lambda a: int(magnitude(a) < fmt.infinity),
        "infinite": lambda a: int(magnitude(a) == fmt.infinity),
        "number": lambda a: int(magnitude(a) <= fmt.infinity),
        "notanumber": lambda a: int(magnitude(a) > fmt.infinity),
        # "As a special case, positive and negative zero are considered normal numbers" (9.7.3.1).
        "normal": lambda a: int(magnitude(a) < fmt.infinity and not fmt.subnormal(a)),
        "subnormal": lambda a: int(fmt.subnormal(a)),
    }


def _pairs(kind: str) -> Iterator[Row]:
    """Both halves of a register; f16x2 and bf16x2."""
    fmt = FORMATS[kind]
    functions: dict[str, Callable[..., int | None]] = {
        "add": exact.operation(fmt, exact.add, 2),
        "sub": exact.operation(fmt, lambda a, b: exact.add(a, exact.negated(b)), 2),
        "mul": exact.operation(fmt, exact.multiply, 2),
        "min": exact.extreme(fmt, exact.lesser),
        "max": exact.extreme(fmt, exact.greater),
    }
    for name, function in functions.items():
        word = f"{name}.{kind}x2"
        yield Row(word, _code(word, 2), 4, each(exact.halves(function, 2), EVERY))
    for name in ("neg", "abs"):
        word = f"{name}.{kind}x2"
        mask = 0x8000 if name == "neg" else 0

        def sign(a: int, mask: int = mask) -> int | None:
            return None if fmt.is_nan(a) else a ^ mask if mask else a & 0x7FFF

        yield Row(word, _code(word, 1), 4, each(exact.halves(sign, 1)))


def _fused(kind: str, pair: bool) -> Iterator[Row]:
    fmt = FORMATS[kind]
    variants: tuple[tuple[str, ...], ...] = ((), ("relu",))
    if kind == "f32":
        variants = ((), ("ftz",), ("sat",), ("ftz", "sat"))
    for flags in variants:
        word = ".".join(("fma", "rn", *flags, kind + ("x2" if pair else "")))
        function = exact.operation(fmt, exact.fused, 3, flags)
        if flags == ("relu",):
            function = _relu(function, fmt)
        if pair:
            function = exact.halves(function, 3)
        yield Row(word, _code(word, 3), 4 if pair else fmt.bits // 8, each(function, EVERY))


def _relu(function: Callable[..., int | None], fmt: Format) -> Callable[..., int | None]:
    """Negative numbers become +0; NaN stays. Whether -0 counts as negative is open."""

    def clamped(a: int, b: int, c: int) -> int | None:
        code = function(a, b, c)
        if code == 1 << fmt.bits - 1:
            return None
        return code if code is None or fmt.is_nan(code) or not code >> fmt.bits - 1 else 0

    return clamped


def _within(low: float, high: float) -> Callable[..., NDArray[np.bool_]]:
    def domain(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
        inside: NDArray[np.bool_] = (np.abs(a) >= low) & (np.abs(a) <= high)
        return inside

    return domain


def _divisor(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    inside: NDArray[np.bool_] = (np.abs(b) >= 2.0**-126) & (np.abs(b) <= 2.0**126)
    return inside


SMALLEST = 2.0**-149
FUNCTIONS: dict[str, Tolerance] = {
    "rcp.approx": Tolerance(2.0**-23 + HALF_ULP, SMALLEST),
    "sqrt.approx": Tolerance(2.0**-23 + HALF_ULP, SMALLEST),
    "rsqrt.approx": Tolerance(2.0**-22.9 + HALF_ULP, SMALLEST),
    "sin.approx": Tolerance(HALF_ULP, 2.0**-20.5, _within(0.0, np.pi)),
    "cos.approx": Tolerance(HALF_ULP, 2.0**-20.5, _within(0.0, np.pi)),
    "lg2.approx": Tolerance(2.0**-22 + HALF_ULP, 2.0**-22),
    "ex2.approx": Tolerance(2.0**-22 + HALF_ULP, SMALLEST),
    "tanh.approx": Tolerance(2.0**-11 + HALF_ULP, SMALLEST),
    "div.approx": Tolerance(2.0**-22 + HALF_ULP, SMALLEST, _divisor),
    "div.full": Tolerance(2.0**-22 + HALF_ULP, SMALLEST),
}


def _approximate() -> Iterator[Row]:
    for name, tolerance in FUNCTIONS.items():
        number = 2 if name.startswith("div") else 1
        for word in (f"{name}.f32", f"{name}.ftz.f32"):
            if word != "tanh.approx.ftz.f32":
                yield Row(word, _code(word, number), 4, tolerance=tolerance)


def _moderate(seed: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Operands of approximate functions: the edges, then magnitudes at which they are not constant."""
    a, b = pairs(edges(F32), 32, seed, count)
    rng = np.random.default_rng(seed)
    for values in (a, b):
        some = (rng.standard_normal(count) * 2.0 ** rng.integers(-6, 6, count)).astype(np.float32)
        values[count // 4 :] = some.view(np.uint32)[count // 4 :]
    a[: count // 4] = np.resize(np.array(edges(F32), np.uint32), count // 4)
    return a, b


def groups() -> Iterator[Group]:
    """All of them."""
    for number, kind in enumerate(FORMATS):
        fmt = FORMATS[kind]
        yield Group(f"float-{kind}", operands(fmt, 20 + number, 2048, 2), tuple(_arithmetic(kind)))
        if kind != "f64":
            yield Group(f"fma-{kind}", operands(fmt, 30 + number, 6144, 3), tuple(_fused(kind, False)))
        if fmt.bits == 16:
            yield Group(f"float-{kind}x2", packed(fmt, 40 + 2 * number, 2048, 2), tuple(_pairs(kind)))
            yield Group(f"fma-{kind}x2", packed(fmt, 50 + 2 * number, 4096, 3), tuple(_fused(kind, True)))
    yield Group("float-approximate", _moderate(60, 1024), tuple(_approximate()))
