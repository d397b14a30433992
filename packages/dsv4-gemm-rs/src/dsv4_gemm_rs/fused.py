# SPDX-License-Identifier: Apache-2.0
"""The fused path: quantise the activations, then one kernel that multiplies, exchanges and adds.

Contract: a call only enqueues work on the current stream: no allocation beyond the activations as BF16, no
synchronisation, nothing compiled. BF16 activations take one kernel to be quantised and written back; those
that arrive quantised are dequantised by PyTorch, in several passes. The weight's BF16 copy, which SM90
multiplies, is made when the weight is prepared.
"""

from __future__ import annotations

import torch
from dsv4_symm_mem.errors import UnsupportedError

from dsv4_gemm_rs.kernels.launch import launch
from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.unfused import activations_bf16
from dsv4_gemm_rs.workspace import Workspace


def run_fused(operands: Operands, workspace: Workspace, out: torch.Tensor) -> None:
    """Perform one call."""
    launch_fused(activations_bf16(operands), operands.weight.bf16(), workspace, out)


def launch_fused(x: torch.Tensor, weight: torch.Tensor, workspace: Workspace, out: torch.Tensor) -> None:
    """Perform one call on BF16 operands [M, K] and [N, K] that need no preparation."""
    if workspace.launches is None:
        raise UnsupportedError("the fused path needs symmetric memory on a GPU with a fused kernel")
    plan = workspace.plan(x.shape[0], weight.shape[0], x.shape[1])
    launch(plan, x, weight, workspace.launches, out)
