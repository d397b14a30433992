# SPDX-License-Identifier: Apache-2.0
"""The fused path: quantise the activations, then one kernel that multiplies, exchanges and adds.

Contract: a call only enqueues work on the current stream: no allocation beyond the quantised activations,
no synchronisation, nothing compiled once `warm_up` has run. The weight's BF16 copy, which SM90 multiplies, is
made at the first call or by `PreparedWeight.bf16`, outside any graph capture.
"""

from __future__ import annotations

import torch
from dsv4_symm_mem.errors import UnsupportedError

from dsv4_gemm_rs.kernels.cache import gemm_reduce_scatter_kernel
from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.unfused import activations_bf16
from dsv4_gemm_rs.workspace import Workspace


def run_fused(operands: Operands, workspace: Workspace, out: torch.Tensor) -> None:
    """Perform one call."""
    launch_fused(activations_bf16(operands), operands.weight.bf16(), workspace, out)


def launch_fused(x: torch.Tensor, weight: torch.Tensor, workspace: Workspace, out: torch.Tensor) -> None:
    """Launch the kernel on the current stream.

    Args:
        x: BF16 [M, K], rows 16-byte aligned.
        weight: BF16 [N, K], contiguous.
        workspace: This rank's workspace, with symmetric memory mapped.
        out: BF16 [ceil(M / P), N], contiguous; filled completely.
    """
    if workspace.launches is None:
        raise UnsupportedError("the fused path needs symmetric memory on a GPU with a fused kernel")
    m, k = x.shape
    n = weight.shape[0]
    plan = workspace.plan(m, n, k)
    gemm_reduce_scatter_kernel(plan.config)(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        weight.stride(0),
        out.data_ptr(),
        out.stride(0),
        m,
        n,
        k,
        *workspace.launches.arguments(plan.signature),
        plan.group_rows,
        plan.lag,
        plan.grid,
        torch.cuda.current_stream(out.device).cuda_stream,
    )
