# SPDX-License-Identifier: Apache-2.0
"""What a run of the protocol model is asked to explore: calls, ranks, faults, and the rules in force.

A scenario holds the tile order of every rank in every call as plain (owner, index) pairs, so that whoever
owns a schedule feeds the real one in; the model knows nothing of schedules, shapes or kernels.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.words import SIGNATURE_MASK, Operation

TileId = tuple[int, int]
"""(owner, index among the owner's tiles)."""


class Deadline(enum.Enum):
    """When a wait may expire. The model has no clock, so it has the two ends of what a clock allows."""

    OFF = "off"
    """Never, even for a rank that waits for a dead one."""
    PATIENT = "patient"
    """Only once no healthy rank can move: deadlines are longer than any rank goes on after another stops."""
    HASTY = "hasty"
    """In any wait at any time: deadlines shorter than the skew of healthy ranks."""


@dataclass(frozen=True)
class Call:
    """One collective call as each rank understands it.

    Attributes:
        orders: For each rank, the tiles that it computes, in the order in which it takes them.
        signatures: For each rank, what its flags carry; different ones are ranks that disagree on the call.
        operation: All-reduce sends each reduced tile to every peer, and waits for theirs; all-gather does so
            with own tiles that nobody adds to. In multicast calls partials stay with their source, and where
            there are several workers the last one reads and the others produce.
        workspace: Calls on different workspaces share neither flags nor slots nor epochs.
        units: For each rank, the lengths of the runs of its order that a worker takes at a time, as a
            thread-block cluster takes several row tiles; empty for single tiles.
    """

    orders: tuple[tuple[TileId, ...], ...]
    signatures: tuple[int, ...]
    operation: Operation = Operation.REDUCE_SCATTER
    workspace: int = 0
    units: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.units and [sum(lengths) for lengths in self.units] != [len(order) for order in self.orders]:
            raise ArgumentError("units", self.units, "lengths that sum to each rank's tiles")
        if len(self.signatures) != len(self.orders):
            raise ArgumentError("signatures", self.signatures, f"one for each of {len(self.orders)} ranks")
        if any(not 0 <= signature <= SIGNATURE_MASK for signature in self.signatures):
            raise ArgumentError("signatures", self.signatures, f"0 to {SIGNATURE_MASK}")
        for order in self.orders:
            if len(set(order)) != len(order):
                raise ArgumentError("orders", order, "each tile at most once")
            if any(not 0 <= owner < len(self.orders) for owner, _ in order):
                raise ArgumentError("orders", order, f"owners below {len(self.orders)}")


@dataclass(frozen=True)
class Scenario:
    """A sequence of calls on P ranks and the circumstances in which they run.

    Attributes:
        name: What the scenario shows.
        calls: Launched in this order on every rank, one stream.
        workers: CTAs (or clusters) per rank; worker w takes units w, w + workers, ... of its rank's order.
        publish_lag: Tiles that a worker issues before it publishes an earlier one.
        mortal: Ranks of which any one may stop for ever, at any point.
        deadline: When waits may expire.
        overlap: The next call is launched while the one before still runs (programmatic dependent launch).
        places: Workers that a rank's device can hold at once; None for exactly `workers`.
        graph_calls: Calls captured in one graph and replayed; None for all of them. Matters to baked epochs.
        shared_device: All ranks' kernels run on one device (virtual ranks).
        flags_in_flight: A flag, too, becomes visible some time after it was stored; else at once.
        tokens_always: Send a token to every peer in every call, not only where a peer gets no tile.
        shared_banks: A bank is one piece of memory of which each call makes what it likes, so a call may
            begin only when no rank is in an earlier call with that bank.
    """

    name: str
    calls: tuple[Call, ...]
    workers: int = 1
    publish_lag: int = 1
    mortal: tuple[int, ...] = ()
    deadline: Deadline = Deadline.OFF
    overlap: bool = False
    places: int | None = None
    graph_calls: int | None = None
    shared_device: bool = False
    flags_in_flight: bool = False
    tokens_always: bool = False
    shared_banks: bool = False

    def __post_init__(self) -> None:
        if not self.calls or len({len(call.orders) for call in self.calls}) != 1:
            raise ArgumentError("calls", self.calls, "at least one, all with the same ranks")
        if self.workers < 1:
            raise ArgumentError("workers", self.workers, "at least 1")
        if self.publish_lag < 0:
            raise ArgumentError("publish_lag", self.publish_lag, "at least 0")
        if any(not 0 <= rank < self.world_size for rank in self.mortal):
            raise ArgumentError("mortal", self.mortal, f"ranks below {self.world_size}")

    @property
    def world_size(self) -> int:
        """Number of ranks P."""
        return len(self.calls[0].orders)


@dataclass(frozen=True)
class Rules:
    """The protocol's rules, each of which can be broken by setting it False; `SOUND` keeps them all.

    Attributes:
        two_banks: Flags and slots alternate between two banks, by the epoch's parity.
        tokens: A peer that gets no tile gets a token.
        flush_before_poll: Pending publications are made before any wait.
        flush_before_exit: Pending publications are made before the worker ends.
        publish_after_landing: A flag is raised when its tile is visible at the receiver, not when the tile's
            source buffer is free again.
        alias_fences: In a multicast call a flag is raised when what it stands for can be seen through the
            other address of the same memory.
        remote_tiles_first: Tiles are taken in the scenario's order; else each rank takes its own first.
        one_stream: All ranks launch calls in one order; else ranks other than 0 swap each pair of calls.
        co_resident: A rank's device holds all of its workers at once; else one fewer.
        warmed_up: Nothing on the first call's way needs an idle device (module load, allocation, memset).
        launch_after_all_run: With `overlap`, the next call is launched once all workers of this one run.
        waits_for_previous_call: With `overlap`, a call touches nothing before the one before it has ended.
        epoch_in_flag: Flags hold the epoch; else one bit that alternates at each use of its bank.
        signature_in_flag: Flags hold the call's signature too.
        epoch_in_memory: The epoch is counted in device memory; else it is an argument baked into a graph.
        deadline: Waits end at the scenario's deadline.
        broadcast_abort: A worker that gives up tells every rank.
        earliest_wait_blames: The abort word that stands is the one whose wait is earliest in (epoch, tile),
            and each rank that ends adds its own wait; else the first writer wins.
        expiry_reads_row: An expired wait looks at all flags of the rank that it waited for, so that a rank
            in the same call with another shape is reported as such.
        last_worker_fills: NaN is written over an aborted call's output by the last worker to leave; else by
            each worker that gives up.
    """

    two_banks: bool = True
    tokens: bool = True
    flush_before_poll: bool = True
    flush_before_exit: bool = True
    publish_after_landing: bool = True
    alias_fences: bool = True
    remote_tiles_first: bool = True
    one_stream: bool = True
    co_resident: bool = True
    warmed_up: bool = True
    launch_after_all_run: bool = True
    waits_for_previous_call: bool = True
    epoch_in_flag: bool = True
    signature_in_flag: bool = True
    epoch_in_memory: bool = True
    deadline: bool = True
    broadcast_abort: bool = True
    earliest_wait_blames: bool = True
    expiry_reads_row: bool = True
    last_worker_fills: bool = True

    @property
    def broken(self) -> frozenset[str]:
        """Names of the rules that are not kept."""
        return frozenset(field.name for field in fields(self) if not getattr(self, field.name))


SOUND = Rules()


def grouped_order(owned: Sequence[int], rank: int, lag: int = 1) -> tuple[TileId, ...]:
    """The design's order in groups of one tile: at each step the remote tiles, then an own one of earlier.

    Args:
        owned: Tiles that each rank owns.
        rank: Whose order.
        lag: Steps by which own tiles trail.
    """
    order: list[TileId] = []
    for step in range(max(owned, default=0) + lag):
        owners = [(rank + distance) % len(owned) for distance in range(1, len(owned))]
        order.extend((owner, step) for owner in owners if step < owned[owner])
        if 0 <= step - lag < owned[rank]:
            order.append((rank, step - lag))
    return tuple(order)


def uniform_call(
    owned: Sequence[int],
    operation: Operation = Operation.REDUCE_SCATTER,
    lag: int = 1,
    workspace: int = 0,
) -> Call:
    """A call in whose shape all ranks agree, in `grouped_order`; `owned` gives the tiles of each rank.

    The signature numbers the shape: different `owned` or operations differ in it.
    """
    return Call(
        orders=tuple(grouped_order(owned, rank, lag) for rank in range(len(owned))),
        signatures=(signature_of(owned, operation),) * len(owned),
        operation=operation,
        workspace=workspace,
    )


def signature_of(owned: Iterable[int], operation: Operation) -> int:
    """A signature for a call with `owned` tiles per rank, each below 8, at most 4 ranks: digits of it."""
    digits = int(operation)
    for tiles in owned:
        digits = digits * 8 + tiles
    return digits & SIGNATURE_MASK
