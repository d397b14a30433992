# SPDX-License-Identifier: Apache-2.0
"""The packed form of FP8 weights: a bijection, in the order that the kernel's lanes read."""

from __future__ import annotations

import pytest
import torch
from dsv4_gemm_rs.packing import (
    BLOCK_BYTES,
    CODE_BYTES,
    LARGEST_WHOLE_SCALE,
    PackedWeight,
    pack,
    packed_bytes,
    unpack,
)


def weight(n: int, k: int, high: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Every finite code, and scale bytes below `high`."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=generator)
    codes[(codes & 0x7F) == 0x7F] = 0x80
    scale = torch.randint(0, high, (n, k // 32), dtype=torch.uint8, generator=generator)
    return codes.view(torch.float8_e4m3fn), scale


@pytest.mark.parametrize(("n", "k"), [(128, 128), (192, 256), (64, 64), (320, 192)])
@pytest.mark.parametrize("high", [LARGEST_WHOLE_SCALE + 1, 255])
def test_unpacking_gives_back_every_code_and_scale(n: int, k: int, high: int) -> None:
    data, scale = weight(n, k, high)
    packed = pack(data, scale)
    assert packed.split == (high == 255)
    assert packed.blocks.numel() == packed_bytes(n, k)
    got, scales = unpack(packed)
    assert torch.equal(got.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(scales, scale)
    again, scales = unpack(pack(data, scale, split=True))
    assert torch.equal(again.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(scales, scale)


def value_of(packed: PackedWeight, row: int, k: int) -> float:
    """What a thread makes of the bytes that it holds for element (row, k), by the ISA's fragment layout."""
    block = packed.blocks[row // 128, k // 64]
    feature, element = row % 128, k % 64
    warp, matrix, r = feature // 32, feature % 32 // 8, feature % 8
    step, half, q, e = element // 16, element % 16 // 8, element % 8 // 2, element % 2
    thread = 32 * warp + 4 * r + q
    code = int(block[step * 2048 + thread * 16 + 4 * matrix + 2 * half + e])
    bits = (code & 0x87) << 8 | (code << 1) & 0xF0
    at = CODE_BYTES + element // 32 * 256 + warp * 64 + r * 8 + matrix * 2
    factor = float(block[at : at + 2].view(torch.bfloat16))
    pair = torch.tensor([bits - (bits >> 15 << 16)], dtype=torch.int16).view(torch.bfloat16)
    return float(pair) * (2.0**120 if packed.split else 1.0) * factor


@pytest.mark.parametrize("split", [False, True])
def test_each_byte_is_where_the_lane_that_needs_it_reads(split: bool) -> None:
    data, scale = weight(256, 128, LARGEST_WHOLE_SCALE + 1)
    packed = pack(data, scale, split)
    assert packed.blocks.shape == (2, 2, BLOCK_BYTES)
    for row in range(0, 256, 5):
        for k in range(row % 3, 128, 3):
            exact = float(data[row, k]) * 2.0 ** (int(scale[row, k // 32]) - 127)
            assert value_of(packed, row, k) == exact, (row, k)


def test_a_nan_makes_its_block_nan() -> None:
    data, scale = weight(128, 128, 130)
    data.view(torch.uint8)[5, 40] = 0xFF
    scale[7, 3] = 255
    packed = pack(data, scale)
    assert not packed.split
    got, scales = unpack(packed)
    nan = got.float().isnan()
    assert nan[5, 32:64].all()
    assert nan[7, 96:].all()
    assert nan.sum() == 64
    assert scales[5, 1] == scales[7, 3] == 255


def test_features_past_the_last_are_zeros() -> None:
    data, scale = weight(64, 64, 130)
    codes = pack(data, scale).blocks[0, 0, :CODE_BYTES].view(4, 4, 32, 16)
    assert codes[:, :2].any()
    assert not codes[:, 2:].any()
