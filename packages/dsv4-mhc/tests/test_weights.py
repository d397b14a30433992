# SPDX-License-Identifier: Apache-2.0
"""Packed weights stand for the weights they were made from."""

from __future__ import annotations

import pytest
import torch
from dsv4_mhc import ArgumentError, pack_weight
from dsv4_mhc.weights import unpack_weight


@pytest.mark.parametrize("rows", [4, 24])
@pytest.mark.parametrize("hidden", [64, 320])
def test_round_trip_loses_2_to_minus_17(rows: int, hidden: int) -> None:
    fn = torch.randn(rows, 4 * hidden, generator=torch.Generator().manual_seed(3))
    packed = pack_weight(fn)
    assert packed.shape == (hidden // 32, 4, -(-rows // 8), 2, 256)
    assert ((unpack_weight(packed) - fn).abs() <= fn.abs() * 2.0**-17).all()


def test_place_of_each_weight() -> None:
    fn = torch.zeros(24, 4 * 128)
    row, stream, chunk, lane, half, pair, element = 13, 2, 3, 1, 1, 0, 1
    fn[row, 128 * stream + 32 * chunk + 8 * lane + 4 * half + 2 * pair + element] = 1 + 2.0**-10
    packed = pack_weight(fn)
    operand = packed[chunk, stream, row // 8, half].view(8, 4, 8)[row % 8, lane]
    assert operand.nonzero().flatten().tolist() == [4 * pair + element, 4 * pair + 2 + element]
    assert operand[4 * pair + element] == 1
    assert operand[4 * pair + 2 + element] == 2.0**-10
    assert packed.count_nonzero() == 2


@pytest.mark.parametrize(
    "fn",
    [torch.zeros(24, 256).bfloat16(), torch.zeros(23, 256), torch.zeros(24, 258), torch.zeros(24, 4 * 96)],
    ids=["dtype", "rows", "columns", "hidden"],
)
def test_refusals(fn: torch.Tensor) -> None:
    with pytest.raises(ArgumentError):
        pack_weight(fn)


def test_something_else_is_not_unpacked() -> None:
    with pytest.raises(ArgumentError):
        unpack_weight(torch.zeros(2, 48, 64, dtype=torch.bfloat16))
