# SPDX-License-Identifier: Apache-2.0
"""The operands that ranks of a projection scenario had, for the test that judges their results."""

from __future__ import annotations

import io
from typing import Any

import torch
from dsv4_gemm_rs import quantize_mxfp8
from dsv4_gemm_rs.quantize import ScaleLayout
from dsv4_gemm_rs.reference import dequantize
from vllm_layers import random_activations, random_weight
from vllm_scenarios import K, N

KINDS = [
    "bf16",
    "FlashInferCutedslMxfp8LinearKernel",
    "FlashInferCutlassMxfp8LinearKernel",
    "MarlinMxfp8LinearKernel",
]


def tensor(data: bytes) -> torch.Tensor:
    """What `vllm_scenarios.plain` packed."""
    loaded: torch.Tensor = torch.load(io.BytesIO(data))
    return loaded


def exact_operands(kind: str, m: int, load: int, world_size: int) -> tuple[list[Any], list[Any]]:
    """Every rank's activations and weight as the product sees them."""
    xs, ws = [], []
    for rank in range(world_size):
        x, w = random_activations(m, K, m + rank), random_weight(N, K, load + rank)
        if kind == "bf16":
            ws.append(w.to(torch.bfloat16).double())
        else:
            quantised = quantize_mxfp8(w, layout=ScaleLayout.ROW_MAJOR)
            ws.append(dequantize(quantised.data, quantised.scale))
        if kind.startswith("FlashInfer"):
            seen = quantize_mxfp8(x, layout=ScaleLayout.ROW_MAJOR)
            xs.append(dequantize(seen.data, seen.scale))
        else:
            xs.append(x.double())
    return xs, ws
