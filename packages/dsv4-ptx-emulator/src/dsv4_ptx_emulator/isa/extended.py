# SPDX-License-Identifier: Apache-2.0
"""Extended-precision integer arithmetic (PTX ISA 9.7.2): sums, differences and products with carry.

The carry flag CC.CF is a predicate register of its own that the parser adds to every kernel. It is kept
between instructions, and a subtraction leaves its borrow there.
"""

from __future__ import annotations

import numpy as np

from dsv4_ptx_emulator.isa.arithmetic import Array, high_product
from dsv4_ptx_emulator.isa.emit import Emitter, expression
from dsv4_ptx_emulator.ptx.module import CARRY, Operand


def sum_with_carry(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    """A + b + carry of unsigned arrays, and the carry out."""
    first: Array = a + b
    total = first + carry.astype(a.dtype)
    return total, (first < a) | (total < first)


def difference_with_borrow(a: Array, b: Array, borrow: Array) -> tuple[Array, Array]:
    """A - b - borrow of unsigned arrays, and the borrow out."""
    first: Array = a - b
    total = first - borrow.astype(a.dtype)
    return total, (a < b) | (first < total)


def product_part(a: Array, b: Array, part: str, signed: bool) -> Array:
    """The low or high half of a product, as unsigned."""
    if part == "lo":
        low: Array = a * b
        return low
    if not signed:
        return high_product(a, b)
    kind: np.dtype[np.generic] = np.dtype(f"i{a.dtype.itemsize}")
    high: Array = high_product(a.view(kind), b.view(kind)).view(a.dtype)
    return high


def _emit(e: Emitter, function: object, target: Operand, texts: tuple[str, str], bits: int) -> None:
    words = e.context.instruction.words()
    none = e.bind(np.zeros(32, np.bool_))
    carry = e.get(CARRY, 1) if words[0].endswith("c") else none
    both = e.let(f"{e.bind(function)}({texts[0]}, {texts[1]}, {carry})")
    e.put(target, bits, f"{both}[0]")
    if "cc" in words:
        e.put(CARRY, 1, f"{both}[1]")


@expression("add.cc", "addc", section="9.7.2.1, 9.7.2.2")
def add_carry(e: Emitter) -> None:
    """Sum with carry in, out, or both."""
    _, bits = e.type("u32", "s32", "u64", "s64")
    e.flags("cc")
    operands = e.take(3)
    _emit(e, sum_with_carry, operands[0], (e.get(operands[1], bits), e.get(operands[2], bits)), bits)


@expression("sub.cc", "subc", section="9.7.2.3, 9.7.2.4")
def sub_borrow(e: Emitter) -> None:
    """Difference with borrow in, out, or both."""
    _, bits = e.type("u32", "s32", "u64", "s64")
    e.flags("cc")
    operands = e.take(3)
    _emit(e, difference_with_borrow, operands[0], (e.get(operands[1], bits), e.get(operands[2], bits)), bits)


@expression("mad.lo.cc", "mad.hi.cc", "madc", section="9.7.2.5, 9.7.2.6")
def mad_carry(e: Emitter) -> None:
    """Half a product, and a sum with carry in, out, or both."""
    letter, bits = e.type("u32", "s32", "u64", "s64")
    words = e.context.instruction.words()
    e.flags("lo", "hi", "cc")
    operands = e.take(4)
    part = "hi" if "hi" in words else "lo"
    product = e.bind(product_part)
    text = f"{product}({e.get(operands[1], bits)}, {e.get(operands[2], bits)}, {part!r}, {letter == 's'})"
    _emit(e, sum_with_carry, operands[0], (text, e.get(operands[3], bits)), bits)
