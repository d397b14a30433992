# SPDX-License-Identifier: Apache-2.0
"""What threads hand to the tensor core: tcgen05.mma, .cp, .commit (PTX ISA 9.4, sections 9.7.18.9, .10, .12).

One thread issues; lanes that execute such an instruction together issue it one after the other. Refused by
name: `.sp`, `.ws`, `.ashift`, integer and mxf4 kinds, decompression in `.cp`, and, being registered
nowhere, `tcgen05.shift`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from dsv4_ptx_emulator.engines.tensor_core import Copy, Multiply, TensorPipe
from dsv4_ptx_emulator.engines.tensor_operands import parts_of
from dsv4_ptx_emulator.errors import AsyncMisuseError
from dsv4_ptx_emulator.formats.tensor_core import DEPTHS, decode_instruction, decode_shared
from dsv4_ptx_emulator.isa.bulk import windows_of
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.isa.shared_operands import lanes_of, shared_address
from dsv4_ptx_emulator.isa.tensor_memory import ctas_of_group, pair_of
from dsv4_ptx_emulator.machine.cta import SHARED_STRIDE
from dsv4_ptx_emulator.machine.tensor_memory import split_address
from dsv4_ptx_emulator.ptx.module import Address, Immediate, Vector

if TYPE_CHECKING:
    from dsv4_ptx_emulator.engines.tensor_operands import Part
    from dsv4_ptx_emulator.formats.matrix import MatrixDescriptor
    from dsv4_ptx_emulator.isa.context import DecodeContext, Source
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.outcome import Outcome
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Instruction

_GROUPS = ("cta_group::1", "cta_group::2")
_COLLECTORS = tuple(f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard"))
_WHOLE = ((0, 0, 128),)
_COPIES: dict[tuple[str, ...], tuple[int, tuple[tuple[int, int, int], ...]]] = {
    ("128x256b",): (32, _WHOLE),
    ("128x128b",): (16, _WHOLE),
    ("4x256b",): (32, tuple((row, 32 * row, 1) for row in range(4))),
    ("64x128b", "warpx2::02_13"): (16, ((0, 0, 64), (0, 64, 64))),
    ("64x128b", "warpx2::01_23"): (16, ((0, 0, 32), (0, 32, 32), (32, 64, 32), (32, 96, 32))),
    ("32x128b", "warpx4"): (16, tuple((0, lane, 32) for lane in range(0, 128, 32))),
}
"""Bytes of a row, and which rows go to which lanes: (row, lane, rows). Section 9.7.18.9.2."""


@instruction("tcgen05.cp", section="9.7.18.9.2", observable=True)
def copy(instruction: Instruction, context: DecodeContext) -> Step:
    """Copy rows of shared memory to lanes of tensor memory, asynchronously, in both CTAs of a pair."""
    ctas = ctas_of_group(context)
    words = tuple(word for word in context.modifiers if word not in _GROUPS)
    if words not in _COPIES:
        context.unsupported(f"the shape .{'.'.join(words)}")
    row_bytes, lanes = _COPIES[words]
    target = context.address(context.operand(0))
    source = context.source(context.operand(1), 64)
    kind = context.kind(proxy="async")

    def step(warp: Warp) -> Outcome | None:
        group = pair_of(warp, ctas, kind)
        targets, sources = target(warp), source(warp)
        pipe = TensorPipe.of(warp.cta)
        for number in lanes_of(warp):
            lane, column = split_address(int(targets[number]) & 0xFFFFFFFF)
            if lane:
                _misuse(kind, warp, f"the destination begins at lane {lane}, not 0")
            found = _shared_descriptor(int(sources[number]), kind, warp)
            pipe.issue(Copy(kind, (warp.index, number), group, found, row_bytes, lanes, column))
        return None

    return step


@instruction("tcgen05.mma", section="9.7.18.10.10.1", observable=True)
def multiply(instruction: Instruction, context: DecodeContext) -> Step:
    """Multiply matrices, with block scaling or without, and add to tensor memory, asynchronously."""
    ctas = ctas_of_group(context)
    words = [word for word in context.modifiers if word not in _GROUPS and word not in _COLLECTORS]
    name = words[0].removeprefix("kind::") if words else ""
    if not words or not words[0].startswith("kind::") or name not in DEPTHS:
        context.unsupported(f"modifier .{words[0] if words else ''}")
    scaled = name == "mxf8f6f4"
    allowed = ("block_scale", "scale_vec::1X", "block32") if scaled else ()
    for word in words[1:]:
        if word not in allowed:
            context.unsupported(f"modifier .{word}")
    if scaled and "block_scale" not in words:
        context.unsupported("the kind without .block_scale")
    operands = list(context.instruction.operands)
    target = context.address(context.operand(0))
    a_operand = context.operand(1)
    in_memory = isinstance(a_operand, Address)
    a_source = context.address(a_operand) if in_memory else context.source(a_operand, 64)
    b_source = context.source(context.operand(2), 64)
    shape_source = context.source(context.operand(3), 32)
    rest = operands[4:]
    scale_sources: tuple[Source, Source] | None = None
    if scaled:
        if len(rest) != 3:
            context.unsupported(f"the form with {len(operands)} operands")
        scale_sources = context.address(rest[0]), context.address(rest[1])
        rest = rest[2:]
    mask_sources: list[Source] = []
    if rest and isinstance(rest[0], Vector):
        if scaled or len(rest[0].elements) != 4 * ctas:
            context.unsupported(f"operand {rest[0]}")
        mask_sources = context.sources(rest[0], 32)
        rest = rest[1:]
    if not 1 <= len(rest) <= 2 or (len(rest) == 2 and name not in ("f16", "tf32")):
        context.unsupported(f"the form with {len(operands)} operands")
    accumulate = context.source(rest[0], 1)
    scale_down = 0
    if len(rest) == 2:
        if not isinstance(rest[1], Immediate) or not 0 <= rest[1].value <= 15:
            context.unsupported(f"operand {rest[1]} where an immediate from 0 to 15 is expected")
        scale_down = rest[1].value
    kind = context.kind(proxy="async")
    depth = DEPTHS[name]

    def step(warp: Warp) -> Outcome | None:
        group = pair_of(warp, ctas, kind)
        pipe = TensorPipe.of(warp.cta)
        targets, shapes, adds = target(warp), shape_source(warp), accumulate(warp)
        a_values, b_values = a_source(warp), b_source(warp)
        scales = [read(warp) for read in scale_sources] if scale_sources else []
        masks = [read(warp) for read in mask_sources]
        for number in lanes_of(warp):
            try:
                shape = decode_instruction(int(shapes[number]), name, ctas)
            except AsyncMisuseError as error:
                _misuse(kind, warp, str(error))
            lane, column = split_address(int(targets[number]) & 0xFFFFFFFF)
            parts = parts_of(shape.rows, shape.columns, ctas, lane, column)
            if parts is None:
                _misuse(kind, warp, f"D with M = {shape.rows} at lane {lane}")
            a: MatrixDescriptor | tuple[Part, ...]
            if in_memory:
                if shape.a.width < 8 or shape.a_transposed or (ctas, shape.rows) == (2, 128):
                    _misuse(kind, warp, "A of this type or shape in tensor memory is not emulated")
                a_lane, a_column = split_address(int(a_values[number]) & 0xFFFFFFFF)
                placed = parts_of(shape.rows, depth * shape.a.width // 32, ctas, a_lane, a_column)
                if placed is None or a_lane != lane:
                    _misuse(kind, warp, f"A with M = {shape.rows} at lane {a_lane}, D at lane {lane}")
                a = placed
            else:
                a = _shared_descriptor(int(a_values[number]), kind, warp)
            b = _shared_descriptor(int(b_values[number]), kind, warp)
            factors = None
            if scales:
                # Bits 30 and 31 are CuTe's number of the byte, which the instruction descriptor repeats.
                starts = [split_address(int(values[number]) & 0x3FFFFFFF) for values in scales]
                if starts[0][0] or starts[1][0]:
                    _misuse(kind, warp, "scale factors that do not begin at lane 0")
                factors = starts[0][1], starts[1][1]
            disabled = None
            if masks:
                bits = np.array([values[number] for values in masks], np.uint32)
                flat = np.unpackbits(bits.view(np.uint8), bitorder="little")
                disabled = flat.astype(np.bool_).reshape(ctas, 128)
            thread = (warp.index, number)
            add = bool(adds[number])
            pipe.issue(
                Multiply(kind, thread, group, shape, depth, a, b, parts, factors, add, scale_down, disabled)
            )
        return None

    return step


@instruction("tcgen05.commit", section="9.7.18.12.1", observable=True)
def commit(instruction: Instruction, context: DecodeContext) -> Step:
    """Arrive at an mbarrier, or at several CTAs', once the thread's tcgen05 operations are complete."""
    ctas = ctas_of_group(context)
    context.require(*_GROUPS, "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64")
    words = context.modifiers
    multicast = "multicast::cluster" in words
    if "mbarrier::arrive::one" not in words or len(instruction.operands) != 1 + multicast:
        context.unsupported("this form")
    barrier = shared_address(context, context.operand(0), local=False, generic="shared::cluster" not in words)
    mask = context.source(context.operand(1), 16) if multicast else None
    kind = context.kind(proxy="async", semantics="release", scope="cluster")

    def step(warp: Warp) -> Outcome | None:
        group = pair_of(warp, ctas, kind)
        addresses = barrier(warp)
        masks = mask(warp) if mask is not None else None
        for number in lanes_of(warp):
            at = int(addresses[number])
            told = [at]
            if masks is not None:
                told = [window + at % SHARED_STRIDE for window in windows_of(warp, int(masks[number]), kind)]
            for each in told:
                warp.shared.locate(each, 8, warp, kind)
            TensorPipe.of(warp.cta).commit(kind, (warp.index, number), group, told)
        return None

    return step


def _shared_descriptor(bits: int, kind: AccessKind, warp: Warp) -> MatrixDescriptor:
    try:
        return decode_shared(bits)
    except AsyncMisuseError as error:
        _misuse(kind, warp, str(error))


def _misuse(kind: AccessKind, warp: Warp, text: str) -> NoReturn:
    raise AsyncMisuseError(f"{kind.opcode}: {text}", line=kind.line, where=warp.describe())
