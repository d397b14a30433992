# SPDX-License-Identifier: Apache-2.0
"""prepare_weight: accepted forms, refusals that name what is wrong, and staleness."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dsv4_gemm_rs import Activation, WeightKind, prepare_weight
from dsv4_gemm_rs.quantize import swizzle_scales, swizzled_scale_numel
from dsv4_gemm_rs.reference import dequantize
from dsv4_symm_mem.errors import ArgumentError, StaleWeightError

N, K = 192, 256


def mxfp8(n: int = N, k: int = K, low: int = 110, high: int = 140) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 255, (n, k), dtype=torch.uint8, generator=generator)
    data[(data & 0x7F) == 0x7F] = 0
    scale = torch.randint(low, high, (n, k // 32), dtype=torch.uint8, generator=generator)
    return data.view(torch.float8_e4m3fn), scale


def test_every_scale_form_means_the_same() -> None:
    data, _ = mxfp8()
    blocks = torch.randint(110, 140, (N // 32, K // 32), dtype=torch.uint8)
    rows = blocks.repeat_interleave(32, dim=0)
    forms = [blocks, rows, swizzle_scales(rows), rows.view(torch.float8_e8m0fnu)]
    prepared = [prepare_weight(data, form) for form in forms]
    for weight in prepared:
        assert (weight.kind, weight.n, weight.k) == (WeightKind.MXFP8, N, K)
        assert weight.scale is not None
        assert prepared[0].scale is not None
        assert torch.equal(weight.scale, prepared[0].scale)
        assert weight.data.data_ptr() == data.data_ptr()
    swizzled = swizzle_scales(rows)
    again = prepare_weight(data, swizzled).scale
    assert again is not None
    assert again.data_ptr() == swizzled.data_ptr()


def test_the_bf16_copy_is_exact_and_kept() -> None:
    data, scale = mxfp8(low=3, high=247)
    weight = prepare_weight(data, scale)
    copy = weight.bf16()
    assert torch.equal(copy.double(), dequantize(data, scale))
    assert weight.bf16() is copy


@pytest.mark.parametrize(("byte", "scale"), [(0x7E, 254), (0x01, 0), (0x0F, 1)])
def test_a_scale_that_bf16_cannot_follow_is_refused_not_rounded(byte: int, scale: int) -> None:
    data, scales = mxfp8()
    data.view(torch.uint8)[5, 40] = byte
    scales[5, 1] = scale
    values = dequantize(data[5:6, 32:64].contiguous(), scales[5:6, 1:2].contiguous())
    weight = prepare_weight(data, scales)
    if torch.equal(values.float().bfloat16().double(), values):
        assert torch.equal(weight.bf16()[5, 32:64].double(), values[0])
    else:
        with pytest.raises(ArgumentError, match=r"scale: got \d+, expected .*row 5, block 1"):
            weight.bf16()


def test_nan_elements_stay_nan_in_the_bf16_copy() -> None:
    data, scales = mxfp8()
    data.view(torch.uint8)[7, 9] = 0x7F
    copy = prepare_weight(data, scales).bf16()
    assert copy[7, 9].isnan()
    assert copy.isnan().sum() == 1


def bad_weights() -> list[Any]:
    data, scale = mxfp8()
    bf16 = torch.zeros(N, K, dtype=torch.bfloat16)
    nan = scale.clone()
    nan[3, 2] = 255
    return [
        pytest.param(data.view(torch.uint8), scale, "weight: got torch.uint8", id="dtype"),
        pytest.param(bf16.half(), None, "weight: got torch.float16", id="fp16"),
        pytest.param("w", None, "weight: got <class 'str'>", id="not a tensor"),
        pytest.param(bf16[0], None, r"weight: got \(256,\)", id="1-D"),
        pytest.param(bf16[:, :96].contiguous(), None, "K a positive multiple of 64", id="K of BF16"),
        pytest.param(mxfp8(k=192)[0], scale, "K a positive multiple of 128", id="K of MXFP8"),
        pytest.param(bf16[:100], None, "N a positive multiple of 64", id="N"),
        pytest.param(bf16[:0], None, "N a positive multiple of 64", id="N of 0"),
        pytest.param(bf16.T, None, "K a positive|contiguous", id="transposed"),
        pytest.param(
            torch.zeros(N, 2 * K, dtype=torch.bfloat16)[:, :K], None, "contiguous rows", id="strided"
        ),
        pytest.param(
            torch.zeros(N * K + 4, dtype=torch.bfloat16)[4:].view(N, K), None, "16-byte", id="aligned"
        ),
        pytest.param(bf16, scale, r"scale: got \(192, 8\), expected None", id="scale of BF16"),
        pytest.param(data, None, "scale: got None", id="no scale"),
        pytest.param(data, scale.float(), "scale: got torch.float32", id="scale dtype"),
        pytest.param(data, scale[:, :-1], r"scale: got \(192, 7\)", id="scale shape"),
        pytest.param(data, scale.reshape(-1), r"scale: got \(1536,\)", id="flat but not padded"),
        pytest.param(
            data, torch.zeros(swizzled_scale_numel(N, K) + 1, dtype=torch.uint8)[1:], "16-byte", id="at"
        ),
        pytest.param(data, nan, r"NaN \(byte 255\) at \[3, 2\]", id="NaN scale"),
        pytest.param(data, scale.to("meta"), "scale: got 'meta'", id="scale device"),
    ]


@pytest.mark.parametrize(("weight", "scale", "text"), bad_weights())
def test_bad_weights_are_named(weight: Any, scale: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        prepare_weight(weight, scale)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ArgumentError, match="activation: got 'int4'"):
        prepare_weight(torch.zeros(64, 64, dtype=torch.bfloat16), activation="int4")
    assert prepare_weight(*mxfp8(), activation="bf16").activation is Activation.BF16


def test_a_write_into_a_source_is_noticed_until_refresh() -> None:
    data, scale = mxfp8()
    weight = prepare_weight(data, scale)
    kept = weight.bf16()
    weight.check()
    data.view(torch.uint8)[0, 0] = 0x38
    data.view(torch.uint8)[0, 1:32] = 0
    with pytest.raises(StaleWeightError, match="weight: it was written in place"):
        weight.check()
    with pytest.raises(StaleWeightError):
        weight.bf16()
    scale[0, 0] = 130
    weight.refresh()
    weight.check()
    assert weight.bf16() is kept
    assert kept[0, 0] == 8.0
    scale[0, 0] = 129
    with pytest.raises(StaleWeightError, match="scale: it was written in place"):
        weight.check()


def test_a_moved_source_is_noticed() -> None:
    source = torch.zeros(64, 64, dtype=torch.bfloat16)
    weight = prepare_weight(source)
    source.data = torch.ones(64, 64, dtype=torch.bfloat16)
    with pytest.raises(StaleWeightError, match="its storage moved"):
        weight.check()


def test_weights_made_in_inference_mode_are_accepted() -> None:
    with torch.inference_mode():
        weight = prepare_weight(torch.zeros(64, 64, dtype=torch.bfloat16))
        weight.check()
