# SPDX-License-Identifier: Apache-2.0
"""`engram_seam`: V4.1's seam with an Engram between the finished sublayer and the next one."""

from __future__ import annotations

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
    check_tensor,
    check_weight,
)
from dsv4_mhc.ops.library import Result, Results, copy_to, define
from dsv4_mhc.ops.seam import MIXES, Seam
from dsv4_mhc.plan import STREAMS, Kernel, SeamOptions, choose_tile
from dsv4_mhc.weights import unpack_weight

SCHEMA = (
    "Tensor residual, Tensor? output, Tensor? post, Tensor? comb, Tensor memory, Tensor query_weight, "
    "Tensor key_weight, Tensor open_gate, Tensor carried, Tensor weight, Tensor scale, Tensor base, "
    "Tensor? norm_weight, float rms_eps, float hc_eps, float norm_eps, float engram_eps, int iterations, "
    "float multiplier, bool exact_statistic"
)


def _describe(
    residual: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    memory: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    open_gate: torch.Tensor,
    carried: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    engram_eps: float,
    iterations: int,
    multiplier: float,
    exact_statistic: bool,
) -> Results:
    tokens, hidden = check_residual(residual)
    check_post(residual, output, post, comb)
    check_tensor("memory", memory, (tokens, STREAMS + 1, hidden), torch.bfloat16, residual.device)
    check_norm(residual, query_weight, "query_weight")
    check_norm(residual, key_weight, "key_weight")
    check_tensor("open_gate", open_gate, (tokens,), torch.uint8, residual.device)
    check_carried(residual, carried)
    check_weight(residual, weight, scale, base, MIXES)
    check_norm(residual, norm_weight)
    check_eps(rms_eps=rms_eps, hc_eps=hc_eps, norm_eps=norm_eps, engram_eps=engram_eps)
    if iterations < 1:
        raise ArgumentError("iterations", iterations, "at least 1")
    return (
        Result((tokens, STREAMS), torch.float32),
        Result((tokens, STREAMS), torch.float32),
        Result((tokens, STREAMS, STREAMS), torch.float32),
        Result((tokens, STREAMS, hidden), torch.bfloat16),
        Result((tokens, hidden), torch.bfloat16),
    )


def _cpu(
    residual: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    memory: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    open_gate: torch.Tensor,
    carried: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    engram_eps: float,
    iterations: int,
    multiplier: float,
    exact_statistic: bool,
    *outs: torch.Tensor,
) -> None:
    streams = residual
    if output is not None and post is not None and comb is not None:
        streams = reference.post(residual, output, post, comb, torch.float32)
    streams = reference.engram(
        streams, memory, query_weight, key_weight, eps=engram_eps, mask=open_gate == 0, dtype=torch.float32
    )
    y, found = reference.pre(
        streams,
        unpack_weight(weight),
        scale,
        base,
        carried=carried,
        norm_weight=norm_weight,
        rms_eps=rms_eps,
        hc_eps=hc_eps,
        norm_eps=norm_eps,
        iterations=iterations,
        multiplier=multiplier,
        exact_statistic=exact_statistic,
        dtype=torch.float32,
    )
    copy_to(outs, [*found, streams, y])


def launch(
    residual: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    memory: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    open_gate: torch.Tensor,
    carried: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    engram_eps: float,
    iterations: int,
    multiplier: float,
    exact_statistic: bool,
    pre_out: torch.Tensor,
    post_out: torch.Tensor,
    comb_out: torch.Tensor,
    residual_out: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Run the kernel on checked arguments."""
    check_alignment(
        residual=residual,
        output=output,
        post=post,
        comb=comb,
        memory=memory,
        query_weight=query_weight,
        key_weight=key_weight,
        weight=weight,
        norm_weight=norm_weight,
        residual_out=residual_out,
        y=y,
    )
    options = SeamOptions(
        post=output is not None,
        norm=norm_weight is not None,
        exact_statistic=exact_statistic and norm_weight is not None,
    )
    tile = choose_tile(Kernel.ENGRAM, residual.shape[2], residual.shape[0])
    variant = compilation.seam_variant(Kernel.ENGRAM, tile, options)
    tensors = (
        *(output, post, comb, memory, query_weight, key_weight, open_gate, carried, weight, scale, base),
        *(norm_weight, residual_out, y, pre_out, post_out, comb_out),
    )
    with compilation.on_device(residual):
        kernel = compilation.kernel_for(variant, residual.device)
        filled = (residual if tensor is None else tensor for tensor in tensors)
        kernel(residual, *filled, rms_eps, hc_eps, norm_eps, engram_eps, multiplier, iterations)


define(
    "engram_seam",
    SCHEMA,
    ["pre_out", "post_out", "comb_out", "residual_out", "y"],
    describe=_describe,
    cpu=_cpu,
    cuda=launch,
)


def engram_seam(
    residual: torch.Tensor,
    memory: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    open_gate: torch.Tensor,
    carried: torch.Tensor,
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
    engram_eps: float = 1e-6,
    iterations: int = 20,
    multiplier: float = 2.0,
    exact_statistic: bool = False,
    out: Seam | None = None,
) -> Seam:
    """From a finished sublayer through an Engram to the next sublayer's input, in one launch.

    Args:
        residual: [T, 4, H] BF16, contiguous; H a multiple of 64.
        memory: [T, 5, H] BF16: the Engram's keys for the four streams and their shared value.
        query_weight: [H] BF16, norm weight of the queries, which are the streams.
        key_weight: [H] BF16, norm weight of the keys.
        open_gate: [T] uint8; 0 closes a token's gates (image tokens).
        carried: [T, 4] FP32, the pre of the seam before.
        weight: Result of `pack_weight`.
        scale: [3] FP32.
        base: [24] FP32.
        output: [T, H] BF16, with `post` and `comb`; None where the residual is finished.
        post: [T, 4] FP32.
        comb: [T, 4, 4] FP32.
        norm_weight: [H] BF16, the next sublayer's RMSNorm.
        rms_eps: Of the projection's normaliser.
        hc_eps: Added to pre and in Sinkhorn.
        norm_eps: Of the sublayer's norm.
        engram_eps: Of the queries' and keys' norms.
        iterations: Of Sinkhorn.
        multiplier: Of post.
        exact_statistic: The norm's mean of squares is that of the unrounded collapse.
        out: Tensors to write into; quantised forms and mean are None.

    Raises:
        ArgumentError: Another shape, dtype, stride or device, or an eps below zero.
        UnsupportedError: No kernel for this device or H.
    """
    inputs = (
        *(residual, output, post, comb, memory, query_weight, key_weight, open_gate, carried, weight, scale),
        *(base, norm_weight, rms_eps, hc_eps, norm_eps, engram_eps, iterations, multiplier, exact_statistic),
    )
    if out is not None:
        torch.ops.dsv4_mhc.engram_seam_out(*inputs, *out[:5])
        return out
    return Seam(*torch.ops.dsv4_mhc.engram_seam(*inputs))
