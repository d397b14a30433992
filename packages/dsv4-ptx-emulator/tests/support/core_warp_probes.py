# SPDX-License-Identifier: Apache-2.0
"""Probes of the lanes of a warp: shuffles, votes, matches, reductions, divergence.

PTX ISA 9.7.10.6, 9.7.14, 9.7.15.2 and 9.7.15.10 to 9.7.15.15.

Which lanes an `activemask` sees is the hardware's choice after lanes have parted, so it is asked where they
are surely together. Which lane `elect` elects is open as well; the lowest is what an H200 should show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import numpy as np
from core_integer_probes import EDGES
from core_rows import Group, Row, each, pairs, signed, warps
from numpy.typing import NDArray

ALL = 0xFFFF_FFFF
MEET = "bar.warp.sync -1;"
LANES = range(32)


def _source(mode: str, lane: int, by: int, control: int) -> tuple[int, bool]:
    """The lane that is read, and whether it is in range: PTX ISA 9.7.10.6, lane by lane."""
    segment, clamp = control >> 8 & 31, control & 31
    by &= 31
    limit = lane & segment | clamp & ~segment
    lowest = lane & segment
    if mode == "up":
        source = lane - by
        valid = source >= limit
    elif mode == "down":
        source = lane + by
        valid = source <= limit
    elif mode == "bfly":
        source = lane ^ by
        valid = source <= limit
    else:
        source = lowest | by & ~segment
        valid = source <= limit
    return (source if valid else lane), valid


def _shuffles() -> Iterator[Row]:
    for mode in ("up", "down", "bfly", "idx"):
        edge = 0 if mode == "up" else 31
        for width in (32, 16, 8, 2):
            for by in (0, 1, 3, 13, 31, 33):
                control = 32 - width << 8 | edge

                def shuffled(
                    a: list[int], mode: str = mode, by: int = by, control: int = control
                ) -> list[int]:
                    sources = [_source(mode, lane, by, control) for lane in LANES]
                    return [a[source] ^ valid for source, valid in sources]

                code = (
                    f"shfl.sync.{mode}.b32 $o|%p1, $a, {by}, {control}, -1; selp.b32 %r20, 1, 0, %p1; "
                    "xor.b32 $o, $o, %r20;"
                )
                yield Row(f"shfl.sync.{mode}.b32-{by}-{width}", code, 4, warps(shuffled))

        def by_register(a: list[int], b: list[int], mode: str = mode, edge: int = edge) -> list[int]:
            sources = [_source(mode, lane, b[lane], edge) for lane in LANES]
            return [a[source] ^ valid for source, valid in sources]

        code = (
            f"shfl.sync.{mode}.b32 $o|%p1, $a, $b, {edge}, -1; selp.b32 %r20, 1, 0, %p1; "
            "xor.b32 $o, $o, %r20;"
        )
        yield Row(f"shfl.sync.{mode}.b32-register", code, 4, warps(by_register))
    # Only the odd lanes, below a guard.
    code = (
        "and.b32 %r20, $t, 1; setp.eq.u32 %p1, %r20, 1; mov.b32 $o, 9; "
        "@!%p1 bra ${L}A; shfl.sync.bfly.b32 $o, $a, 2, 31, 0xAAAAAAAA; ${L}A: bar.warp.sync -1;"
    )
    yield Row(
        "shfl.sync.bfly.b32-odd-lanes",
        code,
        4,
        warps(lambda a: [a[lane ^ 2] if lane & 1 else 9 for lane in LANES]),
    )


def _votes() -> Iterator[Row]:
    """Predicates that hold in some lanes, in all, in none."""
    # The thread's predicate: sign of a; a != b; warp 1 of a CTA all true; warp 2 all false.
    predicates: dict[str, tuple[str, Callable[[int, int, int], bool]]] = {
        "sign": ("setp.lt.s32 %p1, $a, 0;", lambda a, b, lane: bool(a >> 31)),
        "true": ("setp.eq.u32 %p1, $a, $a;", lambda a, b, lane: True),
        "false": ("setp.ne.u32 %p1, $a, $a;", lambda a, b, lane: False),
        "less": ("setp.lt.u32 %p1, $a, $b;", lambda a, b, lane: a < b),
        "one": ("mov.u32 %r20, %laneid; setp.eq.u32 %p1, %r20, 17;", lambda a, b, lane: lane == 17),
    }
    kinds: dict[str, Callable[[list[bool]], bool]] = {
        "all": all,
        "any": any,
        "uni": lambda values: all(values) or not any(values),
    }
    for name, (code, function) in predicates.items():
        for kind, combine in kinds.items():
            for negated in (False, True):

                def vote(
                    a: list[int],
                    b: list[int],
                    f: Callable[[int, int, int], bool] = function,
                    c: Callable[[list[bool]], bool] = combine,
                    negated: bool = negated,
                ) -> list[int]:
                    return [int(c([f(a[k], b[k], k) != negated for k in LANES]))] * 32

                text = f"{code} vote.sync.{kind}.pred %p2, {'!' * negated}%p1, -1; selp.b32 $$o, 1, 0, %p2;"
                row = f"vote.sync.{kind}.pred-{name}{'-not' * negated}"
                yield Row(row, text.replace("$$", "$"), 4, warps(vote))

        def ballot(a: list[int], b: list[int], f: Callable[[int, int, int], bool] = function) -> list[int]:
            return [sum(f(a[k], b[k], k) << k for k in LANES)] * 32

        yield Row(
            f"vote.sync.ballot.b32-{name}", f"{code} vote.sync.ballot.b32 $o, %p1, -1;", 4, warps(ballot)
        )
    halves = "mov.u32 %r20, %laneid; setp.lt.u32 %p2, %r20, 16; selp.b32 %r21, 0xFFFF, 0xFFFF0000, %p2;"
    yield Row(
        "vote.sync.ballot.b32-halves",
        f"{halves} setp.lt.s32 %p1, $a, 0; @%p2 bra ${{L}}A; vote.sync.ballot.b32 $o, %p1, 0xFFFF0000; "
        f"bra ${{L}}B; "
        "${L}A: vote.sync.ballot.b32 $o, %p1, 0xFFFF; ${L}B: bar.warp.sync -1;",
        4,
        warps(lambda a: [sum((a[k] >> 31) << k for k in LANES if (k < 16) == (lane < 16)) for lane in LANES]),
    )


def _matches() -> Iterator[Row]:
    def together(values: list[int]) -> list[int]:
        return [sum((other == value) << k for k, other in enumerate(values)) for value in values]

    yield Row(
        "match.any.sync.b32",
        "and.b32 %r20, $a, 7; match.any.sync.b32 $o, %r20, -1;",
        4,
        warps(lambda a: together([x & 7 for x in a])),
    )
    yield Row("match.any.sync.b32-whole", "match.any.sync.b32 $o, $a, -1;", 4, warps(together))
    yield Row(
        "match.any.sync.b64",
        "and.b32 %r20, $a, 3; and.b32 %r21, $b, 1; mov.b64 %d30, {%r20, %r21}; "
        "match.any.sync.b64 $o, %d30, -1;",
        4,
        warps(lambda a, b: together([x & 3 | (y & 1) << 32 for x, y in zip(a, b, strict=True)])),
    )
    for bits, same in ((32, True), (32, False), (64, True), (64, False)):
        value = "mov.b32 %r20, 77;" if same else "mov.u32 %r20, %laneid; shr.u32 %r20, %r20, 4;"
        operand = "%r20" if bits == 32 else "%d30"
        wide = "" if bits == 32 else "mov.b64 %d30, {%r20, %r20};"
        code = (
            f"{value} {wide} match.all.sync.b{bits} %r22|%p1, {operand}, -1; selp.b32 %r23, 1, 0, %p1; "
            "mov.b64 $o, {%r22, %r23};"
        )
        result = ALL | 1 << 32 if same else 0
        yield Row(
            f"match.all.sync.b{bits}-{'same' if same else 'two'}",
            code,
            8,
            warps(lambda a, r=result: [r] * 32),
        )


def _reductions() -> Iterator[Row]:
    functions: dict[str, Callable[[int, int], int]] = {
        "add": lambda x, y: x + y,
        "min": min,
        "max": max,
        "and": int.__and__,
        "or": int.__or__,
        "xor": int.__xor__,
    }
    kinds = {"add": ("u32", "s32"), "min": ("u32", "s32"), "max": ("u32", "s32")}
    for name, function in functions.items():
        for kind in kinds.get(name, ("b32",)):

            def reduced(
                a: list[int], f: Callable[[int, int], int] = function, s: bool = kind[0] == "s"
            ) -> list[int]:
                return [reduce(f, [signed(x, 32) if s else x for x in a]) & ALL] * 32

            yield Row(f"redux.sync.{name}.{kind}", f"redux.sync.{name}.{kind} $o, $a, -1;", 4, warps(reduced))
    code = (
        "mov.u32 %r20, %laneid; setp.ge.u32 %p1, %r20, 20; mov.b32 $o, 0; "
        "@%p1 bra ${L}A; redux.sync.add.s32 $o, $a, 0xFFFFF; ${L}A: bar.warp.sync -1;"
    )
    yield Row(
        "redux.sync.add.s32-some-lanes",
        code,
        4,
        warps(lambda a: [sum(a[:20]) & ALL if lane < 20 else 0 for lane in LANES]),
    )


def _elections() -> Iterator[Row]:
    code = "elect.sync %r20|%p1, -1; selp.b32 %r21, 1, 0, %p1; mov.b64 $o, {%r20, %r21};"
    yield Row("elect.sync", code, 8, warps(lambda a: [int(lane == 0) << 32 for lane in LANES]))
    code = (
        "mov.u32 %r20, %laneid; setp.lt.u32 %p2, %r20, 12; mov.b64 $o, -1; @%p2 bra ${L}A; "
        "elect.sync %r22|%p1, 0xFFFFF000; selp.b32 %r21, 1, 0, %p1; mov.b64 $o, {%r22, %r21}; "
        "${L}A: bar.warp.sync -1;"
    )
    yield Row(
        "elect.sync-some-lanes",
        code,
        8,
        warps(lambda a: [(1 << 64) - 1 if lane < 12 else 12 | int(lane == 12) << 32 for lane in LANES]),
    )
    yield Row("activemask.b32", f"{MEET} activemask.b32 $o;", 4, warps(lambda a: [ALL] * 32))


def _branches() -> Iterator[Row]:
    yield Row(
        "branch-nested",
        """mov.b32 $o, 0; and.b32 %r20, $a, 1; setp.eq.u32 %p1, %r20, 0; setp.lt.s32 %p2, $b, 0;
        @%p1 bra ${L}E; @%p2 bra ${L}ON; add.u32 $o, $o, 1; bra ${L}OD; ${L}ON: add.u32 $o, $o, 2; ${L}OD:
        add.u32 $o, $o, 16; bra ${L}D; ${L}E: @!%p2 bra ${L}EP; add.u32 $o, $o, 4; bra ${L}ED; ${L}EP:
        add.u32 $o, $o, 8; ${L}ED: add.u32 $o, $o, 32; ${L}D: bar.warp.sync -1; xor.b32 $o, $o, $a;""",
        4,
        each(lambda a, b: a ^ ((18 if b >> 31 else 17) if a & 1 else (36 if b >> 31 else 40))),
    )
    yield Row(
        "loop-per-lane",
        """and.b32 %r20, $a, 15; mov.b32 $o, 1; ${L}A: setp.eq.u32 %p1, %r20, 0; @%p1 bra ${L}B;
        mad.lo.u32 $o, $o, 3, $b; sub.u32 %r20, %r20, 1; bra ${L}A; ${L}B: bar.warp.sync -1;""",
        4,
        each(lambda a, b: reduce(lambda x, _: (x * 3 + b) & ALL, range(a & 15), 1)),
    )
    yield Row(
        "loop-break-inside",
        """mov.b32 $o, 0; mov.b32 %r20, $a; mov.b32 %r21, 0; ${L}A: setp.ge.u32 %p1, %r21, 20; @%p1 bra ${L}D;
        and.b32 %r22, %r20, 7; setp.eq.u32 %p2, %r22, 5; @%p2 bra ${L}D; and.b32 %r22, %r20, 1;
        setp.eq.u32 %p3, %r22, 1; @!%p3 bra ${L}C; add.u32 $o, $o, %r21; ${L}C: shr.u32 %r20, %r20, 1;
        add.u32 %r21, %r21, 1; bra.uni ${L}A; ${L}D: bar.warp.sync -1;""",
        4,
        each(_broken),
    )
    yield Row(
        "guards",
        """mov.b32 $o, $a; setp.lt.s32 %p1, $a, 0; @%p1 neg.s32 $o, $o; setp.gt.u32 %p2, $o, $b;
        @!%p2 add.u32 $o, $o, $b; @%p2 xor.b32 $o, $o, $b; @%p1 mul.lo.u32 $o, $o, 5;""",
        4,
        each(_guarded),
    )
    yield Row(
        "divergent-shared",
        f"""{MEET} st.shared.b32 [$$s], 0; {MEET} setp.lt.s32 %p1, $$a, 0; @%p1 bra $${{L}}A;
        st.shared.b32 [$$n], $$b; bra $${{L}}B; $${{L}}A: not.b32 %r20, $$b; st.shared.b32 [$$n], %r20;
        $${{L}}B: {MEET} ld.shared.b32 $$o, [$$s];""".replace("$$", "$"),
        4,
        warps(lambda a, b: [~b[k ^ 1] & ALL if a[k ^ 1] >> 31 else b[k ^ 1] for k in LANES]),
    )
    yield Row(
        "nanosleep",
        "setp.lt.s32 %p1, $a, 0; @%p1 nanosleep.u32 20; add.u32 $o, $a, 1;",
        4,
        each(lambda a: a + 1 & ALL),
    )


def _broken(a: int, b: int) -> int:
    total, place = 0, 0
    while place < 20 and a & 7 != 5:
        total += place if a & 1 else 0
        a, place = a >> 1, place + 1
    return total


def _guarded(a: int, b: int) -> int:
    out = -a & ALL if a >> 31 else a
    out = out ^ b if out > b else out + b & ALL
    return out * 5 & ALL if a >> 31 else out


def shuffled_operands() -> tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]:
    """2048 pairs of operands, and 512 of them in an order that mixes edges and random ones in each warp."""
    operands = pairs(EDGES, 32, 120, 2048)
    order = np.random.default_rng(121).permutation(2048)[:512]
    return operands, tuple(values[order] for values in operands)


def groups() -> Iterator[Group]:
    """All of them."""
    operands, chosen = shuffled_operands()
    rows = (*_shuffles(), *_votes(), *_matches(), *_reductions(), *_elections())
    yield Group("collective", chosen, rows, threads=128)
    yield Group("control", operands, tuple(_branches()), threads=128, scratch=True, seeds=2)
