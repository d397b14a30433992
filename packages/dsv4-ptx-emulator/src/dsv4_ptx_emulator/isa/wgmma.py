# SPDX-License-Identifier: Apache-2.0
"""Warpgroup matrix instructions (PTX ISA 9.4, section 9.7.17): floating-point wgmma and its fence and groups.

Refused by name: integer, binary and sparse forms.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dsv4_ptx_emulator.engines.warpgroup import Shape, WarpgroupPipe
from dsv4_ptx_emulator.errors import AsyncMisuseError
from dsv4_ptx_emulator.formats.floats import BF16, E4M3, E5M2, F16, TF32
from dsv4_ptx_emulator.formats.matrix import decode_descriptor
from dsv4_ptx_emulator.isa.bulk import group_count
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.machine.observer import AsyncEvent
from dsv4_ptx_emulator.machine.outcome import Blocked, Outcome, Wait
from dsv4_ptx_emulator.ptx.module import Immediate, Vector

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsv4_ptx_emulator.isa.context import DecodeContext, Source
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Instruction, Operand

_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
_TYPES = {"bf16": BF16, "f16": F16, "e4m3": E4M3, "e5m2": E5M2, "tf32": TF32}
_DEPTH_BYTES = 32


@instruction("wgmma.mma_async", section="9.7.17.5.2", observable=True)
def mma_async(instruction: Instruction, context: DecodeContext) -> Step:
    """Multiply a 64 x K matrix by a K x N matrix and add, asynchronously, by four warps together."""
    words = context.modifiers
    if words[:2] != ("sync", "aligned") or len(words) != 6 or not (shape := _SHAPE.fullmatch(words[2])):
        context.unsupported("a form other than sync.aligned.m64nNkK.d.a.b")
    columns, depth = int(shape[1]), int(shape[2])
    if words[4] not in _TYPES or words[5] not in _TYPES or words[3] not in ("f32", "f16"):
        context.unsupported(f"the types .{words[3]}.{words[4]}.{words[5]}")
    a_type, b_type, half = _TYPES[words[4]], _TYPES[words[5]], words[3] == "f16"
    narrow = {"e4m3", "e5m2"}
    if a_type is not b_type and not {words[4], words[5]} <= narrow:
        context.unsupported(f"the types .{words[4]}.{words[5]} together")
    if half and words[4] in ("bf16", "tf32"):
        context.unsupported(f"the types .f16.{words[4]}")
    if columns % 8 or not 8 <= columns <= 256 or depth * a_type.storage.itemsize != _DEPTH_BYTES:
        context.unsupported(f"the shape .{words[2]} with .{words[4]}")
    operands = context.instruction.operands
    wide = a_type in (BF16, F16)
    from_registers = isinstance(context.operand(1), Vector)
    scales = 2 + (2 if wide and not from_registers else 1 if wide else 0)
    if len(operands) != 4 + scales:
        context.unsupported(f"the form with {len(operands)} operands")
    flags = [_flag(context, operand) for operand in operands[4:]]
    if flags[0] not in (1, -1) or flags[1] not in (1, -1) or any(flag not in (0, 1) for flag in flags[2:]):
        context.unsupported(f"scales and transpositions {flags}")
    accumulators = _numbers(context, context.operand(0), columns // (4 if half else 2))
    static = Shape(
        columns,
        depth,
        a_type,
        b_type,
        half,
        wide and not from_registers and flags[2] == 1,
        wide and flags[-1] == 1,
        flags[0] != flags[1],
        accumulators,
        _numbers(context, context.operand(1), 4) if from_registers else (),
    )
    a_source = None if from_registers else context.source(context.operand(1), 64)
    b_source = context.source(context.operand(2), 64)
    accumulate = context.source(context.operand(3), 1)
    kind = context.kind(proxy="async")
    uniform = _uniform(context)

    def step(warp: Warp) -> Outcome | None:
        try:
            a = None if a_source is None else decode_descriptor(uniform(warp, a_source))
            b = decode_descriptor(uniform(warp, b_source))
        except AsyncMisuseError as error:
            raise AsyncMisuseError(f"{kind.opcode}: {error}", line=kind.line, where=warp.describe()) from None
        WarpgroupPipe.of(warp).issue(warp, static, kind, (a, b), bool(uniform(warp, accumulate)))
        return None

    return step


@instruction("wgmma.fence", section="9.7.17.7.1", observable=True)
def fence(instruction: Instruction, context: DecodeContext) -> Step:
    """Order the warp's register accesses before wgmma that follow."""
    context.require("sync", "aligned")
    line, opcode = instruction.line, instruction.opcode

    def step(warp: Warp) -> Outcome | None:
        WarpgroupPipe.of(warp).fence(warp)
        for hook in warp.machine.fence_hooks:
            hook(warp, opcode, line)
        return None

    return step


@instruction("wgmma.commit_group", section="9.7.17.7.2", observable=True)
def commit_group(instruction: Instruction, context: DecodeContext) -> Step:
    """Close the group of the wgmma that the warp has issued since its last commit."""
    context.require("sync", "aligned")

    def step(warp: Warp) -> Outcome | None:
        WarpgroupPipe.of(warp).commit(warp)
        for hook in warp.machine.async_hooks:
            hook(AsyncEvent("commit", warp, warp.active_bits, "wgmma", instruction.line))
        return None

    return step


@instruction("wgmma.wait_group", section="9.7.17.7.3", observable=True)
def wait_group(instruction: Instruction, context: DecodeContext) -> Step:
    """Wait until at most N of the warp's latest groups are incomplete; the others' registers are defined."""
    context.require("sync", "aligned")
    allowed = group_count(context, context.operand(0))

    def step(warp: Warp) -> Outcome | None:
        pipe = WarpgroupPipe.of(warp)
        if missing := pipe.wait(warp, allowed):
            return Blocked(Wait(pipe.channel(warp), f"{missing} wgmma groups (all but {allowed})"))
        for hook in warp.machine.async_hooks:
            hook(AsyncEvent("wait", warp, warp.active_bits, "wgmma", instruction.line, allowed=allowed))
        return None

    return step


def _flag(context: DecodeContext, operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        context.unsupported(f"operand {operand} where an immediate is expected")
    value = operand.value & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _numbers(context: DecodeContext, operand: Operand, count: int) -> tuple[int, ...]:
    if not isinstance(operand, Vector) or len(operand.elements) != count:
        context.unsupported(f"operand {operand} where {count} registers are expected")
    numbers = tuple(context.register_number(element) for element in operand.elements)
    if len(set(numbers)) != count:
        context.unsupported("a register named twice")
    return numbers


def _uniform(context: DecodeContext) -> Callable[[Warp, Source], int]:
    line, opcode = context.instruction.line, context.instruction.opcode

    def read(warp: Warp, source: Source) -> int:
        values = source(warp)
        first = values[0]
        if not (values == first).all():
            raise AsyncMisuseError(
                f"{opcode}: descriptor or scale-d differs between lanes", line=line, where=warp.describe()
            )
        return int(first)

    return read
