# SPDX-License-Identifier: Apache-2.0
"""Tensor memory as warps see it: allocation, loads and stores, waits and fences (PTX ISA 9.4, 9.7.18.7, .8).

A load puts its values into the registers at once: the ISA lets a true dependency through a register be
enough (section 9.7.18.6.4.5). What `wait::ld` and `wait::st` are for is order in tensor memory: that nobody
overwrites what a load may still read. Observers get both events and check it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.errors import AsyncMisuseError, OutOfBoundsError
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.isa.shared_operands import shared_address
from dsv4_ptx_emulator.machine.outcome import Blocked, Outcome, Wait
from dsv4_ptx_emulator.machine.tensor_memory import (
    Block,
    TensorMemory,
    common_start,
    split_address,
)
from dsv4_ptx_emulator.ptx.module import Immediate

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from dsv4_ptx_emulator.isa.context import DecodeContext
    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Instruction

    Found = tuple[TensorMemory, NDArray[Any], NDArray[Any], tuple[Block, ...]]

_SPACES = ("shared::cta",)
_LARGEST = {"16x64b": 128, "16x128b": 64, "16x256b": 32, "32x32b": 128, "16x32bx2": 128}
_REGISTERS = {"16x64b": 1, "16x128b": 2, "16x256b": 4, "32x32b": 1, "16x32bx2": 1}
"""Registers per repetition."""


def ctas_of_group(context: DecodeContext) -> int:
    """1 or 2 by `.cta_group`, which must be the same throughout a kernel (section 9.7.18.5).

    Raises:
        UnsupportedInstruction: There is none.
        AsyncMisuseError: Another instruction of the kernel has the other one.
    """
    groups = [word for word in context.modifiers if word.startswith("cta_group::")]
    if groups not in (["cta_group::1"], ["cta_group::2"]):
        context.unsupported("a form without .cta_group::1 or .cta_group::2")
    other = "cta_group::2" if groups[0] == "cta_group::1" else "cta_group::1"
    for found in context.kernel.instructions:
        if found.opcode.startswith("tcgen05.") and other in found.words():
            raise AsyncMisuseError(
                f"{context.instruction.opcode}, but {found.opcode} in line {found.line}: all "
                f"tcgen05 instructions of a kernel must have the same .cta_group",
                line=context.instruction.line,
            )
    return int(groups[0][-1])


def pair_of(warp: Warp, ctas: int, kind: AccessKind) -> tuple[Cta, ...]:
    """The warp's CTA, or the two CTAs of its pair, even rank first.

    Raises:
        AsyncMisuseError: It has no peer.
    """
    if ctas == 1:
        return (warp.cta,)
    cluster = warp.cta.cluster.ctas
    even = warp.cta.cluster_rank & ~1
    if even + 1 >= len(cluster):
        raise AsyncMisuseError(
            f"{kind.opcode} in a cluster of {len(cluster)}: there is no peer CTA",
            line=kind.line,
            where=warp.describe(),
        )
    return (cluster[even], cluster[even + 1])


@instruction("tcgen05.alloc", section="9.7.18.7.1", observable=True)
def alloc(instruction: Instruction, context: DecodeContext) -> Step:
    """Allocate columns of tensor memory, once they are free, and store their address in shared memory."""
    ctas = ctas_of_group(context)
    context.require("cta_group::1", "cta_group::2", "sync", "aligned", *_SPACES, "b32")
    address = shared_address(
        context, context.operand(0), local=True, generic="shared::cta" not in context.modifiers
    )
    wanted = context.uniform(context.operand(1), 32)
    kind = context.kind()

    def step(warp: Warp) -> Outcome | None:
        columns = wanted(warp)
        if columns not in (32, 64, 128, 256, 512):
            raise _misuse(kind, warp, f"{columns} columns; 32, 64, 128, 256 and 512 are valid")
        group = pair_of(warp, ctas, kind)
        memory = TensorMemory.of(warp.cta)
        if not memory.may_allocate:
            raise _misuse(kind, warp, "after tcgen05.relinquish_alloc_permit")
        if columns > memory.last_size:
            raise _misuse(
                kind, warp, f"{columns} columns after an allocation of {memory.last_size}: sizes must fall"
            )
        # Both CTAs of a pair allocate together: the first to come leaves its request for the other to find.
        requests: dict[int, int] = warp.cta.cluster.scratch.setdefault("tcgen05.alloc", {})
        granted: dict[int, int] = warp.cta.cluster.scratch.setdefault("tcgen05.granted", {})
        own = warp.cta.cluster_rank
        start = granted.pop(own, None)
        if start is None:
            requests[own] = columns
            sizes = {requests.get(cta.cluster_rank) for cta in group}
            if None in sizes:
                return Blocked(Wait(memory.channel, "its peer CTA to allocate tensor memory"))
            if len(sizes) > 1:
                raise _misuse(kind, warp, f"the CTAs of a pair ask for {requests} columns")
            memories = [TensorMemory.of(cta) for cta in group]
            start = common_start(memories, columns, warp.machine.scheduler.rng)
            if start is None:
                return Blocked(Wait(memory.channel, f"{columns} free columns of tensor memory"))
            for each in memories:
                each.allocate(start, columns)
                each.tell("alloc", warp, (Block(each, 0, 128, start, columns),), kind)
                del requests[each.cta.cluster_rank]
                if each is not memory:
                    granted[each.cta.cluster_rank] = start
                    warp.machine.scheduler.wake(each.channel)
        at = address(warp)[warp.first_lane : warp.first_lane + 1]
        warp.shared.scatter(at, np.array([start], np.uint32), warp, kind)
        return None

    return step


@instruction("tcgen05.dealloc", section="9.7.18.7.1", observable=True)
def dealloc(instruction: Instruction, context: DecodeContext) -> Step:
    """Give an allocation back; the CTAs of a pair do so together."""
    ctas = ctas_of_group(context)
    context.require("cta_group::1", "cta_group::2", "sync", "aligned", "b32")
    address = context.uniform(context.operand(0), 32)
    size = context.uniform(context.operand(1), 32)
    kind = context.kind()

    def step(warp: Warp) -> Outcome | None:
        group = pair_of(warp, ctas, kind)
        memory = TensorMemory.of(warp.cta)
        start, columns = address(warp), size(warp)
        own = warp.cta.cluster_rank
        requests: dict[int, tuple[int, int]] = warp.cta.cluster.scratch.setdefault("tcgen05.dealloc", {})
        freed: set[int] = warp.cta.cluster.scratch.setdefault("tcgen05.freed", set())
        if own in freed:
            freed.discard(own)
            return None
        requests[own] = (start, columns)
        asked = {requests.get(cta.cluster_rank) for cta in group}
        if None in asked:
            return Blocked(Wait(("dealloc", id(warp.cta)), "its peer CTA to give tensor memory back"))
        if len(asked) > 1:
            raise _misuse(kind, warp, f"the CTAs of a pair give back {requests}")
        for cta in group:
            each = TensorMemory.of(cta)
            each.free(start, columns, warp, kind)
            each.tell("free", warp, (Block(each, 0, 128, start, columns),), kind)
            del requests[cta.cluster_rank]
            if each is not memory:
                freed.add(cta.cluster_rank)
                warp.machine.scheduler.wake(("dealloc", id(cta)))
        return None

    return step


@instruction("tcgen05.relinquish_alloc_permit", section="9.7.18.7.1", observable=True)
def relinquish(instruction: Instruction, context: DecodeContext) -> Step:
    """Promise that the CTA allocates no more."""
    ctas = ctas_of_group(context)
    context.require("cta_group::1", "cta_group::2", "sync", "aligned")
    kind = context.kind()

    def step(warp: Warp) -> Outcome | None:
        pair_of(warp, ctas, kind)
        TensorMemory.of(warp.cta).may_allocate = False
        return None

    return step


@cache
def cell_map(shape: str, count: int, second: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Which cell each register of each lane holds (section 9.7.18.2.3, figures of the shapes).

    Args:
        shape: Such as "16x256b".
        count: Repetitions along the columns (`.xN`).
        second: Column offset of the second half of a 16x32bx2.

    Returns:
        Lane and column, both relative to the address: [registers, 32].
    """
    thread = np.arange(32)[None, :]
    repeat = np.arange(count)[:, None]
    if shape == "32x32b":
        lane, column = thread, repeat
    elif shape == "16x32bx2":
        lane, column = thread % 16, repeat + thread // 16 * second
    elif shape == "16x64b":
        lane, column = thread // 4 + thread % 2 * 8, repeat * 2 + thread // 2 % 2
    else:
        # Quads of lanes share a row; registers go on 8 rows further, then to the next repetition.
        width = 1 if shape == "16x128b" else 2
        register = np.arange(count * 2 * width)[:, None]
        lane = thread // 4 + register // width % 2 * 8
        column = register // (2 * width) * 4 * width + thread % 4 * width + register % width
    lane, column = np.broadcast_arrays(lane, column)
    for array in (lane, column):
        array.setflags(write=False)
    return lane.astype(np.intp), column.astype(np.intp)


class _Window:
    """What a load or store of one instruction reaches: decoded once."""

    def __init__(self, context: DecodeContext, packing: str, writes: bool) -> None:
        words = context.modifiers
        shape = next((word for word in words if word in _REGISTERS), "")
        repeats = [word for word in words if word[0] == "x" and word[1:].isdecimal()]
        context.require("sync", "aligned", *_REGISTERS, *repeats, packing, "b32")
        if words[:2] != ("sync", "aligned") or not shape or len(repeats) != 1:
            context.unsupported("a form other than sync.aligned.shape.num")
        self.count = int(repeats[0][1:])
        if self.count & (self.count - 1) or not 1 <= self.count <= _LARGEST[shape]:
            context.unsupported(f"the repetition .{repeats[0]} of .{shape}")
        self.shape = shape
        self.packed = packing in words
        self.halves = shape == "16x32bx2"
        self.registers = self.count * _REGISTERS[shape]
        self.writes = writes
        self.kind = context.kind()

    def second(self, context: DecodeContext, index: int) -> int:
        """Where the second half of a 16x32bx2 begins: the immediate operand at `index`."""
        if not self.halves:
            return 0
        operand = context.operand(index)
        if not isinstance(operand, Immediate):
            context.unsupported(f"operand {operand} where an immediate is expected")
        return operand.value

    def place(self, offset: int) -> Callable[[Warp, int], Found]:
        """How to find memory, cells (lanes and columns) and blocks for an address."""
        step = 2 if self.packed else 1
        lanes, columns = cell_map(self.shape, self.count, offset // step)
        tall = 32 if self.shape == "32x32b" else 16
        kind, writes = self.kind, self.writes
        wide = self.count if self.halves else int(columns.max()) + 1

        def find(warp: Warp, address: int) -> Found:
            lane, column = split_address(address)
            first = 32 * (warp.index % 4)
            if not (lane == first or (tall == 16 and lane == first + 16)):
                raise OutOfBoundsError(
                    f"{kind.opcode}: lane {lane}, but warp {warp.index} reaches lanes {first} to "
                    f"{first + 31}, from a multiple of {tall} on",
                    line=kind.line,
                    where=warp.describe(),
                )
            memory = TensorMemory.of(warp.cta)
            starts = (column, column + offset) if self.halves else (column,)
            blocks = tuple(
                Block(memory, lane, tall, start, wide * step, writes=writes, reads=not writes)
                for start in starts
            )
            for block in blocks:
                memory.check(block, warp, kind)
            return memory, lane + lanes, column + columns * step, blocks

        return find


@instruction("tcgen05.ld", section="9.7.18.8.3", observable=True)
def load(instruction: Instruction, context: DecodeContext) -> Step:
    """Load cells of the warp's 32 lanes of tensor memory into registers."""
    window = _Window(context, "pack::16b", writes=False)
    targets = context.destinations(context.operand(0), 32)
    if len(targets) != window.registers or len(instruction.operands) != 2 + window.halves:
        context.unsupported(f"{len(targets)} destinations")
    address = _uniform_address(context, 1)
    find = window.place(window.second(context, 2))
    packed, kind = window.packed, window.kind

    def step(warp: Warp) -> Outcome | None:
        memory, lanes, columns, blocks = find(warp, address(warp))
        if warp.machine.tensor_hooks:
            memory.tell("read", warp, blocks, kind)
        values = memory.cells[lanes, columns]
        if packed:
            values = values & np.uint32(0xFFFF) | memory.cells[lanes, columns + 1] << np.uint32(16)
        for write, column in zip(targets, values, strict=True):
            write(warp, column)
        return None

    return step


@instruction("tcgen05.st", section="9.7.18.8.4", observable=True)
def store(instruction: Instruction, context: DecodeContext) -> Step:
    """Store registers into cells of the warp's 32 lanes of tensor memory."""
    window = _Window(context, "unpack::16b", writes=True)
    halves = window.halves
    sources = context.sources(context.operand(1 + halves), 32)
    if len(sources) != window.registers or len(instruction.operands) != 2 + halves:
        context.unsupported(f"{len(sources)} sources")
    address = _uniform_address(context, 0)
    find = window.place(window.second(context, 1))
    unpacked, kind = window.packed, window.kind

    def step(warp: Warp) -> Outcome | None:
        memory, lanes, columns, blocks = find(warp, address(warp))
        memory.tell("write", warp, blocks, kind)
        values = np.stack([read(warp) for read in sources])
        if unpacked:
            memory.cells[lanes, columns] = values & np.uint32(0xFFFF)
            memory.cells[lanes, columns + 1] = values >> np.uint32(16)
        else:
            memory.cells[lanes, columns] = values
        return None

    return step


@instruction("tcgen05.wait::ld", "tcgen05.wait::st", section="9.7.18.8.5", observable=True)
def wait(instruction: Instruction, context: DecodeContext) -> Step:
    """Wait until the thread's loads or stores have accessed tensor memory."""
    context.require("sync", "aligned")
    action = "wait::ld" if "wait::ld" in instruction.opcode else "wait::st"
    kind = context.kind()

    def step(warp: Warp) -> Outcome | None:
        TensorMemory.of(warp.cta).tell(action, warp, (), kind)
        return None

    return step


@instruction(
    "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync",
    section="9.7.18.11.1",
    observable=True,
)
def fence(instruction: Instruction, context: DecodeContext) -> Step:
    """Order tcgen05 operations before, or after, what synchronises threads."""
    context.require()
    opcode, line = instruction.opcode, instruction.line

    def step(warp: Warp) -> Outcome | None:
        for hook in warp.machine.fence_hooks:
            hook(warp, opcode, line)
        return None

    return step


def _uniform_address(context: DecodeContext, index: int) -> Callable[[Warp], int]:
    """The address `[taddr]`, which must be the same in all lanes."""
    read = context.address(context.operand(index))
    kind = context.kind()

    def address(warp: Warp) -> int:
        values = read(warp)
        first = values[0]
        if not (values == first).all():
            raise AsyncMisuseError(
                f"{kind.opcode}: the address differs between lanes", line=kind.line, where=warp.describe()
            )
        return int(first) & 0xFFFFFFFF

    return address


def _misuse(kind: AccessKind, warp: Warp, text: str) -> AsyncMisuseError:
    return AsyncMisuseError(f"{kind.opcode}: {text}", line=kind.line, where=warp.describe())
