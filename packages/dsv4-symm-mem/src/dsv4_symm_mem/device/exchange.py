# SPDX-License-Identifier: Apache-2.0
"""One call of the push exchange on the device: where its words and slots lie, how one waits and gives up.

Contract: follows `protocol.layout` and `protocol.words`; fused kernels of every architecture and the
stand-alone reduce-scatter use it, so they understand each other. Whoever ends without its peers' data, on its
own or following an abort, combines its own wait into every rank's abort word, where the greatest stays
(`protocol.words` says why), leaves a diagnosis in its own block and tells the host. The last CTA to leave an
aborted call fills the output with NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64

from dsv4_symm_mem.device.address import global_pointer
from dsv4_symm_mem.device.clock import deadline_after
from dsv4_symm_mem.device.flags import (
    WaitStatus,
    abort_word,
    arrive_ticket,
    load_relaxed,
    raise_abort,
    store_relaxed,
    store_release,
    try_lock,
    wait_signal,
)
from dsv4_symm_mem.protocol.layout import (
    ABORT_OFFSET,
    CONTROL_BYTES,
    DIAGNOSIS_LOCK_OFFSET,
    DIAGNOSIS_OFFSET,
    EPOCH_OFFSET,
    LEAVING_OFFSET,
    TICKET_OFFSET,
)
from dsv4_symm_mem.protocol.words import MAX_LEVEL, NO_ABORT, SIGNATURE_BITS, AbortKind


class ExchangeArguments(NamedTuple):
    """What a launch is told about the exchange, in the order in which `LaunchExchange.arguments` gives it.

    Attributes:
        own_base: Address of this rank's block.
        bases: Address of int64[P], every rank's block as mapped here.
        report: Address of one int64 of pinned host memory that hears of an abort, see `protocol.launch`.
        rank: This rank.
        world_size: Ranks P.
        max_tiles: From `ExchangeLayout`, as the next three.
        flag_row_bytes: Bytes of one source's flags in one bank.
        slots_offset: First byte of the slots.
        slot_bytes: Bytes of one slot.
        signature: `call_signature` of the call.
        timeout: Nanoseconds from a worker's first wait until its waits end, 0 for never.
    """

    own_base: Int64
    bases: Int64
    report: Int64
    rank: Int32
    world_size: Int32
    max_tiles: Int32
    flag_row_bytes: Int64
    slots_offset: Int64
    slot_bytes: Int64
    signature: Int32
    timeout: Int64


EXAMPLE_ARGUMENTS = ExchangeArguments(
    own_base=Int64(0),
    bases=Int64(0),
    report=Int64(0),
    rank=Int32(0),
    world_size=Int32(1),
    max_tiles=Int32(1),
    flag_row_bytes=Int64(0),
    slots_offset=Int64(0),
    slot_bytes=Int64(0),
    signature=Int32(0),
    timeout=Int64(0),
)
"""Values to compile a kernel with."""


class Exchange:
    """One call as device values. Reads the epoch: to be made before the CTA's ticket is taken."""

    def __init__(self, arguments: ExchangeArguments) -> None:
        self.own_base, self.bases, self.report = arguments.own_base, arguments.bases, arguments.report
        self.rank, self.world_size = arguments.rank, arguments.world_size
        self.token, self.flag_row_bytes = arguments.max_tiles, arguments.flag_row_bytes
        self.slots_offset, self.slot_bytes = arguments.slots_offset, arguments.slot_bytes
        self.timeout = arguments.timeout
        self.epoch = load_relaxed(self.own_base + EPOCH_OFFSET) + 1
        self.bank = Int32(self.epoch & 1)
        self.signal = (self.epoch << SIGNATURE_BITS) | Int64(arguments.signature)


def base_of(exchange: Exchange, rank: Int32) -> Int64:
    """Address of `rank`'s block."""
    return cute.arch.load(global_pointer(exchange.bases + Int64(rank) * 8, Int64, 8), Int64)


def flag_offset(exchange: Exchange, source: Int32, tile: Int32) -> Int64:
    """`ExchangeLayout.flag_offset` in this call's bank."""
    row = exchange.bank * exchange.world_size + source
    return Int64(CONTROL_BYTES) + Int64(tile) * 8 + Int64(row) * exchange.flag_row_bytes


def slot_address(exchange: Exchange, owner_base: Int64, owner: Int32, source: Int32) -> Int64:
    """Address, in `owner`'s block at `owner_base`, of its slot for `source` in this call's bank."""
    index = source - owner - 1
    index += Int32(cutlass.select_(index < 0, exchange.world_size, Int32(0)))
    slot = exchange.bank * (exchange.world_size - 1) + index
    return owner_base + exchange.slots_offset + Int64(slot) * exchange.slot_bytes


def raise_flag(exchange: Exchange, owner_base: Int64, tile: Int32) -> None:
    """Publish to the owner of the block what happened before in this thread: a tile, or the token."""
    store_release(owner_base + flag_offset(exchange, exchange.rank, tile), exchange.signal)


def is_aborted(exchange: Exchange) -> Boolean:
    """Whether this rank's abort word is set."""
    return load_relaxed(exchange.own_base + ABORT_OFFSET) != NO_ABORT


def report_abort(exchange: Exchange) -> None:
    """Tell the host that this rank has ended a call, or found one ended."""
    store_relaxed(exchange.report, load_relaxed(exchange.own_base + ABORT_OFFSET))


@cute.jit
def enter(exchange: Constexpr[Exchange], halted: cute.Pointer, aborted: cute.Pointer) -> None:
    """Set a CTA's two shared-memory words, as one thread: 1 where the call is ended before it begins, else 0.

    A halted CTA counts as aborted: others may have started before the abort and store tiles yet.
    """
    word = Int32(0)
    if is_aborted(exchange):
        word = Int32(1)
        report_abort(exchange)
    cute.arch.store(halted, word)
    cute.arch.store(aborted, word)


@cute.jit
def _kind_of_silence(exchange: Constexpr[Exchange], source: Int32) -> Int32:
    """Whether `source` is late, or in this call with another shape and so raised other flags than awaited."""
    kind = Int32(int(AbortKind.TIMEOUT))
    tile = Int32(0)
    while tile <= exchange.token and kind == int(AbortKind.TIMEOUT):
        seen = load_relaxed(exchange.own_base + flag_offset(exchange, source, tile))
        if (seen >> SIGNATURE_BITS) == exchange.epoch and seen != exchange.signal:
            kind = Int32(int(AbortKind.MISMATCH))
        tile += 1
    return kind


@cute.jit
def _record(
    exchange: Constexpr[Exchange], word: Int64, source: Int32, tile: Int32, seen: Int64, polls: Int64
) -> None:
    """Leave the diagnosis, unless another worker of this rank has left that of a greater word.

    One at a time, or two lines would mix. The lock is free while no one is inside, and who is inside neither
    waits nor branches away, so lanes of one warp may compete too.
    """
    line = exchange.own_base + DIAGNOSIS_OFFSET
    lock = exchange.own_base + DIAGNOSIS_LOCK_OFFSET
    recorded = Boolean(False)
    while not recorded:
        if try_lock(lock):
            if load_relaxed(line) < word:
                store_relaxed(line + 8, Int64(source))
                store_relaxed(line + 16, Int64(tile))
                store_relaxed(line + 24, seen)
                store_relaxed(line + 32, exchange.signal)
                store_relaxed(line + 40, polls)
                store_release(line, word)
            store_release(lock, Int64(0), "gpu")
            recorded = Boolean(True)


@cute.jit
def give_up(
    exchange: Constexpr[Exchange], status: Int32, source: Int32, tile: Int32, seen: Int64, polls: Int64
) -> None:
    """End this call on every rank: a wait for `tile`'s flag of `source` ended with `status`, not an arrival.

    Also where a peer's abort ended the wait: only the earliest of all waits tells whose fault it is. The
    diagnosis is that of the greatest word which this rank has raised.
    """
    kind = status
    if status != int(WaitStatus.MISMATCH):
        kind = _kind_of_silence(exchange, source)
    level = Int32(0)
    if tile != exchange.token:
        level = cutlass.min(tile + 1, MAX_LEVEL)
    word = abort_word(exchange.epoch, source, kind, level)
    if raise_abort(exchange.own_base + ABORT_OFFSET, word) < word:
        _record(exchange, word, source, tile, seen, polls)
    for rank in cutlass.range(exchange.world_size, unroll=1):
        if rank != exchange.rank:
            raise_abort(base_of(exchange, rank) + ABORT_OFFSET, word)
    report_abort(exchange)


def wait_for_peers(exchange: Exchange, tile: Int32, deadline: Int64) -> tuple[Boolean, Int64]:
    """`wait_for_sources` for all of them."""
    return wait_for_sources(exchange, Int32(0), exchange.world_size, tile, deadline)


@cute.jit
def wait_for_sources(
    exchange: Constexpr[Exchange],
    first: Int32,
    last: Int32,
    tile: Int32,
    deadline: Int64,
    own: Constexpr[bool] = False,
) -> tuple[Boolean, Int64]:
    """Wait, as one whole warp, until the peers among ranks [first, last) have raised flag `tile` here.

    With `own`, the rank itself as well, which raises flags at itself in multicast calls. Lanes take the
    sources in turn. `deadline` is what the warp's previous wait returned, at first 0, so one deadline covers
    all of its waits, counted from the first.

    Returns whether the call was aborted, and the deadline. If not aborted, what the peers stored before
    raising is visible to the whole warp.
    """
    if deadline == 0:
        deadline = deadline_after(exchange.timeout)
    failed = Int32(0)
    source = first + cute.arch.lane_idx()
    while source < last:
        awaited = source != exchange.rank
        if cutlass.const_expr(own):
            awaited = Boolean(True)
        if awaited and failed == 0:
            status, seen, polls = wait_signal(
                exchange.own_base + flag_offset(exchange, source, tile),
                exchange.signal,
                exchange.own_base + ABORT_OFFSET,
                deadline,
            )
            if status != int(WaitStatus.ARRIVED):
                failed = Int32(1)
                give_up(exchange, status, source, tile, seen, polls)
        source += 32
    cute.arch.sync_warp()
    return cute.arch.vote_any_sync(failed != 0), deadline


@cute.jit
def count_in(exchange: Constexpr[Exchange], workers: Int32) -> None:
    """Count one of `workers` CTAs, as one thread once its whole CTA has read the epoch; the last bumps it.

    Nothing but the next launch of this rank reads the epoch, and that starts when this one has ended, so this
    ticket needs not be the last thing that a CTA does, and its round trip is hidden.
    """
    if arrive_ticket(exchange.own_base + TICKET_OFFSET, workers):
        store_relaxed(exchange.own_base + EPOCH_OFFSET, exchange.epoch, "gpu")


@cute.jit
def leave(exchange: Constexpr[Exchange], workers: Int32, aborted: Boolean) -> Boolean:
    """Count one of `workers` CTAs out, as one whole warp after a barrier over its CTA.

    Returns whether the caller is to fill the output with NaN: it is the last, so that nothing is stored
    after it, and one of the CTAs was `aborted`.
    """
    fill = Int32(0)
    if cute.arch.lane_idx() == 0:
        one = Int64(1)
        if aborted:
            one = Int64(1 << 32 | 1)
        address = exchange.own_base + LEAVING_OFFSET
        before = cute.arch.atomic_add(global_pointer(address, Int64, 8), one, sem="acq_rel", scope="gpu")
        if Int32(before & 0xFFFFFFFF) == workers - 1:
            store_relaxed(address, Int64(0), "gpu")
            if (before + one) >> 32 != 0:
                fill = Int32(1)
    # The atomic acquires for its own lane; a vote orders no memory.
    cute.arch.sync_warp()
    return cute.arch.vote_any_sync(fill != 0)
