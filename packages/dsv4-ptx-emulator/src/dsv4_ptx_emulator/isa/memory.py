# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and prefetches (PTX ISA 9.7.10.8 to 9.7.10.21).

A load that is stronger than weak may be a poll: if it reads what it read the last time, at every such
load since the last news, the step answers POLL and the scheduler runs the warp again when one of the
addresses is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.isa.context import DTYPES, DecodeContext, width_of
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.isa.spaces import locate, split
from dsv4_ptx_emulator.machine.observer import AccessKind
from dsv4_ptx_emulator.machine.outcome import POLL, Outcome
from dsv4_ptx_emulator.machine.warp import LANES
from dsv4_ptx_emulator.ptx.module import Immediate, Instruction

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.warp import Warp

_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_TYPES = (*(f"{letter}{bits}" for letter in "bus" for bits in (8, 16, 32, 64)), "f16", "bf16", "f32", "f64")
_LOADS = frozenset({"weak", "relaxed", "acquire", "volatile", "mmio", ""})
_STORES = frozenset({"weak", "relaxed", "release", "volatile", "mmio", ""})


def _shape(context: DecodeContext, rest: tuple[str, ...]) -> tuple[int, int, str]:
    """Elements, bits and type of an access from the words that say nothing else."""
    count = 1
    types = []
    for word in rest:
        if word in _VECTORS:
            count = _VECTORS[word]
        elif word in _TYPES:
            types.append(word)
        else:
            context.unsupported(f"modifier .{word}")
    if len(types) != 1:
        context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
    bits = width_of(types[0])
    if bits * count > 256 or (bits * count == 256 and not context.arch.startswith("sm_10")):
        context.unsupported(f"{bits * count // 8} bytes per lane")
    return count, bits, types[0]


def _kind(context: DecodeContext, semantics: str, scope: str) -> AccessKind:
    if semantics in ("volatile", "mmio"):
        scope = scope or "sys"
    return context.kind(semantics=semantics or "weak", scope=scope)


@instruction("ld", section="9.7.10.8, 9.7.10.9", observable=True)
def ld(instruction: Instruction, context: DecodeContext) -> Step:
    """Load one element or a vector per lane."""
    words = split(context.modifiers)
    if words.semantics not in _LOADS:
        context.unsupported(f"modifier .{words.semantics}")
    count, bits, type_name = _shape(context, words.rest)
    signed = type_name[0] == "s"
    targets = context.destinations(context.operand(0), bits, signed=signed)
    if len(targets) != count:
        context.unsupported(f"{len(targets)} destinations")
    find = locate(context, context.operand(1), words.space)
    kind = _kind(context, words.semantics, words.scope)
    width = bits // 8
    polls = words.semantics in ("relaxed", "acquire", "volatile", "mmio")
    pc = context.pc
    dtype = DTYPES[bits]
    target = targets[0]

    def one(warp: Warp) -> Outcome | None:
        memory, addresses = find(warp)
        if warp.full:
            values = memory.gather(addresses, width, 1, warp, kind)
            target(warp, values)
        else:
            active = warp.active
            addresses = addresses[active]
            values = memory.gather(addresses, width, 1, warp, kind)
            spread = np.zeros(LANES, dtype)
            spread[active] = values
            target(warp, spread)
        if polls and memory is warp.machine.global_memory:
            return _poll(warp, pc, addresses, values)
        return None

    def many(warp: Warp) -> Outcome | None:
        memory, addresses = find(warp)
        if warp.full:
            columns = np.ascontiguousarray(memory.gather(addresses, width, count, warp, kind).T)
        else:
            active = warp.active
            found = memory.gather(addresses[active], width, count, warp, kind)
            columns = np.zeros((count, LANES), dtype)
            columns[:, active] = found.T
        for write, values in zip(targets, columns, strict=True):
            write(warp, values)
        return None

    return one if count == 1 else many


def _poll(warp: Warp, pc: int, addresses: NDArray[np.uint64], values: NDArray[Any]) -> Outcome | None:
    raw = values.tobytes()
    key = (pc, warp.active_bits)
    before = warp.polls.get(key)
    if before is not None and before[1] == raw and np.array_equal(before[0], addresses):
        warp.stale += 1
        if warp.stale >= len(warp.polls):
            warp.stale = 0
            if not warp.polling:
                warp.polling = True
                for hook in warp.machine.event_hooks:
                    hook(warp, "poll", {"line": warp.program.line_of(pc)})
            return POLL
        return None
    if before is not None:
        warp.polls.clear()
        warp.polling = False
    warp.stale = 0
    warp.polls[key] = (addresses, raw)
    return None


@instruction("st", section="9.7.10.11", observable=True)
def st(instruction: Instruction, context: DecodeContext) -> Step:
    """Store one element or a vector per lane."""
    words = split(context.modifiers)
    if (
        words.semantics not in _STORES
        or words.space in ("const", "param", "param::entry")
        or "nc" in words.caching
    ):
        context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
    count, bits, _ = _shape(context, words.rest)
    find = locate(context, context.operand(0), words.space)
    sources = context.sources(context.operand(1), bits)
    if len(sources) != count:
        context.unsupported(f"{len(sources)} sources")
    kind = _kind(context, words.semantics, words.scope)
    dtype = DTYPES[bits]
    source = sources[0]

    def one(warp: Warp) -> Outcome | None:
        memory, addresses = find(warp)
        values = source(warp)
        if not warp.full:
            active = warp.active
            addresses, values = addresses[active], values[active]
        memory.scatter(addresses, values, warp, kind)
        return None

    def many(warp: Warp) -> Outcome | None:
        memory, addresses = find(warp)
        values = np.empty((LANES, count), dtype)
        for place, read in enumerate(sources):
            values[:, place] = read(warp)
        if not warp.full:
            active = warp.active
            addresses, values = addresses[active], values[active]
        memory.scatter(addresses, values, warp, kind)
        return None

    return one if count == 1 else many


@instruction("prefetch", "prefetchu", section="9.7.10.16")
def prefetch(instruction: Instruction, context: DecodeContext) -> Step:
    """Bring a line, or a tensor map, nearer; without effect on what is computed."""
    for word in split(context.modifiers).rest:
        if word not in ("L1", "L2", "tensormap"):
            context.unsupported(f"modifier .{word}")
    context.address(context.operand(0))
    return lambda warp: None


@instruction("createpolicy", section="9.7.10.21")
def createpolicy(instruction: Instruction, context: DecodeContext) -> Step:
    """A cache policy; opaque, and without effect on what is computed."""
    if (
        not context.modifiers
        or context.modifiers[0] not in ("fractional", "range")
        or context.modifiers[-1] != "b64"
    ):
        context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
    write = context.destination(context.operand(0), 64)
    policy = context.source(Immediate(0), 64)
    return lambda warp: write(warp, policy(warp))
