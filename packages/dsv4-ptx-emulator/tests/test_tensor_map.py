# SPDX-License-Identifier: Apache-2.0
"""Tensor maps that the driver and the DSL made, with what they were asked for (data/tensor_maps.json)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dsv4_ptx_emulator.errors import AsyncMisuseError
from dsv4_ptx_emulator.formats import swizzle
from dsv4_ptx_emulator.formats.tensor_map import (
    PAYLOAD_BYTES,
    TensorMap,
    decode_tensor_map,
    encode_tensor_map,
)

SWEEP = json.loads(Path(__file__).with_name("data").joinpath("tensor_maps.json").read_text())
SWIZZLES = [swizzle.NONE, swizzle.S32, swizzle.S64, swizzle.S128]


def refused(entry: dict[str, Any]) -> str | None:
    """The field for which an entry must be refused."""
    if entry["interleave"]:
        return "interleave"
    if entry["element"] in ("tf32", "f32_ftz", "tf32_ftz"):
        return "element type"
    if any(stride != 1 for stride in entry["traversal"]):
        return "traversal strides"
    return None


@pytest.mark.parametrize("source", ["driver", "dsl"])
def test_every_recorded_map_decodes_to_what_was_asked_for(source: str) -> None:
    accepted = 0
    for entry in SWEEP[source]:
        data = bytes.fromhex(entry["map"])
        if field := refused(entry):
            with pytest.raises(AsyncMisuseError, match=field):
                decode_tensor_map(data)
            continue
        decoded = decode_tensor_map(data)
        accepted += 1
        assert decoded == TensorMap(
            entry["address"],
            tuple(entry["sizes"]),
            tuple(entry["strides"]),
            tuple(entry["box"]),
            entry["element"],
            {"u8": 1, "f16": 2, "bf16": 2, "u16": 2, "u64": 8, "s64": 8, "f64": 8}.get(entry["element"], 4),
            SWIZZLES[entry["swizzle"]],
            entry["nan_fill"],
            decoded.promotion if source == "dsl" else entry["promotion"],
        )
    assert accepted >= 20


def test_encoding_gives_the_drivers_bytes() -> None:
    for entry in SWEEP["driver"]:
        if not refused(entry):
            data = bytes.fromhex(entry["map"])[:PAYLOAD_BYTES]
            assert encode_tensor_map(decode_tensor_map(data))[:PAYLOAD_BYTES] == data


def plain() -> bytearray:
    entry = next(entry for entry in SWEEP["driver"] if not refused(entry) and len(entry["sizes"]) == 2)
    return bytearray.fromhex(entry["map"])


@pytest.mark.parametrize(
    ("word", "bit", "field"),
    [
        (0, 3, "global address"),
        (2, 0, "word 2, bits 0 to 3"),
        (2, 6, "rank"),
        (2, 11, "interleave"),
        (2, 16, "tf32"),
        (2, 19, "swizzle atom"),
        (2, 25, "word 2, bits 22 to 31"),
        (4, 3, "stride of dimension 2"),
        (7, 17, "word 7"),
        (10, 0, "size or box of dimension 2"),
        (13, 4, "traversal strides"),
        (13, 16, "word 13, bits 15 to 23"),
        (13, 24, "inner box size"),
        (14, 9, "size or box of dimension 2"),
        (15, 0, "word 15"),
        (2, 15, "out-of-bounds fill"),
    ],
)
def test_every_bit_that_is_not_understood_is_refused_by_name(word: int, bit: int, field: str) -> None:
    data = plain()
    decode_tensor_map(bytes(data))
    data[4 * word + bit // 8] ^= 1 << bit % 8
    with pytest.raises(AsyncMisuseError, match=field):
        decode_tensor_map(bytes(data))


def test_a_box_wider_than_its_swizzle_is_refused() -> None:
    wide = TensorMap(0x1000, (256, 8), (2, 512), (64, 8), "bf16", 2, swizzle.S64)
    with pytest.raises(AsyncMisuseError, match="at most 64 with swizzle 64B"):
        encode_tensor_map(wide)
    assert decode_tensor_map(encode_tensor_map(replace(wide, swizzle=swizzle.S128))).box_bytes == 1024
