# SPDX-License-Identifier: Apache-2.0
"""Comparison and selection (PTX ISA 9.7.7 and 9.7.8)."""

from __future__ import annotations

import numpy as np

from dsv4_ptx_emulator.formats.floats import BF16, F16, decode
from dsv4_ptx_emulator.isa.arithmetic import Array
from dsv4_ptx_emulator.isa.emit import Emitter, expression
from dsv4_ptx_emulator.ptx.module import Pair

_INTEGER = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
_TYPES = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "f16", "bf16")


def compare_floats(a: Array, b: Array, name: str) -> Array:
    """A float comparison: `ltu` and the like are true with a NaN, `lt` and the like (also `ne`) false."""
    unordered = np.isnan(a) | np.isnan(b)
    if name == "nan":
        return unordered
    if name == "num":
        return ~unordered
    base = _UNORDERED.get(name, name)
    function = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }[base]
    result: Array = function(a, b)
    return result | unordered if name in _UNORDERED else result & ~unordered


def _widen(bits: Array, name: str) -> Array:
    return decode(F16 if name == "f16" else BF16, bits)


def _comparison(e: Emitter, name: str, type_name: str) -> str:
    """The Python expression that compares operands 1 and 2."""
    first, second = e.operands[1:3]
    letter = type_name.rstrip("0123456789")
    bits = int(type_name[len(letter) :])
    if letter in ("f", "bf"):
        if name not in (*_ORDERED, *_UNORDERED, "num", "nan"):
            e.context.unsupported(f"comparison .{name}")
        function = e.bind(compare_floats)
        if bits == 16:
            widen = e.bind(_widen)
            texts = [f"{widen}({e.get(x, 16)}, {type_name!r})" for x in (first, second)]
        else:
            texts = [e.get(x, bits, "f") for x in (first, second)]
        return f"{function}({texts[0]}, {texts[1]}, {name!r})"
    if name not in _INTEGER or (letter == "b" and name not in ("eq", "ne")):
        e.context.unsupported(f"comparison .{name}")
    signed = letter == "s" and name not in ("eq", "ne", "lo", "ls", "hi", "hs")
    view = "s" if signed else "u"
    return f"{e.get(first, bits, view)} {_INTEGER[name]} {e.get(second, bits, view)}"


@expression("setp", section="9.7.7.2, 9.7.8.2")
def setp(e: Emitter) -> None:
    """Compare, combine with a predicate, set one or two predicates."""
    words = [word for word in e.modifiers if word != "ftz"]
    flushed = len(words) != len(e.modifiers)
    if len(words) not in (2, 3) or words[-1] not in _TYPES or (flushed and words[-1] != "f32"):
        e.context.unsupported(f"modifiers .{'.'.join(e.modifiers)}")
    if flushed:
        e.context.unsupported("modifier .ftz")
    operands = e.take(4 if len(words) == 3 else 3)
    text = e.let(_comparison(e, words[0], words[-1]))
    first, second = text, f"~{text}"
    if len(words) == 3:
        operator = {"and": "&", "or": "|", "xor": "^"}.get(words[1])
        if operator is None:
            e.context.unsupported(f"modifier .{words[1]}")
        extra = e.get(operands[3], 1)
        first, second = f"{text} {operator} {extra}", f"~{text} {operator} {extra}"
    target = operands[0]
    if isinstance(target, Pair):
        second = e.let(second)
        e.put(target.first, 1, first)
        e.put(target.second, 1, second)
    else:
        e.put(target, 1, first)


@expression("set", section="9.7.7.1")
def set_number(e: Emitter) -> None:
    """Compare, give all ones (or 1.0) or zero."""
    if len(e.modifiers) != 3 or e.modifiers[1] not in ("u32", "s32", "f32") or e.modifiers[2] not in _TYPES:
        e.context.unsupported(f"modifiers .{'.'.join(e.modifiers)}")
    operands = e.take(3)
    text = _comparison(e, e.modifiers[0], e.modifiers[2])
    true = 0x3F80_0000 if e.modifiers[1] == "f32" else 0xFFFF_FFFF
    e.put(operands[0], 32, f"where({text}, {e.constant(true, 32)}, {e.constant(0, 32)})")


@expression("selp", section="9.7.7.3")
def selp(e: Emitter) -> None:
    """One of two by a predicate."""
    _, bits = e.type("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")
    d, a, b, p = e.take(4)
    e.put(d, bits, f"where({e.get(p, 1)}, {e.get(a, bits)}, {e.get(b, bits)})")


@expression("slct", section="9.7.7.4")
def slct(e: Emitter) -> None:
    """One of two by the sign of a third."""
    if len(e.modifiers) != 2 or e.modifiers[1] not in ("s32", "f32"):
        e.context.unsupported(f"modifiers .{'.'.join(e.modifiers)}")
    bits = int(e.modifiers[0][1:])
    d, a, b, c = e.take(4)
    sign = e.get(c, 32, "s" if e.modifiers[1] == "s32" else "f")
    e.put(d, bits, f"where({sign} >= 0, {e.get(a, bits)}, {e.get(b, bits)})")
