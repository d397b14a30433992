# SPDX-License-Identifier: Apache-2.0
"""PTX text to the module model."""

from __future__ import annotations

import pytest
from dsv4_ptx_emulator.errors import PtxSyntaxError
from dsv4_ptx_emulator.ptx.lexer import tokens
from dsv4_ptx_emulator.ptx.module import (
    Address,
    Guard,
    Immediate,
    Instruction,
    Label,
    Not,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from dsv4_ptx_emulator.ptx.parser import parse

HEADER = ".version 9.4\n.target sm_90a\n.address_size 64\n"


def body(text: str, variables: str = "") -> tuple[Instruction, ...]:
    declared = ".reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<4>;"
    module = parse(f"{HEADER}{variables}\n.entry k(.param .u64 k_param_0)\n{{ {declared}\n{text}\n}}")
    return module.kernels["k"].instructions


def test_header_and_entry() -> None:
    module = parse(
        HEADER
        + """
        .extern .shared .align 1024 .b8 dyn[];
        .global .align 4 .u32 table[3] = {1, 2, 0x10};
        .visible .entry k(
            .param .align 64 .b8 k_param_0[128],
            .param .u32 k_param_1,
            .param .u64 .ptr .global .align 16 k_param_2
        )
        .reqntid 384, 1, 1
        .minnctapersm 1
        { ret; }
        """
    )
    assert module.version == (9, 4)
    assert module.target == "sm_90a"
    dynamic, table = module.variables
    assert (dynamic.name, dynamic.space, dynamic.size, dynamic.align) == ("dyn", "shared", 0, 1024)
    assert table.initial == bytes([1, 0, 0, 0, 2, 0, 0, 0, 16, 0, 0, 0])
    kernel = module.kernels["k"]
    assert [(p.offset, p.size, p.align) for p in kernel.parameters] == [
        (0, 128, 64),
        (128, 4, 4),
        (136, 8, 8),
    ]
    assert kernel.parameter_bytes == 144
    assert kernel.directives == {"reqntid": (384, 1, 1), "minnctapersm": (1,)}


def test_opcode_is_one_token() -> None:
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd2], 16, [%r3];"
    assert tokens(text)[0].text == text.split(" ")[0]


def test_operands() -> None:
    first, second = body(
        "foo.b32 %r1|%p1, {%r2, _, 7}, [%rd1+-16], -5, 0f3F800000, !%p2, %tid.x, k_param_0;\n"
        "bar.tensor [%r1+64], [%rd1, {%r2, %r3}], [%r4];"
    )
    r = [Register(f"%r{number}", "b32") for number in range(8)]
    rd1 = Register("%rd1", "b64")
    assert first.operands == (
        Pair(r[1], Register("%p1", "pred")),
        Vector((r[2], Sink(), Immediate(7))),
        Address(rd1, -16),
        Immediate(-5),
        Immediate(0x3F80_0000, 32),
        Not(Register("%p2", "pred")),
        Special("%tid.x"),
        Symbol("k_param_0"),
    )
    assert second.operands == (Address(r[1], 64), Address(rd1, 0, (r[2], r[3])), Address(r[4], 0))


def test_numbers() -> None:
    (instruction,) = body("foo 0x1FU, 017, 0b101, 1.5, 0d3FF0000000000000, 12U, -0f3F800000;")
    assert [operand.value for operand in instruction.operands if isinstance(operand, Immediate)] == [
        31,
        15,
        5,
        0x3FF8_0000_0000_0000,
        0x3FF0_0000_0000_0000,
        12,
        0xBF80_0000,
    ]


def test_guards_and_lines() -> None:
    plain, guarded, negated = body("ret;\n@%p1 ret;\n@!%p1 ret;")
    p1 = Register("%p1", "pred")
    assert plain.guard is None
    assert guarded.guard == Guard(p1, False)
    assert negated.guard == Guard(p1, True)
    assert (guarded.line - plain.line, negated.line - plain.line) == (1, 2)


def test_inline_assembly_scopes_have_their_own_names() -> None:
    module = parse(
        HEADER
        + """.entry k() { .reg .b32 %r<2>;
        { .reg .pred P; LAB: setp.eq.b32 P, %r0, %r1; @P bra DONE; bra LAB; DONE: }
        { .reg .pred P; LAB: setp.ne.b32 P, %r0, %r1; @P bra DONE; bra LAB; DONE: }
        bra OUT;
        OUT: ret; }"""
    )
    kernel = module.kernels["k"]
    branches = [i.operands[0] for i in kernel.instructions if i.opcode == "bra"]
    names = [label.name for label in branches if isinstance(label, Label)]
    assert [kernel.labels[name] for name in names] == [3, 0, 6, 3, 7]
    assert len(set(names)) == 5
    declared = [register.name for register in kernel.registers.values() if register.type == "pred"]
    assert len(declared) == 3, "two of the text, and the carry flag"


def test_pragmas_comments_and_debug_sections_are_skipped() -> None:
    instructions = body('// a\n.pragma "nounroll";\n.loc 1 2 3\n/* b\n c */ ret;')
    assert [i.opcode for i in instructions] == ["ret"]
    parse(HEADER + '.file 1 "x.cu"\n.section .debug_str { .b8 1, 2 { } }\n.entry k() { ret; }')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add.s32 %r1, %r99, 1;", "unknown name %r99"),
        ("bra NOWHERE;", "unknown name NOWHERE"),
        ("@%q ret;", "unknown register %q"),
        ("add.s32 %r1, %r2", "expected ';'"),
        ("mov.b32 %r1, #;", "unexpected '#"),
        (".reg .v4 .f32 %v;", "vector registers"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(PtxSyntaxError, match=message) as caught:
        parse(f"{HEADER}.entry k() {{\n.reg .b32 %r<4>;\n{text}\n}}")
    assert caught.value.line in (6, 7)


def test_function_bodies_are_refused() -> None:
    parse(
        HEADER + ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n.entry k() { ret; }"
    )
    with pytest.raises(PtxSyntaxError, match="functions with bodies"):
        parse(HEADER + ".func f() { ret; }")
