# SPDX-License-Identifier: Apache-2.0
"""The matrix pipe of a CTA: tcgen05.mma, .cp and .commit in flight (PTX ISA 9.4, sections 9.7.18.6 and .10).

Operations are executed one after the other, in the order in which the CTA's threads issued them, at times
that the seed decides; a commit waits for the earlier operations of its own thread only and may overtake the
others'. An operation reads shared and tensor memory when it is executed, not when it is issued, so whoever
changes an operand too early gets a result that depends on the seed.

The ISA promises less order than that: of one thread's operations only mma after mma (same accumulator and
shape), cp before mma, and both before commit (section 9.7.18.6.2). Kernels that are known to work rely on
cp after mma as well: they copy the next scale factors over those that the issued mma still reads.

Arithmetic is as for wgmma (engines/warpgroup.py): products and scale factors are exact in float64, the sum
over K is formed in float64 (exact for E4M3 and narrower), scaled, added to D and rounded once, to nearest
even, to the type of D. The ISA fixes neither order nor rounding; hardware truncates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.engines.barriers import change_barrier
from dsv4_ptx_emulator.engines.tensor_operands import (
    Part,
    matrix_from_cells,
    matrix_from_shared,
    product,
    rows_from_shared,
    scale_factors,
)
from dsv4_ptx_emulator.machine.cta import SHARED_STRIDE
from dsv4_ptx_emulator.machine.mbarrier import MBarrier
from dsv4_ptx_emulator.machine.tensor_memory import Block, TensorMemory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.formats.matrix import MatrixDescriptor
    from dsv4_ptx_emulator.formats.tensor_core import InstructionDescriptor
    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.observer import AccessKind

Thread = tuple[int, int]
"""Warp and lane."""


class Copy:
    """A tcgen05.cp: rows of shared memory to lanes of tensor memory, in each of its CTAs alike.

    Attributes:
        kind: The instruction.
        thread: Who issued it.
        ctas: One CTA or a pair.
        source: Where the rows are.
        row_bytes: Their width.
        lanes: First destination lanes of each run of rows: (row, lane, rows).
        column: First destination column.
        blocks: Cells that it writes.
    """

    name = "cp"

    def __init__(
        self,
        kind: AccessKind,
        thread: Thread,
        ctas: Sequence[Cta],
        source: MatrixDescriptor,
        row_bytes: int,
        lanes: Sequence[tuple[int, int, int]],
        column: int,
    ) -> None:
        self.kind = kind
        self.thread = thread
        self.ctas = ctas
        self.source = source
        self.row_bytes = row_bytes
        self.lanes = lanes
        self.column = column
        self.blocks = tuple(
            Block(TensorMemory.of(cta), lane, rows, column, row_bytes // 4, writes=True)
            for cta in ctas
            for _, lane, rows in lanes
        )

    def run(self, pipe: TensorPipe) -> None:
        """Copy."""
        total = max(row + rows for row, _, rows in self.lanes)
        columns = slice(self.column, self.column + self.row_bytes // 4)
        for cta in self.ctas:
            data = rows_from_shared(self.source, total, self.row_bytes, cta, pipe, self.kind)
            cells = TensorMemory.of(cta).cells
            for row, lane, rows in self.lanes:
                cells[lane : lane + rows, columns] = data[row : row + rows]


class Multiply:
    """A tcgen05.mma.

    Attributes:
        kind: The instruction.
        thread: Who issued it.
        ctas: One CTA or a pair, the even one first.
        shape: The decoded instruction descriptor.
        a: Where A is in shared memory, or the lane and column where it is in tensor memory.
        b: Where B is; of a pair, each CTA has half of its rows.
        parts: Per CTA (alike), where pieces of its tile of D lie.
        scales: First columns of A's and B's scale factors, or None.
        accumulate: Whether D is added to.
        scale_down: D counts times 2 to the power of minus this.
        disabled: bool [CTAs, 128]: lanes that are not written; None for none.
        blocks: Cells that it reads and writes.
    """

    name = "mma"

    def __init__(
        self,
        kind: AccessKind,
        thread: Thread,
        ctas: Sequence[Cta],
        shape: InstructionDescriptor,
        depth: int,
        a: MatrixDescriptor | tuple[Part, ...],
        b: MatrixDescriptor,
        parts: tuple[Part, ...],
        scales: tuple[int, int] | None,
        accumulate: bool,
        scale_down: int,
        disabled: NDArray[np.bool_] | None,
    ) -> None:
        self.kind = kind
        self.thread = thread
        self.ctas = ctas
        self.shape = shape
        self.depth = depth
        self.a = a
        self.b = b
        self.parts = parts
        self.scales = scales
        self.accumulate = accumulate
        self.scale_down = scale_down
        self.disabled = disabled
        self.blocks = tuple(block for cta in ctas for block in self._blocks(TensorMemory.of(cta)))

    def run(self, pipe: TensorPipe) -> None:
        """Multiply."""
        shape = self.shape
        rows, columns = shape.rows // len(self.ctas), shape.columns // len(self.ctas)
        transposed = shape.b_transposed
        halves = [
            matrix_from_shared(self.b, columns, self.depth, transposed, shape.b, cta, pipe, self.kind)
            for cta in self.ctas
        ]
        b = halves[0] if len(halves) == 1 else np.concatenate(halves)
        for number, cta in enumerate(self.ctas):
            cells = TensorMemory.of(cta).cells
            if isinstance(self.a, tuple):
                a = matrix_from_cells(cells, self.a, rows, self.depth, shape.a)
            else:
                transposed = shape.a_transposed
                a = matrix_from_shared(self.a, rows, self.depth, transposed, shape.a, cta, pipe, self.kind)
            total = product(a, b)
            if self.scales is not None:
                a_column, b_column = self.scales
                a_factors = scale_factors(cells, a_column, rows, shape.a_scale, pipe, self.kind)
                b_factors = scale_factors(cells, b_column, shape.columns, shape.b_scale, pipe, self.kind)
                total *= a_factors[:, None]
                total *= b_factors[None, :]
            if shape.negate:
                np.negative(total, out=total)
            self._store(cells, total, None if self.disabled is None else ~self.disabled[number])
        for hook in pipe.machine.event_hooks:
            detail = {"line": self.kind.line, "m": shape.rows, "n": shape.columns, "k": self.depth}
            hook(pipe, "mma", detail)

    def _store(self, cells: NDArray[np.uint32], total: NDArray[Any], enabled: NDArray[Any] | None) -> None:
        half = self.shape.half
        for part in self.parts:
            target = cells[part.lane : part.lane + part.rows, part.column : part.column + part.columns]
            tile = total[part.row : part.row + part.rows, part.first : part.first + part.columns]
            if self.accumulate:
                old = (
                    target.astype(np.uint16).view(np.float16)
                    if half
                    else np.ascontiguousarray(target).view(np.float32)
                ).astype(np.float64)
                tile = tile + (np.ldexp(old, -self.scale_down) if self.scale_down else old)
            with np.errstate(over="ignore", invalid="ignore"):
                new = (
                    tile.astype(np.float16).view(np.uint16).astype(np.uint32)
                    if half
                    else tile.astype(np.float32).view(np.uint32)
                )
            if enabled is None:
                target[...] = new
            else:
                lanes = enabled[part.lane : part.lane + part.rows]
                target[lanes] = new[lanes]

    def _blocks(self, memory: TensorMemory) -> list[Block]:
        found = [
            Block(memory, p.lane, p.rows, p.column, p.columns, writes=True, reads=self.accumulate)
            for p in self.parts
        ]
        if isinstance(self.a, tuple):
            found += [Block(memory, p.lane, p.rows, p.column, p.columns, reads=True) for p in self.a]
        if self.scales is not None:
            rows = self.shape.rows // len(self.ctas)
            for column, count in zip(self.scales, (rows, self.shape.columns), strict=True):
                whole, rest = divmod(count, 32)
                if whole:
                    found.append(Block(memory, 0, 128, column, whole, reads=True))
                if rest:
                    last = column + whole
                    found += [Block(memory, lane, rest, last, 1, reads=True) for lane in range(0, 128, 32)]
        return found


class Commit:
    """A tcgen05.commit: one arrival at each of its barriers once the thread's earlier operations are done.

    Attributes:
        kind: The instruction.
        thread: Who issued it.
        ctas: CTAs whose operations it tracks.
        barriers: Addresses in the cluster's window, those that have not been told yet.
        covered: Operations that it completes.
    """

    name = "commit"
    blocks: tuple[Block, ...] = ()

    def __init__(
        self, kind: AccessKind, thread: Thread, ctas: Sequence[Cta], barriers: list[int], covered: list[Any]
    ) -> None:
        self.kind = kind
        self.thread = thread
        self.ctas = ctas
        self.barriers = barriers
        self.covered = covered


Work = Copy | Multiply
Operation = Copy | Multiply | Commit


class TensorPipe:
    """The pipe that a CTA's threads hand their operations to. An `AsyncAgent`.

    Attributes:
        cta: The CTA.
        rank: Its rank.
        queue: Operations that are not done, oldest first.
    """

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.rank = cta.rank
        self.machine = cta.launch.machine
        self.queue: list[Operation] = []
        self._uncommitted: dict[Thread, list[Work]] = {}

    @classmethod
    def of(cls, cta: Cta) -> TensorPipe:
        """The CTA's pipe, made at first use."""
        pipe = cta.scratch.get("tensor_pipe")
        if pipe is None:
            pipe = cta.scratch["tensor_pipe"] = cls(cta)
        assert isinstance(pipe, cls)
        return pipe

    def issue(self, work: Work) -> None:
        """Take an operation up.

        Raises:
            OutOfBoundsError: It touches tensor memory that is not there or not allocated.
        """
        for block in work.blocks:
            block.memory.check(block, self, work.kind)
        self._uncommitted.setdefault(work.thread, []).append(work)
        TensorMemory.of(self.cta).tell("issue", self, work.blocks, work.kind, work)
        self._enqueue(work)

    def commit(self, kind: AccessKind, thread: Thread, ctas: Sequence[Cta], barriers: list[int]) -> None:
        """Tell the barriers once all that the thread has issued so far is done."""
        self._enqueue(Commit(kind, thread, ctas, barriers, self._uncommitted.pop(thread, [])))

    def ready(self) -> bool:
        """Whether something is in flight."""
        return bool(self.queue)

    def step(self, rng: random.Random) -> None:
        """Execute the oldest operation, or one arrival of a commit that nothing of its thread precedes."""
        able = [0]
        threads = {self.queue[0].thread}
        for place, operation in enumerate(self.queue[1:], 1):
            if isinstance(operation, Commit) and operation.thread not in threads:
                able.append(place)
            threads.add(operation.thread)
        place = able[int(rng.random() * len(able))] if len(able) > 1 else 0
        operation = self.queue[place]
        memory = TensorMemory.of(self.cta)
        if isinstance(operation, Commit):
            if operation.covered:
                for work in operation.covered:
                    memory.tell("commit", self, work.blocks, operation.kind, work)
                operation.covered = []
            barriers = operation.barriers
            at = barriers.pop(int(rng.random() * len(barriers)))
            change_barrier(self.machine, self.cta.cluster.shared, at, MBarrier.arrive, self, operation.kind)
            if barriers:
                return
        else:
            for block in operation.blocks:
                # Again: the columns may have been given back meanwhile.
                block.memory.check(block, self, operation.kind)
            memory.tell("execute", self, operation.blocks, operation.kind, operation)
            operation.run(self)
        del self.queue[place]

    def touching(self, cta: Cta) -> Operation | None:
        """An operation in flight that still uses something of `cta`, if there is one."""
        for operation in self.queue:
            if cta in operation.ctas:
                return operation
            if isinstance(operation, Commit) and any(
                at // SHARED_STRIDE == cta.cluster_rank for at in operation.barriers
            ):
                return operation
        return None

    def describe(self) -> str:
        """Such as "tensor core of rank 0, CTA (0, 0, 0): 4 operations, first mma of line 812"; "" if idle."""
        if not self.queue:
            return ""
        first = self.queue[0]
        return (
            f"tensor core of {self.cta.describe()}: {len(self.queue)} operations, "
            f"first {first.name} of line {first.kind.line}"
        )

    def _enqueue(self, operation: Operation) -> None:
        self.queue.append(operation)
        self.machine.scheduler.activate(self)
