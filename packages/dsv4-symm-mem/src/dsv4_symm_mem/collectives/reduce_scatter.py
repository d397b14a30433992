# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter over rows, summed in FP32 in rank order, driven by the host over slots and flags.

Contract: rank r receives `out[r] = bf16(sum over p in rank order of partial_p[rows of r])`, where a remote
partial is rounded once to BF16 for the wire and the rank's own enters unrounded, so equal inputs give equal
bits in every run and on every path. Rows of the output at or past M are zero.

`push_tiles` is the whole algorithm over any order of tiles and any source of partial tiles; the plain
`reduce_scatter` feeds it slices of a finished partial, a fused operation feeds it tiles as it computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from dsv4_symm_mem.collectives.operands import check_operands
from dsv4_symm_mem.errors import ArgumentError, ExchangeError
from dsv4_symm_mem.protocol.host import HostCall, HostExchange
from dsv4_symm_mem.protocol.layout import shard_rows
from dsv4_symm_mem.protocol.slots import BLOCK_COLUMNS, BLOCK_ROWS, read_tile, write_tile
from dsv4_symm_mem.protocol.tiles import Tile, TileGrid, TileShape
from dsv4_symm_mem.protocol.words import Operation, call_signature

HOST_TILE = TileShape(128, 128)


def push_tiles(
    exchange: HostExchange,
    grid: TileGrid,
    order: Iterable[Tile],
    partial: Callable[[Tile], torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Perform one reduce-scatter call, taking tiles in `order`.

    Args:
        exchange: This rank's end of the exchange.
        grid: Tiles of the call, equal on all ranks.
        order: Every tile of the grid once; own tiles at places that satisfy the schedule's deadlock rule.
        partial: This rank's partial of a tile, FP32 [rows, columns] of the tile.
        out: BF16 [L, N] with L = ceil(M / P), filled completely; NaN if the call ends with an error.

    Raises:
        ArgumentError: The tile is not made of whole blocks (see `protocol.slots`), or the shard does not fit
            into the slots; before anything is sent.
        ExchangeError: A peer failed, is late or runs another call; every rank gets one.
        Exception: What `partial` raised; peers get a `PeerAbortError` that blames this rank.
    """
    if grid.shape.m % BLOCK_ROWS or grid.shape.n % BLOCK_COLUMNS:
        raise ArgumentError("grid", grid.shape, f"a tile of multiples of {BLOCK_ROWS} by {BLOCK_COLUMNS}")
    grid.require_fits(exchange.layout)
    rank, world_size = exchange.rank, grid.world_size
    peers = [(rank + distance) % world_size for distance in range(1, world_size)]
    signature = call_signature(Operation.REDUCE_SCATTER, grid.m, grid.n, grid.shape.m, grid.shape.n)
    call = exchange.begin(signature)
    try:
        for peer in peers:
            if grid.owned_tiles(peer) == 0:
                call.publish_token(peer)
        for tile in order:
            if tile.owner == rank:
                _reduce_tile(call, rank, grid, tile, partial(tile), out)
            else:
                slot_tile = _slot_tile(call.slot(tile.owner, rank), grid, tile)
                write_tile(slot_tile, grid.shape.m, grid.shape.n, partial(tile))
                call.publish(tile.owner, tile.index)
        if grid.owned_tiles(rank) == 0:
            for peer in peers:
                call.wait_token(peer)
    except BaseException as error:
        out.fill_(float("nan"))
        if not isinstance(error, ExchangeError):
            call.fail()
        raise
    out[len(shard_rows(grid.m, world_size, rank)) :].zero_()
    call.finish()


def reduce_scatter(
    exchange: HostExchange, partial: torch.Tensor, out: torch.Tensor, shape: TileShape = HOST_TILE
) -> None:
    """Reduce-scatter a finished partial.

    Args:
        exchange: This rank's end of the exchange.
        partial: FP32 or BF16 [M, N], M and N equal on all ranks.
        out: BF16 [ceil(M / P), N], filled completely.
        shape: Tile shape, equal on all ranks and to that of ranks which run a fused kernel.

    Raises:
        ArgumentError: Wrong dtype or shape; before anything is sent.
        ExchangeError: As for `push_tiles`.
    """
    world_size = exchange.layout.world_size
    check_operands(partial, out, world_size)
    m, n = partial.shape
    grid = TileGrid(m, n, world_size, shape)
    remote = (exchange.rank + distance for distance in range(1, world_size))
    owners = [*(owner % world_size for owner in remote), exchange.rank]

    def part(tile: Tile) -> torch.Tensor:
        return partial[tile.rows.start : tile.rows.stop, tile.columns.start : tile.columns.stop]

    push_tiles(exchange, grid, (tile for owner in owners for tile in grid.tiles(owner)), part, out)


def _slot_tile(slot: torch.Tensor, grid: TileGrid, tile: Tile) -> torch.Tensor:
    start = tile.index * grid.tile_elements
    return slot[start : start + grid.tile_elements]


def _reduce_tile(
    call: HostCall, rank: int, grid: TileGrid, tile: Tile, own: torch.Tensor, out: torch.Tensor
) -> None:
    def term(source: int) -> torch.Tensor:
        if source == rank:
            return own.float()
        call.wait(source, tile.index)
        whole = read_tile(_slot_tile(call.slot(rank, source), grid, tile), grid.shape.m, grid.shape.n)
        return whole[: len(tile.rows), : len(tile.columns)].float()

    total = term(0)
    for source in range(1, grid.world_size):
        total = total + term(source)
    top = tile.rows.start - rank * grid.shard_length
    out[top : top + len(tile.rows), tile.columns.start : tile.columns.stop] = total
