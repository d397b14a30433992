# SPDX-License-Identifier: Apache-2.0
"""What lanes of a warp do together: shfl, vote, match, redux, elect, bar.warp.sync (PTX ISA 9.7.10, 9.7.15).

The lanes in the member mask that have not exited must be together; until they are, the step answers CONVERGE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.errors import DivergenceError
from dsv4_ptx_emulator.isa.context import DecodeContext
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.machine.outcome import CONVERGE, Outcome
from dsv4_ptx_emulator.machine.warp import LANE_IDS, LANES, bits_of, mask_of
from dsv4_ptx_emulator.ptx.module import Immediate, Instruction, Operand

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.warp import Warp

Members = Callable[["Warp"], "list[int] | None"]
_LANES = LANE_IDS.astype(np.int64)


def member_groups(context: DecodeContext, operand: Operand) -> Members:
    """The sets of lanes (as bits) that execute an instruction together; None while some are missing."""
    instruction = context.instruction
    constant = operand.value & 0xFFFF_FFFF if isinstance(operand, Immediate) else None
    read = context.source(operand, 32)

    def members(warp: Warp) -> list[int] | None:
        if constant is not None:
            masks = [constant]
        else:
            masks = sorted({int(mask) for mask in read(warp)[warp.active]})
        covered = 0
        for mask in masks:
            covered |= mask
        if warp.active_bits & ~covered:
            raise DivergenceError(
                f"{instruction.opcode}: lanes {warp.active_bits & ~covered:#010x} execute it, but are not in "
                f"its member mask {covered:#010x}",
                line=instruction.line,
                where=warp.describe(),
            )
        if covered & warp.live_bits & ~warp.active_bits:
            return None
        return [mask & warp.active_bits for mask in masks]

    return members


@instruction("shfl.sync", section="9.7.10.6")
def shfl(instruction: Instruction, context: DecodeContext) -> Step:
    """Read a register of another lane."""
    if context.modifiers[1:] != ("b32",) or context.modifiers[0] not in ("up", "down", "bfly", "idx"):
        context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
    mode = context.modifiers[0]
    write, flag = context.pair(context.operand(0), 32)
    value = context.source(context.operand(1), 32)
    b = context.source(context.operand(2), 32)
    c = context.source(context.operand(3), 32)
    members = member_groups(context, context.operand(4))
    constant = all(isinstance(instruction.operands[place], Immediate) for place in (2, 3))
    cached: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def sources(warp: Warp) -> tuple[NDArray[Any], NDArray[Any]]:
        lane = b(warp).astype(np.int64) & 31
        control = c(warp).astype(np.int64)
        segment, clamp = control >> 8 & 31, control & 31
        lowest = _LANES & segment
        limit = lowest | clamp & ~segment
        if mode == "up":
            source = _LANES - lane
            valid = source >= limit
        elif mode == "down":
            source = _LANES + lane
            valid = source <= limit
        elif mode == "bfly":
            source = _LANES ^ lane
            valid = source <= limit
        else:
            source = lowest | lane & ~segment
            valid = source <= limit
        return np.where(valid, source, _LANES), valid

    def step(warp: Warp) -> Outcome | None:
        if members(warp) is None:
            return CONVERGE
        if constant:
            if not cached:
                cached.append(sources(warp))
            source, valid = cached[0]
        else:
            source, valid = sources(warp)
        write(warp, value(warp)[source])
        flag(warp, valid)
        return None

    return step


@instruction("vote.sync", section="9.7.15.10")
def vote(instruction: Instruction, context: DecodeContext) -> Step:
    """Reduce a predicate over lanes."""
    kind = context.modifiers[0]
    if context.modifiers not in (("all", "pred"), ("any", "pred"), ("uni", "pred"), ("ballot", "b32")):
        context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
    write = context.destination(context.operand(0), 32 if kind == "ballot" else 1)
    read = context.source(context.operand(1), 1)
    members = member_groups(context, context.operand(2))

    def step(warp: Warp) -> Outcome | None:
        groups = members(warp)
        if groups is None:
            return CONVERGE
        bits = bits_of(read(warp))
        result: NDArray[Any] = np.zeros(LANES, np.uint32 if kind == "ballot" else np.bool_)
        for group in groups:
            ones = bits & group
            answer = {
                "all": ones == group,
                "any": ones != 0,
                "uni": ones in (0, group),
                "ballot": ones,
            }[kind]
            result[mask_of(group)] = answer
        write(warp, result)
        return None

    return step


@instruction("match", section="9.7.15.11")
def match(instruction: Instruction, context: DecodeContext) -> Step:
    """Lanes with the same value."""
    kind, bits = context.modifiers[0], {"b32": 32, "b64": 64}.get(context.modifiers[-1], 0)
    if kind not in ("any", "all") or context.modifiers[1:-1] != ("sync",) or not bits:
        context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
    write, flag = context.pair(context.operand(0), 32)
    read = context.source(context.operand(1), bits)
    members = member_groups(context, context.operand(2))

    def step(warp: Warp) -> Outcome | None:
        groups = members(warp)
        if groups is None:
            return CONVERGE
        values = read(warp)
        result, same = np.zeros(LANES, np.uint32), np.zeros(LANES, np.bool_)
        for group in groups:
            lanes = mask_of(group)
            for number in np.unique(values[lanes]):
                equal = lanes & (values == number)
                together = bits_of(equal)
                if kind == "any":
                    result[equal] = together
                elif together == group:
                    result[lanes], same[lanes] = group, True
        write(warp, result)
        flag(warp, same)
        return None

    return step


_REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("redux.sync", section="9.7.15.13")
def redux(instruction: Instruction, context: DecodeContext) -> Step:
    """Reduce a register over lanes."""
    name, type_name = context.modifiers[0], context.modifiers[-1]
    extra = context.modifiers[1:-1]
    allowed = {"and": ("b32",), "or": ("b32",), "xor": ("b32",), "add": ("u32", "s32")}
    if name not in _REDUCTIONS or type_name not in allowed.get(name, ("u32", "s32", "f32")):
        context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
    if any(word not in ("abs", "NaN") for word in extra) or (extra and type_name != "f32"):
        context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
    view: Any = {"s32": np.int32, "f32": np.float32}.get(type_name, np.uint32)
    function = _REDUCTIONS[name]
    if type_name == "f32" and "NaN" not in extra:
        function = np.fmin if name == "min" else np.fmax
    write = context.destination(context.operand(0), 32)
    read = context.source(context.operand(1), 32)
    members = member_groups(context, context.operand(2))

    def step(warp: Warp) -> Outcome | None:
        groups = members(warp)
        if groups is None:
            return CONVERGE
        values = read(warp).view(view)
        if "abs" in extra:
            values = np.abs(values)
        result = np.zeros(LANES, view)
        for group in groups:
            lanes = mask_of(group)
            result[lanes] = function.reduce(values[lanes], dtype=view)
        if type_name == "f32":
            nan = np.isnan(result)
            write(warp, np.where(nan, np.uint32(0x7FFF_FFFF), result.view(np.uint32)))
        else:
            write(warp, result.view(np.uint32))
        return None

    return step


@instruction("elect.sync", section="9.7.15.15")
def elect(instruction: Instruction, context: DecodeContext) -> Step:
    """Choose one lane: the lowest, since the choice must be the same every time."""
    context.require()
    write, flag = context.pair(context.operand(0), 32)
    members = member_groups(context, context.operand(1))
    chosen_lanes: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}

    def step(warp: Warp) -> Outcome | None:
        groups = members(warp)
        if groups is None:
            return CONVERGE
        if len(groups) == 1:
            answer = chosen_lanes.get(groups[0])
            if answer is None:
                answer = chosen_lanes[groups[0]] = _leaders(groups)
        else:
            answer = _leaders(groups)
        write(warp, answer[0])
        flag(warp, answer[1])
        return None

    return step


def _leaders(groups: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    leader, chosen = np.zeros(LANES, np.uint32), np.zeros(LANES, np.bool_)
    for group in groups:
        first = (group & -group).bit_length() - 1
        leader[mask_of(group)] = first
        chosen[first] = True
    return leader, chosen


@instruction("bar.warp.sync", section="9.7.15.2", observable=True)
def warp_sync(instruction: Instruction, context: DecodeContext) -> Step:
    """Wait for lanes of the warp."""
    context.require()
    members = member_groups(context, context.operand(0))
    line = instruction.line

    def step(warp: Warp) -> Outcome | None:
        if members(warp) is None:
            return CONVERGE
        for hook in warp.machine.sync_hooks:
            hook(warp, "bar.warp", ("bar.warp", id(warp)), line)
        return None

    return step
