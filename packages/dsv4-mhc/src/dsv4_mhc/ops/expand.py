# SPDX-License-Identifier: Apache-2.0
"""`expand`: the residual before the first layer, and where a draft model starts anew."""

from __future__ import annotations

from typing import cast

import torch

from dsv4_mhc import compile as compilation
from dsv4_mhc import reference
from dsv4_mhc.errors import ArgumentError
from dsv4_mhc.ops.checks import check_alignment, check_tensor
from dsv4_mhc.ops.library import Result, Results, copy_to, define
from dsv4_mhc.plan import MAX_ELEMENTS, STREAMS, check_hidden


def _describe(embedding: torch.Tensor) -> Results:
    if embedding.dim() != 2:
        raise ArgumentError("embedding.shape", tuple(embedding.shape), "(T, H)")
    check_hidden(embedding.shape[1])
    if STREAMS * embedding.numel() > MAX_ELEMENTS:
        raise ArgumentError(
            "embedding.shape", tuple(embedding.shape), f"at most {MAX_ELEMENTS // STREAMS} elements"
        )
    check_tensor("embedding", embedding, embedding.shape, torch.bfloat16, embedding.device)
    tokens, hidden = embedding.shape
    return (Result((tokens, STREAMS, hidden), torch.bfloat16),)


def _cpu(embedding: torch.Tensor, residual_out: torch.Tensor) -> None:
    copy_to([residual_out], [reference.expand(embedding)])


def launch(embedding: torch.Tensor, residual_out: torch.Tensor) -> None:
    """Run the kernel on checked arguments."""
    check_alignment(embedding=embedding, residual_out=residual_out)
    variant = compilation.Variant("expand", (embedding.shape[1],))
    with compilation.on_device(embedding):
        compilation.kernel_for(variant, embedding.device)(embedding, residual_out)


define("expand", "Tensor embedding", ["residual_out"], describe=_describe, cpu=_cpu, cuda=launch)


def expand(embedding: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Make every stream the embedding.

    Args:
        embedding: [T, H] BF16, contiguous; H a multiple of 64.
        out: [T, 4, H] BF16 to write into.

    Returns:
        [T, 4, H] BF16.

    Raises:
        ArgumentError: Another shape, dtype, stride or device.
        UnsupportedError: No kernel for this device.
    """
    if out is None:
        return cast(torch.Tensor, torch.ops.dsv4_mhc.expand(embedding))
    torch.ops.dsv4_mhc.expand_out(embedding, out)
    return out
