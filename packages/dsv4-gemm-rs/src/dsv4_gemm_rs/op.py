# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.dsv4.gemm_rs` and `gemm_ar`: torch operators, so that compilers and graphs can hold them.

Workspace and weight travel as named handles: text, which no compiler takes for a dynamic size. The operator
declares that it writes the workspace's `order` tensor: two calls are then never merged, dropped or
exchanged, which would part the ranks. The exchange's real state is deliberately not declared, since a
compiler may clone and write back what is declared.

Trap: an operator's output may not alias an input, so a caller's `out` is an operator of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dsv4_symm_mem.protocol.layout import shard_length

from dsv4_gemm_rs.operands import check_devices, check_operands
from dsv4_gemm_rs.perform import all_reduce_product, reduce_scatter_product
from dsv4_gemm_rs.weights import weight_of
from dsv4_gemm_rs.workspace import workspace_of


def _perform(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    workspace: str,
    prepared: str,
    out: torch.Tensor | None,
    gathered: bool,
) -> torch.Tensor:
    space = workspace_of(workspace)
    operands = check_operands(x, x_scale, weight_of(prepared), space, out, gathered=gathered)
    weight = operands.weight
    decision = space.decide(operands.problem)
    if out is None:
        rows = operands.m if gathered else shard_length(operands.m, space.world_size)
        out = torch.empty(rows, weight.n, dtype=torch.bfloat16, device=space.device)
    with space.call(decision):
        (all_reduce_product if gathered else reduce_scatter_product)(operands, space, decision, out)
    return out


Operator = Callable[..., Any]


def _define(name: str, *, gathered: bool) -> tuple[Operator, Operator]:
    """The operator that allocates its result and the one that writes into `out`.

    `weight` and `weight_scale` are the prepared weight's tensors, so that a compiler knows they are read.
    """

    @torch.library.custom_op(f"dsv4::{name}", mutates_args=("order",))
    def allocating(
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
        order: torch.Tensor,
        workspace: str,
        prepared: str,
    ) -> torch.Tensor:
        return _perform(x, x_scale, workspace, prepared, None, gathered)

    @allocating.register_fake
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
        # Not `shard_length`: the number of tokens may be a symbol.
        rows = x.shape[0] if gathered else (x.shape[0] + space.world_size - 1) // space.world_size
        return x.new_empty(rows, weight_of(prepared).n, dtype=torch.bfloat16)

    @torch.library.custom_op(f"dsv4::{name}_out", mutates_args=("order", "out"))
    def writing(
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
        order: torch.Tensor,
        workspace: str,
        prepared: str,
        out: torch.Tensor,
    ) -> None:
        _perform(x, x_scale, workspace, prepared, out, gathered)

    @writing.register_fake
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

    return allocating, writing


gemm_rs_op, gemm_rs_out_op = _define("gemm_rs", gathered=False)
gemm_ar_op, gemm_ar_out_op = _define("gemm_ar", gathered=True)
