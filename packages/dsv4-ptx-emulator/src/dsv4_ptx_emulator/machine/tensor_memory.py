# SPDX-License-Identifier: Apache-2.0
"""Tensor memory of a CTA: 128 lanes by 512 columns of 32-bit cells, and who has allocated which columns.

PTX ISA 9.4, sections 9.7.18.1 (layout and addresses) and 9.7.18.7 (allocation). An address has the lane in
its upper and the column in its lower 16 bits. Warp w of a CTA reaches lanes 32·(w % 4) to 32·(w % 4) + 31
by loads and stores; the matrix pipe and its copies reach all of them.

What an allocation gets is decided by the seed among the free multiples of its size, so that a program that
takes its first allocation for column 0 is found. Each CTA has all 512 columns: CTAs on one processor
compete for them on hardware, and which CTAs share a processor is not defined here.

What was never written reads as `POISON`. That it was read at all is for an observer
(checkers/tensor_memory.py), as are operations that overlap in time; here is only what an address means.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.errors import AsyncMisuseError, OutOfBoundsError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.agent import AsyncAgent
    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.warp import Warp

    Agent = Warp | AsyncAgent

LANES = 128
COLUMNS = 512
POISON = 0x7FFD7FFD
"""What a cell holds that nothing has written: a NaN, as float32 and as two float16."""


@dataclass(frozen=True, slots=True)
class Block:
    """Lanes by columns of one CTA's tensor memory that an instruction reads or writes.

    Attributes:
        memory: Whose.
        lane: First lane.
        lanes: How many.
        column: First column.
        columns: How many.
        writes: Whether they are written (an accumulator that is read and written counts as written).
        reads: Whether they are read.
    """

    memory: TensorMemory
    lane: int
    lanes: int
    column: int
    columns: int
    writes: bool = False
    reads: bool = False

    @property
    def rows(self) -> slice:
        """Its lanes as an index."""
        return slice(self.lane, self.lane + self.lanes)

    @property
    def places(self) -> slice:
        """Its columns as an index."""
        return slice(self.column, self.column + self.columns)

    def describe(self) -> str:
        """Such as "lanes 0 to 127, columns 32 to 63 of the tensor memory of rank 0, CTA (0, 0, 0)"."""
        lanes = f"lanes {self.lane} to {self.lane + self.lanes - 1}"
        columns = f"columns {self.column} to {self.column + self.columns - 1}"
        return f"{lanes}, {columns} of the tensor memory of {self.memory.cta.describe()}"

    def overlaps(self, other: Block) -> bool:
        """Whether they have a cell in common."""
        return (
            self.memory is other.memory
            and self.column < other.column + other.columns
            and other.column < self.column + self.columns
            and self.lane < other.lane + other.lanes
            and other.lane < self.lane + self.lanes
        )


@dataclass(frozen=True, slots=True)
class TensorEvent:
    """Something that happened to tensor memory, for observers.

    Attributes:
        action: "alloc", "free"; "read", "write" (cells accessed now, by a warp or by an operation);
            "issue" (an asynchronous operation was handed to the matrix pipe), "execute" (it was done),
            "commit" (a commit behind `operation` has arrived at its barrier, so that it is complete);
            "wait::ld", "wait::st".
        agent: Who.
        blocks: Which cells.
        kind: The instruction.
        operation: What tells operations apart in "issue", "execute" and "commit"; None otherwise.
    """

    action: str
    agent: Agent
    blocks: tuple[Block, ...]
    kind: AccessKind
    operation: Any = None


class TensorMemory:
    """One CTA's.

    Attributes:
        cta: Whose.
        cells: uint32 [128, 512].
        allocations: Columns by first column.
        may_allocate: No warp has given the permit back.
        last_size: Columns of the last allocation; a later one must not be larger.
    """

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.cells: NDArray[np.uint32] = np.full((LANES, COLUMNS), POISON, np.uint32)
        self.allocations: dict[int, int] = {}
        self.may_allocate = True
        self.last_size = COLUMNS
        self._allocated = np.zeros(COLUMNS, np.bool_)

    @classmethod
    def of(cls, cta: Cta) -> TensorMemory:
        """The CTA's tensor memory, made at first use."""
        memory = cta.scratch.get("tensor_memory")
        if memory is None:
            memory = cta.scratch["tensor_memory"] = cls(cta)
        assert isinstance(memory, cls)
        return memory

    @property
    def channel(self) -> tuple[str, int]:
        """What those wait for who wait for free columns."""
        return ("tensor memory", id(self))

    def free_starts(self, columns: int) -> list[int]:
        """First columns that an allocation of this size may get now."""
        return [
            start
            for start in range(0, COLUMNS, columns)
            if not self._allocated[start : start + columns].any()
        ]

    def allocate(self, start: int, columns: int) -> None:
        """Take the columns, which must be free."""
        self.allocations[start] = columns
        self.last_size = columns
        self._allocated[start : start + columns] = True
        self.cells[:, start : start + columns] = POISON

    def free(self, address: int, columns: int, agent: Agent, kind: AccessKind) -> None:
        """Give an allocation back, all of it (section 9.7.18.7.1).

        Raises:
            AsyncMisuseError: There is no such allocation.
        """
        found = self.allocations.get(address)
        if found is None:
            known = ", ".join(f"{size} at {start:#x}" for start, size in sorted(self.allocations.items()))
            raise AsyncMisuseError(
                f"{kind.opcode}: {address:#x} is no allocation; columns allocated: {known or 'none'}",
                line=kind.line,
                where=agent.describe(),
            )
        if found != columns:
            raise AsyncMisuseError(
                f"{kind.opcode}: {columns} columns at {address:#x}, where {found} were allocated",
                line=kind.line,
                where=agent.describe(),
            )
        del self.allocations[address]
        self._allocated[address : address + columns] = False
        self.cta.launch.machine.scheduler.wake(self.channel)

    def check(self, block: Block, agent: Agent, kind: AccessKind) -> None:
        """Whether all of a block exists and is allocated.

        Raises:
            OutOfBoundsError: It is not.
        """
        first, last = block.column, block.column + block.columns
        if block.lane < 0 or block.lane + block.lanes > LANES or first < 0 or last > COLUMNS:
            raise OutOfBoundsError(
                f"{kind.opcode}: {block.describe()} are not all there",
                line=kind.line,
                where=agent.describe(),
            )
        if not self._allocated[first:last].all():
            missing = first + int(np.argmin(self._allocated[first:last]))
            raise OutOfBoundsError(
                f"{kind.opcode}: {block.describe()}: column {missing} is not allocated",
                line=kind.line,
                where=agent.describe(),
            )

    def tell(
        self, action: str, agent: Agent, blocks: tuple[Block, ...], kind: AccessKind, operation: Any = None
    ) -> None:
        """Tell the observers."""
        for hook in self.cta.launch.machine.tensor_hooks:
            hook(TensorEvent(action, agent, blocks, kind, operation))


def split_address(address: int) -> tuple[int, int]:
    """Lane and column of an address."""
    return address >> 16, address & 0xFFFF


def common_start(memories: list[TensorMemory], columns: int, rng: random.Random) -> int | None:
    """A first column where an allocation fits in all of the memories, or None if there is none."""
    starts = set(memories[0].free_starts(columns))
    for memory in memories[1:]:
        starts &= set(memory.free_starts(columns))
    ordered = sorted(starts)
    return ordered[int(rng.random() * len(ordered))] if ordered else None
