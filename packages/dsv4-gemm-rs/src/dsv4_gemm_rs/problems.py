# SPDX-License-Identifier: Apache-2.0
"""Random problems of the model's shapes, for the demonstration, the benchmark and the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_gemm_rs.quantize import ScaleLayout, quantize_mxfp8
from dsv4_gemm_rs.reference import dequantize
from dsv4_gemm_rs.weights import MXFP8_K_MULTIPLE, PreparedWeight, WeightKind, prepare_weight

WO_B_N = 5120
"""Hidden size of DeepSeek-V4.1-Flash: N of its attention output projection."""
WO_B_K = 8192
"""Its K before the split over ranks (8 groups of rank 1024)."""


def default_k(world_size: int) -> int:
    """`wo_b`'s K of one rank, rounded down to the multiple of 128 that MXFP8 needs and at least 128."""
    return max(WO_B_K // max(world_size, 1) // MXFP8_K_MULTIPLE, 1) * MXFP8_K_MULTIPLE


@dataclass(frozen=True)
class RankProblem:
    """One rank's operands and the same as plain numbers.

    Attributes:
        x: BF16 activations [M, K].
        weight: The prepared weight [N, K].
        x_exact: The activations that the product sees, FP64 on the CPU.
        weight_exact: The weight, FP64 on the CPU.
    """

    x: torch.Tensor
    weight: PreparedWeight
    x_exact: torch.Tensor
    weight_exact: torch.Tensor


def random_problem(
    m: int, n: int, k: int, kind: WeightKind, device: torch.device | str, seed: int
) -> RankProblem:
    """Normally distributed activations and weights of one rank; rows differ in magnitude by powers of two.

    Args:
        m: Rows.
        n: Output features.
        k: Input features of the rank.
        kind: Operand type of the weight.
        device: Where the operands go.
        seed: Gives the same problem on every machine; use another for each rank.
    """
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-3, 4, (m, 1), generator=generator).float().exp2()
    x = (torch.randn(m, k, generator=generator) * spread).to(torch.bfloat16)
    dense = (torch.randn(n, k, generator=generator) / k**0.5).to(torch.bfloat16)
    if kind is WeightKind.BF16:
        prepared = prepare_weight(dense.to(device))
        return RankProblem(x.to(device), prepared, x.double(), dense.double())
    quantised = quantize_mxfp8(dense, layout=ScaleLayout.ROW_MAJOR)
    prepared = prepare_weight(quantised.data.to(device), quantised.scale.to(device))
    seen = quantize_mxfp8(x, layout=ScaleLayout.ROW_MAJOR)
    return RankProblem(
        x.to(device), prepared, dequantize(seen.data, seen.scale), dequantize(quantised.data, quantised.scale)
    )
