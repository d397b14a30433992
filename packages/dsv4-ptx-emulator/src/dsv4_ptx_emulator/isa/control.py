# SPDX-License-Identifier: Apache-2.0
"""Control flow (PTX ISA 9.7.14) and what only the machine notices: traps, registers, dependent launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsv4_ptx_emulator.errors import BarrierMisuseError, TrapError
from dsv4_ptx_emulator.isa.context import DecodeContext
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.machine.outcome import BRANCH, EXIT, YIELD, Blocked, Outcome, Wait
from dsv4_ptx_emulator.machine.warp import LANES, Group, bits_of
from dsv4_ptx_emulator.ptx.module import Guard, Immediate, Instruction

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.warp import Warp

_NONE = bytes(LANES)
_ALL = b"\x01" * LANES


def branch(context: DecodeContext, target: int, guard: Guard | None) -> Step:
    """`bra` to step `target` (section 9.7.14.3); lanes that go another way wait in `Warp.others`."""
    if guard is None:

        def always(warp: Warp) -> Outcome | None:
            warp.pc = target
            return BRANCH

        return always
    number = context.register_number(guard.register)
    taken, passed = (_NONE, _ALL) if guard.negated else (_ALL, _NONE)
    negated = guard.negated

    def maybe(warp: Warp) -> Outcome | None:
        predicate = warp.registers[number]
        if warp.full:
            raw = predicate.tobytes()
            if raw == taken:
                warp.pc = target
                return BRANCH
            if raw == passed:
                return None
        active = warp.active_bits
        bits = bits_of(predicate)
        bits = active & (~bits if negated else bits)
        if bits == active:
            warp.pc = target
            return BRANCH
        if not bits:
            return None
        warp.others.append(Group(target, bits))
        warp.set_active(active & ~bits)
        return None

    return maybe


def leave(context: DecodeContext, guard: Guard | None) -> Step:
    """`exit` and `ret` of a kernel (sections 9.7.14.6 and 9.7.14.7)."""
    if guard is None:
        return lambda warp: EXIT
    read = context.source(guard.register, 1)

    def maybe(warp: Warp) -> Outcome | None:
        bits = bits_of(read(warp))
        bits = warp.active_bits & (~bits if guard.negated else bits)
        if not bits:
            return None
        rest = warp.active_bits & ~bits
        if rest:
            warp.others.append(Group(warp.pc + 1, rest))
            warp.set_active(bits)
        return EXIT

    return maybe


@instruction("nanosleep", section="9.7.21.2", observable=True)
def nanosleep(instruction: Instruction, context: DecodeContext) -> Step:
    """Let others run; no time passes for its own sake."""
    context.require("u32")
    context.operand(0)
    return lambda warp: YIELD


@instruction("trap", "brkpt", section="9.7.21.4, 9.7.21.1")
def trap(instruction: Instruction, context: DecodeContext) -> Step:
    """End the run with an error."""
    context.require()

    def step(warp: Warp) -> Outcome | None:
        raise TrapError(f"{instruction.opcode} executed", line=instruction.line, where=warp.describe())

    return step


@instruction("setmaxnreg", section="9.7.21.5")
def setmaxnreg(instruction: Instruction, context: DecodeContext) -> Step:
    """Registers per thread; checked for its range and direction, otherwise without effect.

    How many registers a kernel starts with is not in its PTX, so the pool that `.inc` takes from is not
    modelled.
    """
    context.require("inc", "dec", "sync", "aligned", "u32")
    count = context.operand(0)
    increase = "inc" in context.modifiers
    if not isinstance(count, Immediate) or increase == ("dec" in context.modifiers):
        context.unsupported("this form")
    wanted = count.value

    def step(warp: Warp) -> Outcome | None:
        before = warp.scratch.get("setmaxnreg")
        wrong = not 24 <= wanted <= 256 or wanted % 8
        if wrong or (before is not None and (wanted < before if increase else wanted > before)):
            raise BarrierMisuseError(
                f"{instruction.opcode} {wanted} (now {before or 'unknown'}): must be a multiple of 8 in "
                "24..256, and not below (inc) or above (dec) the present number",
                line=instruction.line,
                where=warp.describe(),
            )
        warp.scratch["setmaxnreg"] = wanted
        return None

    return step


@instruction("griddepcontrol.wait", section="9.7.15.14", observable=True)
def grid_wait(instruction: Instruction, context: DecodeContext) -> Step:
    """Wait until the launch before in the stream has ended, if this one could begin earlier."""
    context.require()

    def step(warp: Warp) -> Outcome | None:
        before = warp.cta.launch.predecessor
        if before is None or before.state == "done":
            for hook in warp.machine.sync_hooks:
                hook(warp, instruction.opcode, ("grid", id(warp.cta.launch)), instruction.line)
            return None
        return Blocked(Wait(("done", id(before)), f"{before.describe()} to end"))

    return step


@instruction("griddepcontrol.launch_dependents", section="9.7.15.14", observable=True)
def grid_launch(instruction: Instruction, context: DecodeContext) -> Step:
    """Allow the next launch in the stream to begin."""
    context.require()

    def step(warp: Warp) -> Outcome | None:
        warp.cta.launch.release_dependents(warp.cta)
        warp.machine.begin_launches()
        return None

    return step


@instruction("activemask.b32", section="9.7.15.12")
def activemask(instruction: Instruction, context: DecodeContext) -> Step:
    """Lanes that execute this together."""
    context.require()
    write = context.destination(context.operand(0), 32)

    def step(warp: Warp) -> Outcome | None:
        write(warp, np.full(LANES, warp.active_bits, np.uint32))
        return None

    return step
