# SPDX-License-Identifier: Apache-2.0
"""Bulk copies of consecutive bytes and their groups (PTX ISA 9.4, sections 9.7.10.28.4 and 9.7.10.28.6).

A copy is issued by each active lane for itself, as an operation of the async proxy that the CTA's copy engine
does later. Reductions read, combine and write a piece in one step, which makes them atomic.

Rules checked here: addresses and sizes are multiples of 16, a barrier that is to be told lies in the CTA
that gets the data, a CTA mask names CTAs of the cluster.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dsv4_ptx_emulator.engines.copies import CopyEngine, Read, Target, Transfer, completes, cuts
from dsv4_ptx_emulator.engines.groups import GroupSequence
from dsv4_ptx_emulator.engines.reductions import reduction
from dsv4_ptx_emulator.errors import AsyncMisuseError, MisalignedError
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.isa.shared_operands import lanes_of, shared_address
from dsv4_ptx_emulator.machine.cta import SHARED_STRIDE
from dsv4_ptx_emulator.machine.observer import AsyncEvent
from dsv4_ptx_emulator.machine.outcome import Blocked, Outcome, Wait
from dsv4_ptx_emulator.machine.warp import LANES
from dsv4_ptx_emulator.ptx.module import Immediate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.engines.boxes import Combine
    from dsv4_ptx_emulator.isa.context import DecodeContext
    from dsv4_ptx_emulator.machine.memory import Memory
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Instruction, Operand

BY_BARRIER = "mbarrier::complete_tx::bytes"
BY_GROUP = "bulk_group"


def bulk_groups(warp: Warp) -> list[GroupSequence]:
    """The bulk async-groups of each lane."""
    groups = warp.scratch.get("bulk_groups")
    if groups is None:
        groups = warp.scratch["bulk_groups"] = [GroupSequence() for _ in range(LANES)]
    assert isinstance(groups, list)
    return groups


def bulk_channel(warp: Warp) -> tuple[str, int]:
    """What those wait for who wait for bulk groups of the warp."""
    return ("bulk_group", id(warp))


def issued(warp: Warp, lane: int, family: str, kind: AccessKind, transfer: Transfer) -> None:
    """Tell the observers that a lane has issued a copy."""
    for hook in warp.machine.async_hooks:
        hook(AsyncEvent("issue", warp, 1 << lane, family, kind.line, transfer))


def windows_of(warp: Warp, mask: int, kind: AccessKind) -> list[int]:
    """Shared windows of the CTAs that a multicast's mask names, as offsets to add to CTA-relative addresses.

    Raises:
        AsyncMisuseError: The mask is empty or names a CTA that the cluster lacks.
    """
    size = len(warp.cta.cluster.ctas)
    if not 0 < mask < 1 << size:
        raise AsyncMisuseError(
            f"{kind.opcode}: CTA mask {mask:#x} in a cluster of {size}", line=kind.line, where=warp.describe()
        )
    return [rank * SHARED_STRIDE for rank in range(size) if mask >> rank & 1]


def require_same_cta(
    warp: Warp, destination: int, barrier: int, kind: AccessKind, *, pair: bool = False
) -> None:
    """Data and the barrier that is told of it are in one CTA, or in one pair of CTAs (`.cta_group::2`).

    Raises:
        AsyncMisuseError: They are not.
    """
    if destination // SHARED_STRIDE >> pair != barrier // SHARED_STRIDE >> pair:
        raise AsyncMisuseError(
            f"{kind.opcode}: data goes to CTA {destination // SHARED_STRIDE} of the cluster, "
            f"the barrier is in CTA {barrier // SHARED_STRIDE}",
            line=kind.line,
            where=warp.describe(),
        )


def _require_aligned(warp: Warp, kind: AccessKind, **values: int) -> None:
    for name, value in values.items():
        if value % 16:
            raise MisalignedError(
                f"{kind.opcode}: {name} {value:#x} is not a multiple of 16",
                line=kind.line,
                where=warp.describe(),
            )


class _Operands:
    """Operands of a bulk copy or reduction as the words of the opcode lay them out."""

    def __init__(self, context: DecodeContext, to_shared: bool, from_global: bool, by_barrier: bool) -> None:
        words = context.modifiers
        operands = list(context.instruction.operands)
        multicast, hint = "multicast::cluster" in words, "L2::cache_hint" in words
        expected = 3 + by_barrier + multicast + hint
        if len(operands) != expected:
            context.unsupported(f"the form with {len(operands)} operands (expected {expected})")
        own = "shared::cta" in words
        if to_shared:
            self.destination = shared_address(context, operands[0], local=own and from_global)
        else:
            self.destination = context.address(operands[0])
        if from_global:
            self.source = context.address(operands[1])
        else:
            self.source = shared_address(context, operands[1], local=True)
        self.size = context.source(operands[2], 32)
        self.barrier = shared_address(context, operands[3], local=False) if by_barrier else None
        self.mask = context.source(operands[3 + by_barrier], 16) if multicast else None


@instruction("cp.async.bulk", section="9.7.10.28.4.1", observable=True)
def bulk_copy(instruction: Instruction, context: DecodeContext) -> Step:
    """Copy consecutive bytes between global and shared memory or between CTAs, asynchronously."""
    return _copy(context, None)


@instruction("cp.reduce.async.bulk", section="9.7.10.28.4.2", observable=True)
def bulk_reduce(instruction: Instruction, context: DecodeContext) -> Step:
    """Combine consecutive elements with those at the destination, asynchronously."""
    words = [word for word in context.modifiers if word not in _PLAIN]
    if words and words[0] == "noftz":
        context.unsupported("the order of its modifiers")
    names = [word for word in words if word != "noftz"]
    if len(names) != 2:
        context.unsupported("the reduction " + ".".join(names))
    combine = reduction(*names, flushing=True)
    if combine is None:
        context.unsupported("the reduction " + ".".join(names))
    return _copy(context, combine, tuple(words))


_PLAIN = (
    "shared::cta",
    "shared::cluster",
    "global",
    BY_BARRIER,
    BY_GROUP,
    "multicast::cluster",
    "L2::cache_hint",
)


def _copy(context: DecodeContext, combine: Combine | None, extra: tuple[str, ...] = ()) -> Step:
    context.require(*_PLAIN, *extra)
    words = context.modifiers
    to_shared, from_global = words[0] != "global", words[1] == "global"
    by_barrier = BY_BARRIER in words
    if words[0] not in _PLAIN[:3] or words[1] not in ("global", "shared::cta"):
        context.unsupported(f"the direction .{words[0]}.{words[1]}")
    if to_shared != by_barrier or (not to_shared and from_global) or (combine is not None and from_global):
        context.unsupported(f"the direction .{words[0]}.{words[1]} with this completion")
    operands = _Operands(context, to_shared, from_global, by_barrier)
    kind = context.kind(proxy="async")
    told = context.kind(proxy="async", semantics="release", scope="cluster")
    name = (
        "bulk.reduce"
        if combine
        else "bulk.load"
        if from_global
        else "bulk.send"
        if to_shared
        else "bulk.store"
    )

    def step(warp: Warp) -> Outcome | None:
        destinations, sources, sizes = operands.destination(warp), operands.source(warp), operands.size(warp)
        barriers = operands.barrier(warp) if operands.barrier is not None else None
        masks = operands.mask(warp) if operands.mask is not None else None
        engine = CopyEngine.of(warp.cta)
        machine = warp.machine
        shared, world = warp.shared, machine.global_memory
        for lane in lanes_of(warp):
            destination, source, size = int(destinations[lane]), int(sources[lane]), int(sizes[lane])
            _require_aligned(warp, kind, destination=destination, source=source, size=size)
            (shared if to_shared else world).locate(destination, size, warp, kind)
            (world if from_global else shared).locate(source, size, warp, kind)
            windows = [0]
            barrier = int(barriers[lane]) if barriers is not None else 0
            if barriers is not None:
                require_same_cta(warp, destination, barrier, kind)
            if masks is not None:
                windows = windows_of(warp, int(masks[lane]), kind)
                destination, barrier = destination % SHARED_STRIDE, barrier % SHARED_STRIDE
            for hook in machine.event_hooks:
                hook(warp, name, {"bytes": size, "line": kind.line, "copies": len(windows)})
            if size == 0:
                continue
            pieces: list[tuple[Read, list[Target]]] = []
            for low, high in cuts(size, 16, machine.scheduler.rng):
                read = partial(_read, world if from_global else shared, source + low, high - low, kind)
                pieces.append(
                    (
                        read,
                        [
                            Target(
                                partial(
                                    _write,
                                    shared if to_shared else world,
                                    destination + window + low,
                                    kind,
                                    combine,
                                ),
                                shared if by_barrier else None,
                                barrier + window,
                                completes(high - low),
                            )
                            for window in windows
                        ],
                    )
                )
            if by_barrier:
                transfer = Transfer(told, name, pieces, from_shared=not from_global)
            else:
                group = bulk_groups(warp)[lane].open
                transfer = Transfer(kind, name, pieces, [group], bulk_channel(warp), from_shared=True)
            engine.enqueue(transfer)
            issued(warp, lane, "" if by_barrier else "bulk", kind, transfer)
        return None

    return step


def _read(memory: Memory, address: int, size: int, kind: AccessKind, engine: CopyEngine) -> NDArray[np.uint8]:
    return memory.read_block(address, size, engine, kind)


def _write(
    memory: Memory,
    address: int,
    kind: AccessKind,
    combine: Combine | None,
    engine: CopyEngine,
    data: NDArray[np.uint8],
) -> None:
    if combine is not None:
        data = combine(memory.read_block(address, len(data), engine, kind), data)
    memory.write_block(address, data, engine, kind)


@instruction("cp.async.bulk.prefetch.L2.global", section="9.7.10.28.4.3", observable=True)
def bulk_prefetch(instruction: Instruction, context: DecodeContext) -> Step:
    """Bring consecutive bytes into the L2 cache: the operands are checked, nothing else happens."""
    context.require("L2::cache_hint")
    address = context.address(context.operand(0))
    size = context.source(context.operand(1), 32)
    kind = context.kind(proxy="async")

    def step(warp: Warp) -> Outcome | None:
        addresses, sizes = address(warp), size(warp)
        for lane in lanes_of(warp):
            at, count = int(addresses[lane]), int(sizes[lane])
            _require_aligned(warp, kind, source=at, size=count)
            warp.machine.global_memory.locate(at, count, warp, kind)
        return None

    return step


@instruction("cp.async.bulk.commit_group", section="9.7.10.28.6.1", observable=True)
def commit_group(instruction: Instruction, context: DecodeContext) -> Step:
    """Close the group of the bulk copies that each lane has issued since its last commit."""
    context.require()

    def step(warp: Warp) -> Outcome | None:
        groups = bulk_groups(warp)
        for lane in lanes_of(warp):
            groups[lane].commit()
        for hook in warp.machine.async_hooks:
            hook(AsyncEvent("commit", warp, warp.active_bits, "bulk", instruction.line))
        return None

    return step


@instruction("cp.async.bulk.wait_group", section="9.7.10.28.6.2", observable=True)
def wait_group(instruction: Instruction, context: DecodeContext) -> Step:
    """Wait until at most N of the latest groups are incomplete, with `.read` until their sources are read."""
    context.require("read")
    reads = "read" in context.modifiers
    allowed = group_count(context, context.operand(0))
    what = "read" if reads else "complete"

    def step(warp: Warp) -> Outcome | None:
        groups = bulk_groups(warp)
        for lane in lanes_of(warp):
            pending = groups[lane].pending_before(allowed, reads)
            if pending:
                return Blocked(
                    Wait(
                        bulk_channel(warp),
                        f"{pending} bulk groups of lane {lane} to be {what} (all but {allowed})",
                    )
                )
        for hook in warp.machine.async_hooks:
            lanes, line = warp.active_bits, instruction.line
            hook(AsyncEvent("wait", warp, lanes, "bulk", line, allowed=allowed, reads=reads))
        return None

    return step


def group_count(context: DecodeContext, operand: Operand) -> int:
    """The immediate N of a wait_group."""
    if not isinstance(operand, Immediate) or operand.value < 0:
        context.unsupported(f"operand {operand}")
    return operand.value
