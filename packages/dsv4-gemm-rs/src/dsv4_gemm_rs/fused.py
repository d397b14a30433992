# SPDX-License-Identifier: Apache-2.0
"""The fused path: bring the activations into the kernel's form, then one kernel multiplies, exchanges, adds.

Contract: a call only enqueues work on the current stream: no allocation beyond the activations' new form, no
synchronisation, nothing compiled. BF16 activations take one kernel: quantised where the tensor cores take
block scales, else quantised and written back as BF16, or none where they stay as they are. Activations that
arrive quantised are taken so where the tensor cores take them (row-major scales are swizzled by PyTorch),
else dequantised by PyTorch, in several passes. The weight keeps the form that it was given in; what SM90
multiplies, a BF16 copy or the packed form, is made beside it when the weight is prepared.
"""

from __future__ import annotations

import torch
from dsv4_symm_mem.errors import UnsupportedError

from dsv4_gemm_rs.dispatch import Problem
from dsv4_gemm_rs.dispatch.decide import operand_for
from dsv4_gemm_rs.kernels.families import Operand
from dsv4_gemm_rs.kernels.launch import Factors, launch
from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.unfused import activations_bf16, activations_mxfp8, quantises
from dsv4_gemm_rs.workspace import Workspace


def run_fused(operands: Operands, workspace: Workspace, out: torch.Tensor, *, gathered: bool = False) -> None:
    """Perform one call; `gathered` makes it an all-reduce, where the exchange has that in one kernel."""
    factors = factors_of(operands, workspace.machine.arch)
    launch_fused(factors, operands.problem, workspace, out, gathered=gathered)


def factors_of(operands: Operands, arch: int | None) -> Factors:
    """What the fused kernel of `arch` multiplies for these operands."""
    weight = operands.weight
    operand = operand_for(arch, operands.kind, packed=weight.packed is not None)
    # On a CPU, emulated or not, there is no kernel that quantises.
    launched = quantises(operands) and operands.x.device.type == "cuda" and operands.x.numel() > 0
    if operand is Operand.MXFP8:
        x, x_scale = activations_mxfp8(operands)
        return Factors(x, weight.data, x_scale, weight.scale, launched)
    x = activations_bf16(operands)
    packed = weight.packed if operand is Operand.FP8_WEIGHT else None
    return Factors(x, weight.bf16() if packed is None else packed, quantised=launched)


def launch_fused(
    factors: Factors, problem: Problem, workspace: Workspace, out: torch.Tensor, *, gathered: bool = False
) -> None:
    """Perform one call on operands that need no preparation."""
    if workspace.launches is None:
        raise UnsupportedError("the fused path needs symmetric memory on a GPU with a fused kernel")
    early = factors.quantised and workspace.overlaps
    launch(workspace.plan(problem, gathered=gathered), factors, workspace.launches, out, early=early)
