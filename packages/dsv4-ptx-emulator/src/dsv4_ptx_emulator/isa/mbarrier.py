# SPDX-License-Identifier: Apache-2.0
"""The mbarrier instructions (PTX ISA 9.4, section 9.7.15.16).

Lanes that execute one of them together do so one after the other, lowest first, within one step. A lane's
state token is the object as that lane found it.

`try_wait` blocks: the machine runs others until the phase completes. Once in a while, by seed, it gives up at
once and returns false, as its unspecified time limit allows, so that a program's retry loop is exercised; the
second try of the same wait never does, or a run could be made arbitrarily long. Rejected: returning false
each time; programs that wait would then take most of the steps.

Limit: the time limit never ends a wait later. A program that looks at something else between two tries, such
as a deadline, and waits for a phase that never completes is reported as deadlocked at the try_wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dsv4_ptx_emulator.engines.barriers import BarrierWait, change_barrier, channel_of
from dsv4_ptx_emulator.errors import BarrierMisuseError
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.isa.shared_operands import lanes_of, shared_address
from dsv4_ptx_emulator.machine.mbarrier import MBarrier, pending_count, phase_parity
from dsv4_ptx_emulator.machine.outcome import YIELD, Blocked, Outcome
from dsv4_ptx_emulator.machine.warp import LANES
from dsv4_ptx_emulator.ptx.module import Sink

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.isa.context import DecodeContext, Source
    from dsv4_ptx_emulator.machine.memory import Memory
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Instruction, Operand

SPACES = ("shared", "shared::cta", "shared::cluster")
SPURIOUS = 1 / 16
"""Probability that a try_wait that would have to wait returns false instead."""


@instruction("mbarrier.init", section="9.7.15.16.12", observable=True)
def init(instruction: Instruction, context: DecodeContext) -> Step:
    """Make an mbarrier object with a count of expected arrivals."""
    context.require("shared", "shared::cta", "b64")
    address = _address(context, context.operand(0), local=True)
    count = context.source(context.operand(1), 32)
    kind = context.kind()

    def step(warp: Warp) -> Outcome | None:
        addresses, counts = address(warp), count(warp)
        live = _live(warp)
        for lane in lanes_of(warp):
            at = int(addresses[lane])
            try:
                if at in live and _is_barrier(warp.shared, at):
                    raise BarrierMisuseError("initialised again without mbarrier.inval")
                bits = MBarrier.initialise(int(counts[lane])).to_bits()
            except BarrierMisuseError as error:
                raise _placed(error, warp, kind, at) from None
            warp.acting = lane
            warp.shared.scatter(addresses[lane : lane + 1], np.array([bits], np.uint64), warp, kind)
            live.add(at)
        warp.acting = -1
        return None

    return step


@instruction("mbarrier.inval", section="9.7.15.16.13", observable=True)
def inval(instruction: Instruction, context: DecodeContext) -> Step:
    """End the life of an mbarrier object, so that its memory may be used for something else."""
    context.require("shared", "shared::cta", "b64")
    address = _address(context, context.operand(0), local=True)
    kind = context.kind()

    def step(warp: Warp) -> Outcome | None:
        addresses = address(warp)
        for lane in lanes_of(warp):
            at = int(addresses[lane])
            _parity(_load(warp, addresses, lane, kind), warp, kind, at)
            warp.acting = lane
            warp.shared.scatter(addresses[lane : lane + 1], np.zeros(1, np.uint64), warp, kind)
            _live(warp).discard(at)
        warp.acting = -1
        return None

    return step


@instruction("mbarrier.arrive", section="9.7.15.16.16", observable=True)
def arrive(instruction: Instruction, context: DecodeContext) -> Step:
    """Arrive, with `.expect_tx` after raising the transaction count; yields the state before."""
    return _arrive(context, drop=False)


@instruction("mbarrier.arrive_drop", section="9.7.15.16.17", observable=True)
def arrive_drop(instruction: Instruction, context: DecodeContext) -> Step:
    """Arrive and lower the count of expected arrivals of the phases to come."""
    return _arrive(context, drop=True)


def _arrive(context: DecodeContext, drop: bool) -> Step:
    context.require("expect_tx", "noComplete", "release", "relaxed", "cta", "cluster", *SPACES, "b64")
    words = context.modifiers
    expects, no_complete = "expect_tx" in words, "noComplete" in words
    kind = context.kind(
        semantics="relaxed" if "relaxed" in words else "release",
        scope="cluster" if "cluster" in words else "cta",
    )
    operands = context.instruction.operands
    token, target, *rest = operands
    write = None if isinstance(token, Sink) else context.destination(token, 64)
    remote = "shared::cluster" in words
    if remote and write is not None:
        context.unsupported("a state of a barrier in shared::cluster")
    address = _address(context, target, local=not remote)
    if (expects or no_complete) and not rest:
        context.unsupported("the form without a count")
    number = context.source(rest[0], 32) if rest else None

    def operation(value: int) -> Callable[[MBarrier], int]:
        if expects:
            return lambda barrier: barrier.arrive_expect_tx(value, drop=drop)
        return lambda barrier: barrier.arrive(value, drop=drop, no_complete=no_complete)

    def step(warp: Warp) -> Outcome | None:
        addresses = address(warp)
        values = number(warp) if number is not None else None
        states = np.zeros(LANES, np.uint64)
        machine = warp.machine
        for lane in lanes_of(warp):
            at = int(addresses[lane])
            change = operation(1 if values is None else int(values[lane]))
            warp.acting = lane
            states[lane] = change_barrier(machine, warp.shared, at, change, warp, kind)
            for hook in machine.sync_hooks:
                hook(warp, "mbarrier.arrive", channel_of(warp.shared, at), kind.line)
        warp.acting = -1
        if write is not None:
            write(warp, states)
        return None

    return step


@instruction("mbarrier.expect_tx", section="9.7.15.16.14", observable=True)
def expect_tx(instruction: Instruction, context: DecodeContext) -> Step:
    """Raise the transaction count of the current phase."""
    return _transactions(context, lambda value: lambda barrier: barrier.expect_tx(value))


@instruction("mbarrier.complete_tx", section="9.7.15.16.15", observable=True)
def complete_tx(instruction: Instruction, context: DecodeContext) -> Step:
    """Lower the transaction count as an asynchronous copy would."""
    return _transactions(context, lambda value: lambda barrier: barrier.complete_tx(value))


def _transactions(context: DecodeContext, operation: Callable[[int], Callable[[MBarrier], None]]) -> Step:
    context.require("relaxed", "cta", "cluster", *SPACES, "b64")
    words = context.modifiers
    remote = "shared::cluster" in words
    address = _address(context, context.operand(0), local=not remote)
    amount = context.source(context.operand(1), 32)
    kind = context.kind(semantics="relaxed", scope="cluster" if "cluster" in words else "cta")

    def step(warp: Warp) -> Outcome | None:
        addresses, amounts = address(warp), amount(warp)
        for lane in lanes_of(warp):
            change = operation(int(amounts[lane]))
            warp.acting = lane
            change_barrier(warp.machine, warp.shared, int(addresses[lane]), change, warp, kind)
        warp.acting = -1
        return None

    return step


@instruction("mbarrier.test_wait", section="9.7.15.16.19", observable=True)
def test_wait(instruction: Instruction, context: DecodeContext) -> Step:
    """Ask whether a phase has completed."""
    return _wait(context, blocking=False)


@instruction("mbarrier.try_wait", section="9.7.15.16.19", observable=True)
def try_wait(instruction: Instruction, context: DecodeContext) -> Step:
    """Wait for a phase to complete, for a limited time, and say whether it has."""
    return _wait(context, blocking=True)


def _wait(context: DecodeContext, blocking: bool) -> Step:
    context.require("parity", "acquire", "relaxed", "cta", "cluster", "shared", "shared::cta", "b64")
    words = context.modifiers
    by_parity = "parity" in words
    count = len(context.instruction.operands)
    if count != 3 and not (blocking and count == 4):
        # The fourth is a hint for the time limit.
        context.unsupported(f"the form with {count} operands")
    done = context.destination(context.operand(0), 1)
    address = _address(context, context.operand(1), local=True)
    wanted = context.source(context.operand(2), 32 if by_parity else 64)
    kind = context.kind(
        semantics="relaxed" if "relaxed" in words else "acquire",
        scope="cluster" if "cluster" in words else "cta",
    )
    key = f"try_wait {context.pc}"

    def step(warp: Warp) -> Outcome | None:
        addresses, values = address(warp), wanted(warp)
        found: dict[tuple[int, int], bool] = {}
        result = np.zeros(LANES, np.bool_)
        lanes = lanes_of(warp)
        first = lanes[0]
        if (addresses == addresses[first]).all() and (values == values[first]).all():
            lanes = lanes[:1]
        for lane in lanes:
            at, value = int(addresses[lane]), int(values[lane])
            answer = found.get((at, value))
            if answer is None:
                current = _parity(_load(warp, addresses, lane, kind), warp, kind, at)
                past = value & 1 if by_parity else _parity(value, warp, kind, at)
                answer = found[at, value] = current != past
            result[lane] = answer
        if len(found) == 1:
            result[:] = answer
        if blocking and len(found) == 1 and not answer:
            # With several barriers, or some lanes that may go on, nobody waits: the time limit is always up.
            channel = channel_of(warp.shared, at)
            if key in warp.scratch or warp.machine.scheduler.rng.random() >= SPURIOUS:
                return Blocked(BarrierWait(warp.shared, at, past))
            warp.scratch[key] = channel
        elif blocking:
            warp.scratch.pop(key, None)
        for (at, _), answer in found.items():
            for hook in warp.machine.sync_hooks:
                if answer:
                    hook(warp, "mbarrier.pass", channel_of(warp.shared, at), kind.line)
        done(warp, result)
        return None if all(found.values()) else YIELD

    return step


@instruction("mbarrier.pending_count", section="9.7.15.16.20")
def pending(instruction: Instruction, context: DecodeContext) -> Step:
    """Read the pending arrivals out of a state token."""
    context.require("b64")
    write = context.destination(context.operand(0), 32)
    state = context.source(context.operand(1), 64)
    kind = context.kind()

    def step(warp: Warp) -> Outcome | None:
        states = state(warp)
        counts = np.zeros(LANES, np.uint32)
        for lane in lanes_of(warp):
            value = int(states[lane])
            _parity(value, warp, kind, 0)
            counts[lane] = pending_count(value)
        write(warp, counts)
        return None

    return step


def _address(context: DecodeContext, operand: Operand, *, local: bool) -> Source:
    return shared_address(
        context, operand, local=local, generic=not any(word in SPACES for word in context.modifiers)
    )


def _live(warp: Warp) -> set[int]:
    """Addresses in the cluster where an mbarrier was initialised and not invalidated."""
    live: set[int] = warp.cta.cluster.scratch.setdefault("mbarriers", set())
    return live


def _is_barrier(memory: Memory, at: int) -> bool:
    try:
        phase_parity(memory.peek(at, 8))
    except (KeyError, BarrierMisuseError):
        return False
    return True


def _load(warp: Warp, addresses: NDArray[np.uint64], lane: int, kind: AccessKind) -> int:
    return int(warp.shared.gather(addresses[lane : lane + 1], 8, 1, warp, kind)[0])


def _parity(bits: int, warp: Warp, kind: AccessKind, at: int) -> int:
    try:
        return phase_parity(bits)
    except BarrierMisuseError as error:
        raise _placed(error, warp, kind, at) from None


def _placed(error: BarrierMisuseError, warp: Warp, kind: AccessKind, at: int) -> BarrierMisuseError:
    return BarrierMisuseError(
        f"{kind.opcode}: mbarrier at {at:#x}: {error}", line=kind.line, where=warp.describe()
    )
