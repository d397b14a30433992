# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic (PTX ISA 9.7.1) and logic and shifts (9.7.9).

Opcodes that also exist for floats (add, sub, mul, mad/fma, min, max, abs, neg, div) are here and hand
float types to floating.py.
"""

from __future__ import annotations

from collections.abc import Callable

from dsv4_ptx_emulator.isa import floating
from dsv4_ptx_emulator.isa.emit import Emitter, expression
from dsv4_ptx_emulator.ptx.module import Immediate

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
BITS = ("b16", "b32", "b64")


def _is_float(e: Emitter) -> bool:
    return bool(e.modifiers) and e.modifiers[-1].startswith(("f", "bf"))


def _two(e: Emitter, operator: str, view: str = "u") -> None:
    _, bits = e.type(*INTEGERS)
    d, a, b = e.take(3)
    e.put(d, bits, f"{e.get(a, bits, view)} {operator} {e.get(b, bits, view)}", view, signed=view == "s")


@expression("add", section="9.7.1.1, 9.7.3.3, 9.7.4.1")
def add(e: Emitter) -> None:
    """Sum."""
    if _is_float(e):
        floating.binary(e, "+")
    elif "sat" in e.flags("sat"):
        _saturating(e, "saturated_sum")
    else:
        _two(e, "+")


@expression("sub", section="9.7.1.2, 9.7.3.4, 9.7.4.2")
def sub(e: Emitter) -> None:
    """Difference."""
    if _is_float(e):
        floating.binary(e, "-")
    elif "sat" in e.flags("sat"):
        _saturating(e, "saturated_difference")
    else:
        _two(e, "-")


def _saturating(e: Emitter, function: str) -> None:
    _, bits = e.type("s32")
    d, a, b = e.take(3)
    e.put(d, bits, f"{function}({e.get(a, bits, 's')}, {e.get(b, bits, 's')})", "s")


def _product(e: Emitter, a: str, b: str, letter: str, bits: int, part: str) -> tuple[str, int, str]:
    """Expression, bits and view of a product's low half, high half, or all of it."""
    view = "s" if letter == "s" else "u"
    if part == "lo":
        return f"{a} * {b}", bits, view
    if part == "hi":
        return f"high_product({a}, {b})", bits, view
    wide = f"{'i' if letter == 's' else 'u'}{2 * bits}"
    return f"{a}.astype({wide}) * {b}.astype({wide})", 2 * bits, view


@expression("mul", section="9.7.1.3, 9.7.3.5, 9.7.4.3")
def mul(e: Emitter) -> None:
    """Product: low half, high half, or twice as wide."""
    if _is_float(e):
        floating.binary(e, "*")
        return
    letter, bits = e.type(*INTEGERS)
    (part,) = e.flags("lo", "hi", "wide") or {"lo"}
    d, a, b = e.take(3)
    view = "s" if letter == "s" else "u"
    text, width, view = _product(e, e.get(a, bits, view), e.get(b, bits, view), letter, bits, part)
    e.put(d, width, text, view, signed=letter == "s")


@expression("mad", section="9.7.1.4, 9.7.3.7")
def mad(e: Emitter) -> None:
    """Product and sum."""
    if _is_float(e):
        floating.fused(e)
        return
    letter, bits = e.type(*INTEGERS)
    (part,) = e.flags("lo", "hi", "wide") or {"lo"}
    d, a, b, c = e.take(4)
    view = "s" if letter == "s" else "u"
    text, width, view = _product(e, e.get(a, bits, view), e.get(b, bits, view), letter, bits, part)
    e.put(d, width, f"{text} + {e.get(c, width, view)}", view, signed=letter == "s")


@expression("div", section="9.7.1.8, 9.7.3.8")
def div(e: Emitter) -> None:
    """Quotient, towards zero."""
    if _is_float(e):
        floating.divide(e)
    else:
        _function(e, "truncated_quotient")


@expression("rem", section="9.7.1.9")
def rem(e: Emitter) -> None:
    """Remainder with the dividend's sign."""
    _function(e, "remainder")


def _function(e: Emitter, name: str) -> None:
    letter, bits = e.type(*INTEGERS)
    e.flags()
    d, a, b = e.take(3)
    view = "s" if letter == "s" else "u"
    e.put(d, bits, f"{name}({e.get(a, bits, view)}, {e.get(b, bits, view)})", view, signed=letter == "s")


@expression("min", section="9.7.1.12, 9.7.3.11, 9.7.4.7")
def minimum(e: Emitter) -> None:
    """Smaller of two; `.relu` clamps below at 0."""
    if _is_float(e):
        floating.extreme(e, "minimum_float")
    else:
        _extreme(e, "minimum")


@expression("max", section="9.7.1.13, 9.7.3.12, 9.7.4.8")
def maximum(e: Emitter) -> None:
    """Larger of two; `.relu` clamps below at 0."""
    if _is_float(e):
        floating.extreme(e, "maximum_float")
    else:
        _extreme(e, "maximum")


def _extreme(e: Emitter, name: str) -> None:
    letter, bits = e.type(*INTEGERS)
    relu = "relu" in e.flags(*(["relu"] if (letter, bits) == ("s", 32) else []))
    d, a, b = e.take(3)
    view = "s" if letter == "s" else "u"
    text = f"{name}({e.get(a, bits, view)}, {e.get(b, bits, view)})"
    e.put(
        d, bits, f"maximum({text}, {e.constant(0, bits, view)})" if relu else text, view, signed=letter == "s"
    )


@expression("abs", section="9.7.1.10, 9.7.3.9, 9.7.4.6")
def absolute(e: Emitter) -> None:
    """Absolute value."""
    if _is_float(e):
        floating.sign(e, clear=True)
        return
    _, bits = e.type("s16", "s32", "s64")
    d, a = e.take(2)
    e.put(d, bits, f"abs({e.get(a, bits, 's')})", "s", signed=True)


@expression("neg", section="9.7.1.11, 9.7.3.10, 9.7.4.5")
def negate(e: Emitter) -> None:
    """Negation."""
    if _is_float(e):
        floating.sign(e, clear=False)
        return
    _, bits = e.type("s16", "s32", "s64")
    d, a = e.take(2)
    e.put(d, bits, f"-{e.get(a, bits, 's')}", "s", signed=True)


def _logic(operator: str) -> Callable[[Emitter], None]:
    def emit(e: Emitter) -> None:
        _, bits = e.type("pred", *BITS)
        d, a, b = e.take(3)
        e.put(d, bits, f"{e.get(a, bits)} {operator} {e.get(b, bits)}")

    emit.__doc__ = f"Bitwise {operator}."
    return emit


for _name, _operator, _section in (("and", "&", "9.7.9.1"), ("or", "|", "9.7.9.2"), ("xor", "^", "9.7.9.3")):
    expression(_name, section=_section)(_logic(_operator))


@expression("not", section="9.7.9.4")
def invert(e: Emitter) -> None:
    """Bitwise complement."""
    _, bits = e.type("pred", *BITS)
    d, a = e.take(2)
    e.put(d, bits, f"~{e.get(a, bits)}")


@expression("cnot", section="9.7.9.5")
def logical_not(e: Emitter) -> None:
    """1 where the operand is 0, else 0."""
    _, bits = e.type(*BITS)
    d, a = e.take(2)
    e.put(d, bits, f"({e.get(a, bits)} == 0).astype(u{bits})")


@expression("lop3.b32", section="9.7.9.6")
def lop3(e: Emitter) -> None:
    """Any function of three bits, given as its table."""
    d, a, b, c, table = e.take(5)
    if e.modifiers or not isinstance(table, Immediate):
        e.context.unsupported("this form")
    text = ", ".join(e.get(x, 32) for x in (a, b, c))
    e.put(d, 32, f"lookup3({text}, {table.value & 255})")


@expression("shl", section="9.7.9.8")
def shl(e: Emitter) -> None:
    """Shift left; amounts beyond the width give 0."""
    _, bits = e.type(*BITS)
    d, a, by = e.take(3)
    if isinstance(by, Immediate) and 0 <= by.value < bits:
        e.put(d, bits, f"{e.get(a, bits)} << {e.constant(by.value, bits)}")
    else:
        e.put(d, bits, f"shift_left({e.get(a, bits)}, {e.get(by, 32)})")


@expression("shr", section="9.7.9.9")
def shr(e: Emitter) -> None:
    """Shift right, with the sign for signed types; amounts beyond the width are clamped."""
    letter, bits = e.type(*BITS, *INTEGERS)
    d, a, by = e.take(3)
    view = "s" if letter == "s" else "u"
    if isinstance(by, Immediate) and 0 <= by.value < bits:
        text = f"{e.get(a, bits, view)} >> {e.constant(by.value, bits, view)}"
    else:
        text = f"shift_right({e.get(a, bits, view)}, {e.get(by, 32)})"
    e.put(d, bits, text, view, signed=letter == "s")


@expression("shf", section="9.7.9.7")
def shf(e: Emitter) -> None:
    """Funnel shift of two words."""
    if e.modifiers[-1:] != ("b32",) or len(e.modifiers) != 3:
        e.context.unsupported("this form")
    left, clamp = e.modifiers[0] == "l", e.modifiers[1] == "clamp"
    d, a, b, by = e.take(4)
    e.put(d, 32, f"funnel({e.get(a, 32)}, {e.get(b, 32)}, {e.get(by, 32)}, {left}, {clamp})")


@expression("prmt.b32", section="9.7.10.7")
def prmt(e: Emitter) -> None:
    """Bytes of two words in any order."""
    if e.modifiers:
        e.context.unsupported(f"mode .{e.modifiers[0]}")
    d, a, b, selector = e.take(4)
    e.put(d, 32, f"permute({e.get(a, 32)}, {e.get(b, 32)}, {e.get(selector, 32)})")


@expression("popc", section="9.7.1.14")
def popc(e: Emitter) -> None:
    """Number of ones."""
    _, bits = e.type("b32", "b64")
    d, a = e.take(2)
    e.put(d, 32, f"population({e.get(a, bits)})")


@expression("clz", section="9.7.1.15")
def clz(e: Emitter) -> None:
    """Number of leading zeros."""
    _, bits = e.type("b32", "b64")
    d, a = e.take(2)
    e.put(d, 32, f"leading_zeros({e.get(a, bits)})")


@expression("bfind", section="9.7.1.16")
def bfind(e: Emitter) -> None:
    """Place of the most significant bit that is not the sign."""
    letter, bits = e.type("u32", "s32", "u64", "s64")
    amount = "shiftamt" in e.flags("shiftamt")
    d, a = e.take(2)
    found = e.let(f"highest_one({e.get(a, bits, 's' if letter == 's' else 'u')})")
    if amount:
        e.put(d, 32, f"where({found} == 0xFFFFFFFF, {found}, {e.constant(bits - 1, 32)} - {found})")
    else:
        e.put(d, 32, found)


@expression("brev", section="9.7.1.18")
def brev(e: Emitter) -> None:
    """Bits in reverse order."""
    _, bits = e.type("b32", "b64")
    d, a = e.take(2)
    e.put(d, bits, f"reverse({e.get(a, bits)})")


@expression("bfe", section="9.7.1.19")
def bfe(e: Emitter) -> None:
    """Bit field extract."""
    letter, bits = e.type("u32", "s32", "u64", "s64")
    d, a, start, length = e.take(4)
    value = e.get(a, bits, "s" if letter == "s" else "u")
    e.put(d, bits, f"extract({value}, {e.get(start, 32)}, {e.get(length, 32)})")


@expression("bfi", section="9.7.1.20")
def bfi(e: Emitter) -> None:
    """Bit field insert."""
    _, bits = e.type("b32", "b64")
    d, a, b, start, length = e.take(5)
    e.put(d, bits, f"insert({e.get(a, bits)}, {e.get(b, bits)}, {e.get(start, 32)}, {e.get(length, 32)})")
