# SPDX-License-Identifier: Apache-2.0
"""Scale layouts: the swizzle against its offset formula, the padding, and which layout a shape means."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dsv4_gemm_rs.quantize import (
    ScaleLayout,
    infer_layout,
    quantize_mxfp8,
    swizzle_scales,
    swizzled_scale_numel,
    unswizzle_scales,
)
from dsv4_symm_mem.errors import ArgumentError

SHAPES = [(1, 32), (31, 96), (127, 128), (128, 128), (129, 160), (257, 2048), (300, 224)]


def offset(row: int, block: int, tiles: int) -> int:
    """Byte of a scale: atoms of 128 rows x 4 blocks, K tiles fastest, rows 32 apart side by side."""
    atom = (row // 128) * tiles + block // 4
    return atom * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4


def random_scales(rows: int, blocks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + blocks)
    return torch.randint(1, 255, (rows, blocks), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("rows", "k"), SHAPES)
def test_swizzle_follows_the_offset_formula_and_pads_with_zeros(rows: int, k: int) -> None:
    scale = random_scales(rows, k // 32)
    tiles = -(-k // 128)
    expected = torch.zeros(-(-rows // 128) * tiles * 512, dtype=torch.uint8)
    for row in range(rows):
        for block in range(k // 32):
            expected[offset(row, block, tiles)] = scale[row, block]
    assert swizzled_scale_numel(rows, k) == expected.numel()
    assert torch.equal(swizzle_scales(scale), expected)


@pytest.mark.parametrize(("rows", "k"), [*SHAPES, (0, 64), (5, 0), (0, 0)])
def test_unswizzle_inverts_swizzle(rows: int, k: int) -> None:
    scale = random_scales(rows, k // 32)
    flat = swizzle_scales(scale)
    back = unswizzle_scales(flat, rows, k)
    assert torch.equal(back, scale)
    assert back.is_contiguous()


def test_strided_and_e8m0_scales() -> None:
    scale = random_scales(140, 12)
    wide = torch.zeros(140, 20, dtype=torch.uint8)
    wide[:, 3:15] = scale
    e8m0 = torch.float8_e8m0fnu
    flat = swizzle_scales(scale)
    assert torch.equal(swizzle_scales(wide[:, 3:15]), flat)
    assert torch.equal(swizzle_scales(scale.view(e8m0)), flat)
    assert torch.equal(unswizzle_scales(flat.view(e8m0), 140, 384), scale)
    spaced = torch.stack([flat, flat], dim=1)[:, 0]
    assert torch.equal(unswizzle_scales(spaced, 140, 384), scale)


def test_padding_of_quantised_scales_is_zero() -> None:
    got = quantize_mxfp8(torch.ones(129, 96))
    rows = unswizzle_scales(got.scale, 256, 128)
    assert (rows[:129, :3] > 0).all()
    assert not rows[129:].any()
    assert not rows[:, 3:].any()


@pytest.mark.parametrize(("rows", "k"), [*SHAPES, (0, 64), (0, 0)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_layout_is_inferred_from_the_shape(rows: int, k: int, dtype: torch.dtype) -> None:
    data = torch.zeros(rows, k)
    for layout, shape in (
        (ScaleLayout.ROW_MAJOR, (rows, k // 32)),
        (ScaleLayout.SWIZZLED, (swizzled_scale_numel(rows, k),)),
    ):
        assert infer_layout(data, torch.zeros(shape, dtype=torch.uint8).view(dtype)) is layout


@pytest.mark.parametrize(
    ("data", "scale"),
    [
        ((64, 128), (64 * 4,)),  # flat row-major
        ((64, 128), (64, 8)),
        ((64, 128), (4, 64)),
        ((64, 128), (1024,)),
        ((64, 128), (1, 512)),
        ((64,), (2,)),
        ((64, 100), (64, 3)),
    ],
)
def test_other_shapes_are_refused(data: tuple[int, ...], scale: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError) as raised:
        infer_layout(torch.zeros(data), torch.zeros(scale, dtype=torch.uint8))
    assert raised.value.value in (data, scale)


SCALE = torch.zeros(4, 4, dtype=torch.uint8)
FLAT = torch.zeros(512, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("scale", lambda: swizzle_scales(SCALE[0])),
        ("scale.dtype", lambda: swizzle_scales(SCALE.int())),
        ("scale", lambda: swizzle_scales("scale")),  # type: ignore[arg-type]
        ("flat", lambda: unswizzle_scales(FLAT[1:], 4, 128)),
        ("flat", lambda: unswizzle_scales(FLAT.view(4, 128), 4, 128)),
        ("flat.dtype", lambda: unswizzle_scales(FLAT.float(), 4, 128)),
        ("k", lambda: unswizzle_scales(FLAT, 4, 100)),
        ("rows", lambda: unswizzle_scales(FLAT, -1, 128)),
    ],
)
def test_bad_arguments_of_the_conversions(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError) as raised:
        call()
    assert raised.value.argument == argument
