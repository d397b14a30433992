# SPDX-License-Identifier: Apache-2.0
"""Conversions compared with PyTorch's types for every bit pattern, and with exact distances near ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from dsv4_ptx_emulator.formats import floats
from dsv4_ptx_emulator.formats.floats import FORMATS, FloatFormat, decode, encode

TORCH = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}
ROUNDED = [f for f in FORMATS.values() if f.name != "ue8m0"]


def every_code(fmt: FloatFormat) -> npt.NDArray[np.unsignedinteger]:
    return np.arange(1 << fmt.width, dtype=np.uint32).astype(fmt.storage)


def interesting_floats(fmt: FloatFormat) -> npt.NDArray[np.float32]:
    """Each value of the format and each midpoint of two neighbours, with a float32 step below and above."""
    codes = np.arange(0, fmt.maximum + 1, 1 << fmt.padding, dtype=np.uint32)
    if len(codes) > 1 << 16:
        codes = np.unique(np.concatenate([codes[:2048], codes[-2048:], codes[:: len(codes) // 60000]]))
    values = decode(fmt, codes).astype(np.float64)
    middles = np.concatenate([(values[1:] + values[:-1]) / 2, values, [values[-1] * 1.5 - values[-2] / 2]])
    base = middles.astype(np.float32)
    out = np.concatenate(
        [base, np.nextafter(base, np.float32(np.inf)), np.nextafter(base, np.float32(-np.inf))]
    )
    out = np.concatenate([out, -out, [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-45, 3e38, -3e38]])
    return out.astype(np.float32)


@pytest.mark.parametrize("name", TORCH)
def test_every_code_decodes_as_in_torch(name: str) -> None:
    fmt = FORMATS[name]
    codes = every_code(fmt)
    expected = torch.from_numpy(codes.copy()).view(TORCH[name]).float().numpy()
    actual = decode(fmt, codes)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def test_every_scale_decodes_as_in_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes.copy()).view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(decode(floats.UE8M0, codes), expected)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_nearest_even_as_in_torch_and_the_short_way_as_the_general_one(name: str) -> None:
    fmt = FORMATS[name]
    values = interesting_floats(fmt)
    actual = encode(fmt, values)
    expected = torch.from_numpy(values).to(TORCH[name]).view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(actual[~nan], expected[~nan])
    assert set(actual[nan].tolist()) == {0x7FFF}
    np.testing.assert_array_equal(floats._encode_general(fmt, values, "rn", False, False), actual)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("source", [np.float32, np.float16])
def test_fp8_saturates_and_rounds_to_nearest_even(name: str, source: type) -> None:
    fmt = FORMATS[name]
    with np.errstate(over="ignore"):
        values: npt.NDArray[Any] = interesting_floats(fmt).astype(source)
    actual = encode(fmt, values, saturate=True)
    top = np.float32(decode(fmt, np.array([fmt.maximum], np.uint8))[0])
    clamped = torch.from_numpy(np.clip(values.astype(np.float32), -top, top))
    expected = clamped.to(TORCH[name]).view(torch.uint8).numpy()
    nan = np.isnan(values)
    np.testing.assert_array_equal(actual[~nan], expected[~nan])
    assert set(actual[nan].tolist()) == {0x7F}


@pytest.mark.parametrize("rounding", ["rn", "rna", "rz", "rm", "rp"])
@pytest.mark.parametrize("fmt", ROUNDED, ids=lambda f: f.name)
def test_every_rounding_against_a_search_of_the_grid(fmt: FloatFormat, rounding: str) -> None:
    """The neighbours on the grid, found by bisection, and the rule applied to exact float64 distances."""
    if fmt is floats.F32:
        base = np.array([1.0, 1.5, 2.0**-130, 3.3e38, 2.0**-149], np.float64)
        values = np.concatenate([base * (1 + k * 2.0**-25) for k in range(-4, 5)])
        values = np.concatenate([values, -values])
        grid = np.unique(
            np.concatenate(
                [np.float32(np.abs(values)) + 0.0]
                + [np.nextafter(np.float32(np.abs(values)), np.float32(t)) for t in (np.inf, 0)]
            ).astype(np.float64)
        )
        grid = np.unique(np.concatenate([[0.0], grid[np.isfinite(grid)]]))
    else:
        codes = np.arange(0, fmt.maximum + 1, 1 << fmt.padding, dtype=np.uint32)
        grid = decode(fmt, codes).astype(np.float64)
        values = interesting_floats(fmt).astype(np.float64)
    values = values[np.abs(values) <= grid[-1]]
    magnitude = np.abs(values)
    index = np.searchsorted(grid, magnitude, side="right") - 1
    low, high = grid[index], grid[np.minimum(index + 1, len(grid) - 1)]
    middle = (low + high) / 2
    even = _code(fmt, low) & 1 == 0
    up = {
        "rn": (magnitude > middle) | ((magnitude == middle) & ~even),
        "rna": magnitude >= middle,
        "rz": np.zeros(len(values), bool),
        "rm": (values < 0) & (magnitude > low),
        "rp": (values > 0) & (magnitude > low),
    }[rounding] & (magnitude > low)
    expected = np.copysign(np.where(up, high, low), values)
    actual = decode(fmt, encode(fmt, values, rounding, saturate=True)).astype(np.float64)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(values))


def _code(fmt: FloatFormat, values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Index of an exactly representable non-negative value on the format's grid."""
    exponent = np.maximum(np.frexp(values + (values == 0) * 2.0**-300)[1] - 1, 1 - fmt.bias)
    whole = np.ldexp(values, fmt.mantissa_bits - exponent).astype(np.int64)
    code: npt.NDArray[np.int64] = whole + ((exponent - 1 + fmt.bias) << fmt.mantissa_bits)
    return code


@pytest.mark.parametrize(("fmt", "beyond"), [(floats.E4M3, 0x7F), (floats.E5M2, 0x7C), (floats.BF16, 0x7F80)])
def test_overflow_without_saturation(fmt: FloatFormat, beyond: int) -> None:
    top = decode(fmt, np.array([fmt.maximum], fmt.storage)).astype(np.float64)
    assert encode(fmt, top * 1.2, "rn")[0] == beyond
    assert encode(fmt, top * 1.2, "rz")[0] == fmt.maximum
    assert encode(fmt, -top * 1.2, "rm")[0] == beyond | 1 << fmt.width - 1
    assert encode(fmt, -top * 1.2, "rp")[0] == fmt.maximum | 1 << fmt.width - 1


def test_relu_clears_what_is_negative_and_keeps_nan() -> None:
    values = np.array([-1.0, -0.0, 2.0, np.nan, -np.inf], np.float32)
    assert encode(floats.BF16, values, relu=True).tolist() == [0, 0, 0x4000, 0x7FFF, 0]


@pytest.mark.parametrize("rounding", ["rz", "rp"])
@pytest.mark.parametrize("saturate", [False, True])
def test_scales_round_the_magnitude(rounding: str, saturate: bool) -> None:
    rng = np.random.default_rng(5)
    values = np.concatenate(
        [
            np.ldexp(1.0, np.arange(-149, 128)),
            np.ldexp(1.0 + rng.random(500), rng.integers(-140, 127, 500)),
            [2.0**-127 * (1 + 2.0**-22), np.finfo(np.float32).max],
        ]
    ).astype(np.float32)
    values = np.concatenate([values, -values])
    exponent = np.log2(np.abs(values).astype(np.float64))
    exponent = np.floor(exponent) if rounding == "rz" else np.ceil(exponent)
    # log2 of a value next to a power of two may round to it.
    magnitude = np.abs(values).astype(np.float64)
    exponent += np.where(np.ldexp(1.0, exponent.astype(int)) < magnitude, rounding == "rp", 0)
    expected = np.maximum(exponent, -127).astype(np.int64) + 127
    expected = np.minimum(expected, 0xFE if saturate else 0xFF)
    np.testing.assert_array_equal(encode(floats.UE8M0, values, rounding, saturate=saturate), expected)
    special = np.array([np.inf, -np.inf, np.nan, 0.0], np.float32)
    top = 0xFE if saturate else 0xFF
    assert encode(floats.UE8M0, special, rounding, saturate=saturate).tolist() == [top, top, 0xFF, 0]


def test_a_rounding_that_a_type_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="ue8m0 rounds"):
        encode(floats.UE8M0, np.ones(1, np.float32), "rn")
    with pytest.raises(ValueError, match="none of rn"):
        encode(floats.E4M3, np.ones(1, np.float32), "rs")
