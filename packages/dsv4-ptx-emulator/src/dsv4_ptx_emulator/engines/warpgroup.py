# SPDX-License-Identifier: Apache-2.0
"""The asynchronous matrix pipe of a warpgroup: wgmma in flight (PTX ISA 9.4, section 9.7.17).

An instruction belongs to four warps, which reach it one after the other. Its operation exists from the first
of them on and may execute once all four have issued it, in the order of issue, at a time that the seed
decides; it then reads shared memory (and A from registers) and adds into accumulators that the pipe holds.
Registers get the accumulators back in `wait_group`. Until then they hold `POISON`, because the ISA leaves
them undefined; a program that reads them too early computes with NaN instead of with a lucky value.

Arithmetic: elements are exact in float64 and so are their products; the K products of an instruction and the
accumulator are added in float64 and the sum is rounded once, to nearest even, to the accumulator's type
(float32 or float16). The ISA fixes neither order nor rounding. So results are exact where all partial sums
are integers below 2^24, say, and otherwise within half a unit in the last place of the result's type per
instruction, plus float64 noise of about 2^-50 of the largest product. Hardware aligns the terms and
truncates: on an H200, one m64n64 instruction of standard normal values (sums up to 21) differed from this by
at most 1.9e-6 for BF16 and F16, 9.5e-7 for TF32 and 1.9e-3 for E4M3 (tests/data/async_probes.npz).

Rejected: float32 products with a BLAS: its order of summation differs between machines by more than one
rounding.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.errors import AsyncMisuseError
from dsv4_ptx_emulator.formats.floats import FloatFormat, decode
from dsv4_ptx_emulator.formats.matrix import MatrixDescriptor, descriptor_chunks, elements_from_chunks
from dsv4_ptx_emulator.machine.cta import SHARED_STRIDE
from dsv4_ptx_emulator.machine.observer import AsyncEvent
from dsv4_ptx_emulator.machine.warp import LANES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.warp import Warp

WARPS = 4
ROWS = 64
POISON = np.full(LANES, 0x7FFD7FFD, np.uint32)
"""What accumulator registers hold while they are undefined: a NaN, as float32 and as two float16."""
POISON.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a wgmma when it is decoded.

    Attributes:
        columns: N.
        depth: K in elements.
        a: Type of A's elements.
        b: Type of B's elements.
        half: Whether accumulators are float16 rather than float32.
        a_transposed: Whether A in shared memory is M major.
        b_transposed: Whether B is N major.
        negate: Whether exactly one of A and B is negated.
        accumulators: Register numbers of D.
        a_registers: Register numbers of A; empty if A is in shared memory.
    """

    columns: int
    depth: int
    a: FloatFormat
    b: FloatFormat
    half: bool
    a_transposed: bool
    b_transposed: bool
    negate: bool
    accumulators: tuple[int, ...]
    a_registers: tuple[int, ...]


class Accumulator:
    """A D tile that the pipe holds.

    Attributes:
        values: float32 [64, N].
        flying: Warps of the group whose registers it stands for.
        unwaited: Operations per warp that write it and have not been waited for.
    """

    __slots__ = ("flying", "unwaited", "values")

    def __init__(self, columns: int) -> None:
        self.values = np.zeros((ROWS, columns), np.float32)
        self.flying = [False] * WARPS
        self.unwaited = [0] * WARPS


class Operation:
    """One wgmma, possibly not yet issued by all four warps."""

    __slots__ = ("accumulate", "accumulator", "descriptors", "done", "issued", "kind", "shape", "warps")

    def __init__(
        self,
        shape: Shape,
        kind: AccessKind,
        descriptors: tuple[MatrixDescriptor | None, MatrixDescriptor],
        accumulate: bool,
        accumulator: Accumulator,
    ) -> None:
        self.shape = shape
        self.kind = kind
        self.descriptors = descriptors
        self.accumulate = accumulate
        self.accumulator = accumulator
        self.issued = 0
        self.done = False
        self.warps: list[Warp | None] = [None] * WARPS


class _Issuer:
    """A warp's side of the pipe.

    Attributes:
        number: How many operations it has issued.
        open: Issued and not committed.
        groups: Committed and not waited for, oldest first.
        fenced: Whether a wgmma.fence came since registers were given back, or at all.
        returned: Register arrays that the pipe gave back since, by register number.
    """

    __slots__ = ("fenced", "groups", "number", "open", "returned")

    def __init__(self) -> None:
        self.number = 0
        self.open: list[Operation] = []
        self.groups: deque[list[Operation]] = deque()
        self.fenced = False
        self.returned: dict[int, NDArray[Any]] = {}


class WarpgroupPipe:
    """The pipe of four consecutive warps. An `AsyncAgent`.

    Attributes:
        cta: The CTA.
        rank: Its rank.
        first: Number of the first warp.
        acting: The operation that the access at hand is for; None between steps.
    """

    def __init__(self, cta: Cta, first: int) -> None:
        self.cta = cta
        self.rank = cta.rank
        self.first = first
        self.machine = cta.launch.machine
        self.acting: Operation | None = None
        self._queue: deque[Operation] = deque()
        self._base = 0
        self._held: dict[tuple[int, ...], Accumulator] = {}
        self._issuers = [_Issuer() for _ in range(WARPS)]

    @classmethod
    def of(cls, warp: Warp) -> WarpgroupPipe:
        """The pipe of the warp's group, made at first use."""
        first = warp.index // WARPS * WARPS
        key = f"wgmma {first}"
        pipe = warp.cta.scratch.get(key)
        if pipe is None:
            pipe = warp.cta.scratch[key] = cls(warp.cta, first)
        assert isinstance(pipe, cls)
        return pipe

    def channel(self, warp: Warp) -> tuple[str, int]:
        """What a warp waits for whose groups are not complete."""
        return ("wgmma", id(warp))

    def fence(self, warp: Warp) -> None:
        """Registers are settled (`wgmma.fence`)."""
        issuer = self._issuers[warp.index - self.first]
        issuer.fenced = True
        issuer.returned.clear()

    def issue(
        self,
        warp: Warp,
        shape: Shape,
        kind: AccessKind,
        descriptors: tuple[MatrixDescriptor | None, MatrixDescriptor],
        accumulate: bool,
    ) -> None:
        """A warp executes a wgmma.

        Raises:
            AsyncMisuseError: Another warp of the group executed a different one; registers of another
                operation in flight are used differently; no fence orders the registers' earlier use.
        """
        member = warp.index - self.first
        issuer = self._issuers[member]
        held = self._hold(warp, issuer, shape, kind)
        at = issuer.number - self._base
        if at < len(self._queue):
            operation = self._queue[at]
            if (
                operation.shape != shape
                or operation.descriptors != descriptors
                or operation.accumulate != accumulate
            ):
                raise AsyncMisuseError(
                    f"{kind.opcode}: the warps of warpgroup {self.first // WARPS} execute different wgmma "
                    f"(line {operation.kind.line}) or the same with different descriptors or scale-d",
                    line=kind.line,
                    where=warp.describe(),
                )
        else:
            operation = Operation(shape, kind, descriptors, accumulate, held)
            self._queue.append(operation)
        issuer.number += 1
        operation.issued += 1
        operation.warps[member] = warp
        held.unwaited[member] += 1
        issuer.open.append(operation)
        for hook in self.machine.async_hooks:
            hook(AsyncEvent("issue", warp, warp.active_bits, "wgmma", kind.line, operation))
        # Also where it is not ready, so that a deadlock report finds it.
        self.machine.scheduler.activate(self)

    def commit(self, warp: Warp) -> None:
        """Close the warp's open group (`wgmma.commit_group`)."""
        issuer = self._issuers[warp.index - self.first]
        issuer.groups.append(issuer.open)
        issuer.open = []

    def wait(self, warp: Warp, allowed: int) -> int:
        """Give back the registers of all but the `allowed` latest groups if those are complete.

        Returns:
            How many groups are not complete; zero if nothing is left to wait for.
        """
        member = warp.index - self.first
        issuer = self._issuers[member]
        due = len(issuer.groups) - allowed
        if due <= 0:
            return 0
        missing = sum(not all(op.done for op in issuer.groups[index]) for index in range(due))
        if missing:
            return missing
        for _ in range(due):
            for operation in issuer.groups.popleft():
                operation.accumulator.unwaited[member] -= 1
                if not operation.accumulator.unwaited[member]:
                    self._give_back(warp, issuer, operation)
        return 0

    def ready(self) -> bool:
        """Whether the oldest operation has been issued by all four warps."""
        return bool(self._queue) and self._queue[0].issued == WARPS

    def step(self, rng: random.Random) -> None:
        """Execute the oldest operation."""
        operation = self._queue[0]
        self.acting = operation
        shape = operation.shape
        a_descriptor, b_descriptor = operation.descriptors
        if a_descriptor is None:
            a = self._from_registers(operation)
        else:
            a = self._from_shared(a_descriptor, ROWS, shape.a_transposed, shape.a, operation)
        b = self._from_shared(b_descriptor, shape.columns, shape.b_transposed, shape.b, operation)
        total = a @ b.T
        if shape.negate:
            np.negative(total, out=total)
        accumulator = operation.accumulator
        if operation.accumulate:
            total += accumulator.values
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = total.astype(np.float16) if shape.half else total
            accumulator.values = rounded.astype(np.float32)
        self._queue.popleft()
        self._base += 1
        operation.done = True
        self.acting = None
        for hook in self.machine.event_hooks:
            detail = {"line": operation.kind.line, "m": ROWS, "n": shape.columns, "k": shape.depth}
            hook(self, "mma", detail)
        for warp in operation.warps:
            assert warp is not None
            self.machine.scheduler.wake(self.channel(warp))

    def describe(self) -> str:
        """Such as "matrix pipe of rank 0, CTA (0, 0, 0), warpgroup 1: 4 wgmma, first at line 812", or ""."""
        if not self._queue:
            return ""
        first = self._queue[0]
        partial = f" issued by {first.issued} of 4 warps" if first.issued < WARPS else ""
        return (
            f"matrix pipe of {self.cta.describe()}, warpgroup {self.first // WARPS}: "
            f"{len(self._queue)} wgmma, first at line {first.kind.line}{partial}"
        )

    def _hold(self, warp: Warp, issuer: _Issuer, shape: Shape, kind: AccessKind) -> Accumulator:
        """The accumulator of a warp's D registers, taken over from them if it is not held for the warp."""
        member = warp.index - self.first
        numbers = shape.accumulators
        held = self._held.get(numbers)
        if held is not None and held.flying[member]:
            return held
        for other, accumulator in self._held.items():
            if accumulator.flying[member] and not set(other).isdisjoint(numbers):
                raise AsyncMisuseError(
                    f"{kind.opcode}: accumulator registers are those of a wgmma of another shape in flight",
                    line=kind.line,
                    where=warp.describe(),
                )
        registers = warp.registers
        if not issuer.fenced:
            touched = [n for n in numbers if registers[n] is not issuer.returned.get(n)]
            if touched or shape.a_registers:
                raise AsyncMisuseError(
                    f"{kind.opcode}: no wgmma.fence orders this after the warp's own use of its registers",
                    line=kind.line,
                    where=warp.describe(),
                )
        if held is None:
            held = self._held[numbers] = Accumulator(shape.columns)
        held.values[16 * member : 16 * member + 16] = tile_of([registers[n] for n in numbers], shape.half)
        held.flying[member] = True
        for number in numbers:
            registers[number] = POISON
        return held

    def _give_back(self, warp: Warp, issuer: _Issuer, operation: Operation) -> None:
        member = warp.index - self.first
        shape = operation.shape
        accumulator = operation.accumulator
        arrays = registers_of(accumulator.values[16 * member : 16 * member + 16], shape.half)
        for number, array in zip(shape.accumulators, arrays, strict=True):
            warp.registers[number] = array
            issuer.returned[number] = array
        issuer.fenced = False
        accumulator.flying[member] = False
        if not any(accumulator.flying):
            del self._held[shape.accumulators]

    def _from_shared(
        self, descriptor: MatrixDescriptor, rows: int, row_major: bool, fmt: FloatFormat, operation: Operation
    ) -> NDArray[np.float64]:
        size = fmt.storage.itemsize
        depth = operation.shape.depth
        addresses = (
            descriptor_chunks(descriptor, rows, depth, row_major, size)
            + self.cta.cluster_rank * SHARED_STRIDE
        )
        flat = addresses.reshape(-1).view(np.uint64)
        chunks = self.cta.cluster.shared.gather(flat, 8, 2, self, operation.kind)
        raw = chunks.view(np.uint8).reshape(*addresses.shape, 16)
        bits = elements_from_chunks(raw, rows, depth, row_major, fmt.storage)
        return decode(fmt, bits).astype(np.float64)

    def _from_registers(self, operation: Operation) -> NDArray[np.float64]:
        shape = operation.shape
        tiles = []
        for warp in operation.warps:
            assert warp is not None
            tiles.append(a_tile_of([warp.registers[n] for n in shape.a_registers], shape.a))
        return np.concatenate(tiles).astype(np.float64)


def tile_of(registers: list[NDArray[Any]], half: bool) -> NDArray[np.float32]:
    """A warp's 16 rows of D from its registers (section 9.7.17.5.1.1, "Register fragment of D").

    Lane l holds, of each 8 columns, two neighbours at 2·(l % 4) in rows l / 4 and l / 4 + 8.

    Args:
        registers: uint32[32] each: N / 2 of float32, or N / 4 of two float16.
        half: Whether they are float16.

    Returns:
        float32 [16, N].
    """
    stacked = np.stack(registers)
    if half:
        pairs = stacked.view(np.uint16).reshape(len(registers), LANES, 2).view(np.float16)
        # register (block, row half), lane (row, column pair), element
        lanes = pairs.reshape(-1, 2, 8, 4, 2).transpose(1, 2, 0, 3, 4).astype(np.float32)
    else:
        # register (block, row half, element), lane (row, column pair)
        lanes = stacked.view(np.float32).reshape(-1, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2)
    return lanes.reshape(16, -1)


def registers_of(tile: NDArray[np.float32], half: bool) -> NDArray[np.uint32]:
    """The inverse of `tile_of`: uint32 [registers, 32]."""
    blocks = tile.reshape(2, 8, -1, 4, 2)
    if half:
        pairs = np.ascontiguousarray(blocks.transpose(2, 0, 1, 3, 4).astype(np.float16))
        return pairs.view(np.uint32).reshape(-1, LANES)
    values = np.ascontiguousarray(blocks.transpose(2, 0, 4, 1, 3))
    return values.view(np.uint32).reshape(-1, LANES)


def a_tile_of(registers: list[NDArray[Any]], fmt: FloatFormat) -> NDArray[np.float32]:
    """A warp's 16 rows of A from its four registers (section 9.7.17.5.1.1, "Register fragment of A").

    Returns:
        float32 [16, K].
    """
    bits = np.stack(registers).view(fmt.storage).reshape(2, 2, 8, 4, -1)
    # register (column half, row half), lane (row, column group), element
    return decode(fmt, np.ascontiguousarray(bits.transpose(1, 2, 0, 3, 4)).reshape(16, -1))
