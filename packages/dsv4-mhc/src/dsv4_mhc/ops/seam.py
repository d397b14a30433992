# SPDX-License-Identifier: Apache-2.0
"""`seam` and `pre`: between two sublayers, and before the first one.

One operator: with a finished sublayer's output it begins with the post map, without it reads the residual as
it is; with a carried pre it collapses with that (V4.1, shifted), without one with the pre that it finds (V4,
coupled).
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    check_quant,
    check_residual,
    check_weight,
)
from dsv4_mhc.ops.library import Result, Results, copy_to, define
from dsv4_mhc.plan import (
    FP8_GROUP,
    STREAMS,
    Kernel,
    Quant,
    SeamOptions,
    choose_tile,
    coupled_form,
    finishing,
)
from dsv4_mhc.weights import unpack_weight

MIXES = 24
SCHEMA = (
    "Tensor residual, Tensor? output, Tensor? post, Tensor? comb, Tensor weight, Tensor scale, Tensor base, "
    "Tensor? carried, Tensor? norm_weight, float rms_eps, float hc_eps, float norm_eps, int iterations, "
    "float multiplier, bool exact_statistic, bool mean, bool bf16, str quant"
)
OUTPUTS = ["pre_out", "post_out", "comb_out", "residual_out?", "y?", "codes?", "scales?", "mean_out?"]


class Seam(NamedTuple):
    """What a seam yields; None for what a call does not have.

    Attributes:
        pre: [T, 4] FP32; V4.1 carries it to the next seam.
        post: [T, 4] FP32, for the end of the sublayer that follows.
        comb: [T, 4, 4] FP32, source stream first, likewise.
        residual: [T, 4, H] BF16, the streams after the post map.
        y: [T, H] BF16, the next sublayer's input.
        codes: [T, H] float8_e4m3fn, the same quantised.
        scales: E8M0 bytes, 1-D uint8 in the 128 x 4 layout of ceil(T / 128) 128 ceil(H / 128) 4 bytes
            (mxfp8), or [T, H / 128] FP32 (fp8). A given tensor's bytes of rows from T on are left alone.
        mean: [T, H] BF16, mean of the streams.
    """

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    residual: torch.Tensor | None = None
    y: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    mean: torch.Tensor | None = None


def scales_result(tokens: int, hidden: int, quant: Quant) -> Result | None:
    """The scale tensor of a quantised input."""
    if quant is Quant.MXFP8:
        return Result((-(-tokens // 128) * 128 * -(-hidden // 128) * 4,), torch.uint8, zeroed=True)
    if quant is Quant.FP8:
        return Result((tokens, hidden // FP8_GROUP), torch.float32)
    return None


def _describe(
    residual: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    carried: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    iterations: int,
    multiplier: float,
    exact_statistic: bool,
    mean: bool,
    bf16: bool,
    quant: str,
) -> Results:
    tokens, hidden = check_residual(residual)
    check_post(residual, output, post, comb)
    check_weight(residual, weight, scale, base, MIXES)
    check_carried(residual, carried)
    check_norm(residual, norm_weight)
    check_eps(rms_eps=rms_eps, hc_eps=hc_eps, norm_eps=norm_eps)
    if iterations < 1:
        raise ArgumentError("iterations", iterations, "at least 1")
    form = check_quant(hidden, quant, bf16)
    row = Result((tokens, hidden), torch.bfloat16)
    return (
        Result((tokens, STREAMS), torch.float32),
        Result((tokens, STREAMS), torch.float32),
        Result((tokens, STREAMS, STREAMS), torch.float32),
        None if output is None else Result((tokens, STREAMS, hidden), torch.bfloat16),
        row if bf16 else None,
        None if form is Quant.NONE else Result((tokens, hidden), torch.float8_e4m3fn),
        scales_result(tokens, hidden, form),
        row if mean else None,
    )


def _cpu(
    residual: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    carried: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    iterations: int,
    multiplier: float,
    exact_statistic: bool,
    mean: bool,
    bf16: bool,
    quant: str,
    *outs: torch.Tensor | None,
) -> None:
    streams = residual
    if output is not None and post is not None and comb is not None:
        streams = reference.post(residual, output, post, comb, torch.float32)
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
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    if quant == Quant.MXFP8:
        codes, rows = reference.quantize_mxfp8(y)
        scales = reference.swizzle_scales(rows)
    elif quant == Quant.FP8:
        codes, scales = reference.quantize_fp8(y)
    average = reference.stream_mean(streams, torch.float32) if mean else None
    copy_to(outs, [*found, streams, y, codes, scales, average])


def launch(
    residual: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    carried: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    iterations: int,
    multiplier: float,
    exact_statistic: bool,
    mean: bool,
    bf16: bool,
    quant: str,
    pre_out: torch.Tensor,
    post_out: torch.Tensor,
    comb_out: torch.Tensor,
    residual_out: torch.Tensor | None,
    y: torch.Tensor | None,
    codes: torch.Tensor | None,
    scales: torch.Tensor | None,
    mean_out: torch.Tensor | None,
) -> None:
    """Run the kernel on checked arguments."""
    check_alignment(
        residual=residual,
        output=output,
        post=post,
        comb=comb,
        weight=weight,
        norm_weight=norm_weight,
        residual_out=residual_out,
        y=y,
        codes=codes,
        mean_out=mean_out,
    )
    options = SeamOptions(
        post=output is not None,
        store_residual=output is not None,
        norm=norm_weight is not None,
        exact_statistic=exact_statistic and norm_weight is not None,
        mean=mean,
        y=bf16,
        quant=Quant(quant),
    )
    tokens, _, hidden = residual.shape
    wiring = Kernel.SHIFTED if carried is not None else coupled_form(hidden, tokens)
    variant = compilation.seam_variant(wiring, choose_tile(wiring, hidden, tokens), options)
    given = (output, post, comb) if wiring is Kernel.COUPLED else (output, post, comb, carried)
    projection = (weight, scale, base)
    inputs = (*given, *projection, norm_weight)
    coefficients = (pre_out, post_out, comb_out)
    numbers = (rms_eps, hc_eps, norm_eps, multiplier, iterations)
    with compilation.on_device(residual):
        if wiring is not Kernel.PROJECT:
            run(variant, residual, *inputs, residual_out, y, codes, scales, mean_out, *coefficients, *numbers)
            return
        absent = (None, None, None)
        run(
            variant,
            residual,
            *given,
            *projection,
            None,
            residual_out,
            *absent,
            mean_out,
            *coefficients,
            *numbers,
        )
        streams = residual if residual_out is None else residual_out
        run(
            compilation.collapse_variant(hidden, tokens, finishing(options)),
            *(streams, *absent, pre_out, norm_weight, None, y, codes, scales, None, norm_eps),
        )


def run(
    variant: compilation.Variant, residual: torch.Tensor, *arguments: torch.Tensor | float | None
) -> None:
    """Launch a variant; what a call does not have is given as the residual, which is not touched."""
    kernel = compilation.kernel_for(variant, residual.device)
    kernel(residual, *(residual if argument is None else argument for argument in arguments))


define("seam", SCHEMA, OUTPUTS, describe=_describe, cpu=_cpu, cuda=launch)


def seam(
    residual: torch.Tensor,
    output: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    weight: torch.Tensor,
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
    mean: bool = False,
    bf16: bool = True,
    quant: Quant = Quant.NONE,
    out: Seam | None = None,
) -> Seam:
    """From a finished sublayer to the next one's input: one launch, V4's with many tokens two.

    Args:
        residual: [T, 4, H] BF16, contiguous; H a multiple of 64.
        output: [T, H] BF16, the finished sublayer's output.
        post: [T, 4] FP32, found before that sublayer.
        comb: [T, 4, 4] FP32, likewise; source stream first.
        weight: Result of `pack_weight` for the next sublayer's site.
        scale: [3] FP32: of pre, post, comb.
        base: [24] FP32.
        carried: [T, 4] FP32, the pre of the seam before: V4.1. None: V4.
        norm_weight: [H] BF16, the next sublayer's RMSNorm.
        rms_eps: Of the projection's normaliser.
        hc_eps: Added to pre and in Sinkhorn.
        norm_eps: Of the sublayer's norm.
        iterations: Of Sinkhorn.
        multiplier: Of post.
        exact_statistic: The norm's mean of squares is that of the unrounded collapse (V4's fused order).
        mean: Also write the mean of the streams.
        bf16: Write the input in BF16.
        quant: Also, or only, write it quantised.
        out: Tensors to write into, None for what this call does not have.

    Raises:
        ArgumentError: Another shape, dtype, stride or device, an eps below zero, or an option that does not
            fit.
        UnsupportedError: No kernel for this device or H.
        NotCompiledError: A graph is being captured and the kernel was never loaded.
    """
    inputs = (
        *(residual, output, post, comb, weight, scale, base, carried, norm_weight),
        *(rms_eps, hc_eps, norm_eps, iterations, multiplier, exact_statistic, mean, bf16, str(quant)),
    )
    return _call(inputs, out, True, bf16, quant, mean)


def pre(
    residual: torch.Tensor,
    weight: torch.Tensor,
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
    mean: bool = False,
    bf16: bool = True,
    quant: Quant = Quant.NONE,
    out: Seam | None = None,
) -> Seam:
    """A sublayer's input and its coefficients from the residual: one read of it. Arguments as for `seam`.

    Before the first layer, `carried` of V4.1 is one-hot: `reference.first_pre`.

    Raises:
        ArgumentError: As for `seam`.
        UnsupportedError: As for `seam`.
        NotCompiledError: As for `seam`.
    """
    inputs = (
        *(residual, None, None, None, weight, scale, base, carried, norm_weight),
        *(rms_eps, hc_eps, norm_eps, iterations, multiplier, exact_statistic, mean, bf16, str(quant)),
    )
    return _call(inputs, out, False, bf16, quant, mean)


def _call(
    inputs: tuple[object, ...], out: Seam | None, streams: bool, bf16: bool, quant: Quant, mean: bool
) -> Seam:
    if out is not None:
        torch.ops.dsv4_mhc.seam_out(*inputs, *out)
        return out
    quantised = quant != Quant.NONE
    kept = (True, True, True, streams, bf16, quantised, quantised, mean)
    found = torch.ops.dsv4_mhc.seam(*inputs)
    results: list[Any] = [tensor if keep else None for tensor, keep in zip(found, kept, strict=True)]
    return Seam(*results)
