# SPDX-License-Identifier: Apache-2.0
"""The quantiser's torch path against a second implementation that shares nothing with it.

The second one works in float64 from definitions: the 256 E4M3 codes are decoded from sign, exponent and
mantissa, an element is the nearest of them (ties to the even code), and a scale is the smallest power of two
whose 448-fold covers the block (`vllm`) or the largest power of two not above its maximum, over 2^8 (`ocp`).
It takes no logarithm and looks at no bit of an FP32 number.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dsv4_gemm_rs.quantize import Mxfp8, ScaleLayout, ScaleRule, dequantize_mxfp8, quantize_mxfp8
from dsv4_gemm_rs.quantize.rule import scale_bytes

RULES = list(ScaleRule)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TINY = torch.finfo(torch.float32).tiny


def decode_e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if sign else magnitude


E4M3 = np.array([decode_e4m3(code) for code in range(256)])
POSITIVE = E4M3[:127]


def nearest_codes(values: np.ndarray) -> np.ndarray:
    """Saturating round to nearest even, by search among the codes; NaN for anything not finite."""
    magnitude = np.minimum(np.abs(values), 448.0)
    upper = np.searchsorted(POSITIVE, np.nan_to_num(magnitude)).clip(0, 126)
    lower = (upper - 1).clip(0)
    below, above = magnitude - POSITIVE[lower], POSITIVE[upper] - magnitude
    even = np.where(lower % 2 == 0, lower, upper)
    code = np.where(below < above, lower, np.where(above < below, upper, even))
    code = np.where(np.signbit(values), code | 0x80, code)
    return np.where(np.isfinite(values), code, 0x7F).astype(np.uint8)


def scale_of(amax: float, rule: ScaleRule) -> int:
    if amax == 0:
        return 0
    if rule is ScaleRule.OCP:
        return max(math.frexp(amax)[1] - 1 - 8 + 127, 0)
    power = math.frexp(amax)[1] - 12
    while amax > math.ldexp(448.0, power):
        power += 1
    return max(power + 127, 0)


def slow_quantize(x: torch.Tensor, rule: ScaleRule) -> tuple[np.ndarray, np.ndarray]:
    blocks = x.double().numpy().reshape(x.shape[0], -1, 32)
    amax = np.where(np.isfinite(blocks), np.abs(blocks), 0.0).max(-1)
    scale = np.vectorize(lambda one: scale_of(one, rule), otypes=[np.int64])(amax)
    return nearest_codes(np.ldexp(blocks, 127 - scale[..., None])).reshape(x.shape), scale.astype(np.uint8)


def check(x: torch.Tensor, rule: ScaleRule) -> None:
    got = quantize_mxfp8(x, layout=ScaleLayout.ROW_MAJOR, rule=rule)
    data, scale = slow_quantize(x, rule)
    np.testing.assert_array_equal(got.scale.numpy(), scale)
    np.testing.assert_array_equal(got.data.view(torch.uint8).numpy(), data)


def all_values(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def finite_magnitudes(dtype: torch.dtype) -> torch.Tensor:
    values = all_values(dtype).float()
    return values[torch.isfinite(values) & ~torch.signbit(values)]


def float_formula(amax: torch.Tensor) -> torch.Tensor:
    """The expression of vLLM's `mxfp8_utils.py`, evaluated as written in FP32."""
    return (torch.ceil(torch.log2(amax.clamp_min(TINY) / 448.0)) + 127).clamp(0, 254).int()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vllm_bytes_equal_the_float_formula_for_every_amax(dtype: torch.dtype) -> None:
    amax = finite_magnitudes(dtype)
    assert amax.numel() == {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[dtype]
    torch.testing.assert_close(scale_bytes(amax.view(torch.int32), ScaleRule.VLLM), float_formula(amax))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bytes_equal_the_definition_for_every_amax(dtype: torch.dtype, rule: ScaleRule) -> None:
    amax = finite_magnitudes(dtype)
    expected = torch.tensor([scale_of(one, rule) for one in amax.tolist()], dtype=torch.int32)
    torch.testing.assert_close(scale_bytes(amax.view(torch.int32), rule), expected)


def test_fp32_differs_from_the_float_formula_only_just_above_448_times_a_power_of_two() -> None:
    window = 0x40
    fraction = torch.arange(0x600000 - window, 0x600000 + 4 * window, dtype=torch.int32)
    exponent = torch.arange(1, 255, dtype=torch.int32) << 23
    bits = exponent[:, None] | fraction
    exact, rounded = scale_bytes(bits, ScaleRule.VLLM), float_formula(bits.view(torch.float32))
    differs = exact != rounded
    assert differs.any()
    torch.testing.assert_close(exact[differs], rounded[differs] + 1)
    offsets = (fraction.expand_as(bits) - 0x600000)[differs]
    assert offsets.min() >= 1
    assert offsets.max() < window
    largest = torch.ldexp(bits.view(torch.float32)[differs].double(), 127 - rounded[differs])
    assert nearest_codes(largest.numpy()).tolist() == [0x7E] * int(differs.sum())

    generator = torch.Generator().manual_seed(1)
    anywhere = torch.randint(0, 0x7F800000, (200_000,), dtype=torch.int32, generator=generator)
    above = (anywhere & 0x7FFFFF) - 0x600000
    anywhere = anywhere[(above <= 0) | (above >= window)]
    torch.testing.assert_close(
        scale_bytes(anywhere, ScaleRule.VLLM), float_formula(anywhere.view(torch.float32))
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "anchor",
    [2.0**-133, 448 * 2.0**-127, 2.0**-118, 2.0**-60, 1.0, 447.0, 448.0, 450.0, 510.0, 2.0**100, 3.3895e38],
)
def test_every_bf16_value_as_an_element(anchor: float, rule: ScaleRule) -> None:
    """`anchor` leads each block and fixes its scale; every value up to it, and every NaN and Inf, follows."""
    lead = torch.tensor(anchor).bfloat16()
    values = all_values(torch.bfloat16)
    values = values[~(values.float().abs() > lead.float()) | values.isinf()]
    blocks = torch.full((-(-values.numel() // 31), 32), lead.item(), dtype=torch.bfloat16)
    padded = torch.zeros(blocks.shape[0] * 31, dtype=torch.bfloat16)
    padded[: values.numel()] = values
    blocks[:, 1:] = padded.view(-1, 31)
    check(blocks, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bit_patterns(dtype: torch.dtype, rule: ScaleRule) -> None:
    generator = torch.Generator().manual_seed(2)
    word = torch.int32 if dtype is torch.float32 else torch.int16
    low, high = torch.iinfo(word).min, torch.iinfo(word).max
    bits = torch.randint(low, high + 1, (64, 256), dtype=torch.int64, generator=generator)
    check(bits.to(word).view(dtype), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0, 4, 14, 40])
def test_normal_numbers_of_mixed_magnitude(dtype: torch.dtype, rule: ScaleRule, spread: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 256, generator=generator)
    x *= torch.exp2(torch.randint(-spread, spread + 1, x.shape, generator=generator))
    check(x.to(dtype), rule)


@pytest.mark.parametrize("rule", RULES)
def test_ties_round_to_even(rule: ScaleRule) -> None:
    """Midpoints between all neighbouring codes, subnormal ones included, and their FP32 neighbours."""
    middle = torch.tensor((POSITIVE[1:] + POSITIVE[:-1]) / 2, dtype=torch.float32)
    infinity = torch.tensor(math.inf)
    near = torch.cat([middle, torch.nextafter(middle, infinity), torch.nextafter(middle, -infinity)])
    near = torch.cat([near, -near])
    x = torch.zeros(-(-near.numel() // 31), 32)
    x[:, 1:] = torch.nn.functional.pad(near, (0, x.shape[0] * 31 - near.numel())).view(-1, 31)
    for lead in (448.0, 256.0):
        x[:, 0] = lead
        for power in (-100, 0, 100):
            check(torch.ldexp(x, torch.tensor(power)), rule)


@pytest.mark.parametrize("rule", RULES)
def test_special_values(rule: ScaleRule) -> None:
    nan, inf = math.nan, math.inf
    x = torch.ones(6, 32)
    x[0], x[1] = 0.0, -0.0
    x[2, :3] = torch.tensor([nan, inf, -inf])
    x[3] = torch.tensor([nan, inf, -inf, nan] * 8)
    x[4, 0], x[4, 1] = 448.0, -(2.0**-30)
    x[5] = -(2.0**-149)
    got = quantize_mxfp8(x, layout="row_major", rule=rule)
    codes = got.data.view(torch.uint8)
    assert got.scale[:, 0].tolist()[:2] == [0, 0]
    assert set(codes[0].tolist()) == {0}
    assert set(codes[1].tolist()) == {0x80}
    assert codes[2, :3].tolist() == [0x7F] * 3
    assert (int(got.scale[2, 0]), int(codes[2, 3])) == quantize_scalar(1.0, rule)
    assert got.scale[3].item() == 0
    assert set(codes[3].tolist()) == {0x7F}
    assert codes[4, 1].item() == 0x80
    assert (got.scale[5].item(), codes[5, 0].item()) == (0, 0x80)
    assert dequantize_mxfp8(got)[3].isnan().all()


def quantize_scalar(value: float, rule: ScaleRule) -> tuple[int, int]:
    got = quantize_mxfp8(torch.full((1, 32), value), layout="row_major", rule=rule)
    return int(got.scale[0, 0]), int(got.data.view(torch.uint8)[0, 0])


def test_the_rules_differ_between_448_and_512() -> None:
    assert quantize_scalar(448.0, ScaleRule.VLLM) == (127, 0x7E)
    assert quantize_scalar(448.0, ScaleRule.OCP) == (127, 0x7E)
    assert quantize_scalar(480.0, ScaleRule.VLLM) == (128, 0x77)  # 240 * 2
    assert quantize_scalar(480.0, ScaleRule.OCP) == (127, 0x7E)  # saturated


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_smallest_numbers(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    x = torch.full((4, 32), info.max, dtype=dtype)
    x[1] = info.tiny
    x[2] = info.smallest_normal * info.eps  # the smallest subnormal
    x[3, 1:] = info.smallest_normal * info.eps
    for rule in RULES:
        check(x, rule)


def test_dequantize_is_the_definition_for_every_code_and_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    expected = np.ldexp(E4M3, np.arange(256)[:, None] - 127)
    expected[255] = math.nan
    data = codes.view(torch.float8_e4m3fn)
    exact = dequantize_mxfp8(data, scale, torch.float64)
    np.testing.assert_array_equal(exact.numpy(), expected)
    assert torch.signbit(exact[:255, 0x80]).all()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(dequantize_mxfp8(data, scale).numpy(), expected.astype(np.float32))
    assert np.isinf(expected[:247].astype(np.float32)).sum() == 0


def test_error_is_within_half_a_step() -> None:
    x = torch.randn(32, 512, generator=torch.Generator().manual_seed(4)).bfloat16().double()
    got = quantize_mxfp8(x.bfloat16(), layout="row_major")
    scale = torch.exp2(got.scale.double() - 127).repeat_interleave(32, 1)
    half_step = torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10)
    assert ((dequantize_mxfp8(got, dtype=torch.float64) - x).abs() <= half_step).all()


def test_input_that_requires_grad_is_quantised_without_a_graph() -> None:
    x = torch.randn(2, 32, requires_grad=True)
    got = quantize_mxfp8(x)
    assert isinstance(got, Mxfp8)
    assert not got.data.requires_grad
