# SPDX-License-Identifier: Apache-2.0
"""The multicast exchange: partials stay with their source, owners read sums, and may write them back.

Contract: data warps store every tile, of their own shard too, into this rank's own bank (`protocol.layout`,
`partial_offset`), in the slot layout; the publishing warp raises its flag at the owner. Reading warps of the
owner take units (`protocol.slots`, `UNIT_BYTES`) of its shard: wait for the tile's flags from every rank, its
own included, then `multimem.ld_reduce` adds all partials, in FP32 and in the switch's order. An all-reduce
writes each sum back through multicast, over the partials that it was made of, and raises a flag at every
peer; other reading warps wait for these and copy the peers' sums from this rank's own bank into the output.

So all ranks have the bits that the owner read, which a reading of all tiles by every rank would not promise,
and of S = the bytes of a partial a rank sends S and S/P, not P·S.

Who publishes waits for nobody, so there is nothing for an order of tiles to keep from deadlock. Readers take
units in the order of tiles, from every SM: a tile's last unit is read as soon as any SM has time for it.

Ordering (PTX ISA, memory consistency model): a data warp's stores -> bar.warp.sync -> its lane 0's
mbarrier.arrive -> the publisher's wait -> fence.proxy.alias -> st.release.sys of the flag -> ld.acquire.sys
of one lane of the reader -> bar.warp.sync -> fence.proxy.alias in each lane -> multimem.ld_reduce. Back: each
lane's multimem.st -> fence.proxy.alias -> bar.warp.sync -> st.release.sys of the flags, one lane for each
peer -> the same of the reader, whose loads are ordinary ones. A unit is read and written by the same lanes
through the same address, so the sum needs nothing to stay behind the partials that it replaces.

Flags are never touched through multicast: a store there and a poll through the ordinary address would be two
proxies that race. The alias fence is a full barrier and drops L1, hence one for each tile of a publisher and
each unit of a reader, and none in the data warps.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64, Uint32

from dsv4_symm_mem.device.exchange import Exchange, base_of, raise_flag, wait_for_peers, wait_for_sources
from dsv4_symm_mem.device.fences import fence_proxy_alias
from dsv4_symm_mem.device.multimem import multimem_ld_reduce_bf16, multimem_store
from dsv4_symm_mem.device.order import row_tiles, rows_of, select
from dsv4_symm_mem.device.roles import Call, note_abort
from dsv4_symm_mem.device.vectors import Words, load_16, store_16
from dsv4_symm_mem.protocol.layout import BANKS
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_ROWS, unit_rows, units_of


@dataclass(frozen=True)
class PulledCall(Call):
    """A multicast call. Its output is [L, n], or [m, n] of an all-reduce.

    Attributes:
        tile_m, tile_n: Tile shape, constants; `stored` and `published` have `PUBLICATIONS` barriers.
        multicast: Multicast address of the block.
        gathered: Whether sums are written back, for an all-reduce.
        aborted: Shared-memory word, 1 once a warp has given up.
    """

    tile_m: int
    tile_n: int
    multicast: Int64
    gathered: Boolean
    aborted: cute.Pointer


def partial_address(exchange: Exchange, base: Int64, owner: Int32) -> Int64:
    """Address, in the block at `base`, of a rank's partial of `owner`'s shard in this call's bank."""
    others = exchange.world_size - 1
    index = select(owner == others, BANKS * others + exchange.bank, exchange.bank * others + owner)
    return base + exchange.slots_offset + Int64(index) * exchange.slot_bytes


@cute.jit
def run_reducer(call: Constexpr[PulledCall], reader: Int32, readers: Int32) -> None:
    """A reading warp, number `reader` of `readers` of this rank: sums of its share of the own shard."""
    exchange, order = call.exchange, call.order
    units = cutlass.const_expr(units_of(call.tile_m, call.tile_n))
    own_units = row_tiles(order, exchange.rank) * order.columns * units
    if exchange.world_size == 1:
        own_units = Int32(0)
    aborted = Boolean(False)
    deadline = Int64(0)
    item = Int32(reader)
    while item < own_units and not aborted:
        tile, first_row, columns, offset = _unit_place(call, exchange.rank, item)
        if first_row < order.own_rows:
            aborted, deadline = wait_for_sources(
                exchange, Int32(0), exchange.world_size, tile, deadline, own=True
            )
            if not aborted:
                fence_proxy_alias()
                sum_unit(call, first_row, tile, columns, offset)
                if call.gathered:
                    fence_proxy_alias()
                    cute.arch.sync_warp()
                    peer = cute.arch.lane_idx()
                    while peer < exchange.world_size:
                        if peer != exchange.rank:
                            raise_flag(exchange, base_of(exchange, peer), exchange.token + 1 + item)
                        peer += 32
        item += readers
    if reader == 0 and order.own == 0 and exchange.world_size > 1:
        aborted, deadline = wait_for_peers(exchange, exchange.token, deadline)
    note_abort(call.aborted, aborted)


@cute.jit
def run_gatherer(call: Constexpr[PulledCall], reader: Int32, readers: Int32) -> None:
    """A reading warp of an all-reduce, likewise: copies its share of the peers' sums into the output."""
    exchange, order = call.exchange, call.order
    peers = exchange.world_size - 1
    units = cutlass.const_expr(units_of(call.tile_m, call.tile_n))
    items = row_tiles(order, Int32(0)) * order.columns * units * peers
    aborted = Boolean(False)
    deadline = Int64(0)
    turn = Int32(reader)
    while turn < items and not aborted:
        # Owners write back level with each other, so they are taken in turn.
        item = turn // peers
        owner = (exchange.rank + 1 + turn % peers) % exchange.world_size
        tile, first_row, columns, offset = _unit_place(call, owner, item)
        if first_row < rows_of(order, owner):
            aborted, deadline = wait_for_sources(
                exchange, owner, owner + 1, exchange.token + 1 + item, deadline
            )
            if not aborted:
                fence_proxy_alias()
                copy_unit(call, owner, first_row, tile, columns, offset)
        turn += readers
    note_abort(call.aborted, aborted)


@cute.jit
def _unit_place(call: Constexpr[PulledCall], owner: Int32, item: Int32) -> tuple[Int32, Int32, Int32, Int64]:
    """A unit of `owner`'s shard: its tile, first row in the shard, columns of the tile, place in the block.

    The place is that of this lane's part of the unit's first block, from the block's first byte on.
    """
    order = call.order
    units = cutlass.const_expr(units_of(call.tile_m, call.tile_n))
    rows = cutlass.const_expr(unit_rows(call.tile_n))
    tile, unit = item // units, item % units
    columns = cutlass.min(call.n - tile % order.columns * call.tile_n, call.tile_n)
    first_row = tile // order.columns * call.tile_m + unit * (rows * BLOCK_ROWS)
    place_in_tile = unit * (rows * BLOCK_BYTES) + cute.arch.lane_idx() * 16
    tile_bytes = cutlass.const_expr(call.tile_m * call.tile_n * 2)
    offset = partial_address(call.exchange, Int64(0), owner)
    return tile, first_row, columns, offset + Int64(tile) * tile_bytes + Int64(place_in_tile)


def _blocks(call: PulledCall) -> list[tuple[int, int, int]]:
    """The unit's blocks: row and column of blocks, bytes from the first one."""
    step = call.tile_m // BLOCK_ROWS * BLOCK_BYTES
    rows, columns = unit_rows(call.tile_n), call.tile_n // BLOCK_COLUMNS
    return [
        (row, column, column * step + row * BLOCK_BYTES) for row in range(rows) for column in range(columns)
    ]


@cute.jit
def sum_unit(
    call: Constexpr[PulledCall], first_row: Int32, tile: Int32, columns: Int32, offset: Int64
) -> None:
    """Read the sum of a unit that all ranks have published, store it and, if gathered, write it back."""
    order = call.order
    source = call.multicast + offset
    words: list[Words] = []
    # All loads come before any use, so they are in flight together.
    for row, column, place_of_block in _blocks(call):
        zero = Uint32(0)
        block = (zero, zero, zero, zero)
        if first_row + BLOCK_ROWS * row < order.own_rows and BLOCK_COLUMNS * column < columns:
            block = multimem_ld_reduce_bf16(source + place_of_block)
        words.append(block)
    first_output = select(call.gathered, call.exchange.rank * order.shard, 0)
    _store_rows(call, first_output, order.own_rows, first_row, tile, columns, words)
    if call.gathered:
        for index, (row, column, place_of_block) in enumerate(_blocks(call)):
            if first_row + BLOCK_ROWS * row < order.own_rows and BLOCK_COLUMNS * column < columns:
                multimem_store(source + place_of_block, words[index])


@cute.jit
def copy_unit(
    call: Constexpr[PulledCall], owner: Int32, first_row: Int32, tile: Int32, columns: Int32, offset: Int64
) -> None:
    """Copy a unit of `owner`'s sums from this rank's bank into the output."""
    order = call.order
    rows = rows_of(order, owner)
    source = call.exchange.own_base + offset
    words: list[Words] = []
    for row, column, place_of_block in _blocks(call):
        zero = Uint32(0)
        block = (zero, zero, zero, zero)
        if first_row + BLOCK_ROWS * row < rows and BLOCK_COLUMNS * column < columns:
            block = load_16(source + place_of_block)
        words.append(block)
    _store_rows(call, owner * order.shard, rows, first_row, tile, columns, words)


@cute.jit
def _store_rows(
    call: Constexpr[PulledCall],
    first_output: Int32,
    rows: Int32,
    first_row: Int32,
    tile: Int32,
    columns: Int32,
    words: list[Words],
) -> None:
    """Store a unit's rows below `rows`, of a shard that begins at row `first_output` of the output."""
    lane = cute.arch.lane_idx()
    left = tile % call.order.columns * call.tile_n + lane % 4 * 8
    line = first_row + lane // 4
    target = call.out + (Int64(first_output + line) * call.out_stride + Int64(left)) * 2
    step = call.out_stride * (BLOCK_ROWS * 2)
    for index, (row, column, _) in enumerate(_blocks(call)):
        if line + BLOCK_ROWS * row < rows and BLOCK_COLUMNS * column < columns:
            store_16(target + step * row + column * (BLOCK_COLUMNS * 2), words[index])
