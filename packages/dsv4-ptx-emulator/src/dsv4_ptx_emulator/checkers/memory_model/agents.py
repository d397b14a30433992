# SPDX-License-Identifier: Apache-2.0
"""Components of clocks: which thread or piece each one is, and how launches reuse them.

What runs in CTA i of the next launch on a stream comes after all of CTA i of the launch before, so it goes
on with that one's components at later epochs. Clocks stay as short as the largest launches need. A
programmatic dependent launch may overlap with the launch before it and gets components of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsv4_ptx_emulator.checkers.memory_model.clocks import Place, WarpClock
from dsv4_ptx_emulator.checkers.memory_model.operations import Groups, Operation

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.warp import Warp

GROWTH = 1024


@dataclass(slots=True)
class Owner:
    """Who a component is."""

    cta: CtaState
    lane: int
    """Thread of the CTA; -1 for a piece."""


@dataclass(slots=True)
class Reserved:
    """Components of one CTA slot of a stream, over launches.

    Attributes:
        first: Component of thread 0.
        threads: How many threads have components.
        pieces: Components of pieces.
        epochs: By warp, the first epoch never used.
        piece_epoch: The same for pieces.
    """

    first: int
    threads: int
    pieces: list[int] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)
    piece_epoch: int = 1


class CtaState:
    """A CTA that runs.

    Attributes:
        cta: The CTA.
        place: For scopes.
        reserved: Its components.
        warps: Its warps' clocks.
        operations: In flight or done, by identity.
        groups: By family, warp and lane (-1 for all).
        shadow: First granule of its shared memory.
        granules: How many.
        copies: By warp and lane, components of its cp.async so far.
    """

    def __init__(self, cta: Cta, place: Place, reserved: Reserved) -> None:
        self.cta = cta
        self.place = place
        self.reserved = reserved
        self.warps: dict[int, WarpClock] = {}
        self.operations: dict[int, Operation] = {}
        self.groups: dict[tuple[str, int, int], Groups] = {}
        self.shadow = 0
        self.granules = 0
        self.copies: dict[tuple[int, int], list[int]] = {}
        self.used_pieces = 0

    def clock_of(self, warp: Warp) -> WarpClock:
        """A warp's clock."""
        return self.warps[warp.index]

    def groups_of(self, family: str, warp: Warp, lane: int) -> Groups:
        """A thread's groups."""
        key = (family, warp.index, lane)
        found = self.groups.get(key)
        if found is None:
            found = self.groups[key] = Groups()
        return found


class Components:
    """All components.

    Attributes:
        owners: Who each one is at present; component 0 is nobody.
        columns: How long clocks are made.
    """

    def __init__(self) -> None:
        self.owners: list[Owner | None] = [None]
        self.columns = GROWTH
        self._reserved: dict[tuple[int, ...], Reserved] = {}

    def reserve(self, key: tuple[int, ...], threads: int) -> Reserved:
        """The components of a CTA slot, made at first use."""
        found = self._reserved.get(key)
        if found is None or found.threads < threads:
            found = self._reserved[key] = Reserved(self._add(threads), threads)
        return found

    def piece(self, state: CtaState) -> int:
        """A component for a piece of an operation that the CTA issued."""
        reserved = state.reserved
        if state.used_pieces == len(reserved.pieces):
            reserved.pieces.append(self._add(1))
        component = reserved.pieces[state.used_pieces]
        state.used_pieces += 1
        self.owners[component] = Owner(state, -1)
        return component

    def _add(self, count: int) -> int:
        first = len(self.owners)
        self.owners += [None] * count
        while len(self.owners) > self.columns:
            self.columns *= 2
        return first
