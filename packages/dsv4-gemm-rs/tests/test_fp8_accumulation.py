# SPDX-License-Identifier: Apache-2.0
"""How exact SM90's FP8 tensor cores would be, simulated: what docs/numerics.md says of a route not offered.

Of 32 products, aligned to the largest by shifts, the sum keeps about 14 bits (DeepSeek-V3 Technical Report,
arXiv 2412.19437, sections 3.3.2 and 3.5.2). Each such sum is then multiplied by its two scales and added in
FP32.
"""

from __future__ import annotations

import torch
from dsv4_gemm_rs.quantize import ScaleLayout, dequantize_mxfp8, quantize_mxfp8
from dsv4_gemm_rs.reference import tolerance

BLOCK = 32
KEPT_BITS = 13
"""Bits of a product below its leading one that the sum keeps, if the product is the largest."""
M, N, K = 48, 64, 1024


def aligned_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`x` [M, 32] times `w` [N, 32] transposed, each product cut to the largest one's last bit."""
    products = x[:, None, :] * w[None, :, :]
    largest = products.abs().amax(2, keepdim=True).clamp_min(2.0**-60)
    unit = torch.exp2(torch.floor(torch.log2(largest)) - KEPT_BITS)
    return (torch.trunc(products / unit) * unit).sum(2)


def test_sums_of_32_promoted_to_fp32_are_within_the_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    x = quantize_mxfp8(
        torch.randn(M, K, generator=generator).to(torch.bfloat16), layout=ScaleLayout.ROW_MAJOR
    )
    w = torch.randn(N, K, generator=generator)
    blocks = w.view(N // BLOCK, BLOCK, K // BLOCK, BLOCK).abs().amax((1, 3))
    # One scale for 32 x 32 weights: the largest of them comes to 256 and more, below E4M3's 448.
    exponents = (torch.floor(torch.log2(blocks)) + 127 - 8).to(torch.uint8).repeat_interleave(BLOCK, 0)
    scales = torch.exp2(exponents.double() - 127)
    codes = (w / scales.repeat_interleave(BLOCK, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    x_scales = torch.exp2(x.scale.double() - 127)
    total = torch.zeros(M, N)
    for block in range(K // BLOCK):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        part = aligned_sum(x.data.double()[:, columns], codes.double()[:, columns]).float()
        total += part * (x_scales[:, block, None] * scales[None, :, block]).float()
    x_exact = dequantize_mxfp8(x.data, x.scale, torch.float64)
    w_exact = dequantize_mxfp8(codes, exponents, torch.float64)
    exact = x_exact @ w_exact.T
    lost = (total.double() - exact).abs().max()
    rounding = (exact.to(torch.bfloat16).double() - exact).abs().max()
    assert 0 < lost < rounding / 20
    assert (total.to(torch.bfloat16).double() - exact).abs().max() <= tolerance([x_exact], [w_exact])
