# SPDX-License-Identifier: Apache-2.0
"""Wide global loads and stores, and exact arithmetic between packed BF16 words and FP32.

A vector is a tuple of 4 or 8 `Uint32` words of two BF16 each, the lower index in the lower half. Tuples of
scalars were chosen over MLIR vectors: they may be carried through dynamic `if` and loops of the DSL and
indexed with constants, and cost nothing, since registers have no vector type.

Cache hints. `L1::no_allocate`, since each byte of a partial is written once and read once, so keeping it in
L1 only drives out what is used again. `ld.global.nc` would do the same by its non-coherent path and is
**not** allowed here: it promises that nobody writes the data while the kernel runs (PTX ISA, "ld.global.nc"),
slots are written by peers during it, and no acquire or fence orders a read through that path.

Weak and relaxed. The weak forms need a flag: they are ordered by a release and an acquire around them
and race otherwise. The relaxed forms at system scope are for polling the data itself, where there is no flag.
PTX promises single-copy atomicity for each element of a vector only, not for its 16 bytes (ISA, Memory
Consistency Model, "Vector Data-types"), so such a reader checks every 4-byte word for its sentinel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, vector
from cutlass.cutlass_dsl import T, dsl_user_op

from dsv4_symm_mem.device.address import global_pointer
from dsv4_symm_mem.errors import ArgumentError

Words = tuple[Uint32, ...]

_WORD_BYTES = 4
_HIGH_HALF = 0xFFFF0000


def _load(address: Int64, count: int, loc: Any, ip: Any, **semantics: str) -> Words:
    pointer = global_pointer(address, Uint32, count * _WORD_BYTES, loc=loc, ip=ip)
    packed = cute.arch.load(pointer, ir.VectorType.get([count], T.i32()), loc=loc, ip=ip, **semantics)
    return tuple(Uint32(vector.extract(packed, [], [i], loc=loc, ip=ip)) for i in range(count))


def _store(address: Int64, words: Sequence[Uint32], loc: Any, ip: Any, **semantics: str) -> None:
    count = len(words)
    pointer = global_pointer(address, Uint32, count * _WORD_BYTES, loc=loc, ip=ip)
    packed = vector.from_elements(
        ir.VectorType.get([count], T.i32()),
        [Uint32(word).ir_value(loc=loc, ip=ip) for word in words],
        loc=loc,
        ip=ip,
    )
    cute.arch.store(pointer, packed, loc=loc, ip=ip, **semantics)


@dsl_user_op
def load_16(address: Int64, *, loc: Any = None, ip: Any = None) -> Words:
    """Read 16 bytes (8 BF16) without keeping them in L1; `address` a multiple of 16.

    PTX, sm_90a and sm_100a: `ld.global.L1::no_allocate.v4.b32 {d0, d1, d2, d3}, [a];`

    Weak: sees a peer's data only after an acquire of the flag that publishes them (and a barrier, if
    another thread acquired). ISA section "ld".
    """
    return _load(address, 4, loc, ip, level1_eviction_priority="evict_no_allocate")


@dsl_user_op
def load_32(address: Int64, *, loc: Any = None, ip: Any = None) -> Words:
    """Read 32 bytes (16 BF16) without keeping them in L1; `address` a multiple of 32.

    PTX, sm_100a: `ld.global.L1::no_allocate.v8.b32 {d0, ..., d7}, [a];`. sm_90a has no 256-bit loads
    and gets two of `ld.global.L1::no_allocate.v4.b32`, at `[a]` and `[a+16]`. Ordering as `load_16`.
    """
    return _load(address, 8, loc, ip, level1_eviction_priority="evict_no_allocate")


@dsl_user_op
def load_relaxed_16(address: Int64, *, loc: Any = None, ip: Any = None) -> Words:
    """Read 16 bytes that a peer may be writing; `address` a multiple of 16.

    PTX, sm_90a and sm_100a: `ld.relaxed.sys.global.v4.b32 {d0, d1, d2, d3}, [a];`

    Each word is one that was stored; the four may be of different stores. Orders nothing: what the
    sender wrote elsewhere before may still be unseen. System scope, since the writer is another device.
    """
    return _load(address, 4, loc, ip, sem="relaxed", scope="sys")


@dsl_user_op
def store_16(address: Int64, words: Sequence[Uint32], *, loc: Any = None, ip: Any = None) -> None:
    """Write 16 bytes (4 words), own or a peer's, without keeping them in L1; `address` a multiple of 16.

    PTX, sm_90a and sm_100a: `st.global.L1::no_allocate.v4.b32 [a], {s0, s1, s2, s3};`

    Weak: a peer may read them once it has acquired a flag released at system scope afterwards. ISA section
    "st".
    """
    _store(address, exactly(words, 4), loc, ip, level1_eviction_priority="evict_no_allocate")


@dsl_user_op
def store_32(address: Int64, words: Sequence[Uint32], *, loc: Any = None, ip: Any = None) -> None:
    """Write 32 bytes (8 words), own or a peer's, without keeping them in L1; `address` a multiple of 32.

    PTX, sm_100a: `st.global.L1::no_allocate.v8.b32 [a], {s0, ..., s7};`. sm_90a gets two of
    `st.global.L1::no_allocate.v4.b32`, at `[a]` and `[a+16]`. Ordering as `store_16`.
    """
    _store(address, exactly(words, 8), loc, ip, level1_eviction_priority="evict_no_allocate")


@dsl_user_op
def store_relaxed_16(address: Int64, words: Sequence[Uint32], *, loc: Any = None, ip: Any = None) -> None:
    """Write 16 bytes (4 words) that a peer may be polling; `address` a multiple of 16.

    PTX, sm_90a and sm_100a: `st.relaxed.sys.global.v4.b32 [a], {s0, s1, s2, s3};`

    A reader sees each word whole, the four in any order. Orders nothing else.
    """
    _store(address, exactly(words, 4), loc, ip, sem="relaxed", scope="sys")


def exactly(words: Sequence[Uint32], count: int) -> Sequence[Uint32]:
    """The `words`, if there are `count` of them; else raises `ArgumentError` while the kernel is traced."""
    if len(words) != count:
        raise ArgumentError("words", f"{len(words)} words", f"{count} words")
    return words


@dsl_user_op
def unpack_bf16(words: Sequence[Uint32], *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """The two BF16 values of each word as FP32, exactly, NaN payloads included: 4 words give 8 values.

    A BF16 value is the upper half of the FP32 value that it equals, so it is moved there, not converted.

    PTX, sm_90a and sm_100a, per word: `shl.b32 d0, w, 16;` and `and.b32 d1, w, -65536;`
    """
    values: list[Float32] = []
    for word in words:
        values.append((word << Uint32(16)).bitcast(Float32, loc=loc, ip=ip))
        values.append((word & Uint32(_HIGH_HALF)).bitcast(Float32, loc=loc, ip=ip))
    return tuple(values)


@dsl_user_op
def pack_bf16(values: Sequence[Float32], *, loc: Any = None, ip: Any = None) -> Words:
    """FP32 values rounded to nearest even BF16, two to a word: 8 values give 4 words.

    Overflow gives infinity, subnormals are kept, NaN becomes 0x7FFF. The DSL's own `cvt_f32x2_bf16x2` is
    not used: it saturates (`.satfinite`), which would turn an infinite partial into a finite sum.

    PTX, sm_90a and sm_100a, per word: `cvt.rn.bf16x2.f32 d, v1, v0;` (the first source goes to the upper
    half; ISA section "cvt").
    """
    if len(values) % 2:
        raise ArgumentError("values", f"{len(values)} values", "an even number")
    pair_type = ir.VectorType.get([2], T.f32())
    half_type = ir.VectorType.get([2], T.bf16())
    words: list[Uint32] = []
    for low, high in zip(values[::2], values[1::2], strict=True):
        pair = vector.from_elements(
            pair_type,
            [Float32(low).ir_value(loc=loc, ip=ip), Float32(high).ir_value(loc=loc, ip=ip)],
            loc=loc,
            ip=ip,
        )
        halves = arith.truncf(half_type, pair, loc=loc, ip=ip)
        words.append(Uint32(llvm.bitcast(T.i32(), halves, loc=loc, ip=ip)))
    return tuple(words)


@dsl_user_op
def add_bf16(
    accumulators: Sequence[Float32], words: Sequence[Uint32], *, loc: Any = None, ip: Any = None
) -> tuple[Float32, ...]:
    """`accumulators[i]` + the i-th BF16 value of `words`, each one FP32 addition rounded to nearest even.

    Two accumulators a word, so 8 for 16 bytes. The rounding mode is written out, because PTX allows an
    addition without it to be contracted with a multiplication before it (ISA section "add"), and the sum
    would then depend on what the compiler saw.

    PTX, sm_90a and sm_100a, per word: the two of `unpack_bf16` and twice `add.rn.f32 d, a, b;`
    """
    if len(accumulators) != 2 * len(words):
        raise ArgumentError(
            "accumulators", f"{len(accumulators)} values", f"two for each of {len(words)} words"
        )
    return tuple(
        _add_rn(accumulator, value, loc, ip)
        for accumulator, value in zip(accumulators, unpack_bf16(words, loc=loc, ip=ip), strict=True)
    )


def _add_rn(a: Float32, b: Float32, loc: Any, ip: Any) -> Float32:
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(a).ir_value(loc=loc, ip=ip), Float32(b).ir_value(loc=loc, ip=ip)],
            "add.rn.f32 $0, $1, $2;",
            "=f,f,f",
            has_side_effects=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def load_shared_16(address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    """Read 16 bytes of shared memory; `address` a multiple of 16.

    PTX, sm_90a and sm_100a: `ld.shared.v4.b32 {d0, d1, d2, d3}, [a];` (ISA section "ld").
    """
    words = cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )
    return tuple(words)


@dsl_user_op
def store_shared_16(address: Int32, words: Sequence[Uint32], *, loc: Any = None, ip: Any = None) -> None:
    """Write 16 bytes (4 words) of shared memory; `address` a multiple of 16.

    PTX, sm_90a and sm_100a: `st.shared.v4.b32 [a], {s0, s1, s2, s3};` (ISA section "st").
    """
    cute.arch.inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *exactly(words, 4)],
        loc=loc,
        ip=ip,
    )
