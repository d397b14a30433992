# SPDX-License-Identifier: Apache-2.0
"""What every exchanging kernel's service warps do: publish stored tiles, zero the rows that no tile covers.

Why publication needs no queue discipline: data warps store a tile into the peer's slot and arrive on
`stored[i]`; the publisher waits for that, releases the flag at system scope and arrives on `published[i]`,
which the data warps await `PUBLICATIONS` tiles later. The publisher waits for nothing but stored tiles, so a
publication is never held up by a wait for a peer, whatever the other warps wait for (design rule ii), and
the round trip of the release is in nobody's way.

Ordering (PTX ISA, memory consistency model): a data warp's stores -> bar.warp.sync -> its lane 0's
mbarrier.arrive (release, CTA scope) -> the publisher's mbarrier wait (acquire) -> st.release.sys. Causality
order is transitive across these scopes, so the flag's reader sees the stores.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64, Uint32

from dsv4_symm_mem.device.exchange import Exchange, base_of, raise_flag, wait_for_peers
from dsv4_symm_mem.device.fences import fence_proxy_alias
from dsv4_symm_mem.device.order import TileOrder, place, row_tiles, rows_of
from dsv4_symm_mem.device.vectors import store_16

NAN_PAIR = 0x7FFF7FFF
"""Two BF16 quiet NaNs."""
PUBLICATIONS = 4
"""Tiles whose flags may be outstanding before the data warps wait for the publisher."""


@dataclass(frozen=True)
class Call:
    """What all roles of an exchanging kernel share, as device values.

    Attributes:
        exchange, order: The call's words and slots; its tiles.
        out, out_stride: Address of the output [L, n] BF16 and its row stride in elements.
        n: Columns.
        worker, workers: This cluster's number, and how many take positions.
        row_in_cluster: This CTA's row tile within a position.
        stored, published: Rings of mbarriers, see the module.
    """

    exchange: Exchange
    order: TileOrder
    out: Int64
    out_stride: Int64
    n: Int32
    worker: Int32
    workers: Int32
    row_in_cluster: Int32
    stored: cute.Pointer
    published: cute.Pointer


@cute.jit
def advance(stage: Int32, phase: Int32, stages: Constexpr[int]) -> tuple[Int32, Int32]:
    """The stage of a ring after `stage` and the parity of its use."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase


@cute.jit
def send_tokens(call: Constexpr[Call]) -> None:
    """Raise the token's flag at every peer that gets no tile, as one whole warp of each CTA."""
    exchange, order = call.exchange, call.order
    if call.worker == 0 and call.row_in_cluster == 0:
        peer = cute.arch.lane_idx()
        while peer < exchange.world_size:
            if peer != exchange.rank and rows_of(order, peer) == 0:
                raise_flag(exchange, base_of(exchange, peer), exchange.token)
            peer += 32


@cute.jit
def note_abort(word: cute.Pointer, aborted: Boolean) -> None:
    """Write 1 to a word of shared memory if `aborted`, as one of several warps that may."""
    if aborted and cute.arch.lane_idx() == 0:
        # Strong, since several warps may say so at once.
        cute.arch.store(word, Int32(1), sem="relaxed", scope="cta")


@cute.jit
def wait_for_own_tile(
    exchange: Constexpr[Exchange], tile: Int32, deadline: Int64, word: cute.Pointer
) -> tuple[Boolean, Int64]:
    """`wait_for_peers` as the CTA's only warp that waits; an abort is noted in `word`, shared memory."""
    aborted, deadline = wait_for_peers(exchange, tile, deadline)
    if aborted:
        with cute.arch.elect_one():
            cute.arch.store(word, Int32(1))
        cute.arch.sync_warp()
    return aborted, deadline


@cute.jit
def run_publisher(call: Constexpr[Call], multicast: Constexpr[bool] = False) -> None:
    """The publishing warp: tokens for peers without tiles, then a flag at the owner of every tile sent.

    Pushed tiles are the remote ones. With `multicast` (`device.pull`) they are all of a call with peers, and
    are read through another address than they were stored to.
    """
    exchange, order = call.exchange, call.order
    lane = cute.arch.lane_idx()
    send_tokens(call)
    step, slot, phase = Int32(0), Int32(0), Int32(0)
    position = Int32(call.worker)
    while position < order.positions:
        owner, row, column, step = place(order, position, step)
        row_tile = row * order.cluster + call.row_in_cluster
        sent = owner != exchange.rank
        if cutlass.const_expr(multicast):
            sent = exchange.world_size > 1
        if sent and row_tile < row_tiles(order, owner):
            cute.arch.mbarrier_wait(call.stored + slot, phase)
            if lane == 0:
                if cutlass.const_expr(multicast):
                    fence_proxy_alias()
                raise_flag(exchange, base_of(exchange, owner), row_tile * order.columns + column)
                cute.arch.mbarrier_arrive(call.published + slot)
            slot, phase = advance(slot, phase, PUBLICATIONS)
        position += call.workers


@cute.jit
def fill_rows(
    call: Constexpr[Call], first: Int32, last: Int32, pair: Uint32, worker: Int32, workers: Int32
) -> None:
    """Fill rows [first, last) of the output with the BF16 pair `pair`, as one of `workers` warps."""
    row = first + worker
    while row < last:
        target = call.out + Int64(row) * call.out_stride * 2
        column = cute.arch.lane_idx() * 8
        while column < call.n:
            store_16(target + Int64(column) * 2, (pair, pair, pair, pair))
            column += 256
        row += workers


@cute.jit
def zero_uncovered_rows(call: Constexpr[Call], worker: Int32, workers: Int32) -> None:
    """Zero the rows of the output below the last own tile, as one of `workers` warps."""
    fill_rows(call, call.order.covered_rows, call.order.shard, Uint32(0), worker, workers)


@cute.jit
def poison_output(call: Constexpr[Call], worker: Int32, workers: Int32) -> None:
    """Fill the rows of the output that the rank owns with NaN, as one of `workers` warps."""
    fill_rows(call, Int32(0), call.order.own_rows, Uint32(NAN_PAIR), worker, workers)
