# SPDX-License-Identifier: Apache-2.0
"""What the SM90 kernels do around their multiplication: how a CTA begins, meets its peers, and ends.

Contract: `prepare`, `wait_for_inputs` (`kernels.overlap`) and `begin` stand first in a kernel and `end` last,
with all of its threads. Of the service warps
one sends, one gathers and one tidies; how they do it differs only in what a chunk of a peer's tile is. What
an aborted call does is told in `sm90.kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64
from dsv4_symm_mem.device.exchange import Exchange, count_in, enter, leave, wait_for_peers
from dsv4_symm_mem.device.fences import fence_proxy_async
from dsv4_symm_mem.device.order import place
from dsv4_symm_mem.device.pacing import block_duration_of
from dsv4_symm_mem.device.roles import (
    Call,
    poison_output,
    send_tokens,
    wait_for_own_tile,
    zero_uncovered_rows,
)
from dsv4_symm_mem.device.send import SentCall, send_tile


@dataclass(frozen=True)
class GatheringCall(SentCall):
    """A call whose own tiles take their peers' chunks from a ring in shared memory.

    Attributes:
        aborted: Shared-memory word, 1 from the gathering warp's abort on.
    """

    aborted: cute.Pointer


Gather = Callable[..., tuple[Int32, Int32]]
"""Brings in the peers' chunks of an own tile: of a call, the tile's number, whether the call is aborted and
chunks are only handed out, and the ring's place; gives the ring's next place."""
Barriers = Sequence[tuple[cute.Pointer, int, int]]
"""Rings of mbarriers: the first one, how many there are, and arrivals that complete a phase of each."""


@cute.jit
def prepare(barriers: Constexpr[Barriers], thread: Int32) -> None:
    """Initialise the barriers. Touches no global memory, so it may come before `wait_for_inputs`."""
    if thread == 0:
        for first, number, arrivals in barriers:
            for i in cutlass.range_constexpr(number):
                cute.arch.mbarrier_init(first + i, arrivals)
    cute.arch.mbarrier_init_fence()


@cute.jit
def begin(
    exchange: Constexpr[Exchange], halted: cute.Pointer, aborted: cute.Pointer, thread: Int32
) -> Boolean:
    """Set the CTA's two words and meet all of its threads; whether the call was ended before it began."""
    if thread == 0:
        enter(exchange, halted, aborted)
    cute.arch.sync_threads()
    return cute.arch.load(halted, Int32) != 0


@cute.jit
def run_sender(call: Constexpr[SentCall]) -> None:
    """The sending warp: tokens for peers without tiles, then this CTA's remote tiles and their flags."""
    exchange, order = call.exchange, call.order
    send_tokens(call)
    block_ps = block_duration_of(call.pacing)
    step, phase = Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row_tile, column_tile, step = place(order, position, step)
        if owner != exchange.rank:
            send_tile(call, owner, row_tile, column_tile, block_ps, phase)
            phase = phase ^ 1
        position += call.workers


@cute.jit
def run_gatherer(call: Constexpr[GatheringCall], gather: Constexpr[Gather]) -> None:
    """The gathering warp: waits for the peers of every own tile and brings in their chunks."""
    exchange, order = call.exchange, call.order
    aborted = Boolean(False)
    deadline = Int64(0)
    step, stage, phase = Int32(0), Int32(0), Int32(0)
    position = Int32(call.worker)
    if exchange.world_size > 1:
        while position < order.positions:
            owner, row_tile, column_tile, step = place(order, position, step)
            if owner == exchange.rank:
                tile = row_tile * order.columns + column_tile
                if not aborted:
                    aborted, deadline = wait_for_own_tile(exchange, tile, deadline, call.aborted)
                fence_proxy_async()
                stage, phase = gather(call, tile, aborted, stage, phase)
            position += call.workers
        if call.worker == 0 and order.own == 0:
            aborted, deadline = wait_for_peers(exchange, exchange.token, deadline)


@cute.jit
def run_tidier(call: Constexpr[Call], first: Boolean) -> None:
    """The tidying warp: its `first` thread counts the CTA in, all zero the rows that no tile covers."""
    if first:
        count_in(call.exchange, call.workers)
    zero_uncovered_rows(call, call.worker, call.workers)


@cute.jit
def end(call: Constexpr[GatheringCall], warp: Int32) -> None:
    """Wait for all of the CTA and count it out; the last CTA of an aborted call fills the output with NaN."""
    cute.arch.sync_threads()
    if warp == 0 and call.exchange.world_size > 1:
        aborted = cute.arch.load(call.aborted, Int32) != 0
        if leave(call.exchange, call.workers, aborted):
            poison_output(call, Int32(0), Int32(1))
