# SPDX-License-Identifier: Apache-2.0
"""Floating-point arithmetic (PTX ISA 9.7.3 and 9.7.4): f32, f64, and pairs f32x2, f16x2, bf16x2.

f32 and f64 add, sub, mul, div, sqrt and rcp are IEEE-754 with round to nearest even, and so is fma for
f32. The `.approx` and `.full` functions return the correctly rounded value (computed in f64): the ISA
gives them an error bound, not bits, so nothing may depend on the difference. f16 and bf16 arithmetic is
computed in f64 and rounded once. What a NaN looks like is said in arithmetic.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsv4_ptx_emulator.formats.floats import BF16, F16, decode, encode
from dsv4_ptx_emulator.isa.arithmetic import Array, maximum_float, minimum_float
from dsv4_ptx_emulator.isa.emit import Emitter, expression

_FLUSHED = {"*": "flushed_product", "/": "flushed_quotient"}
NARROW = {"f16": F16, "bf16": BF16}
_INFINITY = {"f16": np.uint16(0x7C00), "bf16": np.uint16(0x7F80)}


def _narrow_type(e: Emitter) -> tuple[str, int] | None:
    name = e.modifiers[-1]
    base, _, count = name.partition("x")
    return (base, 2 if count else 1) if base in NARROW else None


def _unpack(bits: Array, name: str) -> Array:
    """Elements of f16(x2) or bf16(x2) registers as f64, shape (32 * elements,)."""
    return decode(NARROW[name], np.ascontiguousarray(bits).view(np.uint16)).astype(np.float64)


def _pack(values: Array, name: str, like: Array) -> Array:
    """Round f64 to the narrow type, once: `encode` rounds from f64."""
    packed: Array = encode(NARROW[name], values).view(like.dtype)
    return packed


def narrow_binary(a: Array, b: Array, name: str, operator: str) -> Array:
    """A operator b for f16(x2) or bf16(x2) registers."""
    left, right = _unpack(a, name), _unpack(b, name)
    if operator == "+":
        result = left + right
    elif operator == "-":
        result = left - right
    elif operator == "*":
        result = left * right
    elif operator == "min":
        result = minimum_float(left, right, False)
    else:
        result = maximum_float(left, right, False)
    return _pack(result, name, a)


def narrow_fma(a: Array, b: Array, c: Array, name: str) -> Array:
    """A * b + c for f16(x2) or bf16(x2) registers, rounded once."""
    product = _unpack(a, name) * _unpack(b, name)
    addend = _unpack(c, name)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return _pack((bits + np.where(inexact, step, 0)).view(np.float64), name, a)


def narrow_relu(a: Array, name: str) -> Array:
    """Negative elements of f16(x2) or bf16(x2) registers become +0; NaN stays."""
    values = _unpack(a, name)
    return _pack(np.where(np.signbit(values) & ~np.isnan(values), 0.0, values), name, a)


def narrow_sign(a: Array, name: str, clear: bool) -> Array:
    """f16(x2) or bf16(x2) registers without their sign, or with the other one; NaN becomes canonical."""
    halves = np.ascontiguousarray(a).view(np.uint16)
    magnitude = halves & np.uint16(0x7FFF)
    nan = magnitude > _INFINITY[name]
    result = magnitude if clear else halves ^ np.uint16(0x8000)
    if nan.any():
        result[nan] = 0x7FFF
    packed: Array = result.view(a.dtype)
    return packed


def wide_absolute(a: Array) -> Array:
    """abs.f64 on bits: "NaN input is passed through unchanged" (9.7.3.9), its sign included.

    An H200 makes a signalling NaN quiet on the way.
    """
    return np.where(np.isnan(a.view(np.float64)), a, a & np.uint64(0x7FFF_FFFF_FFFF_FFFF))


def wide_negation(a: Array) -> Array:
    """neg.f64 on bits; a NaN keeps its sign and becomes quiet, as on an H200 (9.7.3.10: unspecified)."""
    return np.where(np.isnan(a.view(np.float64)), a | np.uint64(1 << 51), a ^ np.uint64(1 << 63))


def _finish(text: str, flags: frozenset[str]) -> str:
    """An f32 result; one that `.ftz` concerns has been flushed."""
    text = f"canonical({text})"
    return f"saturate({text})" if "sat" in flags else text


def _result(operator: str, texts: Sequence[str], flags: frozenset[str]) -> str:
    """An operator of two f32, or fma of three, with its flags."""
    if operator == "fma":
        return _finish(f"{'flushed_' if 'ftz' in flags else ''}fma({', '.join(texts)})", flags)
    if "ftz" not in flags:
        return _finish(f" {operator} ".join(texts), flags)
    if operator in _FLUSHED:
        return _finish(f"{_FLUSHED[operator]}({', '.join(texts)})", flags)
    return _finish(f"flush({f' {operator} '.join(texts)})", flags)


def _operand(text: str, flags: frozenset[str]) -> str:
    return f"flush({text})" if "ftz" in flags else text


def binary(e: Emitter, operator: str) -> None:
    """add, sub, mul of floats."""
    d, a, b = e.take(3)
    narrow = _narrow_type(e)
    if narrow is not None:
        e.flags("rn")
        bits = 16 * narrow[1]
        name = e.bind(narrow_binary)
        e.put(d, bits, f"{name}({e.get(a, bits)}, {e.get(b, bits)}, {narrow[0]!r}, {operator!r})")
        return
    if e.modifiers[-1] == "f32x2":
        flags = e.flags("rn", "ftz")
        texts = [_operand(f"{e.get(x, 64)}.view(f32)", flags) for x in (a, b)]
        e.put(d, 64, f"{_result(operator, texts, flags)}.view(u64)")
        return
    _, bits = e.type("f32", "f64")
    flags = e.flags("rn", *(("ftz", "sat") if bits == 32 else ()))
    texts = [_operand(e.get(x, bits, "f"), flags) for x in (a, b)]
    if bits == 64:
        e.put(d, bits, f"payload({texts[0]} {operator} {texts[1]}, {texts[0]}, {texts[1]})", "f")
    else:
        e.put(d, bits, _result(operator, texts, flags), "f")


@expression("fma", section="9.7.3.6, 9.7.4.4")
def fused(e: Emitter) -> None:
    """Product and sum with one rounding."""
    d, a, b, c = e.take(4)
    narrow = _narrow_type(e)
    if narrow is not None:
        relu = "relu" in e.flags("rn", "relu")
        bits = 16 * narrow[1]
        name = e.bind(narrow_fma)
        text = f"{name}({', '.join(e.get(x, bits) for x in (a, b, c))}, {narrow[0]!r})"
        if relu:
            text = f"{e.bind(narrow_relu)}({text}, {narrow[0]!r})"
        e.put(d, bits, text)
        return
    if e.modifiers[-1] == "f32x2":
        flags = e.flags("rn", "ftz")
        texts = [_operand(f"{e.get(x, 64)}.view(f32)", flags) for x in (a, b, c)]
        e.put(d, 64, f"{_result('fma', texts, flags)}.view(u64)")
        return
    _, bits = e.type("f32")
    flags = e.flags("rn", "ftz", "sat")
    texts = [_operand(e.get(x, bits, "f"), flags) for x in (a, b, c)]
    e.put(d, bits, _result("fma", texts, flags), "f")


def divide(e: Emitter) -> None:
    """Div of floats."""
    _, bits = e.type("f32", "f64")
    flags = e.flags("rn", *(("approx", "full", "ftz") if bits == 32 else ()))
    d, a, b = e.take(3)
    texts = [_operand(e.get(x, bits, "f"), flags) for x in (a, b)]
    if bits == 64:
        e.put(d, bits, f"payload({texts[0]} / {texts[1]}, {texts[1]}, {texts[0]})", "f")
    else:
        e.put(d, bits, _result("/", texts, flags), "f")


def extreme(e: Emitter, function: str) -> None:
    """min, max of floats."""
    narrow = _narrow_type(e)
    if narrow is not None:
        e.flags()
        bits = 16 * narrow[1]
        d, a, b = e.take(3)
        name = e.bind(narrow_binary)
        e.put(d, bits, f"{name}({e.get(a, bits)}, {e.get(b, bits)}, {narrow[0]!r}, {function[:3]!r})")
        return
    _, bits = e.type("f32", "f64")
    flags = e.flags("ftz", "NaN")
    d, *sources = e.operands
    texts = [_operand(e.get(x, bits, "f"), flags) for x in sources]
    if len(texts) not in (2, 3):
        e.context.unsupported(f"the form with {len(e.operands)} operands")
    result = texts[0]
    for text in texts[1:]:
        result = f"{function}({result}, {text}, {'NaN' in flags})"
    e.put(d, bits, result, "f")


def sign(e: Emitter, *, clear: bool) -> None:
    """abs, neg of floats: of the sign bit; the NaN that a NaN gives is unspecified but for abs.f64."""
    name = e.modifiers[-1]
    bits = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32}.get(name, 0)
    if not bits:
        e.context.unsupported(f"type .{name}")
    flags = e.flags(*(("ftz",) if name == "f32" else ()))
    d, a = e.take(2)
    if name == "f64":
        e.put(d, bits, f"{e.bind(wide_absolute if clear else wide_negation)}({e.get(a, bits)})")
    elif name != "f32":
        e.put(d, bits, f"{e.bind(narrow_sign)}({e.get(a, bits)}, {name.removesuffix('x2')!r}, {clear})")
    else:
        text = f"abs({e.get(a, bits, 'f')})" if clear else f"-{e.get(a, bits, 'f')}"
        e.put(d, bits, f"canonical({f'flush({text})' if flags else text})", "f")


def _unary(e: Emitter, function: str) -> None:
    """A function of one f32 (or f64), computed in f64 and rounded."""
    _, bits = e.type("f32", "f64")
    flags = e.flags("approx", "rn", *(("ftz",) if bits == 32 else ()))
    d, a = e.take(2)
    value = _operand(e.get(a, bits, "f"), flags)
    text = f"({function.format(f'{value}.astype(f64)')}).astype(f{bits})"
    if bits == 64:
        e.put(d, bits, f"payload({text}, {value})", "f")
    else:
        e.put(d, bits, _finish(f"flush({text})" if "ftz" in flags else text, flags), "f")


_FUNCTIONS = {
    "rcp": ("9.7.3.13", "1.0 / {}", "Reciprocal."),
    "sqrt": ("9.7.3.15", "np.sqrt({})", "Square root."),
    "rsqrt": ("9.7.3.16", "1.0 / np.sqrt({})", "Reciprocal square root."),
    "sin": ("9.7.3.18", "np.sin({})", "Sine."),
    "cos": ("9.7.3.19", "np.cos({})", "Cosine."),
    "lg2": ("9.7.3.20", "np.log2({})", "Logarithm to base 2."),
    "ex2": ("9.7.3.21", "np.exp2({})", "Power of 2."),
    "tanh": ("9.7.3.22", "np.tanh({})", "Hyperbolic tangent."),
}


def _register_functions() -> None:
    for name, (section, text, summary) in _FUNCTIONS.items():

        def emit(e: Emitter, text: str = text) -> None:
            _unary(e, text)

        emit.__doc__ = summary
        expression(name, section=section)(emit)


_register_functions()


@expression("copysign", section="9.7.3.2")
def copysign(e: Emitter) -> None:
    """The second operand with the sign of the first."""
    _, bits = e.type("f32", "f64")
    d, a, b = e.take(3)
    place = 1 << bits - 1
    sign_bit = f"{e.get(a, bits)} & {e.constant(place, bits)}"
    e.put(d, bits, f"({sign_bit}) | ({e.get(b, bits)} & {e.constant(~place, bits)})")


@expression("testp", section="9.7.3.1")
def testp(e: Emitter) -> None:
    """Class of a float as a predicate; zeros are normal."""
    _, bits = e.type("f32", "f64")
    tests = {
        "finite": "np.isfinite({})",
        "infinite": "np.isinf({})",
        "number": "~np.isnan({})",
        "notanumber": "np.isnan({})",
        "normal": f"((abs({{}}) >= np.finfo(f{bits}).tiny) | ({{}} == 0)) & np.isfinite({{}})",
        "subnormal": f"(abs({{}}) < np.finfo(f{bits}).tiny) & ({{}} != 0)",
    }
    (kind,) = e.flags(*tests)
    d, a = e.take(2)
    value = e.get(a, bits, "f")
    e.put(d, 1, tests[kind].replace("{}", value))
