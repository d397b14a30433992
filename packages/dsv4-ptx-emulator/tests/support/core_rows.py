# SPDX-License-Identifier: Apache-2.0
"""Probes of the synchronous instructions: groups of rows, each row a few instructions with one result.

A group is one kernel. Every thread has one element of each input, and every row writes its result to the
row's own part of the last buffer, so that a difference between a GPU and the emulator names the instruction
and the thread's operands. One kernel per row was rejected: a thousand modules take a GPU's compiler minutes.

What a recording depends on is the row (its text, the inputs, the launch), not its neighbours: a new row
leaves the recordings of the others in force.

Names in a row's text, written as `$a`:

    a b c   the thread's element of each input, in a register of its width
    o q     where the result goes: 2, 4 or 8 bytes in `o`, 16 in `o` and `q`
    t i     %tid.x and the thread's number in the grid
    L       a prefix for labels
    s n w   address in shared memory of 64 bytes of the thread, of the next lane (lane ^ 1), of the warp
    g m v   the same in global memory
    x y z   address of the thread's element of each input

%p1-%p19, %h11-%h19, %r20-%r59 and %d30-%d59 are the row's own. A row that reads what other threads write
begins with a barrier of those threads, because the row before it may still be reading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from string import Template
from typing import Any

import numpy as np
from async_probes import Bytes, Probe, emulate
from numpy.typing import NDArray
from probe import WIDTHS, kernel

Expected = Callable[..., Sequence["int | None"]]
"""The inputs as arrays to each thread's result as an unsigned integer, or None where no text fixes it."""

SLOT = 64
"""Bytes of scratch memory per thread."""
_REGISTERS = {2: "%h", 4: "%r", 8: "%d"}


@dataclass(frozen=True)
class Tolerance:
    """How far an approximate function may be from the exact value, by the PTX ISA.

    Attributes:
        relative: Part of the exact value.
        absolute: Added to it.
        domain: For which inputs (arrays of floats) the ISA promises that.
    """

    relative: float
    absolute: float = 0.0
    domain: Callable[..., NDArray[np.bool_]] | None = None


@dataclass(frozen=True)
class Departure:
    """Where the recorded GPU, with its driver's compiler, does other than the ISA says.

    The emulator follows the ISA.

    Attributes:
        reason: What the ISA says, and what the GPU does.
        results: The GPU's result, or None where it follows the ISA.
    """

    reason: str
    results: Expected


@dataclass(frozen=True)
class Row:
    """One or a few instructions with a result.

    Attributes:
        name: The instruction, as a rule.
        code: Its text.
        size: Bytes of the result.
        expected: The result by another way than the emulator's, where that is cheap.
        tolerance: For approximate f32 functions.
        departure: Of the GPU from the ISA. The recording stays comparable, in every thread.
    """

    name: str
    code: str
    size: int = 4
    expected: Expected | None = None
    tolerance: Tolerance | None = None
    departure: Departure | None = None


@dataclass(frozen=True, eq=False)
class Group:
    """A kernel of many rows.

    Attributes:
        name: Of the group.
        inputs: One to three arrays of unsigned integers of equal length, the number of threads.
        rows: What it executes in turn.
        threads: Of a CTA.
        cluster: CTAs of a cluster.
        scratch: Whether rows use memory (`s n w g m v`).
        module: Declarations at module scope.
        seeds: Schedules to try in the emulator.
    """

    name: str
    inputs: tuple[NDArray[Any], ...]
    rows: tuple[Row, ...]
    threads: int = 256
    cluster: int = 1
    scratch: bool = False
    module: str = ""
    seeds: int = 1
    places: dict[str, tuple[int, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.inputs[0])
        assert all(len(values) == count for values in self.inputs)
        assert count % (self.threads * self.cluster) == 0
        offset = 0
        for row in self.rows:
            assert row.name not in self.places, f"{self.name} has two rows {row.name}"
            self.places[row.name] = (offset, row.size * count)
            offset += -(-row.size * count // 16) * 16

    @property
    def count(self) -> int:
        """Threads of the launch."""
        return len(self.inputs[0])

    def fingerprint(self, row: Row) -> str:
        """Of what the recording of a row depends on."""
        launch = f"{row.code}\0{row.size}\0{self.module}\0{self.threads}\0{self.cluster}"
        parts = [launch.encode(), *(values.tobytes() for values in self.inputs)]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]

    def key(self, row: Row) -> str:
        """The row's name in the recordings."""
        return f"{self.name}/{row.name}/{self.fingerprint(row)}"

    def probe(self) -> Probe:
        """The launch; results are in its last buffer."""
        buffers: list[Bytes] = [values.view(np.uint8) for values in self.inputs]
        if self.scratch:
            buffers.append(np.zeros(self.count * SLOT, np.uint8))
        last = self.places[self.rows[-1].name]
        buffers.append(np.zeros(-(-sum(last) // 16) * 16, np.uint8))
        text = kernel(self._body(), module=self.module, params=len(buffers), threads=self.threads)
        return Probe(
            f"core-{self.name}",
            text,
            tuple(buffers),
            threads=self.threads,
            grid=self.count // self.threads,
            cluster=self.cluster,
            seeds=self.seeds,
        )

    def split(self, results: Bytes) -> dict[str, Bytes]:
        """The last buffer's bytes by row."""
        return {name: results[start : start + size] for name, (start, size) in self.places.items()}

    def _body(self) -> str:
        names = {"t": "%r0", "i": "%r2"}
        lines = ["mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;", f"mad.lo.u32 %r2, %r1, {self.threads}, %r0;"]
        for place, (values, letter, where) in enumerate(zip(self.inputs, "abc", "xyz", strict=False)):
            size = values.dtype.itemsize
            names[letter], names[where] = f"{_REGISTERS[size]}{3 + place}", f"%d{15 + place}"
            lines += [
                f"ld.param.b64 %d2, [p{place}];",
                f"mad.wide.u32 {names[where]}, %r2, {size}, %d2;",
                f"ld.global.{WIDTHS[size]} {names[letter]}, [{names[where]}];",
            ]
        place = len(self.inputs)
        if self.scratch:
            names |= {"s": "%r6", "n": "%r7", "w": "%r8", "g": "%d6", "m": "%d7", "v": "%d8"}
            lines += [
                f".shared .align 16 .b8 slots[{self.threads * SLOT}];",
                f"mov.u32 %r9, slots; mad.lo.u32 %r6, %r0, {SLOT}, %r9;",
                f"xor.b32 %r7, %r0, 1; mad.lo.u32 %r7, %r7, {SLOT}, %r9;",
                f"and.b32 %r8, %r0, -32; mad.lo.u32 %r8, %r8, {SLOT}, %r9;",
                f"ld.param.b64 %d2, [p{place}]; mad.wide.u32 %d6, %r2, {SLOT}, %d2;",
                f"xor.b32 %r9, %r2, 1; mad.wide.u32 %d7, %r9, {SLOT}, %d2;",
                f"and.b32 %r9, %r2, -32; mad.wide.u32 %d8, %r9, {SLOT}, %d2;",
            ]
            place += 1
        lines.append(f"ld.param.b64 %d2, [p{place}];")
        lines += [f"mad.wide.u32 %d{20 + size}, %r2, {size}, %d2;" for size in (2, 4, 8)]
        lines.append("mad.wide.u32 %d19, %r2, 16, %d2;")
        for number, row in enumerate(self.rows):
            here = {"L": f"L{number}", "o": f"{_REGISTERS[min(row.size, 8)]}10", "q": "%d11"}
            start = self.places[row.name][0]
            lines.append(Template(row.code).substitute(names | here))
            if row.size == 16:
                lines.append(f"st.global.v2.b64 [%d19+{start}], {{%d10, %d11}};")
            else:
                lines.append(f"st.global.b{8 * row.size} [%d{20 + row.size}+{start}], {here['o']};")
        return "\n".join(lines)


@cache
def emulated(group: Group, seed: int) -> dict[str, Bytes]:
    """What the emulator makes of a group's rows."""
    return group.split(emulate(group.probe(), seed)[-1])


def integers(results: Bytes, size: int) -> list[int]:
    """A row's results as unsigned integers."""
    if size < 16:
        plain: list[int] = results.view(f"u{size}").tolist()
        return plain
    halves = results.view(np.uint64).reshape(-1, 2).tolist()
    return [low | high << 64 for low, high in halves]


def _operands(function: Any) -> int:
    """Arguments without a default: those with one are a lambda's constants."""
    return int(function.__code__.co_argcount) - len(function.__defaults__ or ())


def each(function: Callable[..., int | None], every: int = 1) -> Expected:
    """Expected results of a function of one thread's operands; with `every`, of one thread in so many."""

    def whole(*inputs: NDArray[Any]) -> list[int | None]:
        columns = [values[::every].tolist() for values in inputs[: _operands(function)]]
        results: list[int | None] = [None] * len(inputs[0])
        results[::every] = [function(*operands) for operands in zip(*columns, strict=True)]
        return results

    return whole


def warps(function: Callable[..., Sequence[int | None]]) -> Expected:
    """Expected results of a function of one warp's operands: lists of 32."""

    def whole(*inputs: NDArray[Any]) -> list[int | None]:
        used = [values.reshape(-1, 32).tolist() for values in inputs[: _operands(function)]]
        return [result for operands in zip(*used, strict=True) for result in function(*operands)]

    return whole


def pairs(edges: Sequence[int], bits: int, seed: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Two operands: every pair of the edges, then random ones, many of them near the edges."""
    first, second = crossed(edges, bits, seed, count, 2)
    return first, second


def crossed(
    edges: Sequence[int], bits: int, seed: int, count: int, operands: int
) -> tuple[NDArray[Any], ...]:
    """Every combination of the edges (as many as fit), then random operands and edges mixed."""
    dtype = np.dtype(f"u{bits // 8}")
    rng = np.random.default_rng(seed)
    table = np.array([value & (1 << bits) - 1 for value in edges], dtype)
    number = np.arange(count)
    inside = number < len(edges) ** operands
    results = []
    for place in range(operands):
        wild = rng.integers(0, 1 << bits, count, dtype=dtype)
        mixed = np.where(rng.random(count) < 0.5, wild, table[rng.integers(0, len(edges), count)])
        combined = table[number // len(edges) ** place % len(edges)]
        results.append(np.where(inside, combined, mixed).astype(dtype))
    return tuple(results)


def signed(value: int, bits: int) -> int:
    """The low bits of a number in two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value
