# SPDX-License-Identifier: Apache-2.0
"""The data layout of the push exchange: where an element of a tile lies inside its slot.

A tile [tile_m, tile_n] of BF16 is cut into blocks of 8 rows by 32 columns, 512 contiguous bytes each, row
major inside. Blocks are ordered column first: all blocks of columns 0..31 from the top down, then the next
32 columns. Hence

    offset(row, column) = ((column // 32) * (tile_m // 8) + row // 8) * 256 + (row % 8) * 32 + column % 32

elements from the tile's start. Why: a warp of an MMA epilogue owns whole blocks, so it writes and reads
each with one 16-byte access per lane, a dense 512-byte burst; any run of columns over all rows is one
contiguous piece, so a bulk copy brings it into shared memory and back without a descriptor; and the
layout depends on the tile's shape only, not on a kernel's warps, so the stand-alone reduce-scatter and a
host reference read it too.

Rejected: row-major slots (64-byte pieces per row from an MMA epilogue), the accumulator's own fragment
order (an 8-byte row piece per lane, and every reader would need the writer's warp layout).
"""

from __future__ import annotations

import torch

BLOCK_ROWS = 8
BLOCK_COLUMNS = 32
BLOCK_ELEMENTS = BLOCK_ROWS * BLOCK_COLUMNS
BLOCK_BYTES = 2 * BLOCK_ELEMENTS
UNIT_BYTES = 16 * BLOCK_BYTES
"""What one warp reads at a time where sums are read through multicast: 16 bytes a lane and block."""
STAGED_TILES = 2
"""Tiles that a CTA may have finished and not yet sent, see `device.forward`."""
BOUNCES = 3
"""Pieces of 32 columns in the shared memory through which they are sent."""


def element_offset(tile_m: int, row: int, column: int) -> int:
    """Elements from a tile's start in its slot to (row, column); `tile_m` a multiple of 8."""
    block = (column // BLOCK_COLUMNS) * (tile_m // BLOCK_ROWS) + row // BLOCK_ROWS
    return block * BLOCK_ELEMENTS + (row % BLOCK_ROWS) * BLOCK_COLUMNS + column % BLOCK_COLUMNS


def unit_rows(tile_n: int) -> int:
    """Rows of blocks that a unit has, over all of the tile's columns."""
    return max(UNIT_BYTES // BLOCK_BYTES // (tile_n // BLOCK_COLUMNS), 1)


def units_of(tile_m: int, tile_n: int) -> int:
    """Units of a tile, from the top down."""
    return -(-tile_m // (BLOCK_ROWS * unit_rows(tile_n)))


def read_tile(slot_tile: torch.Tensor, tile_m: int, tile_n: int) -> torch.Tensor:
    """A copy, row major [tile_m, tile_n], of the tile in the BF16 elements `slot_tile` [tile_m * tile_n]."""
    return _blocks(slot_tile, tile_m, tile_n).reshape(tile_m, tile_n)


def write_tile(slot_tile: torch.Tensor, tile_m: int, tile_n: int, values: torch.Tensor) -> None:
    """Round `values` [rows, columns] to BF16 into the tile's upper left corner; the rest becomes zero."""
    whole = torch.zeros(tile_m, tile_n, dtype=slot_tile.dtype, device=slot_tile.device)
    whole[: values.shape[0], : values.shape[1]] = values
    blocks = _blocks(slot_tile, tile_m, tile_n)
    blocks.copy_(whole.view(blocks.shape))


def _blocks(slot_tile: torch.Tensor, tile_m: int, tile_n: int) -> torch.Tensor:
    """A view [row blocks, rows of a block, column blocks, columns of a block], which is row major order."""
    shape = (tile_n // BLOCK_COLUMNS, tile_m // BLOCK_ROWS, BLOCK_ROWS, BLOCK_COLUMNS)
    return slot_tile.view(shape).permute(1, 2, 0, 3)
