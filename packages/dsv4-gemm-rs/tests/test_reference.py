# SPDX-License-Identifier: Apache-2.0
"""The reference against torch's own decoding and plain arithmetic."""

from __future__ import annotations

import pytest
import torch
from dsv4_gemm_rs.reference import (
    decode_e4m3,
    decode_e8m0,
    dequantize,
    gemm_reduce_scatter,
    rounded,
    tolerance,
    worst_error,
)

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def test_e4m3_is_what_torch_says_for_every_byte() -> None:
    theirs = ALL_BYTES.view(torch.float8_e4m3fn).double()
    assert torch.equal(decode_e4m3(ALL_BYTES).nan_to_num(1e9), theirs.nan_to_num(1e9))
    assert decode_e4m3(ALL_BYTES).isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_e8m0_is_what_torch_says_for_every_byte() -> None:
    theirs = ALL_BYTES.view(torch.float8_e8m0fnu).float().double()
    assert torch.equal(decode_e8m0(ALL_BYTES).nan_to_num(1e9), theirs.nan_to_num(1e9))


def test_a_scale_belongs_to_its_32_elements() -> None:
    data = torch.full((2, 64), 0x38, dtype=torch.uint8)  # 1.0
    scale = torch.tensor([[127, 128], [126, 0]], dtype=torch.uint8)
    values = dequantize(data, scale)
    assert torch.equal(values[:, ::32], torch.tensor([[1.0, 2.0], [0.5, 2.0**-127]], dtype=torch.float64))
    assert torch.equal(values[:, 31::32], values[:, ::32])


@pytest.mark.parametrize("m", [0, 1, 2, 3, 5])
def test_shards_are_padded_with_zeros(m: int) -> None:
    xs = [torch.ones(m, 64) for _ in range(3)]
    ws = [torch.ones(2, 64) for _ in range(3)]
    shards = gemm_reduce_scatter(xs, ws)
    assert [tuple(s.shape) for s in shards] == [(-(-m // 3), 2)] * 3
    joined = torch.cat(shards)
    assert torch.equal(joined[:m], torch.full((m, 2), 192.0, dtype=torch.float64))
    assert not joined[m:].any()


def test_the_tolerance_rejects_a_wrong_element_and_nan() -> None:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(8, 64, generator=generator) for _ in range(2)]
    ws = [torch.randn(16, 64, generator=generator) for _ in range(2)]
    exact, good = gemm_reduce_scatter(xs, ws), rounded(xs, ws)
    allowed = tolerance(xs, ws)
    assert worst_error(good, exact) <= allowed
    bad = [g.clone() for g in good]
    bad[1][2, 3] += 0.5
    assert worst_error(bad, exact) > allowed
    bad[1][2, 3] = float("nan")
    assert not worst_error(bad, exact) <= allowed
