# SPDX-License-Identifier: Apache-2.0
"""Non-bulk asynchronous copies, lane by lane, and their groups (PTX ISA 9.4, section 9.7.10.28.3).

They are done by the CTA's copy engine like bulk copies, but in the generic proxy, and the lanes of one
instruction in any order.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.engines.barriers import change_barrier
from dsv4_ptx_emulator.engines.copies import MAX_PIECES, CopyEngine, Read, Target, Transfer
from dsv4_ptx_emulator.engines.groups import GroupSequence
from dsv4_ptx_emulator.errors import AsyncMisuseError
from dsv4_ptx_emulator.isa.bulk import group_count
from dsv4_ptx_emulator.isa.context import width_of
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.isa.shared_operands import lanes_of, shared_address
from dsv4_ptx_emulator.machine.observer import AsyncEvent
from dsv4_ptx_emulator.machine.outcome import Blocked, Outcome, Wait
from dsv4_ptx_emulator.machine.warp import LANES
from dsv4_ptx_emulator.ptx.module import Immediate, Not, Register

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.isa.context import DecodeContext
    from dsv4_ptx_emulator.machine.mbarrier import MBarrier
    from dsv4_ptx_emulator.machine.memory import Memory
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Instruction

SPACES = ("shared", "shared::cta")
HINTS = ("L2::cache_hint", "L2::64B", "L2::128B", "L2::256B")


class _Copies:
    """A warp's non-bulk copies: the groups of each lane, and what is in flight for which lanes."""

    def __init__(self, warp: Warp) -> None:
        self.groups = [GroupSequence() for _ in range(LANES)]
        self.flying: list[tuple[Transfer, set[int]]] = []
        self.channel = ("cp_async", id(warp))

    @classmethod
    def of(cls, warp: Warp) -> _Copies:
        """The warp's, made at first use."""
        found = warp.scratch.get("cp_async")
        if found is None:
            found = warp.scratch["cp_async"] = cls(warp)
        assert isinstance(found, cls)
        return found

    def land(self, transfer: Transfer) -> None:
        """A transfer is complete."""
        self.flying = [entry for entry in self.flying if entry[0] is not transfer]


@instruction("cp.async", section="9.7.10.28.3.1", observable=True)
def cp_async(instruction: Instruction, context: DecodeContext) -> Step:
    """Copy 4, 8 or 16 bytes per lane from global to shared memory, asynchronously, or fill with zeros."""
    context.require("ca", "cg", *SPACES, "global", *HINTS)
    words = context.modifiers
    operands = list(instruction.operands)
    if "L2::cache_hint" in words:
        operands.pop()
    if not 3 <= len(operands) <= 4 or not isinstance(operands[2], Immediate):
        context.unsupported(f"the form with {len(operands)} operands")
    size = operands[2].value
    if size not in (4, 8, 16) or ("cg" in words and size != 16):
        context.unsupported(f"a copy of {size} bytes")
    destination = shared_address(
        context, operands[0], local=True, generic=not any(w in SPACES for w in words)
    )
    source = context.address(operands[1])
    limit = ignore = None
    if len(operands) == 4:
        last = operands[3]
        if isinstance(last, Not) or (isinstance(last, Register) and width_of(last.type) == 1):
            ignore = context.source(last, 1)
        else:
            limit = context.source(last, 32)
    kind = context.kind()

    def step(warp: Warp) -> Outcome | None:
        copies = _Copies.of(warp)
        lanes = np.flatnonzero(warp.active)
        targets, sources = destination(warp)[lanes], source(warp)[lanes]
        sizes = np.full(len(lanes), size) if limit is None else limit(warp)[lanes].astype(np.int64)
        if ignore is not None:
            sizes = np.where(ignore(warp)[lanes], 0, sizes)
        if (sizes > size).any():
            raise AsyncMisuseError(
                f"{kind.opcode}: a source size above {size}", line=kind.line, where=warp.describe()
            )
        rng = warp.machine.scheduler.rng
        share = np.array([int(rng.random() * MAX_PIECES) for _ in lanes])
        pieces: list[tuple[Read, list[Target]]] = []
        for part in np.unique(share):
            mine = share == part
            read = partial(_read, warp.machine.global_memory, sources[mine], sizes[mine], size, kind)
            write = partial(_write, warp.shared, targets[mine], kind)
            pieces.append((read, [Target(write, lanes=tuple(lanes[mine].tolist()))]))
        groups = [copies.groups[lane].open for lane in lanes.tolist()]
        transfer = Transfer(kind, "cp.async", pieces, groups, copies.channel)
        transfer.followers.append(partial(copies.land, transfer))
        copies.flying.append((transfer, set(lanes.tolist())))
        CopyEngine.of(warp.cta).enqueue(transfer)
        for hook in warp.machine.async_hooks:
            hook(AsyncEvent("issue", warp, warp.active_bits, "cp.async", kind.line, transfer))
        return None

    return step


def _read(
    memory: Memory,
    addresses: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    size: int,
    kind: AccessKind,
    engine: CopyEngine,
) -> NDArray[Any]:
    width, count = min(size, 8), max(size // 8, 1)
    full = sizes == size
    if full.all():
        return memory.gather(addresses, width, count, engine, kind)
    data = np.zeros((len(addresses), size), np.uint8)
    for lane, (address, amount) in enumerate(zip(addresses.tolist(), sizes.tolist(), strict=True)):
        if amount:
            data[lane, :amount] = memory.read_block(address, amount, engine, kind)
    typed = data.view(f"u{width}")
    return typed if count > 1 else typed.reshape(-1)


def _write(
    memory: Memory, addresses: NDArray[np.uint64], kind: AccessKind, engine: CopyEngine, data: NDArray[Any]
) -> None:
    memory.scatter(addresses, data, engine, kind)


@instruction("cp.async.commit_group", section="9.7.10.28.3.2", observable=True)
def commit_group(instruction: Instruction, context: DecodeContext) -> Step:
    """Close the group of the non-bulk copies that each lane has issued since its last commit."""
    context.require()

    def step(warp: Warp) -> Outcome | None:
        copies = _Copies.of(warp)
        for lane in lanes_of(warp):
            copies.groups[lane].commit()
        for hook in warp.machine.async_hooks:
            hook(AsyncEvent("commit", warp, warp.active_bits, "cp.async", instruction.line))
        return None

    return step


@instruction("cp.async.wait_group", "cp.async.wait_all", section="9.7.10.28.3.3", observable=True)
def wait_group(instruction: Instruction, context: DecodeContext) -> Step:
    """Wait until at most N of the latest groups are incomplete, or for all copies of the lane."""
    context.require()
    everything = instruction.opcode.endswith("wait_all")
    allowed = 0 if everything else group_count(context, context.operand(0))

    def step(warp: Warp) -> Outcome | None:
        copies = _Copies.of(warp)
        for lane in lanes_of(warp):
            sequence = copies.groups[lane]
            pending = sequence.pending_before(allowed) + (everything and sequence.open.unfinished > 0)
            if pending:
                return Blocked(
                    Wait(copies.channel, f"{pending} cp.async groups of lane {lane} (all but {allowed})")
                )
        for hook in warp.machine.async_hooks:
            lanes, most = warp.active_bits, -1 if everything else allowed
            hook(AsyncEvent("wait", warp, lanes, "cp.async", instruction.line, allowed=most))
        return None

    return step


@instruction("cp.async.mbarrier.arrive", section="9.7.15.16.18", observable=True)
def mbarrier_arrive(instruction: Instruction, context: DecodeContext) -> Step:
    """Arrive at an mbarrier when all copies that the lane has issued so far are complete."""
    context.require("noinc", *SPACES, "b64")
    words = context.modifiers
    address = shared_address(
        context, context.operand(0), local=True, generic=not any(word in SPACES for word in words)
    )
    kind = context.kind(semantics="release", scope="cta")
    raises = "noinc" not in words

    def step(warp: Warp) -> Outcome | None:
        copies = _Copies.of(warp)
        addresses = address(warp)
        engine = CopyEngine.of(warp.cta)
        for lane in lanes_of(warp):
            at = int(addresses[lane])
            if raises:
                warp.acting = lane
                change_barrier(warp.machine, warp.shared, at, _expect_one_more, warp, kind)
            arrival = Transfer(kind, "cp.async.mbarrier.arrive", ())
            arrival.unsignalled.append(Target(_nothing, warp.shared, at, _arrive))
            for hook in warp.machine.async_hooks:
                hook(AsyncEvent("issue", warp, 1 << lane, "", kind.line, arrival))
            pending = [transfer for transfer, lanes in copies.flying if lane in lanes]
            countdown = _Countdown(len(pending), partial(engine.enqueue, arrival))
            for transfer in pending:
                transfer.followers.append(countdown)
        warp.acting = -1
        return None

    return step


class _Countdown:
    """Calls `then` at the `count`-th call; at once for none."""

    def __init__(self, count: int, then: Any) -> None:
        self.count = count
        self.then = then
        if not count:
            then()

    def __call__(self) -> None:
        self.count -= 1
        if not self.count:
            self.then()


def _arrive(barrier: MBarrier) -> None:
    barrier.arrive()


def _expect_one_more(barrier: MBarrier) -> None:
    barrier.pending += 1


def _nothing(engine: CopyEngine, data: NDArray[Any]) -> None:
    return None
