# SPDX-License-Identifier: Apache-2.0
"""`post`: the streams after a sublayer, on their own."""

from __future__ import annotations

from typing import cast

import torch

from dsv4_mhc import compile as compilation
from dsv4_mhc import reference
from dsv4_mhc.ops.checks import check_alignment, check_post, check_residual
from dsv4_mhc.ops.library import Result, Results, copy_to, define


def _describe(
    residual: torch.Tensor, output: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> Results:
    check_residual(residual)
    check_post(residual, output, post, comb)
    return (Result(tuple(residual.shape), torch.bfloat16),)


def _cpu(
    residual: torch.Tensor,
    output: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    residual_out: torch.Tensor,
) -> None:
    copy_to([residual_out], [reference.post(residual, output, post, comb, torch.float32)])


def launch(
    residual: torch.Tensor,
    output: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    residual_out: torch.Tensor,
) -> None:
    """Run the kernel on checked arguments."""
    check_alignment(residual=residual, output=output, post=post, comb=comb, residual_out=residual_out)
    variant = compilation.Variant("post", (residual.shape[2],))
    with compilation.on_device(residual):
        compilation.kernel_for(variant, residual.device)(residual, output, post, comb, residual_out)


define(
    "post",
    "Tensor residual, Tensor output, Tensor post, Tensor comb",
    ["residual_out"],
    describe=_describe,
    cpu=_cpu,
    cuda=launch,
)


def post(
    residual: torch.Tensor,
    output: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """X'[j] = post_j F + sum over i of comb[i, j] X[i], in FP32, rounded once.

    Args:
        residual: X, [T, 4, H] BF16, contiguous; H a multiple of 64.
        output: F, [T, H] BF16.
        post: [T, 4] FP32.
        comb: [T, 4, 4] FP32, source stream first.
        out: [T, 4, H] BF16 to write into, no memory of an input.

    Returns:
        [T, 4, H] BF16.

    Raises:
        ArgumentError: Another shape, dtype, stride or device.
        UnsupportedError: No kernel for this device.
    """
    if out is None:
        return cast(torch.Tensor, torch.ops.dsv4_mhc.post(residual, output, post, comb))
    torch.ops.dsv4_mhc.post_out(residual, output, post, comb, out)
    return out
