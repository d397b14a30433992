# SPDX-License-Identifier: Apache-2.0
"""Every stage of the hyper-connections in plain torch, in FP32 or FP64, with the kernels' rounding points.

Written from the formulas alone. `dtype` is the precision of the arithmetic; what the models keep in BF16 (the
residual, a sublayer's input) is rounded to BF16 where the models round it, in either precision, so that the
FP64 result is an oracle for a kernel that computes in FP32. Runs on any device; the operators' CPU path is
this module in FP32.

Shapes, with T tokens, n = 4 streams, hidden size H and K = 4 H:

    residual X   [T, 4, H]    BF16      fn      [24, K]   FP32    scale [3]  FP32 (pre, post, comb)
    output F     [T, H]       BF16      base    [24]      FP32    pre, post [T, 4], comb [T, 4, 4]  FP32

Rows of `fn`: 0 to 3 pre, 4 to 7 post, 8 + 4 j + k comb from source stream j to target stream k. `comb` is the
transpose of H_res in the mHC paper (arXiv 2512.24880). The order of the Sinkhorn steps is that of the
published inference kernels, which agree with each other: softmax over targets, then eps added, then columns;
afterwards rows and columns in turn. It ends on columns, so columns sum to 1 and rows only nearly.

Traps: the mean of squares in `mixes` divides by 4 H, not by H. pre has an added eps, post has none but a
factor. Three different eps exist, and models differ in them. The statistic of a sublayer's norm is that of
the rounded y in V4.1 and of the unrounded y in V4's fused kernels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

STREAMS = 4
"""Streams of the residual, hc_mult in the models' configuration."""

MIXES = 24
"""Coefficients before Sinkhorn: 4 pre, 4 post, 16 comb."""

E4M3_MAX = 448.0
"""Largest finite float8_e4m3fn."""

MX_BLOCK = 32
"""Elements that share one E8M0 scale (OCP Microscaling Formats v1.0, table 1)."""

FP8_GROUP = 128
"""Elements that share one FP32 scale in the 1 x 128 grouping of DeepSeek V3's FP8 GEMM."""


class Coefficients(NamedTuple):
    """What one projection yields.

    Attributes:
        pre: [T, 4], weights of the streams in a sublayer's input.
        post: [T, 4], weights of the sublayer's output in the streams.
        comb: [T, 4, 4], from source stream (first) to target stream (second).
    """

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


class Seam(NamedTuple):
    """What a seam yields.

    Attributes:
        residual: [T, 4, H] BF16, the streams after the finished sublayer.
        y: [T, H] BF16, the next sublayer's input.
        coefficients: Of the projection of `residual`.
    """

    residual: torch.Tensor
    y: torch.Tensor
    coefficients: Coefficients


def expand(embedding: torch.Tensor) -> torch.Tensor:
    """[T, H] to [T, 4, H]: every stream starts as the embedding."""
    return embedding.unsqueeze(1).expand(-1, STREAMS, -1).contiguous()


def mixes(
    residual: torch.Tensor, fn: torch.Tensor, rms_eps: float, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Projection of the RMS-normalised flat residual: [T, rows of fn].

    The factor 1 / rms is applied after the dot products, which is exact algebra.
    """
    flat = residual.flatten(1).to(dtype)
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    return flat @ fn.to(dtype).T * inverse


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """[T, 4, 4] logits to nearly doubly stochastic matrices; last axis is the target stream."""
    matrix = torch.softmax(logits, -1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def coefficients(
    mixed: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    hc_eps: float = 1e-6,
    iterations: int = 20,
    multiplier: float = 2.0,
) -> Coefficients:
    """Gates and Sinkhorn, in the dtype of `mixed` [T, 24]."""
    scale, base = scale.to(mixed.dtype), base.to(mixed.dtype)
    pre = torch.sigmoid(mixed[:, :4] * scale[0] + base[:4]) + hc_eps
    post = multiplier * torch.sigmoid(mixed[:, 4:8] * scale[1] + base[4:8])
    logits = (mixed[:, 8:] * scale[2] + base[8:]).unflatten(-1, (STREAMS, STREAMS))
    return Coefficients(pre, post, sinkhorn(logits, iterations, hc_eps))


def head_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    rms_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """V4's head: weights [T, 4] of the streams in the final hidden state. `fn` [4, 4 H], `scale` [1]."""
    mixed = mixes(residual, fn, rms_eps, dtype)
    return torch.sigmoid(mixed * scale.to(dtype) + base.to(dtype)) + hc_eps


def weighted(residual: torch.Tensor, pre: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Sum of the streams weighted by `pre`, [T, H] in `dtype`, not rounded."""
    streams = residual.to(dtype)
    gains = pre.to(dtype).unsqueeze(-1)
    total = gains[:, 0] * streams[:, 0]
    for stream in range(1, STREAMS):
        total = total + gains[:, stream] * streams[:, stream]
    return total


def collapse(residual: torch.Tensor, pre: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A sublayer's input before its norm, [T, H] BF16."""
    return weighted(residual, pre, dtype).to(torch.bfloat16)


def rms_norm(
    y: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype = torch.float64,
    *,
    statistic: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMSNorm of BF16 `y` [T, H], one rounding at the end.

    Args:
        y: Input.
        weight: [H] BF16 or FP32.
        eps: Added to the mean of squares.
        dtype: Of the arithmetic.
        statistic: What the mean of squares is taken from; `y` itself (V4.1) unless given (V4: unrounded y).
    """
    source = y if statistic is None else statistic
    inverse = torch.rsqrt(source.to(dtype).square().mean(-1, keepdim=True) + eps)
    return (y.to(dtype) * inverse * weight.to(dtype)).to(torch.bfloat16)


def sublayer_input(
    residual: torch.Tensor,
    pre: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_eps: float = 1e-6,
    dtype: torch.dtype = torch.float64,
    *,
    exact_statistic: bool = False,
) -> torch.Tensor:
    """Collapse and, with a weight, RMSNorm: [T, H] BF16. `exact_statistic` is V4's order."""
    total = weighted(residual, pre, dtype)
    y = total.to(torch.bfloat16)
    if norm_weight is None:
        return y
    return rms_norm(y, norm_weight, norm_eps, dtype, statistic=total if exact_statistic else None)


def post(
    residual: torch.Tensor,
    output: torch.Tensor,
    post_weights: torch.Tensor,
    comb: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The streams after a sublayer: X'[j] = post_j F + sum over i of comb[i, j] X[i], [T, 4, H] BF16."""
    streams, mixing = residual.to(dtype), comb.to(dtype)
    total = post_weights.to(dtype).unsqueeze(-1) * output.to(dtype).unsqueeze(1)
    for source in range(STREAMS):
        total = total + mixing[:, source].unsqueeze(-1) * streams[:, source].unsqueeze(1)
    return total.to(torch.bfloat16)


def stream_mean(residual: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Mean of the streams, [T, H] BF16: auxiliary hidden states, and the head of models without one."""
    streams = residual.to(dtype)
    return ((streams[:, 0] + streams[:, 1] + streams[:, 2] + streams[:, 3]) * 0.25).to(torch.bfloat16)


def first_pre(tokens: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """V4.1's carried pre of the first layer: one-hot, stream 0."""
    carried = torch.zeros(tokens, STREAMS, dtype=torch.float32, device=device)
    carried[:, 0] = 1
    return carried


def pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    carried: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    iterations: int = 20,
    multiplier: float = 2.0,
    exact_statistic: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, Coefficients]:
    """A sublayer's input and the coefficients, from the residual.

    Without `carried` the collapse uses the pre of this projection (V4, coupled); with it, [T, 4], the carried
    one (V4.1, shifted), and the pre of this projection is what the next seam carries.
    """
    mixed = mixes(residual, fn, rms_eps, dtype)
    found = coefficients(mixed, scale, base, hc_eps=hc_eps, iterations=iterations, multiplier=multiplier)
    gains = found.pre if carried is None else carried
    y = sublayer_input(residual, gains, norm_weight, norm_eps, dtype, exact_statistic=exact_statistic)
    return y, found


def seam(
    residual: torch.Tensor,
    output: torch.Tensor,
    post_weights: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    carried: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    iterations: int = 20,
    multiplier: float = 2.0,
    exact_statistic: bool = False,
) -> Seam:
    """`post` of the finished sublayer, then `pre` of the next one on the rounded streams."""
    streams = post(residual, output, post_weights, comb, dtype)
    y, found = pre(
        streams,
        fn,
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
        dtype=dtype,
    )
    return Seam(streams, y, found)


def engram_gate(
    residual: torch.Tensor,
    memory: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Gates [T, 4] of an Engram's value in the streams.

    Args:
        residual: [T, 4, H] BF16.
        memory: [T, 5, H] BF16: a key for each stream, then the value that they share.
        query_weight: [H], RMSNorm weight of the queries.
        key_weight: [H], RMSNorm weight of the keys.
        eps: Of both norms.
        mask: [T] bool; True closes the gates of a token (image tokens).
        dtype: Of the arithmetic.
    """
    queries, keys = residual.to(dtype), memory[:, :STREAMS].to(dtype)
    gain = query_weight.to(dtype) * key_weight.to(dtype)
    dot = (queries * keys * gain).sum(-1)
    query_inverse = torch.rsqrt(queries.square().mean(-1) + eps)
    key_inverse = torch.rsqrt(keys.square().mean(-1) + eps)
    score = dot * query_inverse * key_inverse / math.sqrt(residual.shape[-1])
    gate = torch.sigmoid(torch.sign(score) * score.abs().clamp(min=1e-6).sqrt())
    return gate if mask is None else gate.masked_fill(mask.unsqueeze(-1), 0)


def engram(
    residual: torch.Tensor,
    memory: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The streams with the gated value added, [T, 4, H] BF16. Arguments as for `engram_gate`."""
    gate = engram_gate(residual, memory, query_weight, key_weight, eps=eps, mask=mask, dtype=dtype)
    value = memory[:, STREAMS].to(dtype).unsqueeze(1)
    return (residual.to(dtype) + gate.unsqueeze(-1) * value).to(torch.bfloat16)


def quantize_mxfp8(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 [T, H] to E4M3 codes and E8M0 scale bytes [T, H / 32], row-major.

    The byte is ceil(log2(amax / 448)) + 127, at least 0, with amax the largest finite magnitude of the block;
    elements that are not finite become NaN and leave the scale alone. With the exponent field b and fraction
    bits f of amax as FP32 that is max(b - 8 + (f > 0x600000), 0), because 448 = 1.75 * 2^8.
    """
    blocks = y.float().unflatten(-1, (-1, MX_BLOCK))
    finite = blocks.isfinite()
    bits = torch.where(finite, blocks.abs(), 0).amax(-1).view(torch.int32)
    byte = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp(min=0)
    factor = ((254 - byte) << 23).view(torch.float32)
    scaled = (blocks * factor.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).masked_fill(~finite, float("nan"))
    return scaled.flatten(-2).to(torch.float8_e4m3fn), byte.to(torch.uint8)


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """Row-major scale bytes [T, B] in the 128 x 4 layout of block-scaled MMAs, padded with zero bytes.

    The byte of row m and block k is at ((m // 128) * ceil(B / 4) + k // 4) * 512 + (m % 32) * 16
    + (m % 128) // 32 * 4 + k % 4 (PTX ISA, scale factor layout of tcgen05 block scaling).
    """
    rows, blocks = scale.shape
    row_tiles, tiles = -(-rows // 128), -(-blocks // 4)
    padded = scale.new_zeros(row_tiles * 128, tiles * 4)
    padded[:rows, :blocks] = scale
    return padded.view(row_tiles, 4, 32, tiles, 4).permute(0, 3, 2, 1, 4).flatten()


def quantize_fp8(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 [T, H] to E4M3 codes and FP32 scales [T, H / 128]: amax / 448 with amax at least 1e-4.

    A group that holds a value that is not finite becomes NaN, codes and scale.
    """
    groups = y.float().unflatten(-1, (-1, FP8_GROUP))
    amax = groups.abs().amax(-1).clamp(min=1e-4) + (groups * 0).sum(-1)
    scaled = (groups * (E4M3_MAX / amax).unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.flatten(-2).to(torch.float8_e4m3fn), amax / E4M3_MAX
