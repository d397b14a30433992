# SPDX-License-Identifier: Apache-2.0
"""Instructions on multicast addresses: reduce what all ranks hold, or write to all ranks, in the switch.

A multicast address may be accessed with `multimem` instructions only, and each is performed on
the same offset of every rank's memory (PTX ISA, "Multimem Addresses"). Two rules follow that no instruction
here keeps by itself:

* A rank's own mapping of that memory is a virtual alias of the multicast address. Ordinary stores must
  reach `multimem_ld_reduce_bf16` through `fence_proxy_alias` on the writer's side before its release, and
  again on the reader's side after its acquire (ISA, "fence.proxy"); the same holds from `multimem_store` to
  ordinary loads.
* Data move as `.relaxed.sys`, never `.weak`: other devices access the same bytes, and a weak access
  to data that others touch is a race unless it is ordered; `.gpu` would exclude the very threads it is for.

Inline PTX, since the DSL's public operations have no multimem; every statement clobbers memory, so the
compiler keeps it in its place among loads and stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from dsv4_symm_mem.device.vectors import Words, exactly


def _asm(result: Any, operands: list[Any], text: str, constraints: str, loc: Any, ip: Any) -> Any:
    return llvm.inline_asm(
        result,
        operands,
        text,
        f"{constraints},~{{memory}}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def multimem_ld_reduce_bf16(address: Int64, *, loc: Any = None, ip: Any = None) -> Words:
    """Sum 8 BF16 over all ranks' memory, FP32 inside the switch, one rounding; `address` a multiple of 16.

    The order of the sum is the switch's, so results may differ between runs and machines.

    PTX, sm_90a and sm_100a:
    `multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {d0, d1, d2, d3}, [a];`

    Orders nothing: every rank's contribution must have been acquired first, with `fence_proxy_alias` after
    the acquire. ISA section "multimem.ld_reduce".
    """
    result = _asm(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        loc,
        ip,
    )
    return tuple(Uint32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def multimem_store(address: Int64, words: Sequence[Uint32], *, loc: Any = None, ip: Any = None) -> None:
    """Write 16 bytes (4 words) to the same place of every rank; `address` a multiple of 16.

    PTX, sm_90a and sm_100a: `multimem.st.relaxed.sys.global.v4.bf16x2 [a], {s0, s1, s2, s3};` (of the types
    that `.v4` allows, the bits are moved as they are).

    Orders nothing; publish with `multimem_store_release` or `multimem_red_add_release`. ISA section
    "multimem.st".
    """
    exactly(words, 4)
    _asm(
        None,
        [
            Int64(address).ir_value(loc=loc, ip=ip),
            *(Uint32(word).ir_value(loc=loc, ip=ip) for word in words),
        ],
        "multimem.st.relaxed.sys.global.v4.bf16x2 [$0], {$1, $2, $3, $4};",
        "l,r,r,r,r",
        loc,
        ip,
    )


@dsl_user_op
def multimem_store_release(address: Int64, value: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Raise the same 64-bit flag on every rank with `value`.

    PTX, sm_90a and sm_100a: `multimem.st.release.sys.global.b64 [a], v;`

    Orders as `flags.store_release` at system scope, towards every rank that acquires its copy. A flag with
    one writer needs no addition, so this is the broadcast form of the epoch protocol. ISA section
    "multimem.st".
    """
    _asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), Int64(value).ir_value(loc=loc, ip=ip)],
        "multimem.st.release.sys.global.b64 [$0], $1;",
        "l,l",
        loc,
        ip,
    )


@dsl_user_op
def multimem_red_add_release(address: Int64, value: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Add `value` to the same 64-bit counter on every rank; returns nothing.

    PTX, sm_90a and sm_100a: `multimem.red.release.sys.global.add.u64 [a], v;` (unsigned, since 64-bit
    addition has no signed form here; two's complement makes it the same).

    Orders as `flags.store_release` at system scope, towards every rank that acquires its copy. ISA section
    "multimem.red".
    """
    _asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), Int64(value).ir_value(loc=loc, ip=ip)],
        "multimem.red.release.sys.global.add.u64 [$0], $1;",
        "l,l",
        loc,
        ip,
    )
