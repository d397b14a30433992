# SPDX-License-Identifier: Apache-2.0
"""The fused path: bring the activations into the kernel's form, then one kernel multiplies, exchanges, adds.

Contract: a call only enqueues work on the current stream: no allocation beyond the activations' new form, no
synchronisation, nothing compiled. BF16 activations take one kernel: quantised where the tensor cores take
block scales, else quantised and written back as BF16, or none where they stay as they are. Activations that
arrive quantised are taken so where the tensor cores take them (row-major scales are swizzled by PyTorch),
else dequantised by PyTorch, in several passes. The weight keeps the form that it was given in, with the BF16
copy that SM90 multiplies beside it, made when the weight is prepared.
"""

from __future__ import annotations

import torch
from dsv4_symm_mem.errors import UnsupportedError

from dsv4_gemm_rs.dispatch import Problem
from dsv4_gemm_rs.dispatch.plan import operand_for
from dsv4_gemm_rs.kernels.families import Operand
from dsv4_gemm_rs.kernels.launch import Factors, launch
from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.unfused import activations_bf16, activations_mxfp8
from dsv4_gemm_rs.workspace import Workspace


def run_fused(operands: Operands, workspace: Workspace, out: torch.Tensor) -> None:
    """Perform one call."""
    launch_fused(factors_of(operands, workspace.machine.arch), operands.problem, workspace, out)


def factors_of(operands: Operands, arch: int | None) -> Factors:
    """What the fused kernel of `arch` multiplies for these operands."""
    weight = operands.weight
    if operand_for(arch, operands.kind) is Operand.BF16:
        return Factors(activations_bf16(operands), weight.bf16())
    x, x_scale = activations_mxfp8(operands)
    return Factors(x, weight.data, x_scale, weight.scale)


def launch_fused(factors: Factors, problem: Problem, workspace: Workspace, out: torch.Tensor) -> None:
    """Perform one call on operands that need no preparation."""
    if workspace.launches is None:
        raise UnsupportedError("the fused path needs symmetric memory on a GPU with a fused kernel")
    launch(workspace.plan(problem), factors, workspace.launches, out)
