# SPDX-License-Identifier: Apache-2.0
"""`collapse` and `tail`: a hidden state with given weights of the streams, at the end of V4.1 or anywhere."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4_mhc import compile as compilation
from dsv4_mhc import reference
from dsv4_mhc.errors import ArgumentError
from dsv4_mhc.ops.checks import (
    check_alignment,
    check_carried,
    check_eps,
    check_norm,
    check_post,
    check_residual,
)
from dsv4_mhc.ops.library import Result, Results, copy_to, define
from dsv4_mhc.plan import SeamOptions

SCHEMA = (
    "Tensor residual, Tensor pre, Tensor? output, Tensor? post, Tensor? comb, Tensor? norm_weight, "
    "float norm_eps, bool exact_statistic, bool keep_residual, bool mean"
)


class Tail(NamedTuple):
    """What `tail` yields; None for what was not asked for.

    Attributes:
        y: [T, H] BF16, the collapsed (and normalised) hidden state.
        residual: [T, 4, H] BF16, the streams.
        mean: [T, H] BF16, mean of the streams.
    """

    y: torch.Tensor
    residual: torch.Tensor | None
    mean: torch.Tensor | None


def _describe(
    residual: torch.Tensor,
    pre: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    exact_statistic: bool,
    keep_residual: bool,
    mean: bool,
) -> Results:
    tokens, hidden = check_residual(residual)
    check_carried(residual, pre)
    check_post(residual, output, post, comb)
    check_norm(residual, norm_weight)
    check_eps(norm_eps=norm_eps)
    if keep_residual and output is None:
        raise ArgumentError("keep_residual", True, "False without a sublayer's output")
    row = Result((tokens, hidden), torch.bfloat16)
    streams = Result(tuple(residual.shape), torch.bfloat16) if keep_residual else None
    return row, streams, row if mean else None


def _cpu(
    residual: torch.Tensor,
    pre: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    exact_statistic: bool,
    keep_residual: bool,
    mean: bool,
    y: torch.Tensor,
    residual_out: torch.Tensor | None,
    mean_out: torch.Tensor | None,
) -> None:
    streams = residual
    if output is not None and post is not None and comb is not None:
        streams = reference.post(residual, output, post, comb, torch.float32)
    found = reference.sublayer_input(
        streams, pre, norm_weight, norm_eps, torch.float32, exact_statistic=exact_statistic
    )
    average = reference.stream_mean(streams, torch.float32) if mean else None
    copy_to([y, residual_out, mean_out], [found, streams, average])


def launch(
    residual: torch.Tensor,
    pre: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    exact_statistic: bool,
    keep_residual: bool,
    mean: bool,
    y: torch.Tensor,
    residual_out: torch.Tensor | None,
    mean_out: torch.Tensor | None,
) -> None:
    """Run the kernel on checked arguments."""
    check_alignment(
        residual=residual,
        pre=pre,
        output=output,
        post=post,
        comb=comb,
        norm_weight=norm_weight,
        y=y,
        residual_out=residual_out,
        mean_out=mean_out,
    )
    options = SeamOptions(
        post=output is not None,
        store_residual=keep_residual,
        norm=norm_weight is not None,
        exact_statistic=exact_statistic and norm_weight is not None,
        mean=mean,
    )
    variant = compilation.collapse_variant(residual.shape[2], residual.shape[0], options)
    tensors = (output, post, comb, pre, norm_weight, residual_out, y, None, None, mean_out)
    with compilation.on_device(residual):
        kernel = compilation.kernel_for(variant, residual.device)
        kernel(residual, *(residual if tensor is None else tensor for tensor in tensors), norm_eps)


define(
    "collapse",
    SCHEMA,
    ["y", "residual_out?", "mean_out?"],
    describe=_describe,
    cpu=_cpu,
    cuda=launch,
)


def collapse(
    residual: torch.Tensor,
    pre: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    exact_statistic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of the streams weighted by `pre`, with a weight also normalised.

    Args:
        residual: [T, 4, H] BF16, contiguous; H a multiple of 64.
        pre: [T, 4] FP32.
        norm_weight: [H] BF16 of an RMSNorm to follow.
        norm_eps: Of that norm.
        exact_statistic: Its mean of squares is that of the unrounded sum (V4's fused order).
        out: [T, H] BF16 to write into.

    Returns:
        [T, H] BF16.

    Raises:
        ArgumentError: Another shape, dtype, stride or device, or an eps below zero.
        UnsupportedError: No kernel for this device.
    """
    inputs = (residual, pre, None, None, None, norm_weight, norm_eps, exact_statistic, False, False)
    if out is None:
        found: torch.Tensor = torch.ops.dsv4_mhc.collapse(*inputs)[0]
        return found
    torch.ops.dsv4_mhc.collapse_out(*inputs, out, None, None)
    return out


def tail(
    residual: torch.Tensor,
    output: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    exact_statistic: bool = False,
    keep_residual: bool = False,
    mean: bool = False,
    out: Tail | None = None,
) -> Tail:
    """V4.1's last seam: post map, collapse with the carried pre, final norm.

    Args:
        residual: [T, 4, H] BF16, contiguous; H a multiple of 64.
        output: [T, H] BF16, the last sublayer's output.
        post: [T, 4] FP32.
        comb: [T, 4, 4] FP32.
        pre: [T, 4] FP32, carried.
        norm_weight: [H] BF16 of the final norm.
        norm_eps: Of that norm.
        exact_statistic: Its mean of squares is that of the unrounded sum.
        keep_residual: Also write the streams.
        mean: Also write their mean.
        out: Tensors to write into, None where nothing is asked for.

    Raises:
        ArgumentError: Another shape, dtype, stride or device, or an eps below zero.
        UnsupportedError: No kernel for this device.
    """
    inputs = (residual, pre, output, post, comb, norm_weight, norm_eps, exact_statistic, keep_residual, mean)
    if out is not None:
        torch.ops.dsv4_mhc.collapse_out(*inputs, *out)
        return out
    y, streams, average = torch.ops.dsv4_mhc.collapse(*inputs)
    return Tail(y, streams if keep_residual else None, average if mean else None)
