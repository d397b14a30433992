# SPDX-License-Identifier: Apache-2.0
"""W's scales as the kernel reads them: the factors of a stage of a tile side by side."""

from __future__ import annotations

import torch

from dsv4_gemm_rs.bench.scaled.config import STEPS, ScaledConfig
from dsv4_gemm_rs.quantize.rule import BLOCK


def packed_scales(scale: torch.Tensor, config: ScaledConfig) -> torch.Tensor:
    """W's scales [N/32, K/32], E8M0 bytes, as the kernel reads them.

    Returns:
        [K/128, tiles, 4, tile_n/32] FP32, the columns of the last tile padded with zeros.
    """
    blocks, steps = scale.shape
    tiles = -(-blocks * BLOCK // config.tile_n)
    factors = torch.exp2(scale.to(torch.float32) - 127)
    padded = torch.zeros(tiles * config.column_blocks, steps, device=scale.device)
    padded[:blocks] = factors
    split = padded.view(tiles, config.column_blocks, steps // STEPS, STEPS)
    return split.permute(2, 0, 3, 1).contiguous()
