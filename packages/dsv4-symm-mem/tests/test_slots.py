# SPDX-License-Identifier: Apache-2.0
"""The layout of a tile in its slot, against the formula element by element."""

from __future__ import annotations

import pytest
import torch
from dsv4_symm_mem.protocol.slots import element_offset, read_tile, write_tile


@pytest.mark.parametrize(("tile_m", "tile_n"), [(8, 32), (16, 96), (64, 128)])
def test_reading_and_writing_follow_the_formula(tile_m: int, tile_n: int) -> None:
    slot = torch.full((tile_m * tile_n,), float("nan"), dtype=torch.bfloat16)
    values = torch.arange(tile_m * tile_n).remainder(251).view(tile_m, tile_n).float()
    write_tile(slot, tile_m, tile_n, values)
    for row in range(tile_m):
        for column in range(tile_n):
            assert slot[element_offset(tile_m, row, column)] == values[row, column]
    assert torch.equal(read_tile(slot, tile_m, tile_n).float(), values)


def test_offsets_are_a_permutation_and_blocks_are_dense() -> None:
    offsets = [element_offset(64, row, column) for row in range(64) for column in range(96)]
    assert sorted(offsets) == list(range(64 * 96))
    block = [element_offset(64, 8 + row, 32 + column) for row in range(8) for column in range(32)]
    assert block == list(range(block[0], block[0] + 256))


def test_a_cut_tile_is_padded_with_zeros() -> None:
    slot = torch.full((16 * 64,), float("nan"), dtype=torch.bfloat16)
    write_tile(slot, 16, 64, torch.ones(5, 40))
    whole = read_tile(slot, 16, 64)
    assert whole[:5, :40].eq(1).all()
    assert whole.sum() == 200
