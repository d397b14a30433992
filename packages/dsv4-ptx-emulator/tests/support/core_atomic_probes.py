# SPDX-License-Identifier: Apache-2.0
"""Probes of atomics (PTX ISA 9.7.15.5, 9.7.15.6): `atom` and `red` in shared and global memory.

Old values are results only where the address is the thread's own; where lanes share one, the operations
commute and the last value is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce

import exact_floats as exact
import numpy as np
from core_float_probes import operands
from core_integer_probes import FEW, WIDE
from core_rows import Group, Row, each, pairs, signed, warps
from exact_floats import BF16, F16, F32, F64

MEET = "bar.warp.sync -1;"
_LOW = 0xFFFF_FFFF

_INTEGER: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda old, b, bits: old + b,
    "exch": lambda old, b, bits: b,
    "and": lambda old, b, bits: old & b,
    "or": lambda old, b, bits: old | b,
    "xor": lambda old, b, bits: old ^ b,
    "min.u": lambda old, b, bits: min(old, b),
    "max.u": lambda old, b, bits: max(old, b),
    "min.s": lambda old, b, bits: min(signed(old, bits), signed(b, bits)),
    "max.s": lambda old, b, bits: max(signed(old, bits), signed(b, bits)),
    "inc": lambda old, b, bits: 0 if old >= b else old + 1,
    "dec": lambda old, b, bits: b if old == 0 or old > b else old - 1,
}
_TYPES = {
    "add": ("u32", "s32", "u64"),
    "exch": ("b32", "b64"),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "inc": ("u32",),
    "dec": ("u32",),
}


def _result(bits: int) -> str:
    """Old and new value side by side."""
    if bits == 64:
        return "mov.b64 $o, %d30; mov.b64 $q, %d31;"
    return "mov.b64 $o, {%r20, %r21};"


def _operand(bits: int) -> tuple[str, str, str, str]:
    """Initial value, operand, and registers for old and new, of inputs a (64 bits) and b, c (32 bits)."""
    if bits == 64:
        return "$a", "%d32", "%d30", "%d31"
    return "$b", "$c", "%r20", "%r21"


def _atomics() -> Iterator[Row]:
    """Old and new value at the thread's own address, in shared and global memory; `red` gives the new one."""
    wide = "mov.b64 %d32, {$c, $b};"
    for space, own in (("shared", "$s"), ("global", "$g")):
        for name, kinds in _TYPES.items():
            for kind in kinds:
                bits = int(kind[1:])
                function = _INTEGER.get(name) or _INTEGER[f"{name}.{kind[0]}"]
                first, second, old, new = _operand(bits)

                def both(
                    a: int, b: int, c: int, f: Callable[[int, int, int], int] = function, bits: int = bits
                ) -> int:
                    before, by = (a, c | b << 32) if bits == 64 else (b, c)
                    return before | (f(before, by, bits) & (1 << bits) - 1) << bits

                word = f"atom.{space}.{name}.{kind}"
                code = (
                    f"{MEET} {wide} st.{space}.b{bits} [{own}+8], {first}; "
                    f"{word} {old}, [{own}+8], {second}; "
                    f"ld.{space}.b{bits} {new}, [{own}+8]; {_result(bits)}"
                )
                yield Row(word, code, bits // 4, each(both))
                if name == "exch":
                    continue
                word = f"red.{space}.{name}.{kind}"
                out = "$o"

                def after(
                    a: int, b: int, c: int, both: Callable[[int, int, int], int] = both, bits: int = bits
                ) -> int:
                    return both(a, b, c) >> bits

                code = (
                    f"{MEET} {wide} st.{space}.b{bits} [{own}+8], {first}; {word} [{own}+8], {second}; "
                    f"ld.{space}.b{bits} {out}, [{own}+8];"
                )
                yield Row(word, code, bits // 8, each(after))
        for bits in (32, 64):
            first, second, old, new = _operand(bits)
            # Lanes of odd b find what they compare with.
            other = (
                f"and.b32 %r22, $b, 1; setp.eq.u32 %p1, %r22, 1; selp.b{bits} {{}}, {first}, {second}, %p1;"
            )
            compare = "%d33" if bits == 64 else "%r23"
            word = f"atom.{space}.cas.b{bits}"
            code = (
                f"{MEET} {wide} {other.format(compare)} st.{space}.b{bits} [{own}], {first}; "
                f"{word} {old}, [{own}], {compare}, {second}; ld.{space}.b{bits} {new}, [{own}]; "
                f"{_result(bits)}"
            )

            def swapped(a: int, b: int, c: int, bits: int = bits) -> int:
                before, by = (a, c | b << 32) if bits == 64 else (b, c)
                return before | (by if b & 1 or before == by else before) << bits

            yield Row(word, code, bits // 4, each(swapped))


def _semantics() -> Iterator[Row]:
    for words in ("relaxed.cta", "acquire.gpu", "release.cluster", "acq_rel.sys"):
        code = (
            f"{MEET} st.global.b32 [$g], $b; atom.{words}.global.add.u32 %r20, [$g], $c; "
            "ld.global.b32 %r21, [$g]; "
            f"{_result(32)}"
        )
        yield Row(f"atom.{words}.global.add.u32", code, 8, each(lambda a, b, c: b | (b + c & _LOW) << 32))
    code = (
        f"{MEET} cvt.u64.u32 %d30, $s; cvta.shared.u64 %d30, %d30; st.shared.b32 [$s], $b; "
        f"atom.max.s32 %r20, [%d30], $c; ld.shared.b32 %r21, [$s]; {_result(32)}"
    )
    yield Row(
        "atom.max.s32-generic",
        code,
        8,
        each(lambda a, b, c: b | (max(signed(b, 32), signed(c, 32)) & _LOW) << 32),
    )
    for words in ("release.gpu", "relaxed.sys"):
        code = f"{MEET} st.global.b32 [$g], $b; red.{words}.global.add.u32 [$g], $c; ld.global.b32 $o, [$g];"
        yield Row(f"red.{words}.global.add.u32", code, 4, each(lambda a, b, c: b + c & _LOW))


def _shared_addresses() -> Iterator[Row]:
    """32 lanes on one word: what is there in the end."""
    starts = {"and": _LOW, "min": _LOW >> 1}
    for space, where in (("shared", "$w"), ("global", "$v")):
        for name, kind in (
            *(("add", "u32"), ("min", "u32"), ("max", "u32"), ("min", "s32"), ("max", "s32"), ("and", "b32")),
            *(("or", "b32"), ("xor", "b32")),
        ):
            start = starts.get(name, 0)
            function = _INTEGER.get(name) or _INTEGER[f"{name}.{kind[0]}"]

            def last(
                a: list[int], b: list[int], f: Callable[[int, int, int], int] = function, start: int = start
            ) -> list[int]:
                return [reduce(lambda old, x: f(old, x, 32) & _LOW, b, start)] * 32

            for word in ("red", "atom"):
                target = "" if word == "red" else "%r20, "
                code = (
                    f"{MEET} elect.sync _|%p1, -1; @%p1 st.{space}.b32 [{where}], {start}; {MEET} "
                    f"{word}.{space}.{name}.{kind} {target}[{where}], $b; "
                    f"{MEET} ld.{space}.b32 $o, [{where}];"
                )
                yield Row(f"{word}.{space}.{name}.{kind}-together", code, 4, warps(last))
        code = (
            f"{MEET} elect.sync _|%p1, -1; @%p1 st.{space}.b32 [{where}], 0; {MEET} "
            f"atom.{space}.inc.u32 %r20, [{where}], 20; {MEET} ld.{space}.b32 $o, [{where}];"
        )
        yield Row(f"atom.{space}.inc.u32-together", code, 4, warps(lambda a: [32 % 21] * 32))


def _floats() -> Iterator[Row]:
    """Inputs are numbers' bits: a for f64, b and c for f32 and pairs."""
    add64 = exact.operation(F64, exact.add, 2)
    for space, own in (("global", "$g"), ("shared", "$s")):
        # In global memory subnormals are flushed (PTX ISA 9.7.15.5), in shared memory not.
        add32 = exact.operation(F32, exact.add, 2, ("ftz",) if space == "global" else ())
        code = (
            f"{MEET} st.{space}.b32 [{own}], $b; atom.{space}.add.f32 %r20, [{own}], $c; "
            f"ld.{space}.b32 %r21, [{own}]; "
            f"{_result(32)}"
        )

        def sum32(a: int, b: int, c: int, add: Callable[..., int | None] = add32) -> int | None:
            total = add(b, c)
            assert total is not None
            return None if F32.is_nan(total) else b | total << 32

        yield Row(f"atom.{space}.add.f32", code, 8, each(sum32))
        code = (
            f"{MEET} mov.b64 %d33, {{$c, $b}}; st.{space}.b64 [{own}], $a; "
            f"atom.{space}.add.f64 %d30, [{own}], %d33; "
            f"ld.{space}.b64 %d31, [{own}]; {_result(64)}"
        )

        def sum64(a: int, b: int, c: int) -> int | None:
            total = add64(a, c | b << 32)
            return None if total is None else a | total << 64

        yield Row(f"atom.{space}.add.f64", code, 16, each(sum64))
        for kind, fmt in (("f16", F16), ("bf16", BF16)):
            add = exact.operation(fmt, exact.add, 2)
            both = exact.halves(add, 2)
            code = (
                f"{MEET} st.{space}.b32 [{own}], $b; atom.{space}.add.noftz.{kind}x2 %r20, [{own}], $c; "
                f"ld.{space}.b32 %r21, [{own}]; {_result(32)}"
            )

            def sum_pair(a: int, b: int, c: int, both: Callable[..., int | None] = both) -> int | None:
                total = both(b, c)
                return None if total is None else b | total << 32

            yield Row(f"atom.{space}.add.noftz.{kind}x2", code, 8, each(sum_pair))
            code = (
                f"{MEET} mov.b32 {{%h11, %h12}}, $b; mov.b32 {{%h13, %h14}}, $c; "
                f"st.{space}.b16 [{own}+2], %h11; "
                f"atom.{space}.add.noftz.{kind} %h15, [{own}+2], %h13; ld.{space}.b16 %h16, [{own}+2]; "
                "mov.b32 $o, {%h15, %h16};"
            )

            def sum_half(a: int, b: int, c: int, add: Callable[..., int | None] = add) -> int | None:
                total = add(b & 0xFFFF, c & 0xFFFF)
                return None if total is None else b & 0xFFFF | total << 16

            yield Row(f"atom.{space}.add.noftz.{kind}", code, 4, each(sum_half))
    for kind in ("f32", "f64", "f16x2", "bf16x2"):
        bits = 64 if kind == "f64" else 32
        noftz = ".noftz" if "16" in kind else ""
        first = "$a" if bits == 64 else "$b"
        code = (
            f"{MEET} st.global.b{bits} [$g], {first}; red.global.add{noftz}.{kind} [$g], {first}; "
            f"ld.global.b{bits} $o, [$g];"
        )
        yield Row(f"red.global.add{noftz}.{kind}", code, bits // 8)
    # Whole numbers: the order of 32 lanes does not matter.
    code = (
        f"{MEET} elect.sync _|%p1, -1; @%p1 st.global.b32 [$v], 0; {MEET} and.b32 %r20, $b, 1023; "
        f"cvt.rn.f32.u32 %r21, %r20; red.global.add.f32 [$v], %r21; {MEET} ld.global.b32 $o, [$v];"
    )

    def whole(a: list[int], b: list[int]) -> list[int]:
        total = np.float32(sum(x & 1023 for x in b))
        return [int(total.view(np.uint32))] * 32

    yield Row("red.global.add.f32-together", code, 4, warps(whole))


def groups() -> Iterator[Group]:
    """All of them."""
    first, second = pairs(FEW, 32, 102, 256)
    wide = pairs(WIDE, 64, 103, 256)[0]
    rows = (*_atomics(), *_semantics(), *_shared_addresses())
    yield Group("atomics", (wide, first, second), rows, threads=128, scratch=True)
    # Of three operands' edges, two make every pair within 256 threads.
    numbers = operands(F32, 104, 512, 3)[:2]
    doubles = operands(F64, 105, 512, 3)[0]
    yield Group("atomics-float", (doubles, *numbers), tuple(_floats()), threads=128, scratch=True)
