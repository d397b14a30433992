# SPDX-License-Identifier: Apache-2.0
"""Barriers of CTAs and clusters, and fences (PTX ISA 9.7.15).

Memory is sequentially consistent here: a fence changes nothing by itself and tells the observers, which
is where missing and too narrow ones are found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dsv4_ptx_emulator.errors import BarrierMisuseError
from dsv4_ptx_emulator.isa.context import DecodeContext
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.machine.barriers import BARRIERS, NamedBarrier
from dsv4_ptx_emulator.machine.outcome import CONVERGE, Blocked, Outcome, Wait
from dsv4_ptx_emulator.machine.warp import LANES, bits_of
from dsv4_ptx_emulator.ptx.module import Instruction, Operand

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.warp import Warp

_FENCE_WORDS = frozenset(
    {
        "sc",
        "acq_rel",
        "acquire",
        "release",
        "cta",
        "cluster",
        "gpu",
        "sys",
        "gl",
        "proxy",
        "alias",
        "async",
        "async::generic",
        "async::global",
        "async::shared::cta",
        "async::shared::cluster",
        "global",
        "shared::cta",
        "shared::cluster",
        "tensormap::generic",
        "mbarrier_init",
        "sync_restrict::shared::cta",
        "sync_restrict::shared::cluster",
    }
)


def _barrier(warp: Warp, number: int, line: int) -> NamedBarrier:
    if not 0 <= number < BARRIERS:
        raise BarrierMisuseError(f"there is no barrier {number}", line=line, where=warp.describe())
    barriers = warp.cta.barriers
    if number not in barriers:
        barriers[number] = NamedBarrier(warp.cta, number)
    return barriers[number]


def _tell(warp: Warp, name: str, barrier: NamedBarrier, phase: int, line: int) -> None:
    for hook in warp.machine.sync_hooks:
        hook(warp, name, (*barrier.channel, phase), line)


@instruction(
    "bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync", section="9.7.15.1", observable=True
)
def bar_sync(instruction: Instruction, context: DecodeContext) -> Step:
    """Arrive at a named barrier and wait for it."""
    context.require("aligned")
    return _sync(context, instruction.operands, lambda warp: (0, 0), lambda warp, barrier: None)


@instruction(
    "bar.arrive",
    "bar.cta.arrive",
    "barrier.arrive",
    "barrier.cta.arrive",
    section="9.7.15.1",
    observable=True,
)
def bar_arrive(instruction: Instruction, context: DecodeContext) -> Step:
    """Arrive at a named barrier."""
    context.require("aligned")
    number = context.uniform(context.operand(0), 32)
    threads = context.uniform(context.operand(1), 32)
    line = instruction.line

    def step(warp: Warp) -> Outcome | None:
        if not warp.converged:
            return CONVERGE
        barrier = _barrier(warp, number(warp), line)
        phase = barrier.arrive(warp, threads(warp), line)
        _tell(warp, "bar.arrive", barrier, phase, line)
        return None

    return step


@instruction("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red", section="9.7.15.1", observable=True)
def bar_red(instruction: Instruction, context: DecodeContext) -> Step:
    """Arrive, wait, and reduce a predicate over all threads."""
    context.require("aligned", "popc", "and", "or", "u32", "pred")
    kind = next((word for word in context.modifiers if word in ("popc", "and", "or")), "")
    if not kind:
        context.unsupported("this form")
    write = context.destination(context.operand(0), 32 if kind == "popc" else 1)
    read = context.source(instruction.operands[-1], 1)

    def vote(warp: Warp) -> tuple[int, int]:
        return warp.active_bits, warp.active_bits & bits_of(read(warp))

    def finish(warp: Warp, barrier: NamedBarrier) -> None:
        lanes = sum(active.bit_count() for active, _ in barrier.result)
        ones = sum(bits.bit_count() for _, bits in barrier.result)
        if kind == "popc":
            write(warp, np.full(LANES, ones, np.uint32))
        else:
            write(warp, np.full(LANES, ones == lanes if kind == "and" else ones > 0))

    return _sync(context, instruction.operands[1:-1], vote, finish)


def _sync(
    context: DecodeContext,
    operands: tuple[Operand, ...],
    vote: Callable[[Warp], tuple[int, int]],
    finish: Callable[[Warp, NamedBarrier], None],
) -> Step:
    if len(operands) not in (1, 2):
        context.unsupported(f"the form with {len(operands)} operands")
    number = context.uniform(operands[0], 32)
    threads = context.uniform(operands[1], 32) if len(operands) == 2 else None
    line = context.instruction.line

    def step(warp: Warp) -> Outcome | None:
        if not warp.converged:
            return CONVERGE
        waiting = warp.scratch.get("bar")
        if waiting is None:
            barrier = _barrier(warp, number(warp), line)
            phase = barrier.arrive(warp, threads(warp) if threads else None, line, vote(warp))
            _tell(warp, "bar.arrive", barrier, phase, line)
        else:
            barrier, phase = waiting
        if barrier.phase == phase:
            warp.scratch["bar"] = (barrier, phase)
            return Blocked(Wait(barrier.channel, barrier.describe()))
        warp.scratch["bar"] = None
        finish(warp, barrier)
        _tell(warp, "bar.pass", barrier, phase, line)
        return None

    return step


@instruction("barrier.cluster.arrive", section="9.7.15.3", observable=True)
def cluster_arrive(instruction: Instruction, context: DecodeContext) -> Step:
    """Arrive at the cluster's barrier."""
    context.require("release", "relaxed", "aligned")
    line = instruction.line

    def step(warp: Warp) -> Outcome | None:
        barrier = warp.cta.cluster.barrier
        phase = barrier.phase
        barrier.arrive(warp, line)
        for hook in warp.machine.sync_hooks:
            hook(warp, instruction.opcode, (*barrier.channel, phase), line)
        return None

    return step


@instruction("barrier.cluster.wait", section="9.7.15.3", observable=True)
def cluster_wait(instruction: Instruction, context: DecodeContext) -> Step:
    """Wait for the cluster's barrier."""
    context.require("acquire", "aligned")
    line = instruction.line

    def step(warp: Warp) -> Outcome | None:
        barrier = warp.cta.cluster.barrier
        if not barrier.passes(warp, line):
            return Blocked(Wait(barrier.channel, barrier.describe()))
        for hook in warp.machine.sync_hooks:
            hook(warp, instruction.opcode, (*barrier.channel, barrier.phase - 1), line)
        return None

    return step


@instruction("fence", "membar", section="9.7.15.4", observable=True)
def fence(instruction: Instruction, context: DecodeContext) -> Step:
    """Memory fence and proxy fence."""
    context.require(*_FENCE_WORDS)
    opcode, line = instruction.opcode, instruction.line

    def step(warp: Warp) -> Outcome | None:
        for hook in warp.machine.fence_hooks:
            hook(warp, opcode, line)
        return None

    return step
