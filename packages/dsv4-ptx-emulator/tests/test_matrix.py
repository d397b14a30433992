# SPDX-License-Identifier: Apache-2.0
"""Shared-memory matrices and register fragments, compared with a second formulation (support/layouts.py)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from dsv4_ptx_emulator.engines.warpgroup import a_tile_of, registers_of, tile_of
from dsv4_ptx_emulator.errors import AsyncMisuseError
from dsv4_ptx_emulator.formats import floats, swizzle
from dsv4_ptx_emulator.formats.matrix import (
    MatrixDescriptor,
    decode_descriptor,
    descriptor_chunks,
    elements_from_chunks,
)
from layouts import a_place, accumulator_place, canonical, xor_swizzle

SWIZZLES = [swizzle.NONE, swizzle.S32, swizzle.S64, swizzle.S128]


@pytest.mark.parametrize("pattern", SWIZZLES, ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("row_major", "element", "rows", "depth"),
    [
        (False, 2, 64, 16),
        (False, 2, 24, 16),
        (False, 1, 64, 32),
        (False, 4, 16, 8),
        (True, 2, 64, 16),
        (True, 2, 192, 16),
    ],
)
def test_layouts(pattern: swizzle.Swizzle, row_major: bool, element: int, rows: int, depth: int) -> None:
    storage = np.dtype({1: np.uint8, 2: np.uint16, 4: np.uint32}[element])
    # A K step into a swizzled row where there is room for one.
    start = 4096 + 64 * (pattern.bits == 3 and not row_major)
    lbo, sbo = (2048, 32768) if row_major and pattern.bits else (32768, 1024)
    offsets = canonical(pattern.bits, 16 // element, row_major, lbo // element, sbo // element, rows, depth)
    memory = np.zeros(1 << 18, np.uint8)
    rng = np.random.default_rng(3)
    matrix = rng.integers(0, 1 << 8 * element, (rows, depth), dtype=np.uint64).astype(storage)
    taken = set()
    for (row, k), offset in offsets.items():
        at = xor_swizzle(start + offset * element, pattern.bits)
        taken.add(at)
        memory[at : at + element] = matrix[row, k : k + 1].view(np.uint8)
    assert len(taken) == rows * depth
    descriptor = MatrixDescriptor(start, lbo, sbo, pattern)
    addresses = descriptor_chunks(descriptor, rows, depth, row_major, element)
    chunks = memory[addresses[..., None] + np.arange(16)]
    np.testing.assert_array_equal(elements_from_chunks(chunks, rows, depth, row_major, storage), matrix)


def test_descriptor_fields() -> None:
    bits = (0x12340 >> 4) | (0x880 >> 4) << 16 | (1024 >> 4) << 32 | 2 << 62
    assert decode_descriptor(bits) == MatrixDescriptor(0x12340, 0x880, 1024, swizzle.S64)
    for value, pattern in enumerate([swizzle.NONE, swizzle.S128, swizzle.S64, swizzle.S32]):
        assert decode_descriptor(value << 62).swizzle == pattern


@pytest.mark.parametrize("bit", [14, 15, 30, 31, 46, 48, 52, 61])
def test_reserved_descriptor_bits(bit: int) -> None:
    with pytest.raises(AsyncMisuseError, match="reserved bits"):
        decode_descriptor(1 << bit)


def test_base_offset_is_refused() -> None:
    with pytest.raises(AsyncMisuseError, match="base offset 3"):
        decode_descriptor(3 << 49)


@pytest.mark.parametrize("columns", [8, 24, 128, 256])
@pytest.mark.parametrize("half", [False, True])
def test_accumulator_fragment_lane_by_lane(columns: int, half: bool) -> None:
    rng = np.random.default_rng(columns)
    tile = rng.integers(-500, 500, (16, columns)).astype(np.float32)
    registers = registers_of(tile, half)
    for lane, i in itertools.product(range(32), range(columns // 2)):
        value = tile[accumulator_place(lane, i)]
        if half:
            bits = int(registers[i // 2, lane]) >> 16 * (i % 2) & 0xFFFF
            assert np.uint16(bits).view(np.float16) == value
        else:
            assert registers[i, lane].view(np.float32) == value
    np.testing.assert_array_equal(tile_of(list(registers), half), tile)


@pytest.mark.parametrize(
    ("fmt", "per"), [(floats.BF16, 2), (floats.E4M3, 4), (floats.TF32, 1)], ids=lambda v: str(v)
)
def test_a_fragment_lane_by_lane(fmt: floats.FloatFormat, per: int) -> None:
    rng = np.random.default_rng(per)
    values = rng.integers(-8, 8, (16, 8 * per)).astype(np.float32)
    codes = floats.encode(fmt, values, saturate=True)
    registers = np.zeros((4, 32), np.uint32)
    for r, lane, e in itertools.product(range(4), range(32), range(per)):
        code = int(codes[a_place(lane, r, e, per)])
        registers[r, lane] |= np.uint32(code << (32 // per) * e)
    np.testing.assert_array_equal(a_tile_of(list(registers), fmt), values)
