# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: cells that nothing has written, operations that overlap in time, allocations left behind.

Overlap is judged by what the ISA orders (PTX ISA 9.4, section 9.7.18.6). A warp may access what an mma or
cp writes (or write what it reads) only after a commit behind that operation has arrived at its mbarrier.
What a warp has loaded or stored is open until its `wait::ld` or `wait::st`; until then no operation and no
other warp may write it (or read it, after a store). That the accessing warp has itself seen the barrier is
not checked here: that is a question for a memory model, and the seed decides whether it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.engines.tensor_core import TensorPipe
from dsv4_ptx_emulator.errors import AsyncMisuseError, UninitialisedError
from dsv4_ptx_emulator.machine.observer import Observer
from dsv4_ptx_emulator.machine.tensor_memory import COLUMNS, LANES, Block, TensorEvent, TensorMemory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.observer import AccessKind

_Open = tuple[tuple[Block, ...], "AccessKind"]


class _State:
    """What is known of one CTA's tensor memory.

    Attributes:
        written: bool [128, 512].
        operations: Issued and not complete, by identity.
        loads: By warp, what it has loaded and not waited for.
        stores: The same for stores.
    """

    def __init__(self) -> None:
        self.written: NDArray[np.bool_] = np.zeros((LANES, COLUMNS), np.bool_)
        self.operations: dict[int, tuple[Any, tuple[Block, ...], AccessKind]] = {}
        self.loads: dict[int, list[_Open]] = {}
        self.stores: dict[int, list[_Open]] = {}


class TensorMemoryUse(Observer):
    """Raises `UninitialisedError` or `AsyncMisuseError` where tensor memory is used against the rules.

    Args:
        loads: Whether a load without its `wait::ld` may still be reading. So the ISA has it (section
            9.7.18.6.4.5); kernels that use what they loaded before they let others overwrite it get away
            without.
    """

    def __init__(self, *, loads: bool = True) -> None:
        self._loads = loads
        self._states: dict[int, _State] = {}

    def on_tensor(self, event: TensorEvent) -> None:
        """Follow what happens."""
        match event.action:
            case "read":
                self._check_warp(event, writes=False)
                self._check_initialised(event)
                if self._loads:
                    self._open(event, "loads")
            case "write":
                self._check_warp(event, writes=True)
                self._mark(event.blocks)
                self._open(event, "stores")
            case "wait::ld" | "wait::st":
                for state in self._states.values():
                    opened = state.loads if event.action == "wait::ld" else state.stores
                    opened.pop(id(event.agent), None)
            case "issue":
                self._check_operation(event)
                for memory in {id(block.memory): block.memory for block in event.blocks}.values():
                    entry = (event.operation, event.blocks, event.kind)
                    self._state(memory).operations[id(event.operation)] = entry
            case "execute":
                self._check_initialised(event)
                self._mark(event.blocks)
            case "commit":
                for block in event.blocks:
                    self._state(block.memory).operations.pop(id(event.operation), None)
            case "alloc":
                for block in event.blocks:
                    self._state(block.memory).written[:, block.places] = False
            case "free":
                self._check_free(event)

    def on_cta_end(self, cta: Cta) -> None:
        """Everything given back, nothing in flight that uses the CTA."""
        memory = cta.scratch.get("tensor_memory")
        for other in cta.cluster.ctas:
            pipe = other.scratch.get("tensor_pipe")
            if isinstance(pipe, TensorPipe) and (operation := pipe.touching(cta)):
                raise AsyncMisuseError(
                    f"the CTA ended while {operation.kind.opcode} of {other.describe()} still uses it",
                    line=operation.kind.line,
                    where=cta.describe(),
                )
        if not isinstance(memory, TensorMemory):
            return
        self._states.pop(id(memory), None)
        if memory.allocations:
            left = ", ".join(f"{size} at {start:#x}" for start, size in sorted(memory.allocations.items()))
            raise AsyncMisuseError(
                f"the CTA ended without tcgen05.dealloc of tensor memory columns: {left}",
                where=cta.describe(),
            )

    def _state(self, memory: TensorMemory) -> _State:
        state = self._states.get(id(memory))
        if state is None:
            state = self._states[id(memory)] = _State()
        return state

    def _open(self, event: TensorEvent, which: str) -> None:
        opened: dict[int, list[_Open]] = getattr(self._state(event.blocks[0].memory), which)
        opened.setdefault(id(event.agent), []).append((event.blocks, event.kind))

    def _mark(self, blocks: tuple[Block, ...]) -> None:
        for block in blocks:
            if block.writes:
                self._state(block.memory).written[block.rows, block.places] = True

    def _check_initialised(self, event: TensorEvent) -> None:
        for block in event.blocks:
            if not block.reads:
                continue
            written = self._state(block.memory).written[block.rows, block.places]
            if not written.all():
                lane, column = np.argwhere(~written)[0].tolist()
                raise UninitialisedError(
                    f"{event.kind.opcode} reads lane {block.lane + lane}, column {block.column + column} "
                    f"of the tensor memory of {block.memory.cta.describe()}, which nothing has written",
                    line=event.kind.line,
                    where=event.agent.describe(),
                )

    def _check_warp(self, event: TensorEvent, writes: bool) -> None:
        state = self._state(event.blocks[0].memory)
        for _, blocks, kind in state.operations.values():
            mine = [block for block in blocks if block.writes or writes]
            self._refuse(event, mine, kind, "which no commit has told complete")
        self._check_stores(event, state)
        if writes:
            for agent, opened in state.loads.items():
                for blocks, kind in opened:
                    if agent != id(event.agent):
                        self._refuse(event, blocks, kind, "which nobody has waited for")

    def _check_operation(self, event: TensorEvent) -> None:
        written = tuple(block for block in event.blocks if block.writes)
        for memory in {id(block.memory): block.memory for block in event.blocks}.values():
            state = self._state(memory)
            self._check_stores(event, state)
            for opened in state.loads.values():
                for blocks, kind in opened:
                    self._refuse(event, blocks, kind, "which nobody has waited for", written)

    def _check_stores(self, event: TensorEvent, state: _State) -> None:
        for opened in state.stores.values():
            for blocks, kind in opened:
                if event.action != "write":
                    self._refuse(event, blocks, kind, "which nobody has waited for")

    def _check_free(self, event: TensorEvent) -> None:
        state = self._state(event.blocks[0].memory)
        for _, blocks, kind in state.operations.values():
            self._refuse(event, blocks, kind, "which no commit has told complete")
        self._check_stores(event, state)

    def _refuse(
        self,
        event: TensorEvent,
        others: Any,
        kind: AccessKind,
        state: str,
        blocks: tuple[Block, ...] | None = None,
    ) -> None:
        for block in event.blocks if blocks is None else blocks:
            for other in others:
                if block.overlaps(other):
                    raise AsyncMisuseError(
                        f"{event.kind.opcode} accesses {block.describe()}, and so does {kind.opcode} of line "
                        f"{kind.line}, {state}",
                        line=event.kind.line,
                        where=event.agent.describe(),
                    )
