# SPDX-License-Identifier: Apache-2.0
"""The copy engine of a CTA: copies in flight, done piece by piece in an order that the seed decides.

A `Transfer` is one copy instruction. It is cut into pieces; each piece is read from the source at once,
written to each destination later, and signalled to each destination's barrier later still, as separate steps.
So data of one copy appears in any order, a barrier's transaction count falls in several amounts, a store's
source is read before its destination changes, and the pieces of different copies interleave, which is all
that the ISA leaves open (PTX ISA 9.4, sections 8.10.1 and 9.7.10.28).

Rejected: visibility by the byte. Real engines write at least 16 bytes at once, and a step per 16 bytes
would make runs fifty times longer to show interleavings that two to four pieces show as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dsv4_ptx_emulator.engines.barriers import change_barrier
from dsv4_ptx_emulator.engines.groups import AsyncGroup
from dsv4_ptx_emulator.machine.cta import SHARED_STRIDE
from dsv4_ptx_emulator.machine.mbarrier import MBarrier
from dsv4_ptx_emulator.machine.observer import AccessKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.memory import Memory

MAX_PIECES = 4
"""Pieces that a copy is cut into, at most."""

Read = Callable[["CopyEngine"], "NDArray[Any]"]
Write = Callable[["CopyEngine", "NDArray[Any]"], None]


class Target:
    """One destination of a piece.

    Attributes:
        write: Stores the piece's data there.
        memory: Where the barrier lives that is told afterwards; None for copies that complete by groups.
        barrier: Its address.
        signal: What the barrier is told.
        place: An address in the CTA that the data goes to, where it is not the barrier's.
        lanes: Whose copies it is, one address of each, where a piece is of several lanes.
    """

    __slots__ = ("barrier", "lanes", "memory", "place", "signal", "write")

    def __init__(
        self,
        write: Write,
        memory: Memory | None = None,
        barrier: int = 0,
        signal: Callable[[MBarrier], Any] | None = None,
        place: int | None = None,
        lanes: tuple[int, ...] = (),
    ) -> None:
        self.write = write
        self.lanes = lanes
        self.place = barrier if place is None else place
        self.memory = memory
        self.barrier = barrier
        self.signal = signal


def completes(size: int) -> Callable[[MBarrier], Any]:
    """The signal of `size` bytes that have arrived."""
    return lambda barrier: barrier.complete_tx(size)


class Transfer:
    """One copy in flight.

    Args:
        kind: Its instruction, with the semantics of its signals.
        name: For events and reports, such as "tma.load".
        pieces: For each piece, how to read it and where it goes.
        groups: The async-groups that it is part of.
        wake: Channel to wake when it has been read and when it is complete.
        from_shared: Whether the source is the issuing CTA's shared memory.
    """

    __slots__ = (
        "followers",
        "from_shared",
        "groups",
        "kind",
        "name",
        "unread",
        "unsignalled",
        "unwritten",
        "wake",
    )

    def __init__(
        self,
        kind: AccessKind,
        name: str,
        pieces: Sequence[tuple[Read, Sequence[Target]]],
        groups: Sequence[AsyncGroup] = (),
        wake: Any = None,
        *,
        from_shared: bool = False,
    ) -> None:
        self.from_shared = from_shared
        self.kind = kind
        self.name = name
        self.unread = list(pieces)
        self.unwritten: list[tuple[NDArray[Any], Target]] = []
        self.unsignalled: list[Target] = []
        self.groups = groups
        self.wake = wake
        self.followers: list[Callable[[], None]] = []
        for group in groups:
            group.unread += 1
            group.unfinished += 1


class CopyEngine:
    """The copies that threads of one CTA have issued. An `AsyncAgent`.

    Attributes:
        cta: The CTA.
        rank: Its rank.
        transfers: In flight.
        acting: What the access at hand is for: the copy and the piece's targets; None between steps.
    """

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.rank = cta.rank
        self.machine = cta.launch.machine
        self.transfers: list[Transfer] = []
        self.acting: tuple[Transfer, Sequence[Target]] | None = None

    @classmethod
    def of(cls, cta: Cta) -> CopyEngine:
        """The CTA's engine, made at first use."""
        engine = cta.scratch.get("copy_engine")
        if engine is None:
            engine = cta.scratch["copy_engine"] = cls(cta)
        assert isinstance(engine, cls)
        return engine

    def enqueue(self, transfer: Transfer) -> None:
        """Take up a copy."""
        self.transfers.append(transfer)
        self.cta.launch.transfers += 1
        self.machine.scheduler.activate(self)

    def ready(self) -> bool:
        """Whether a copy is in flight."""
        return bool(self.transfers)

    def step(self, rng: random.Random) -> None:
        """Read, write or signal one piece of one copy."""
        at = int(rng.random() * len(self.transfers))
        transfer = self.transfers[at]
        read, written, signalled = len(transfer.unread), len(transfer.unwritten), len(transfer.unsignalled)
        choice = int(rng.random() * (read + written + signalled))
        if choice < read:
            source, targets = _take(transfer.unread, choice)
            self.acting = (transfer, targets)
            data = source(self)
            transfer.unwritten.extend((data, target) for target in targets)
            if read == 1 and transfer.groups:
                for group in transfer.groups:
                    group.unread -= 1
                self.machine.scheduler.wake(transfer.wake)
        elif choice < read + written:
            data, target = _take(transfer.unwritten, choice - read)
            self.acting = (transfer, (target,))
            target.write(self, data)
            if target.memory is not None:
                transfer.unsignalled.append(target)
        else:
            target = _take(transfer.unsignalled, choice - read - written)
            assert target.memory is not None
            assert target.signal is not None
            self.acting = (transfer, (target,))
            change_barrier(self.machine, target.memory, target.barrier, target.signal, self, transfer.kind)
        self.acting = None
        if not (transfer.unread or transfer.unwritten or transfer.unsignalled):
            self._finish(at, transfer)

    def touching(self, cta: Cta) -> Transfer | None:
        """A copy that still has to read or write the shared memory of `cta`, if there is one."""
        for transfer in self.transfers:
            if transfer.from_shared and transfer.unread and cta is self.cta:
                return transfer
            targets = [target for _, targets in transfer.unread for target in targets]
            targets += [target for _, target in transfer.unwritten] + transfer.unsignalled
            for target in targets:
                there = {target.barrier // SHARED_STRIDE, target.place // SHARED_STRIDE}
                if cta.cluster_rank in there and target.memory is cta.cluster.shared:
                    return transfer
        return None

    def describe(self) -> str:
        """Such as "copy engine of rank 0, CTA (0, 0, 0): tma.load of line 210, 2 pieces left"; "" if idle."""
        if not self.transfers:
            return ""
        first = self.transfers[0]
        left = len(first.unread) + len(first.unwritten) + len(first.unsignalled)
        more = f" and {len(self.transfers) - 1} more" if len(self.transfers) > 1 else ""
        return (
            f"copy engine of {self.cta.describe()}: {first.name} of line {first.kind.line}, "
            f"{left} pieces left{more}"
        )

    def _finish(self, at: int, transfer: Transfer) -> None:
        del self.transfers[at]
        if transfer.groups:
            for group in transfer.groups:
                group.unfinished -= 1
            self.machine.scheduler.wake(transfer.wake)
        for follow in transfer.followers:
            follow()
        self.machine.transfer_done(self.cta.launch)


def _take(items: list[Any], at: int) -> Any:
    items[at], items[-1] = items[-1], items[at]
    return items.pop()


def cuts(total: int, unit: int, rng: random.Random) -> list[tuple[int, int]]:
    """Cut [0, total) at multiples of `unit` into at most `MAX_PIECES` random ranges."""
    units = total // unit
    pieces = min(1 + int(rng.random() * MAX_PIECES), units)
    if pieces <= 1:
        return [(0, total)]
    edges = sorted({1 + int(rng.random() * (units - 1)) for _ in range(pieces - 1)})
    bounds = [0, *edges, units]
    return [(low * unit, high * unit) for low, high in pairwise(bounds)]
