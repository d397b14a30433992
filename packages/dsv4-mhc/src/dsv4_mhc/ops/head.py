# SPDX-License-Identifier: Apache-2.0
"""`head`: V4's learned head, after a post map or on a finished residual."""

from __future__ import annotations

from typing import cast

import torch

from dsv4_mhc import compile as compilation
from dsv4_mhc import reference
from dsv4_mhc.ops.checks import (
    check_alignment,
    check_eps,
    check_norm,
    check_post,
    check_residual,
    check_weight,
)
from dsv4_mhc.ops.library import Result, Results, copy_to, define
from dsv4_mhc.plan import STREAMS, Kernel, SeamOptions, choose_tile
from dsv4_mhc.weights import unpack_weight

SCHEMA = (
    "Tensor residual, Tensor? output, Tensor? post, Tensor? comb, Tensor weight, Tensor scale, Tensor base, "
    "Tensor? norm_weight, float rms_eps, float hc_eps, float norm_eps, bool exact_statistic"
)


def _describe(
    residual: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    exact_statistic: bool,
) -> Results:
    shape = check_residual(residual)
    check_post(residual, output, post, comb)
    check_weight(residual, weight, scale, base, STREAMS)
    check_norm(residual, norm_weight)
    check_eps(rms_eps=rms_eps, hc_eps=hc_eps, norm_eps=norm_eps)
    return (Result(shape, torch.bfloat16),)


def _cpu(
    residual: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    exact_statistic: bool,
    y: torch.Tensor,
) -> None:
    streams = residual
    if output is not None and post is not None and comb is not None:
        streams = reference.post(residual, output, post, comb, torch.float32)
    gains = reference.head_pre(
        streams, unpack_weight(weight), scale, base, rms_eps=rms_eps, hc_eps=hc_eps, dtype=torch.float32
    )
    found = reference.sublayer_input(
        streams, gains, norm_weight, norm_eps, torch.float32, exact_statistic=exact_statistic
    )
    copy_to([y], [found])


def launch(
    residual: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    exact_statistic: bool,
    y: torch.Tensor,
) -> None:
    """Run the kernel on checked arguments."""
    check_alignment(
        residual=residual, output=output, post=post, comb=comb, weight=weight, norm_weight=norm_weight, y=y
    )
    options = SeamOptions(
        post=output is not None,
        store_residual=False,
        norm=norm_weight is not None,
        exact_statistic=exact_statistic and norm_weight is not None,
    )
    tile = choose_tile(Kernel.HEAD, residual.shape[2], residual.shape[0])
    variant = compilation.seam_variant(Kernel.HEAD, tile, options)
    tensors = (output, post, comb, weight, scale, base, norm_weight, None, y, *(None,) * 6)
    with compilation.on_device(residual):
        kernel = compilation.kernel_for(variant, residual.device)
        filled = (residual if tensor is None else tensor for tensor in tensors)
        kernel(residual, *filled, rms_eps, hc_eps, norm_eps, 0.0, 1)


define("head", SCHEMA, ["y"], describe=_describe, cpu=_cpu, cuda=launch)


def head(
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    output: torch.Tensor | None = None,
    post: torch.Tensor | None = None,
    comb: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    exact_statistic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The final hidden state of V4; with the last sublayer's output also the post map before it.

    Args:
        residual: [T, 4, H] BF16, contiguous; H a multiple of 64.
        weight: Result of `pack_weight` for the head's [4, 4 H].
        scale: [1] FP32.
        base: [4] FP32.
        output: [T, H] BF16, with `post` [T, 4] and `comb` [T, 4, 4]; the streams are not written.
        post: See `output`.
        comb: See `output`.
        norm_weight: [H] BF16 of the model's final norm.
        rms_eps: Of the projection's normaliser.
        hc_eps: Added to the gates.
        norm_eps: Of the final norm.
        exact_statistic: The norm's mean of squares is that of the unrounded collapse.
        out: [T, H] BF16 to write into.

    Returns:
        [T, H] BF16.

    Raises:
        ArgumentError: Another shape, dtype, stride or device, or an eps below zero.
        UnsupportedError: No kernel for this device or H.
    """
    inputs = (
        *(residual, output, post, comb, weight, scale, base, norm_weight),
        *(rms_eps, hc_eps, norm_eps, exact_statistic),
    )
    if out is None:
        return cast(torch.Tensor, torch.ops.dsv4_mhc.head(*inputs))
    torch.ops.dsv4_mhc.head_out(*inputs, out)
    return out
