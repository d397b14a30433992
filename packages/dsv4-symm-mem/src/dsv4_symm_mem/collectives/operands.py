# SPDX-License-Identifier: Apache-2.0
"""The checks that every reduce-scatter and every all-gather makes of its operands."""

from __future__ import annotations

import torch

from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.layout import shard_length


def check_operands(partial: torch.Tensor, out: torch.Tensor, world_size: int) -> None:
    """Check a reduce-scatter's partial [M, N] and output [ceil(M / P), N].

    Raises:
        ArgumentError: Wrong dtype, shape or device.
    """
    if partial.dim() != 2 or partial.dtype not in (torch.float32, torch.bfloat16):
        raise ArgumentError("partial", (tuple(partial.shape), partial.dtype), "FP32 or BF16 of shape [M, N]")
    m, n = partial.shape
    expected = (shard_length(m, world_size), n)
    if out.dtype != torch.bfloat16 or tuple(out.shape) != expected or out.device != partial.device:
        raise ArgumentError(
            "out", (tuple(out.shape), out.dtype, str(out.device)), f"BF16 {expected} on {partial.device}"
        )


def check_gathered(shard: torch.Tensor, out: torch.Tensor, world_size: int) -> None:
    """Check an all-gather's shard [ceil(M / P), N] and output [M, N].

    Raises:
        ArgumentError: Wrong dtype, shape or device.
    """
    if out.dim() != 2 or out.dtype != torch.bfloat16:
        raise ArgumentError("out", (tuple(out.shape), out.dtype), "BF16 of shape [M, N]")
    m, n = out.shape
    expected = (shard_length(m, world_size), n)
    if shard.dtype != torch.bfloat16 or tuple(shard.shape) != expected or shard.device != out.device:
        raise ArgumentError(
            "shard", (tuple(shard.shape), shard.dtype, str(shard.device)), f"BF16 {expected} on {out.device}"
        )
