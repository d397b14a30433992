# SPDX-License-Identifier: Apache-2.0
"""All-gather of row shards over slots and flags, driven by the host: the kernel's twin.

Contract: see `all_gather_kernel`; the same tiles, slots, flags and tokens, so that ranks which run either
meet in one call.
"""

from __future__ import annotations

import torch

from dsv4_symm_mem.collectives.operands import check_gathered
from dsv4_symm_mem.collectives.reduce_scatter import HOST_TILE
from dsv4_symm_mem.errors import ExchangeError
from dsv4_symm_mem.protocol.host import HostExchange
from dsv4_symm_mem.protocol.layout import shard_rows
from dsv4_symm_mem.protocol.slots import read_tile, write_tile
from dsv4_symm_mem.protocol.tiles import TileGrid, TileShape
from dsv4_symm_mem.protocol.words import Operation, call_signature


def all_gather(
    exchange: HostExchange, shard: torch.Tensor, out: torch.Tensor, shape: TileShape = HOST_TILE
) -> None:
    """Gather every rank's shard.

    Args:
        exchange: This rank's end of the exchange.
        shard: BF16 [ceil(M / P), N]; rows past the rank's are not read.
        out: BF16 [M, N], M and N equal on all ranks; NaN if the call ends with an error.
        shape: Tile shape, equal on all ranks and to that of ranks which run the kernel.

    Raises:
        ArgumentError: Wrong dtype or shape, or a shard larger than the slots; before anything is sent.
        ExchangeError: A peer failed, is late or runs another call; every rank gets one.
    """
    rank, world_size = exchange.rank, exchange.layout.world_size
    check_gathered(shard, out, world_size)
    m, n = out.shape
    grid = TileGrid(m, n, world_size, shape)
    grid.require_fits(exchange.layout)
    peers = [(rank + distance) % world_size for distance in range(1, world_size)]
    call = exchange.begin(call_signature(Operation.ALL_GATHER, m, n, shape.m, shape.n))
    size = grid.tile_elements
    own = shard_rows(m, world_size, rank)
    try:
        for tile in grid.tiles(rank):
            rows = shard[tile.rows.start - own.start : tile.rows.stop - own.start]
            values = rows[:, tile.columns.start : tile.columns.stop]
            for peer in peers:
                slot = call.slot(peer, rank)[tile.index * size : (tile.index + 1) * size]
                write_tile(slot, shape.m, shape.n, values)
                call.publish(peer, tile.index)
        for peer in peers if not own else ():
            call.publish_token(peer)
        out[own.start : own.stop] = shard[: len(own)]
        for source in peers:
            if not grid.owned_tiles(source):
                call.wait_token(source)
            for tile in grid.tiles(source):
                call.wait(source, tile.index)
                slot = call.slot(rank, source)[tile.index * size : (tile.index + 1) * size]
                values = read_tile(slot, shape.m, shape.n)[: len(tile.rows), : len(tile.columns)]
                out[tile.rows.start : tile.rows.stop, tile.columns.start : tile.columns.stop] = values
    except BaseException as error:
        out.fill_(float("nan"))
        if not isinstance(error, ExchangeError):
            call.fail()
        raise
    call.finish()
