# SPDX-License-Identifier: Apache-2.0
"""Probes of loads, stores, vectors, address spaces and fences (PTX ISA 9.7.10, 9.7.15.4).

What a thread loads has mostly been stored by another lane, so that a compiler cannot keep it in a register.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from core_integer_probes import EDGES, WIDE
from core_rows import Group, Row, each, pairs, signed, warps

MODULE = """
.const .align 16 .u32 table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
.global .align 8 .u32 words[4] = {11, 22, 33, 44};
"""
MEET = "bar.warp.sync -1;"
_LOW = 0xFFFF_FFFF

# a: 64 bits, b: 32 bits.


def _neighbours(function: Callable[[int, int], int]) -> Callable[..., Sequence[int]]:
    """Of the next lane's operands."""

    def warp(a: list[int], b: list[int]) -> list[int]:
        return [function(a[lane ^ 1], b[lane ^ 1]) for lane in range(32)]

    return warp


def _of_word(function: Callable[[int], int]) -> Callable[[int, int], int]:
    return lambda a, b: function(b)


def _placed(mask: int, shift: int) -> Callable[[int, int], int]:
    """64 ones, among which b's masked bits are put."""
    return lambda a, b: ((1 << 64) - 1) & ~(mask << shift) | (b & mask) << shift


def _exchange(store: str, load: str, global_memory: bool) -> str:
    """Store to the own slot, meet, load from the next lane's."""
    own, other = ("$g", "$m") if global_memory else ("$s", "$n")
    return f"{MEET} {store.replace('@', own)} {MEET} {load.replace('@', other)}"


def _plain() -> Iterator[Row]:
    """Every width and sign, each space, in shared and global memory."""
    widths: dict[str, Callable[[int], int]] = {
        "u8": lambda v: v & 255,
        "s8": lambda v: signed(v, 8) & _LOW,
        "b8": lambda v: v & 255,
        "u16": lambda v: v & 0xFFFF,
        "s16": lambda v: signed(v, 16) & _LOW,
        "b16": lambda v: v & 0xFFFF,
        "b32": lambda v: v,
        "u32": lambda v: v,
        "s32": lambda v: v,
        "f32": lambda v: v,
    }
    for space, is_global in (("shared", False), ("global", True), ("shared::cta", False)):
        for kind, function in widths.items():
            store = f"st.{space}.b32 [@+4], $b;"
            code = _exchange(store, f"ld.{space}.{kind} $o, [@+4];", is_global)
            yield Row(f"ld.{space}.{kind}", code, 4, warps(_neighbours(_of_word(function))))
            bits = int(kind[1:])
            code = _exchange(
                f"st.{space}.b64 [@+8], -1; st.{space}.{kind} [@+10], $b;"
                if bits <= 16
                else f"st.{space}.b64 [@+8], -1; st.{space}.{kind} [@+12], $b;",
                f"ld.{space}.b64 $o, [@+8];",
                is_global,
            )
            shift = 16 if bits <= 16 else 32
            mask = (1 << bits) - 1
            yield Row(
                f"st.{space}.{kind}",
                code,
                8,
                warps(_neighbours(_placed(mask, shift))),
            )
        for kind in ("b64", "u64", "s64", "f64"):
            code = _exchange(f"st.{space}.{kind} [@], $a;", f"ld.{space}.{kind} $o, [@];", is_global)
            yield Row(f"ld-st.{space}.{kind}", code, 8, warps(_neighbours(lambda a, b: a)))
        code = _exchange(f"st.{space}.b64 [@], $a;", f"ld.{space}.s32 $o, [@+4];", is_global)
        yield Row(
            f"ld.{space}.s32-into-64",
            code,
            8,
            warps(_neighbours(lambda a, b: signed(a >> 32, 32) & (1 << 64) - 1)),
        )


def _ordered() -> Iterator[Row]:
    words = [
        ("weak", "weak"),
        ("volatile", "volatile"),
        *((f"release.{scope}", f"acquire.{scope}") for scope in ("cta", "cluster", "gpu", "sys")),
        *((f"relaxed.{scope}", f"relaxed.{scope}") for scope in ("cta", "cluster", "gpu", "sys")),
        ("wb", "ca"),
        ("cg", "cg"),
        ("cs", "cs"),
        ("wt", "cv"),
    ]
    for store, load in words:
        for space, is_global in (("shared", False), ("global", True)):
            order = (f"{store}.{space}", f"{load}.{space}")
            if store in ("wb", "cg", "cs", "wt"):
                if not is_global:
                    continue
                order = (f"{space}.{store}", f"{space}.{load}")
            code = _exchange(f"st.{order[0]}.b32 [@], $b;", f"ld.{order[1]}.b32 $o, [@];", is_global)
            yield Row(f"st.{order[0]}-ld.{order[1]}", code, 4, warps(_neighbours(lambda a, b: b)))
    for hint in ("L1::evict_last", "L1::no_allocate", "L2::128B", "L1::evict_first.L2::256B"):
        code = f"ld.global.nc.{hint}.b32 $o, [$y];"
        yield Row(f"ld.global.nc.{hint}", code, 4, each(lambda a, b: b))
    for fence in ("fence.sc.cta", "fence.acq_rel.gpu", "fence.acq_rel.sys", "membar.gl", "fence.proxy.async"):
        code = f"{MEET} st.global.b32 [$g], $b; {fence}; {MEET} ld.global.b32 $o, [$m];"
        yield Row(fence, code, 4, warps(_neighbours(lambda a, b: b)))


def _vectors() -> Iterator[Row]:
    words: dict[str, tuple[str, str, int, Callable[[int, int], int]]] = {
        "v2.b32": (
            "mov.b64 {%r20, %r21}, $a; st.#.v2.b32 [@+8], {%r21, %r20};",
            "ld.#.v2.b32 {%r22, %r23}, [@+8]; mov.b64 $o, {%r22, %r23};",
            8,
            lambda a, b: a >> 32 | (a & _LOW) << 32,
        ),
        "v4.b32": (
            "mov.b64 {%r20, %r21}, $a; not.b32 %r22, $b; st.#.v4.b32 [@+16], {%r21, $b, %r20, %r22};",
            "ld.#.v4.b32 {%r23, %r24, %r25, %r26}, [@+16]; mov.b64 $o, {%r23, %r24}; "
            "mov.b64 $q, {%r25, %r26};",
            16,
            lambda a, b: a >> 32 | b << 32 | (a & _LOW) << 64 | (~b & _LOW) << 96,
        ),
        "v2.b64": (
            "not.b64 %d30, $a; st.#.v2.b64 [@], {%d30, $a};",
            "ld.#.v2.u64 {$o, $q}, [@];",
            16,
            lambda a, b: ~a & (1 << 64) - 1 | a << 64,
        ),
        "v2.f64": (
            "mov.b64 %d30, $a; st.#.v2.f64 [@], {%d30, %d30};",
            "ld.#.v2.f64 {$o, $q}, [@];",
            16,
            lambda a, b: a | a << 64,
        ),
        "v4.b16": (
            "mov.b64 {%h11, %h12, %h13, %h14}, $a; st.#.v4.b16 [@+8], {%h12, %h11, %h14, %h13};",
            "ld.#.v4.u16 {%h15, %h16, %h17, %h18}, [@+8]; mov.b64 $o, {%h15, %h16, %h17, %h18};",
            8,
            lambda a, b: sum((a >> 16 * (k ^ 1) & 0xFFFF) << 16 * k for k in range(4)),
        ),
        "v2.b16": (
            "mov.b32 {%h11, %h12}, $b; st.#.v2.b16 [@+4], {%h12, %h11};",
            "ld.#.v2.b16 {%h15, %h16}, [@+4]; mov.b32 $o, {%h15, %h16};",
            4,
            lambda a, b: b >> 16 | (b & 0xFFFF) << 16,
        ),
        "v4.u8": (
            "st.#.b32 [@], $b;",
            "ld.#.v4.u8 {%r20, %r21, %r22, %r23}, [@]; shl.b32 %r20, %r20, 24; shl.b32 %r21, %r21, 16; "
            "shl.b32 %r22, %r22, 8; or.b32 %r20, %r20, %r21; or.b32 %r22, %r22, %r23; or.b32 $o, %r20, %r22;",
            4,
            lambda a, b: int.from_bytes(b.to_bytes(4, "little"), "big"),
        ),
        "v2.s8": (
            "st.#.b32 [@], $b;",
            "ld.#.v2.s8 {%r20, %r21}, [@]; add.u32 $o, %r20, %r21;",
            4,
            lambda a, b: (signed(b, 8) + signed(b >> 8, 8)) & _LOW,
        ),
        "v4.f32": (
            "mov.b64 {%r20, %r21}, $a; st.#.v4.f32 [@], {%r20, %r21, $b, $b};",
            "ld.#.v4.f32 {%r23, %r24, %r25, _}, [@]; mov.b64 $o, {%r23, %r24}; mov.b64 $q, {%r25, %r25};",
            16,
            lambda a, b: a | b << 64 | b << 96,
        ),
    }
    for space, is_global in (("shared", False), ("global", True)):
        for name, (store, load, size, function) in words.items():
            code = _exchange(store.replace("#", space), load.replace("#", space), is_global)
            yield Row(f"{space}.{name}", code, size, warps(_neighbours(function)))


def _spaces() -> Iterator[Row]:
    index = "and.b32 %r20, $b, 7; mul.wide.u32 %d30, %r20, 4; mov.u64 %d31, table; add.u64 %d30, %d30, %d31;"
    digits = (3, 1, 4, 1, 5, 9, 2, 6)
    yield Row("ld.const", f"{index} ld.const.u32 $o, [%d30];", 4, each(lambda a, b: digits[b & 7]))
    yield Row(
        "ld.const-symbol",
        "ld.const.v2.u32 {%r20, %r21}, [table+8]; mad.lo.u32 $o, %r20, 16, %r21;",
        4,
        each(lambda a, b: 65),
    )
    yield Row(
        "ld.global-symbol",
        "ld.global.u32 %r20, [words+4]; add.u32 $o, %r20, $b;",
        4,
        each(lambda a, b: 22 + b & _LOW),
    )
    generic = (
        "cvt.u64.u32 %d30, $s; cvta.shared.u64 %d30, %d30; cvt.u64.u32 %d31, $n; cvta.shared.u64 %d31, %d31;"
    )
    yield Row(
        "generic-shared",
        f"{MEET} {generic} st.b64 [%d30], $a; {MEET} ld.b64 $o, [%d31];",
        8,
        warps(_neighbours(lambda a, b: a)),
    )
    yield Row(
        "generic-to-shared",
        f"{MEET} {generic} st.shared.b32 [$s+4], $b; {MEET} cvta.to.shared.u64 %d32, %d31; "
        "cvt.u32.u64 %r20, %d32; "
        "ld.shared.b32 $o, [%r20+4];",
        4,
        warps(_neighbours(lambda a, b: b)),
    )
    yield Row(
        "generic-global",
        f"{MEET} cvta.global.u64 %d30, $g; st.b32 [%d30], $b; {MEET} cvta.to.global.u64 %d31, $m; "
        "ld.b32 $o, [%d31];",
        4,
        warps(_neighbours(lambda a, b: b)),
    )
    local = (
        ".local .align 16 .b8 own[64]; mov.u64 %d30, own; and.b32 %r20, $b, 7; mul.wide.u32 %d31, %r20, 8; "
    )
    local += "st.local.b64 [own], 0; st.local.v2.b64 [own+16], {1, 2}; add.u64 %d32, %d30, %d31; "
    yield Row(
        "local",
        f"{local} st.local.b64 [%d32], $a; ld.local.b32 $o, [%d32+4]; cvta.local.u64 %d33, %d32; "
        "ld.b32 %r21, [%d33]; "
        "xor.b32 $o, $o, %r21;",
        4,
        each(lambda a, b: a >> 32 ^ a & _LOW),
    )
    tests = ("global", "shared", "local")
    asked = " ".join(
        f"isspacep.{space} %p1, %d3{k}; selp.b32 %r20, {1 << 4 * k + j}, 0, %p1; or.b32 $o, $o, %r20;"
        for k in range(3)
        for j, space in enumerate(tests)
    )
    yield Row(
        "isspacep",
        "mov.b32 $o, 0; mov.u64 %d30, $g; cvt.u64.u32 %d31, $s; cvta.shared.u64 %d31, %d31; "
        "mov.u64 %d32, own; "
        f"cvta.local.u64 %d32, %d32; {asked}",
        4,
        each(lambda a, b: 1 | 2 << 4 | 4 << 8),
    )
    yield Row(
        "prefetch",
        "prefetch.global.L2 [$x]; prefetchu.L1 [$x]; ld.global.b32 $o, [$x];",
        4,
        each(lambda a, b: a & _LOW),
    )
    yield Row(
        "createpolicy",
        "createpolicy.fractional.L2::evict_last.b64 %d30, 1.0; ld.global.L2::cache_hint.b32 $o, [$y], %d30;",
        4,
        each(lambda a, b: b),
    )
    yield Row(
        "guarded",
        f"{MEET} setp.lt.s32 %p1, $b, 0; st.shared.b32 [$s], 7; @%p1 st.shared.b32 [$s], $b; "
        f"{MEET} mov.b32 $o, 5; "
        "@!%p1 ld.shared.b32 $o, [$n];",
        4,
        warps(lambda a, b: [5 if b[k] >> 31 else (b[k ^ 1] if b[k ^ 1] >> 31 else 7) for k in range(32)]),
    )


def groups() -> Iterator[Group]:
    """All of them."""
    a, b = pairs(WIDE, 64, 100, 512)[0], pairs(EDGES, 32, 101, 1024)[1][512:]
    rows = (*_plain(), *_ordered(), *_vectors(), *_spaces())
    yield Group("memory", (a, b), rows, threads=128, scratch=True, module=MODULE, seeds=2)
