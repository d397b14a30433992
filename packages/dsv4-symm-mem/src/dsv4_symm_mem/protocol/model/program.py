# SPDX-License-Identifier: Apache-2.0
"""The steps that one worker performs in one call, compiled from a scenario and the rules in force.

All that a rule changes in the order of steps (flushes, tokens, tile order) is decided here; what it changes
in their meaning (banks, what a flag holds, when it may be raised) is `machine`'s.
"""

from __future__ import annotations

import enum
from itertools import accumulate
from typing import NamedTuple

from dsv4_symm_mem.protocol.model.scenario import Call, Rules, Scenario, TileId
from dsv4_symm_mem.protocol.words import MULTICAST, Operation


class Kind(enum.IntEnum):
    """What a step does."""

    BEGIN = 0
    """Wait for the call before to end, read the epoch."""
    SEND = 1
    """Issue the asynchronous store of a tile into a peer's slot."""
    PUBLISH = 2
    """Raise the flag of a tile once its store is complete."""
    TOKEN = 3
    """Raise a token."""
    TAKE = 4
    """Wait for a peer's partial of an own tile, read it and add it."""
    REDUCE = 5
    """Store an own tile into the output; every partial has been added."""
    GATHER = 6
    """Wait for a tile that a peer has reduced and copy it to the output."""
    AWAIT_TOKEN = 7
    """Wait for a peer's token."""
    EXIT = 8
    """End the worker; the last to end completes the call."""
    COPY = 9
    """Store an own tile that needs no adding into the output."""
    AWAIT = 10
    """Wait for a partial of an own tile, a peer's or the rank's own, and leave it where it lies."""
    PULL = 11
    """Read every rank's partial of an own tile at once and store their sum into the output."""


WAITS = frozenset({Kind.TAKE, Kind.GATHER, Kind.AWAIT_TOKEN, Kind.AWAIT})


class Area(enum.IntEnum):
    """What a flag stands for; each has its own flags, and all but tokens their own slots."""

    PARTIAL = 0
    REDUCED = 1
    TOKEN = 2


class Step(NamedTuple):
    """One step of a worker.

    Attributes:
        kind: What it does.
        place: Number of the flag and slot concerned, to be resolved by bank; -1 where none is.
        slot: Number of the slot where it is not the flag's: a sum lies where its reader's partial lay.
        peer: The receiver of what is sent, the source of what is awaited; -1 where none is.
        tile: The tile concerned, (-1, -1) where none is.
        level: For waits: place in the order of waits of one call, see `Machine`.
    """

    kind: Kind
    place: int = -1
    peer: int = -1
    tile: TileId = (-1, -1)
    level: int = -1
    slot: int = -1

    @property
    def data(self) -> int:
        """Number of the slot concerned."""
        return self.place if self.slot < 0 else self.slot


Program = tuple[Step, ...]


class Place(NamedTuple):
    """A (flag, slot) pair of each bank: one writer, the source, and one reader, the receiver.

    In a multicast call the slot lies with the source. Once the receiver has read it, it writes the sum there,
    for the source to read.
    """

    workspace: int
    receiver: int
    source: int
    area: Area
    item: int


class Places:
    """The places in use, numbered."""

    def __init__(self) -> None:
        self._numbers: dict[Place, int] = {}

    def number(self, place: Place) -> int:
        """The number of `place`, a new one at first use."""
        return self._numbers.setdefault(place, len(self._numbers))

    def in_order(self) -> tuple[Place, ...]:
        """All places, by number."""
        return tuple(self._numbers)


def compile_programs(
    scenario: Scenario, rules: Rules, places: Places
) -> tuple[tuple[tuple[Program, ...], ...], ...]:
    """Programs by [rank][call][worker], calls as numbered in the scenario."""
    return tuple(
        tuple(
            tuple(
                _Compiler(scenario, rules, places, rank, call, worker).run()
                for worker in range(scenario.workers)
            )
            for call in scenario.calls
        )
        for rank in range(scenario.world_size)
    )


class _Compiler:
    def __init__(
        self, scenario: Scenario, rules: Rules, places: Places, rank: int, call: Call, worker: int
    ) -> None:
        self.scenario, self.rules, self.places = scenario, rules, places
        self.rank, self.call, self.worker = rank, call, worker
        order = call.orders[rank]
        if not rules.remote_tiles_first:
            order = tuple(sorted(order, key=lambda tile: tile[0] != rank))
        self.order = order
        world_size = scenario.world_size
        self.peers = [(rank + distance) % world_size for distance in range(1, world_size)]
        self.gathered_from = max((index for _, index in order), default=0) + 1
        self.steps: list[Step] = [Step(Kind.BEGIN)]
        self.unpublished: list[Step] = []

    def run(self) -> Program:
        self._send_tokens()
        if self.call.operation is Operation.ALL_GATHER:
            self._gather()
        elif self.call.operation in MULTICAST:
            self._pull_all(self.call.operation is Operation.MULTICAST_ALL_REDUCE)
        else:
            self._reduce_all(self.call.operation is Operation.ALL_REDUCE)
        self._await_tokens()
        if self.rules.flush_before_exit:
            self._flush()
        self.steps.append(Step(Kind.EXIT))
        return tuple(self.steps)

    def _reduce_all(self, all_reduce: bool) -> None:
        for tile in self._dealt():
            if tile[0] != self.rank:
                self._send(Area.PARTIAL, tile[0], tile)
            else:
                self._reduce(tile)
                if all_reduce:
                    for peer in self.peers:
                        self._send(Area.REDUCED, peer, tile)
        if all_reduce:
            for tile in self._foreign():
                level = 1 + self.gathered_from + tile[1]
                self._await(Kind.GATHER, Area.REDUCED, tile[0], tile, level)

    def _pull_all(self, all_reduce: bool) -> None:
        """Partials to where they stay, then sums of them; by workers of their own where there are several."""
        for tile in self._produced():
            self._send(Area.PARTIAL, tile[0], tile)
            if tile[0] == self.rank and self.scenario.workers == 1:
                self._pull(tile, all_reduce)
        if not self._reads:
            return
        if self.scenario.workers > 1:
            for tile in self.order:
                if tile[0] == self.rank:
                    self._pull(tile, all_reduce)
        for tile in self.order if all_reduce else ():
            if tile[0] != self.rank:
                level = 1 + self.gathered_from + tile[1]
                slot = self._place(Area.PARTIAL, tile[0], self.rank, tile[1])
                self._await(Kind.GATHER, Area.REDUCED, tile[0], tile, level, slot)

    def _pull(self, tile: TileId, all_reduce: bool) -> None:
        for source in range(self.scenario.world_size):
            self._await(Kind.AWAIT, Area.PARTIAL, source, tile, 1 + tile[1])
        self.steps.append(Step(Kind.PULL, tile=tile))
        for peer in self.peers if all_reduce else ():
            self._send(Area.REDUCED, peer, tile, self._place(Area.PARTIAL, self.rank, peer, tile[1]))

    @property
    def _reads(self) -> bool:
        """Whether this worker of a multicast call waits for others: the last one, and it alone."""
        return self.worker == self.scenario.workers - 1

    def _produced(self) -> list[TileId]:
        """The tiles of a multicast call that fall to this worker: all but the last share them."""
        producers = max(self.scenario.workers - 1, 1)
        return self._dealt(producers) if self.worker < producers else []

    def _gather(self) -> None:
        """Own tiles to every peer, through the slots that a reduce-scatter uses, then theirs."""
        for tile in self._dealt():
            if tile[0] == self.rank:
                for peer in self.peers:
                    self._send(Area.PARTIAL, peer, tile)
                self.steps.append(Step(Kind.COPY, tile=tile))
        for tile in self._foreign():
            self._await(Kind.GATHER, Area.PARTIAL, tile[0], tile, 1 + tile[1])

    def _foreign(self) -> list[TileId]:
        """The peers' tiles that fall to this worker."""
        foreign = [tile for tile in self.order if tile[0] != self.rank]
        return foreign[self.worker :: self.scenario.workers]

    def _dealt(self, workers: int | None = None) -> list[TileId]:
        """The tiles that fall to this worker, of `workers` that share them, by default all."""
        units = self.call.units[self.rank] if self.call.units else (1,) * len(self.order)
        ends = list(accumulate(units))
        runs = [self.order[end - length : end] for end, length in zip(ends, units, strict=True)]
        return [tile for run in runs[self.worker :: workers or self.scenario.workers] for tile in run]

    def _send_tokens(self) -> None:
        """Before anything that could wait, so a token means: this rank has begun the call."""
        for peer in self.peers if self.worker == 0 and self.rules.tokens else ():
            if self.scenario.tokens_always or not self._sends_tiles(self.rank, peer):
                place = self._place(Area.TOKEN, peer, self.rank, 0)
                self.steps.append(Step(Kind.TOKEN, place, peer))

    def _await_tokens(self) -> None:
        awaits = self._reads if self.call.operation in MULTICAST else self.worker == 0
        for peer in self.peers if awaits and self.rules.tokens else ():
            if self.scenario.tokens_always or not self._sends_tiles(peer, self.rank):
                self._await(Kind.AWAIT_TOKEN, Area.TOKEN, peer, (-1, -1), 0)

    def _reduce(self, tile: TileId) -> None:
        for source in range(self.scenario.world_size):
            if source != self.rank:
                self._await(Kind.TAKE, Area.PARTIAL, source, tile, 1 + tile[1])
        self.steps.append(Step(Kind.REDUCE, tile=tile))

    def _send(self, area: Area, peer: int, tile: TileId, slot: int = -1) -> None:
        place = self._place(area, peer, self.rank, tile[1])
        self.steps.append(Step(Kind.SEND, place, peer, tile, slot=slot))
        self.unpublished.append(Step(Kind.PUBLISH, place, peer, tile, slot=slot))
        self._publish_down_to(self.scenario.publish_lag)

    def _await(self, kind: Kind, area: Area, source: int, tile: TileId, level: int, slot: int = -1) -> None:
        if self.rules.flush_before_poll:
            self._flush()
        place = self._place(area, self.rank, source, max(tile[1], 0))
        self.steps.append(Step(kind, place, source, tile, level, slot))

    def _flush(self) -> None:
        self._publish_down_to(0)

    def _publish_down_to(self, left: int) -> None:
        while len(self.unpublished) > left:
            self.steps.append(self.unpublished.pop(0))

    def _sends_tiles(self, source: int, receiver: int) -> bool:
        """Whether data go from one to the other: what the receiver owns, or what the source does."""
        owner = source if self.call.operation is Operation.ALL_GATHER else receiver
        return any(tile_owner == owner for tile_owner, _ in self.order)

    def _place(self, area: Area, receiver: int, source: int, index: int) -> int:
        return self.places.number(Place(self.call.workspace, receiver, source, area, index))
