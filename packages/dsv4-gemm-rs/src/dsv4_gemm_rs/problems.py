# SPDX-License-Identifier: Apache-2.0
"""Random problems of the model's shapes, for the demonstration, the benchmark and the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_gemm_rs.quantize import ScaleLayout, quantize_mxfp8, unswizzle_scales
from dsv4_gemm_rs.reference import dequantize
from dsv4_gemm_rs.weights import MXFP8_K_MULTIPLE, Keep, PreparedWeight, WeightKind, prepare_weight

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
        x_exact: The activations that the product sees, FP64.
        weight_exact: The weight, FP64.
    """

    x: torch.Tensor
    weight: PreparedWeight
    x_exact: torch.Tensor
    weight_exact: torch.Tensor


def random_operands(
    m: int, n: int, k: int, kind: WeightKind, device: torch.device | str, seed: int
) -> tuple[torch.Tensor, PreparedWeight]:
    """One rank's BF16 activations [M, K] and prepared weight, normally distributed, made on `device`.

    Rows of the activations differ in magnitude by powers of two. The seed gives the same operands on every
    device of one type.
    """
    generator = torch.Generator(device).manual_seed(seed)
    spread = torch.randint(-3, 4, (m, 1), generator=generator, device=device).float().exp2()
    x = (torch.randn(m, k, generator=generator, device=device) * spread).to(torch.bfloat16)
    dense = (torch.randn(n, k, generator=generator, device=device) / k**0.5).to(torch.bfloat16)
    if kind is WeightKind.BF16:
        return x, prepare_weight(dense)
    quantised = quantize_mxfp8(dense)
    return x, prepare_weight(quantised.data, quantised.scale)


def random_problem(
    m: int,
    n: int,
    k: int,
    kind: WeightKind,
    device: torch.device | str,
    seed: int,
    made_on: torch.device | str = "cpu",
    keep: Keep = Keep.BF16,
) -> RankProblem:
    """Random operands of one rank with their exact values.

    Args:
        m: Rows.
        n: Output features.
        k: Input features of the rank.
        kind: Operand type of the weight.
        device: Where the operands go.
        seed: Use another for each rank.
        made_on: Where operands and exact values are made and the latter stay. On the CPU they are equal on
            every machine; a GPU is for sizes that take a CPU too long.
        keep: What an MXFP8 weight is kept as.
    """
    x, weight = random_operands(m, n, k, kind, made_on, seed)
    if weight.scale is None:
        moved = prepare_weight(weight.data.to(device))
        return RankProblem(x.to(device), moved, x.double(), weight.data.double())
    seen = quantize_mxfp8(x, layout=ScaleLayout.ROW_MAJOR)
    return RankProblem(
        x.to(device),
        prepare_weight(weight.data.to(device), weight.scale.to(device), keep=keep),
        dequantize(seen.data, seen.scale),
        dequantize(weight.data, unswizzle_scales(weight.scale, n, k)),
    )
