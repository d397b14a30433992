# SPDX-License-Identifier: Apache-2.0
"""Instructions on multicast addresses: multimem.ld_reduce, .st, .red (PTX ISA 9.4, section 9.7.10.15).

A reduction takes the members' values in ascending order of their ranks and rounds after each addition to
the precision of the accumulation: that of the type, or what `.acc::f32` and `.acc::f16` say. The ISA leaves
the order open, so sums of floats on hardware may differ in the last bits.

All members' copies are accessed within one step. What hardware lets others see in between, a copy that is
written before another, is not shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.errors import MisalignedError
from dsv4_ptx_emulator.formats.floats import F16, FORMATS, FloatFormat, decode, encode
from dsv4_ptx_emulator.isa.context import DTYPES, width_of
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.isa.shared_operands import lanes_of
from dsv4_ptx_emulator.isa.spaces import split
from dsv4_ptx_emulator.machine.warp import LANES

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from dsv4_ptx_emulator.isa.context import DecodeContext, Source
    from dsv4_ptx_emulator.machine.multicast import MulticastRange
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.outcome import Outcome
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Instruction

    Combine = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]

_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_OPERATIONS = ("add", "min", "max", "and", "or", "xor")
_ACCUMULATIONS = {"acc::f32": ("f16", "bf16"), "acc::f16": ("e4m3", "e5m2")}
_INTEGERS = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}
_NARROW = ("f16", "bf16", "e4m3", "e5m2")


class _Form:
    """What the words of an instruction say."""

    def __init__(self, context: DecodeContext, semantics: tuple[str, ...]) -> None:
        words = split(context.modifiers)
        if words.semantics not in semantics or words.space not in ("", "global") or words.caching:
            context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
        self.count, self.operation, self.accumulation, types = 1, "", "", []
        for word in words.rest:
            if word in _VECTORS:
                self.count = _VECTORS[word]
            elif word in _OPERATIONS and not self.operation:
                self.operation = word
            elif word in _ACCUMULATIONS and not self.accumulation:
                self.accumulation = word
            else:
                types.append(word)
        if len(types) != 1:
            context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
        self.type = types[0]
        self.base = self.type.split("x")[0]
        if self.base not in (*_NARROW, "f32", "f64") and self.type[0] not in "bus":
            context.unsupported(f"type .{self.type}")
        repeats = int(self.type.split("x")[1]) if "x" in self.type else 1
        self.element = FORMATS[self.base].width if self.base in _NARROW else width_of(self.base)
        self.bits = self.element * repeats
        if self.count > 1 and self.type[0] in "us":
            context.unsupported(f"vectors of .{self.type}")
        if self.bits * self.count not in (32, 64, 128) or self.bits not in DTYPES:
            context.unsupported(f"{self.bits * self.count // 8} bytes")
        scope = words.scope or ("sys" if words.semantics not in ("", "weak") else "")
        self.kind = context.kind(proxy="multimem", semantics=words.semantics or "weak", scope=scope)

    @property
    def size(self) -> int:
        """Bytes of a lane."""
        return self.bits * self.count // 8


@instruction("multimem.ld_reduce", section="9.7.10.15", observable=True)
def load(instruction: Instruction, context: DecodeContext) -> Step:
    """Load what all members have at a multicast address, reduced to one value."""
    form = _Form(context, ("", "weak", "relaxed", "acquire"))
    combine, finish, start = _reduction(context, form)
    targets = context.destinations(context.operand(0), form.bits)
    if len(targets) != form.count:
        context.unsupported(f"{len(targets)} destinations")
    address = context.address(context.operand(1))
    kind, size = form.kind, form.size
    unsigned: Any = DTYPES[form.bits]
    width = min(size, 8)

    def step(warp: Warp) -> Outcome | None:
        out = np.zeros((form.count, LANES), unsigned)
        memory = warp.machine.global_memory
        for found, lanes, offsets in _ranges(warp, address, size, kind):
            total: NDArray[Any] | None = None
            for _, base in found.members:
                at = offsets + np.uint64(base)
                raw = np.ascontiguousarray(memory.gather(at, width, size // width, warp, kind))
                values = start(raw.view(np.uint8).reshape(len(lanes), size))
                total = values if total is None else combine(total, values)
            assert total is not None
            out[:, lanes] = finish(total).reshape(len(lanes), size).view(unsigned).T
        for write, values in zip(targets, out, strict=True):
            write(warp, values)
        return None

    return step


@instruction("multimem.st", section="9.7.10.15", observable=True)
def store(instruction: Instruction, context: DecodeContext) -> Step:
    """Store a value at a multicast address, for all members."""
    form = _Form(context, ("", "weak", "relaxed", "release"))
    if form.operation or form.accumulation:
        context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
    address = context.address(context.operand(0))
    sources = _sources(context, form)
    kind, size = form.kind, form.size
    wide: Any = DTYPES[8 * min(size, 8)]

    def step(warp: Warp) -> Outcome | None:
        memory = warp.machine.global_memory
        data = np.stack([read(warp) for read in sources], axis=1)
        for found, lanes, offsets in _ranges(warp, address, size, kind):
            members = list(found.members)
            warp.machine.scheduler.rng.shuffle(members)
            values = np.ascontiguousarray(data[lanes]).view(wide)
            for _, base in members:
                memory.scatter(offsets + np.uint64(base), values, warp, kind)
        return None

    return step


@instruction("multimem.red", section="9.7.10.15", observable=True)
def reduce(instruction: Instruction, context: DecodeContext) -> Step:
    """Combine a value with what each member has at a multicast address."""
    form = _Form(context, ("", "relaxed", "release"))
    if form.accumulation or form.base in ("e4m3", "e5m2"):
        context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
    if form.operation != "add" and form.base in (*_NARROW, "f32", "f64"):
        context.unsupported(f"operation .{form.operation}.{form.type}")
    combine, finish, start = _reduction(context, form)
    address = context.address(context.operand(0))
    sources = _sources(context, form)
    told = context.kind(
        proxy="multimem",
        semantics="relaxed" if form.kind.semantics == "weak" else form.kind.semantics,
        scope=form.kind.scope or "sys",
    )
    width = form.bits // 8

    def step(warp: Warp) -> Outcome | None:
        memory = warp.machine.global_memory
        data = [read(warp) for read in sources]
        for found, lanes, offsets in _ranges(warp, address, form.size, told):
            order = list(range(len(lanes)))
            warp.machine.scheduler.rng.shuffle(order)
            for _, base in found.members:
                for place in order:
                    lane = int(lanes[place])
                    warp.acting = lane
                    for part, values in enumerate(data):
                        operand = start(values[lane : lane + 1].view(np.uint8).reshape(1, width))

                        def change(old: int, operand: NDArray[Any] = operand) -> int:
                            now = start(
                                np.frombuffer(old.to_bytes(width, "little"), np.uint8).reshape(1, width)
                            )
                            return int.from_bytes(finish(combine(now, operand)).tobytes(), "little")

                        memory.update(int(offsets[place]) + base + part * width, width, change, warp, told)
        warp.acting = -1
        return None

    return step


def _sources(context: DecodeContext, form: _Form) -> list[Source]:
    sources = context.sources(context.operand(1), form.bits)
    if len(sources) != form.count:
        context.unsupported(f"{len(sources)} sources")
    return sources


def _ranges(
    warp: Warp, address: Source, size: int, kind: AccessKind
) -> list[tuple[MulticastRange, NDArray[np.intp], NDArray[np.uint64]]]:
    """The active lanes by range, with their offsets in it."""
    addresses = address(warp)
    lanes = np.array(lanes_of(warp), np.intp)
    found = []
    while len(lanes):
        first = int(addresses[lanes[0]])
        if first % size:
            raise MisalignedError(
                f"{kind.opcode}: multicast address {first:#x} is not a multiple of {size}",
                line=kind.line,
                where=warp.describe(),
            )
        target = warp.machine.multicast.find(first, size, warp, kind)
        offsets = addresses[lanes] - np.uint64(target.start)
        # The first lane is inside, so each round leaves fewer; misaligned ones are refused by each access.
        inside = offsets <= np.uint64(target.size - size)
        found.append((target, lanes[inside], offsets[inside]))
        lanes = lanes[~inside]
    return found


def _reduction(
    context: DecodeContext, form: _Form
) -> tuple[Combine, Callable[[NDArray[Any]], NDArray[np.uint8]], Callable[[NDArray[Any]], NDArray[Any]]]:
    """How to combine two values, to store one, and to read one from bytes."""
    operation, base = form.operation, form.base
    if not operation or (form.accumulation and base not in _ACCUMULATIONS[form.accumulation]):
        context.unsupported(f"modifiers .{'.'.join(context.modifiers)}")
    if base in _NARROW:
        return _narrow(form, FORMATS[base])
    if base in ("f32", "f64"):
        if operation != "add":
            context.unsupported(f"operation .{operation}.{form.type}")
        dtype: Any = np.float32 if base == "f32" else np.float64
    else:
        if form.type not in _INTEGERS[operation]:
            context.unsupported(f"operation .{operation}.{form.type}")
        dtype = np.dtype(f"{'i' if base[0] == 's' else 'u'}{form.element // 8}")
    functions: dict[str, Combine] = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    return (
        functions[operation],
        lambda values: np.ascontiguousarray(values).view(np.uint8),
        lambda raw: np.ascontiguousarray(raw).view(dtype),
    )


def _narrow(
    form: _Form, fmt: FloatFormat
) -> tuple[Combine, Callable[[NDArray[Any]], NDArray[np.uint8]], Callable[[NDArray[Any]], NDArray[Any]]]:
    """The same for narrow floats, held as float32; sums are rounded to the accumulation's precision."""
    inner = {"acc::f32": None, "acc::f16": F16, "": fmt}[form.accumulation]

    def start(raw: NDArray[Any]) -> NDArray[Any]:
        return decode(fmt, np.ascontiguousarray(raw).view(fmt.storage))

    def add(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
        total = a + b
        return total if inner is None else decode(inner, encode(inner, total))

    def pick(smallest: bool) -> Combine:
        return lambda a, b: np.fmin(a, b) if smallest else np.fmax(a, b)

    def finish(values: NDArray[Any]) -> NDArray[np.uint8]:
        return np.ascontiguousarray(encode(fmt, values)).view(np.uint8)

    combine = add if form.operation == "add" else pick(form.operation == "min")
    return combine, finish, start
