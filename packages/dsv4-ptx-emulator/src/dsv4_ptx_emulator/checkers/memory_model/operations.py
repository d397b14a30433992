# SPDX-License-Identifier: Apache-2.0
"""Asynchronous operations as the memory model sees them: when issued, of which pieces, in which groups.

A piece of a copy reads in one of its epochs and writes in the next; a matrix operation is one piece that
reads. An operation's clock is what its issuing thread knew: operations are ordered after what came before
them in their thread (PTX ISA 9.4, section 8.9.1.1).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.checkers.memory_model.clocks import Clock


@dataclass(slots=True)
class Operation:
    """An operation in flight.

    Attributes:
        subject: The engine's object, kept so that its identity is not reused.
        clock: What is ordered before it.
        line: Of its instruction.
        pieces: Components by the identity of what they write; 0 for the one piece of a matrix operation.
        read_epoch: Epoch of the pieces' reads; their writes have the next one.
        issuers: Components of the threads that issued it.
        covers: Components whose completion its signal tells besides its own.
        lanes: Of pieces that are several lanes' copies, a component for each of those, in order.
    """

    subject: Any
    clock: Clock
    line: int
    pieces: dict[int, int]
    read_epoch: int
    issuers: set[int] = field(default_factory=set)
    covers: list[int] = field(default_factory=list)
    lanes: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    @property
    def write_epoch(self) -> int:
        """Epoch of the pieces' writes."""
        return self.read_epoch + 1


class Groups:
    """Groups of one thread (or, for wgmma, of one warp): components of the operations in each."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.committed: deque[list[int]] = deque()

    def commit(self) -> None:
        """Close the open group."""
        self.committed.append(self.open)
        self.open = []

    def waited(self, allowed: int, reads: bool) -> list[int]:
        """Components that a wait tells complete (or read)."""
        if allowed < 0:
            found = [component for group in self.committed for component in group] + self.open
            self.committed.clear()
            self.open = []
            return found
        found = []
        for index in range(len(self.committed) - allowed):
            found += self.committed[index]
        if not reads:
            for _ in range(len(self.committed) - allowed):
                self.committed.popleft()
        return found
