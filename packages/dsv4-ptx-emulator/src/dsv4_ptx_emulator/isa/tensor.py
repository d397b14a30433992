# SPDX-License-Identifier: Apache-2.0
"""Tensor copies in tiled mode, and what concerns tensor maps (PTX ISA 9.4, section 9.7.10.28.5).

The map is read when the copy is issued, through the tensormap proxy, from global memory or from the kernel's
parameters. im2col, gather and scatter modes and coordinates overrides are refused by name.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dsv4_ptx_emulator.engines.boxes import Box
from dsv4_ptx_emulator.engines.copies import CopyEngine, Read, Target, Transfer, completes, cuts
from dsv4_ptx_emulator.engines.reductions import reduction
from dsv4_ptx_emulator.errors import AsyncMisuseError, MisalignedError
from dsv4_ptx_emulator.formats.tensor_map import PAYLOAD_BYTES, TensorMap, decode_tensor_map
from dsv4_ptx_emulator.isa.bulk import (
    BY_BARRIER,
    BY_GROUP,
    bulk_channel,
    bulk_groups,
    issued,
    require_same_cta,
    windows_of,
)
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.isa.shared_operands import generic_memory, lanes_of, shared_address
from dsv4_ptx_emulator.machine.cta import SHARED_STRIDE
from dsv4_ptx_emulator.ptx.module import Address

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.engines.boxes import Combine
    from dsv4_ptx_emulator.isa.context import DecodeContext, Source
    from dsv4_ptx_emulator.machine.memory import Memory
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.outcome import Outcome
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Instruction, Operand

DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
MAP_ALIGNMENT = 64
IMAGE_ALIGNMENT = 128
INNER_ALIGNMENT = 16


def read_map(warp: Warp, address: int, kind: AccessKind) -> TensorMap:
    """Fetch and decode the tensor map at a generic address.

    Raises:
        AsyncMisuseError: It is not understood, or breaks a rule.
        MisalignedError: The address is not a multiple of 64.
        OutOfBoundsError: There is no memory.
    """
    if address % MAP_ALIGNMENT:
        raise MisalignedError(
            f"{kind.opcode}: tensor map at {address:#x}, not a multiple of {MAP_ALIGNMENT}",
            line=kind.line,
            where=warp.describe(),
        )
    memory, at = generic_memory(warp, address)
    data = memory.read_block(at, PAYLOAD_BYTES, warp, kind)
    try:
        return decode_tensor_map(data.tobytes())
    except AsyncMisuseError as error:
        raise AsyncMisuseError(f"{kind.opcode}: {error}", line=kind.line, where=warp.describe()) from None


class _TensorOperand:
    """`[tensorMap, {c0, ...}]`."""

    def __init__(self, context: DecodeContext, operand: Operand) -> None:
        dimensions = [word for word in context.modifiers if word in DIMENSIONS]
        if not isinstance(operand, Address) or operand.extra:
            context.unsupported(f"operand {operand}")
        if len(dimensions) != 1 or len(operand.coordinates) != int(dimensions[0][0]):
            context.unsupported(f"{len(operand.coordinates)} coordinates")
        self.map = context.address(operand)
        self.coordinates: list[Source] = [context.source(item, 32) for item in operand.coordinates]
        self.kind = context.kind(proxy="tensormap")

    def boxes(self, warp: Warp, starts: NDArray[np.uint64] | None) -> list[tuple[int, Box]]:
        """Lane and box for each active lane; `starts` are the images' addresses."""
        maps = self.map(warp)
        coordinates = [read(warp).view("i4") for read in self.coordinates]
        found = []
        for lane in lanes_of(warp):
            tensor = read_map(warp, int(maps[lane]), self.kind)
            place = tuple(int(values[lane]) for values in coordinates)
            if tensor.rank != len(place):
                raise AsyncMisuseError(
                    f"{self.kind.opcode}: the tensor map is of rank {tensor.rank}",
                    line=self.kind.line,
                    where=warp.describe(),
                )
            start = int(starts[lane]) if starts is not None else 0
            if start % IMAGE_ALIGNMENT:
                raise MisalignedError(
                    f"{self.kind.opcode}: shared address {start:#x} is not a multiple of {IMAGE_ALIGNMENT}",
                    line=self.kind.line,
                    where=warp.describe(),
                )
            if place[0] * tensor.element_bytes % INNER_ALIGNMENT:
                raise MisalignedError(
                    f"{self.kind.opcode}: coordinate {place[0]} of dimension 0 is "
                    f"{place[0] * tensor.element_bytes} bytes, not a multiple of {INNER_ALIGNMENT}",
                    line=self.kind.line,
                    where=warp.describe(),
                )
            found.append((lane, Box(tensor, place, start)))
        return found


@instruction("cp.async.bulk.tensor", section="9.7.10.28.5.3", observable=True)
def tensor_copy(instruction: Instruction, context: DecodeContext) -> Step:
    """Copy a box of a tiled tensor to or from shared memory, asynchronously."""
    if context.modifiers[1:3] == ("global", "shared::cta"):
        context.require(*DIMENSIONS, "global", "shared::cta", "tile", BY_GROUP, "L2::cache_hint")
        return _store(context, None)
    context.require(
        *DIMENSIONS,
        "shared::cta",
        "shared::cluster",
        "global",
        "tile",
        BY_BARRIER,
        "multicast::cluster",
        "L2::cache_hint",
        "cta_group::1",
        "cta_group::2",
    )
    return _load(context)


@instruction("cp.reduce.async.bulk.tensor", section="9.7.10.28.5.4", observable=True)
def tensor_reduce(instruction: Instruction, context: DecodeContext) -> Step:
    """Combine a box in shared memory with the tensor, asynchronously; the map says the elements' type."""
    operations = ("add", "min", "max", "and", "or", "xor")
    context.require(*DIMENSIONS, "global", "shared::cta", "tile", BY_GROUP, "L2::cache_hint", *operations)
    names = [word for word in context.modifiers if word in operations]
    if len(names) != 1:
        context.unsupported("a reduction without one operation")
    return _store(context, names[0])


def _load(context: DecodeContext) -> Step:
    words = context.modifiers
    operands = list(context.instruction.operands)
    multicast, hint = "multicast::cluster" in words, "L2::cache_hint" in words
    if len(operands) != 3 + multicast + hint:
        context.unsupported(f"the form with {len(operands)} operands")
    if BY_BARRIER not in words or words[2] != "global":
        context.unsupported("a direction or completion like this")
    own = words[1] == "shared::cta"
    paired = "cta_group::2" in words
    destination = shared_address(context, operands[0], local=own)
    tensor = _TensorOperand(context, operands[1])
    barrier = shared_address(context, operands[2], local=own)
    mask = context.source(operands[3], 16) if multicast else None
    kind = context.kind(proxy="async")
    told = context.kind(proxy="async", semantics="release", scope="cluster")

    def step(warp: Warp) -> Outcome | None:
        starts, barriers = destination(warp), barrier(warp)
        masks = mask(warp) if mask is not None else None
        machine = warp.machine
        engine = CopyEngine.of(warp.cta)
        for lane, box in tensor.boxes(warp, starts):
            told_at = int(barriers[lane])
            require_same_cta(warp, box.start, told_at, kind, pair=paired)
            windows = [0]
            signals = [0]
            if masks is not None:
                found = windows_of(warp, int(masks[lane]), kind)
                own_window = box.start - box.start % SHARED_STRIDE
                windows = [window - own_window for window in found]
                signals = windows
                if paired:
                    signals = _paired_signals(found, told_at)
            for window in windows:
                warp.shared.locate(box.start + window, box.image_bytes, warp, kind)
            for hook in machine.event_hooks:
                hook(
                    warp,
                    "tma.load",
                    {"bytes": box.tensor.box_bytes, "line": kind.line, "copies": len(windows)},
                )
            pieces: list[tuple[Read, list[Target]]] = []
            for low, high in cuts(box.rows, 1, machine.scheduler.rng):
                read = partial(_read_tensor, box, low, high, machine.global_memory, kind)
                size = (high - low) * box.row_bytes
                pieces.append(
                    (
                        read,
                        [
                            Target(
                                partial(_write_image, box, low, high, warp.shared, kind, window),
                                warp.shared,
                                told_at + signal,
                                completes(size),
                                box.start + window,
                            )
                            for window, signal in zip(windows, signals, strict=True)
                        ],
                    )
                )
            transfer = Transfer(told, "tma.load", pieces)
            engine.enqueue(transfer)
            issued(warp, lane, "", kind, transfer)
        return None

    return step


def _paired_signals(windows: list[int], barrier: int) -> list[int]:
    """For each destination window, how far the barrier that is told of it is from the one that was named.

    With `.cta_group::2` it is in the destination's CTA or in its peer: whichever has a rank of the same
    parity as the named barrier's CTA (section 9.7.10.28.5.3).
    """
    rank = barrier // SHARED_STRIDE
    return [((window // SHARED_STRIDE & ~1 | rank & 1) - rank) * SHARED_STRIDE for window in windows]


def _store(context: DecodeContext, operation: str | None) -> Step:
    words = context.modifiers
    operands = list(context.instruction.operands)
    if len(operands) != 2 + ("L2::cache_hint" in words):
        context.unsupported(f"the form with {len(operands)} operands")
    if BY_GROUP not in words:
        context.unsupported("a completion like this")
    tensor = _TensorOperand(context, operands[0])
    source = shared_address(context, operands[1], local=True)
    kind = context.kind(proxy="async")
    name = "tma.reduce" if operation else "tma.store"

    def step(warp: Warp) -> Outcome | None:
        machine = warp.machine
        engine = CopyEngine.of(warp.cta)
        for lane, box in tensor.boxes(warp, source(warp)):
            if min(box.coordinates) < 0:
                raise AsyncMisuseError(
                    f"{kind.opcode}: the box at {box.coordinates} begins before the tensor",
                    line=kind.line,
                    where=warp.describe(),
                )
            combine = None
            if operation is not None:
                combine = _combination(operation, box.tensor, warp, kind)
            warp.shared.locate(box.start, box.image_bytes, warp, kind)
            for hook in machine.event_hooks:
                hook(warp, name, {"bytes": box.tensor.box_bytes, "line": kind.line, "copies": 1})
            pieces: list[tuple[Read, list[Target]]] = []
            for low, high in cuts(box.rows, 1, machine.scheduler.rng):
                read = partial(_read_image, box, low, high, warp.shared, kind)
                write = partial(_write_tensor, box, low, high, machine.global_memory, kind, combine)
                pieces.append((read, [Target(write)]))
            group = bulk_groups(warp)[lane].open
            transfer = Transfer(kind, name, pieces, [group], bulk_channel(warp), from_shared=True)
            engine.enqueue(transfer)
            issued(warp, lane, "bulk", kind, transfer)
        return None

    return step


def _combination(operation: str, tensor: TensorMap, warp: Warp, kind: AccessKind) -> Combine:
    element = tensor.element
    if operation in ("and", "or", "xor"):
        element = f"b{8 * tensor.element_bytes}"
    combine = reduction(operation, element)
    if combine is None:
        raise AsyncMisuseError(
            f"{kind.opcode}: .{operation} of elements of type {tensor.element}",
            line=kind.line,
            where=warp.describe(),
        )
    return combine


def _read_tensor(
    box: Box, low: int, high: int, memory: Memory, kind: AccessKind, engine: CopyEngine
) -> NDArray[np.uint64]:
    return box.load(low, high, memory, engine, kind)


def _write_image(
    box: Box,
    low: int,
    high: int,
    memory: Memory,
    kind: AccessKind,
    window: int,
    engine: CopyEngine,
    data: NDArray[np.uint64],
) -> None:
    box.deposit(low, high, data, memory, engine, kind, window)


def _read_image(
    box: Box, low: int, high: int, memory: Memory, kind: AccessKind, engine: CopyEngine
) -> NDArray[np.uint64]:
    return box.collect(low, high, memory, engine, kind)


def _write_tensor(
    box: Box,
    low: int,
    high: int,
    memory: Memory,
    kind: AccessKind,
    combine: Combine | None,
    engine: CopyEngine,
    data: NDArray[np.uint64],
) -> None:
    box.store(low, high, data, memory, engine, kind, combine)


@instruction("cp.async.bulk.prefetch.tensor", section="9.7.10.28.5.5", observable=True)
def tensor_prefetch(instruction: Instruction, context: DecodeContext) -> Step:
    """Bring a box into the L2 cache, which has no effect here beyond the checks of map and coordinates."""
    context.require(*DIMENSIONS, "L2", "global", "tile", "L2::cache_hint")
    tensor = _TensorOperand(context, context.operand(0))

    def step(warp: Warp) -> Outcome | None:
        tensor.boxes(warp, None)
        return None

    return step


@instruction(
    "prefetch.tensormap",
    "prefetch.param.tensormap",
    "prefetch.const.tensormap",
    section="9.7.10.16",
    observable=True,
)
def prefetch_map(instruction: Instruction, context: DecodeContext) -> Step:
    """Bring a tensor map into its cache, which has no effect here beyond decoding the map."""
    context.require()
    address = context.address(context.operand(0))
    kind = context.kind(proxy="tensormap")

    def step(warp: Warp) -> Outcome | None:
        addresses = address(warp)
        for lane in lanes_of(warp):
            read_map(warp, int(addresses[lane]), kind)
        return None

    return step
