# SPDX-License-Identifier: Apache-2.0
"""The unfused path: the best library GEMM at hand, then a reduce-scatter.

Contract: the fallback on every machine without a fused kernel, and the baseline that a fused kernel has to
beat. Library GEMMs return BF16, so here the rank's own partial is rounded once like the remote ones; the
fused and host paths keep it in FP32.

Where a row's bits may not depend on M (`dispatch.decide.batch_obstacle`) the fused kernel multiplies, as on a
single rank. So it does for a packed weight (`packing`), which no library takes. Rejected:
dequantising into a workspace for the library, which reads and writes the weight anew in every call, twice
its BF16 bytes, and keeps the memory that packing was to save.
"""

from __future__ import annotations

import torch
from dsv4_symm_mem.collectives.cuda import reduce_scatter_cuda
from dsv4_symm_mem.collectives.process_group import reduce_scatter_all_to_all
from dsv4_symm_mem.collectives.reduce_scatter import reduce_scatter
from dsv4_symm_mem.errors import UnsupportedError

from dsv4_gemm_rs.dispatch import Decision, Exchange, Gemm, Problem
from dsv4_gemm_rs.kernels.launch import launch
from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.quantize import dequantize_mxfp8, quantize_mxfp8, round_trip_mxfp8, swizzle_scales
from dsv4_gemm_rs.schedule import DEFAULT_LAG
from dsv4_gemm_rs.weights import Activation, WeightKind
from dsv4_gemm_rs.workspace import Workspace

OWN_GEMMS = frozenset({Gemm.SM90_FP8, Gemm.FUSED_SM90, Gemm.FUSED_SM100})
"""Products by the fused kernels, as if there were one rank."""


def run_unfused(operands: Operands, workspace: Workspace, decision: Decision, out: torch.Tensor) -> None:
    """Perform one call as `decision` says."""
    if decision.exchange is Exchange.NONE:
        partial_product(operands, decision.gemm, workspace, out)
        return
    partial = partial_product(operands, decision.gemm, workspace)
    exchange_partial(partial, workspace, decision, out, operands.problem)


def exchange_partial(
    partial: torch.Tensor, workspace: Workspace, decision: Decision, out: torch.Tensor, problem: Problem
) -> None:
    """Reduce-scatter a finished partial [M, N] of `problem` into `out` the way `decision` says.

    The tile shape follows from the problem, as for ranks that run fused.
    """
    if decision.exchange is Exchange.PUSH_AFTER and workspace.launches is not None:
        plan = workspace.plan(problem)
        reduce_scatter_cuda(
            workspace.launches,
            partial,
            out,
            plan.shape,
            plan.signature,
            plan.wave_rows,
            DEFAULT_LAG,
            plan.grid,
        )
    elif decision.exchange is Exchange.ALL_TO_ALL and workspace.process_group is not None:
        reduce_scatter_all_to_all(workspace.process_group, partial, out)
    elif workspace.exchange is not None:
        reduce_scatter(workspace.exchange, partial, out)
    else:
        raise UnsupportedError(f"the unfused path cannot exchange by {decision.exchange.value!r} here")


def partial_product(
    operands: Operands, gemm: Gemm, workspace: Workspace, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The partial x·Wᵀ, BF16 [M, N], by whichever `gemm` names; into `out` where that is given."""
    if gemm not in OWN_GEMMS:
        return library_gemm(operands, gemm, out)
    weight = operands.weight
    if workspace.alone is None or (gemm is Gemm.SM90_FP8) != (weight.packed is not None):
        raise UnsupportedError(f"{gemm.value!r} needs a GPU with that kernel, and a weight of its form")
    if out is None:
        out = torch.empty(operands.m, weight.n, dtype=torch.bfloat16, device=weight.device)
    if operands.m:
        # The fused path builds on this module.
        from dsv4_gemm_rs.fused import factors_of

        factors = factors_of(operands, workspace.machine.arch)
        launch(workspace.product_plan(operands.problem), factors, workspace.alone, out)
    return out


def library_gemm(operands: Operands, gemm: Gemm, out: torch.Tensor | None = None) -> torch.Tensor:
    """The partial x·Wᵀ, BF16 [M, N], by the library that `gemm` names; into `out` where that is given."""
    if gemm is Gemm.BF16:
        return torch.matmul(activations_bf16(operands), operands.weight.bf16().T, out=out)
    x, x_scale = activations_mxfp8(operands)
    weight, weight_scale = operands.weight.data, operands.weight.scale
    if weight_scale is None:
        raise UnsupportedError(f"{gemm.value} needs an MXFP8 weight")
    if operands.m == 0:
        return torch.empty(0, weight.shape[0], dtype=torch.bfloat16, device=x.device) if out is None else out
    if gemm is Gemm.FLASHINFER:
        from flashinfer import mm_mxfp8

        # Its kernel takes dense rows only.
        product: torch.Tensor = mm_mxfp8(
            x.contiguous(), weight.T, x_scale, weight_scale, out=out, out_dtype=torch.bfloat16
        )
        return product
    if gemm is Gemm.SCALED_MM:
        product = torch._scaled_mm(
            x,
            weight.T,
            scale_a=x_scale.view(torch.float8_e8m0fnu),
            scale_b=weight_scale.view(torch.float8_e8m0fnu),
            out_dtype=torch.bfloat16,
        )
        return product if out is None else out.copy_(product)
    raise UnsupportedError(f"{gemm.value} is no library GEMM")


def quantises(operands: Operands) -> bool:
    """Whether the activations are to be quantised here: they are not yet, and the weight wants them so."""
    weight = operands.weight
    return (
        operands.x_scale is None
        and weight.kind is WeightKind.MXFP8
        and weight.activation is not Activation.BF16
    )


def activations_bf16(operands: Operands) -> torch.Tensor:
    """The activations as the product sees them, BF16 [M, K]: quantised and back for MXFP8 weights."""
    x, scale = operands.x, operands.x_scale
    if scale is not None:
        return dequantize_mxfp8(x, scale).to(torch.bfloat16)
    return round_trip_mxfp8(x) if quantises(operands) else x


def activations_mxfp8(operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """The activations as E4M3 [M, K] and E8M0 bytes, swizzled 128x4 (`quantize.layout`)."""
    if operands.x_scale is None:
        quantised = quantize_mxfp8(operands.x)
        return quantised.data, quantised.scale
    scale = operands.x_scale
    return operands.x, scale if scale.dim() == 1 else swizzle_scales(scale)
