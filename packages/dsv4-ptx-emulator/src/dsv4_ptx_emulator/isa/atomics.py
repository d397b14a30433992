# SPDX-License-Identifier: Apache-2.0
"""atom and red (PTX ISA 9.7.15.5 and 9.7.15.6).

The lanes take their turns in a random order, which for floats decides the result and for all decides who
sees which old value. Without semantics they are relaxed, without scope of the GPU (ISA, same sections).

In global memory add.f32 flushes subnormal operands and results, unless `.noftz` is written, in shared memory
it does not (9.7.15.5). The ISA is silent about NaN. As an H200 has it, those of f32 and of the 16-bit types
are canonical; add.f64 in shared memory is like add.f64 of registers, and in global memory it hands a NaN
through, a signalling one too. The latter was recorded for NaN in memory; a NaN operand is treated alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.isa.arithmetic import canonical, payload
from dsv4_ptx_emulator.isa.context import DTYPES, DecodeContext, width_of
from dsv4_ptx_emulator.isa.floating import narrow_binary
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.isa.spaces import locate, split
from dsv4_ptx_emulator.machine.outcome import Outcome
from dsv4_ptx_emulator.machine.warp import LANES
from dsv4_ptx_emulator.ptx.module import Instruction

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.warp import Warp

Combine = Callable[[int, int, int], int]
"""New value from the old one and one or two operands, all unsigned; the result is cut to the width."""

_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


def _integer(name: str, letter: str, bits: int) -> Combine | None:
    if letter == "s" and name in ("min", "max"):
        pick = min if name == "min" else max
        return lambda old, b, c: pick(_signed(old, bits), _signed(b, bits))
    table: dict[str, Combine] = {
        "exch": lambda old, b, c: b,
        "cas": lambda old, b, c: c if old == b else old,
        "and": lambda old, b, c: old & b,
        "or": lambda old, b, c: old | b,
        "xor": lambda old, b, c: old ^ b,
        "add": lambda old, b, c: old + b,
        "min": lambda old, b, c: min(old, b),
        "max": lambda old, b, c: max(old, b),
        "inc": lambda old, b, c: 0 if old >= b else old + 1,
        "dec": lambda old, b, c: b if old == 0 or old > b else old - 1,
    }
    bitwise = ("exch", "cas", "and", "or", "xor")
    if (name in bitwise) != (letter == "b") or (name in ("inc", "dec") and (letter, bits) != ("u", 32)):
        return None
    return table.get(name)


def _add_f32(old: int, b: int, c: int) -> int:
    total = np.array([old], np.uint32).view(np.float32) + np.array([b], np.uint32).view(np.float32)
    return int(canonical(total).view(np.uint32)[0])


def _flushed(bits: int) -> int:
    return bits if bits & 0x7F80_0000 else bits & 0x8000_0000


def _add_flushed_f32(old: int, b: int, c: int) -> int:
    return _flushed(_add_f32(_flushed(old), _flushed(b), c))


def _add_f64(old: int, b: int, c: int) -> int:
    first, second = (np.array([bits], np.uint64).view(np.float64) for bits in (old, b))
    return int(payload(first + second, first, second).view(np.uint64)[0])


def _add_passing_f64(old: int, b: int, c: int) -> int:
    for bits in (old, b):
        if bits & (1 << 63) - 1 > 0x7FF << 52:
            return bits
    return _add_f64(old, b, c)


def _float(name: str, type_name: str, in_global: bool, noftz: bool) -> Combine | None:
    if type_name == "f32" and name == "add":
        return _add_flushed_f32 if in_global and not noftz else _add_f32
    if type_name == "f64" and name == "add":
        return _add_passing_f64 if in_global else _add_f64
    base = type_name.removesuffix("x2")
    if base in ("f16", "bf16") and name in ("add", "min", "max"):
        narrow: Any = np.uint32 if type_name.endswith("x2") else np.uint16
        operator = "+" if name == "add" else name

        def combine(old: int, b: int, c: int) -> int:
            result = narrow_binary(np.array([old], narrow), np.array([b], narrow), base, operator)
            return int(result.view(narrow)[0])

        return combine
    return None


def _decode(instruction: Instruction, context: DecodeContext, returns: bool) -> Step:
    words = split(context.modifiers)
    count, rest, noftz = 1, [], "noftz" in words.rest
    for word in words.rest:
        if word in _VECTORS:
            count = _VECTORS[word]
        elif word != "noftz":
            rest.append(word)
    if len(rest) != 2 or words.semantics in ("weak", "volatile", "mmio"):
        context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
    name, type_name = rest
    letter, bits = type_name.rstrip("x0123456789"), width_of(type_name)
    if letter.endswith("f"):
        in_global = _float(name, type_name, True, noftz)
        elsewhere = _float(name, type_name, False, noftz)
    else:
        in_global = elsewhere = _integer(name, letter, bits)
    if (
        in_global is None
        or elsewhere is None
        or bits not in DTYPES
        or (count > 1 and not letter.endswith("f"))
    ):
        context.unsupported(f"operation .{name}.{type_name}")
    targets = context.destinations(context.operand(0), bits) if returns else []
    operands = instruction.operands[1 if returns else 0 :]
    if len(operands) < (3 if name == "cas" else 2):
        context.unsupported(f"the form with {len(instruction.operands)} operands")
    find = locate(context, operands[0], words.space)
    values = context.sources(operands[1], bits)
    others = context.sources(operands[2], bits) if name == "cas" else values
    kind = context.kind(semantics=words.semantics or "relaxed", scope=words.scope or "gpu")
    width = bits // 8

    def step(warp: Warp) -> Outcome | None:
        memory, addresses = find(warp)
        combine = in_global if memory is warp.machine.global_memory else elsewhere
        lanes = [lane for lane in range(LANES) if warp.active_bits >> lane & 1]
        if len(lanes) > 1:
            warp.machine.scheduler.rng.shuffle(lanes)
        old = np.zeros((count, LANES), DTYPES[bits])
        for place in range(count):
            b, c = values[place](warp), others[place](warp)
            for lane in lanes:
                first, second = int(b[lane]), int(c[lane])
                warp.acting = lane
                address = int(addresses[lane]) + place * width
                old[place, lane] = memory.update(
                    address,
                    width,
                    lambda now, first=first, second=second: combine(now, first, second),  # type: ignore[misc]
                    warp,
                    kind,
                )
        warp.acting = -1
        for write, column in zip(targets, old, strict=False):
            write(warp, column)
        return None

    return step


@instruction("atom", section="9.7.15.5", observable=True)
def atom(instruction: Instruction, context: DecodeContext) -> Step:
    """Read, combine, write; gives the old value."""
    return _decode(instruction, context, True)


@instruction("red", section="9.7.15.6", observable=True)
def red(instruction: Instruction, context: DecodeContext) -> Step:
    """Read, combine, write."""
    return _decode(instruction, context, False)
