# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.dsv4.gemm_rs`: the operation as a torch operator, so compilers and graphs can hold it.

Workspace and weight travel as named handles: text, which no compiler takes for a dynamic size. The operator
declares that it writes the workspace's `order` tensor: two calls are then never merged, dropped or
exchanged, which would part the ranks. The exchange's real state is deliberately not declared, since a
compiler may clone and write back what is declared.

Trap: an operator's output may not alias an input, so a caller's `out` is an operator of its own.
"""

from __future__ import annotations

import torch
from dsv4_symm_mem.protocol.layout import shard_length

from dsv4_gemm_rs.dispatch import Path, Problem
from dsv4_gemm_rs.fused import run_fused
from dsv4_gemm_rs.host import run_host
from dsv4_gemm_rs.operands import check_devices, check_operands
from dsv4_gemm_rs.unfused import run_unfused
from dsv4_gemm_rs.weights import weight_of
from dsv4_gemm_rs.workspace import workspace_of


def _perform(
    x: torch.Tensor, x_scale: torch.Tensor | None, workspace: str, prepared: str, out: torch.Tensor | None
) -> torch.Tensor:
    space = workspace_of(workspace)
    operands = check_operands(x, x_scale, weight_of(prepared), space, out)
    weight = operands.weight
    decision = space.decide(Problem(operands.m, weight.n, weight.k, weight.kind))
    if out is None:
        rows = shard_length(operands.m, space.world_size)
        out = torch.empty(rows, weight.n, dtype=torch.bfloat16, device=space.device)
    with space.call(decision):
        if decision.path is Path.HOST:
            run_host(operands, space.exchange, out)
        elif decision.path is Path.FUSED:
            run_fused(operands, space, out)
        else:
            run_unfused(operands, space, decision, out)
    return out


@torch.library.custom_op("dsv4::gemm_rs", mutates_args=("order",))
def gemm_rs_op(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    order: torch.Tensor,
    workspace: str,
    prepared: str,
) -> torch.Tensor:
    """Allocate and return this rank's shard; see `dsv4_gemm_rs.gemm_rs`.

    `weight` and `weight_scale` are the prepared weight's tensors, so that a compiler knows they are read.
    """
    return _perform(x, x_scale, workspace, prepared, None)


@gemm_rs_op.register_fake
def _(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    order: torch.Tensor,
    workspace: str,
    prepared: str,
) -> torch.Tensor:
    space = workspace_of(workspace)
    check_devices(x, x_scale, weight_of(prepared), space, None)
    world_size = space.world_size
    return x.new_empty((x.shape[0] + world_size - 1) // world_size, weight.shape[0], dtype=torch.bfloat16)


@torch.library.custom_op("dsv4::gemm_rs_out", mutates_args=("order", "out"))
def gemm_rs_out_op(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    order: torch.Tensor,
    workspace: str,
    prepared: str,
    out: torch.Tensor,
) -> None:
    """Write this rank's shard into `out`."""
    _perform(x, x_scale, workspace, prepared, out)


@gemm_rs_out_op.register_fake
def _(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    order: torch.Tensor,
    workspace: str,
    prepared: str,
    out: torch.Tensor,
) -> None:
    check_devices(x, x_scale, weight_of(prepared), workspace_of(workspace), out)
