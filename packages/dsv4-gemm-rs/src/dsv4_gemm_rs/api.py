# SPDX-License-Identifier: Apache-2.0
"""The public calls. They only put their arguments into the operators' form; there all is checked."""

from __future__ import annotations

import torch
from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs.op import Operator, gemm_ar_op, gemm_ar_out_op, gemm_rs_op, gemm_rs_out_op
from dsv4_gemm_rs.quantize import Mxfp8
from dsv4_gemm_rs.weights import PreparedWeight
from dsv4_gemm_rs.workspace import Workspace

Activations = torch.Tensor | Mxfp8 | tuple[torch.Tensor, torch.Tensor]


def gemm_rs(
    x: Activations,
    weight: PreparedWeight,
    workspace: Workspace,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row-parallel projection, then reduce-scatter over tokens: this rank's shard of the sum of x·Wᵀ.

    Collective: every rank of the workspace's group makes the same sequence of calls with equal M and N, on
    one stream. M may change from call to call and may be 0.

    Args:
        x: Activations [M, K], M at most the workspace's `max_tokens`: BF16 (quantised here for MXFP8
            weights),
            or already quantised as `quantize_mxfp8` returns them, or as a pair (E4M3 [M, K], E8M0 scales, 1-D
            swizzled 128x4 or row-major [M, K/32]). Rows may be strided by multiples of 16 bytes.
        weight: This rank's weight [N, K] from `prepare_weight`.
        workspace: This rank's workspace.
        out: BF16 [ceil(M / P), N] to write into; allocated when None. Later calls never touch it.

    Returns:
        BF16 [ceil(M / P), N]: rows [rank·L, (rank+1)·L) of the sum for L = ceil(M / P), zero at or past M.
        Each remote partial is rounded once to BF16, sums are FP32 in rank order: equal inputs, equal bits.

    Raises:
        ArgumentError: An argument is unusable; before anything is launched, alike on every rank.
        StaleWeightError: The weight's source changed since it was prepared.
        ClosedError: The workspace was closed.
        ExchangeError: A peer died, is late or runs another call. `out` is NaN and the workspace unusable.
    """
    return _call(gemm_rs_op, gemm_rs_out_op, x, weight, workspace, out)


def gemm_ar(
    x: Activations,
    weight: PreparedWeight,
    workspace: Workspace,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row-parallel projection, then all-reduce: the whole sum of x·Wᵀ on every rank.

    Collective, like `gemm_rs`, whose calls on the same workspace it may be mixed with. For where tokens are
    not split over ranks afterwards.

    Args:
        x: As for `gemm_rs`.
        weight: As for `gemm_rs`.
        workspace: This rank's workspace.
        out: BF16 [M, N] to write into; allocated when None. Later calls never touch it.

    Returns:
        BF16 [M, N], the same bits on every rank: row i is what `gemm_rs` gives the row's owner.

    Raises:
        ArgumentError: An argument is unusable; before anything is launched, alike on every rank.
        StaleWeightError: The weight's source changed since it was prepared.
        ClosedError: The workspace was closed.
        ExchangeError: A peer died, is late or runs another call. `out` is NaN and the workspace unusable.
    """
    return _call(gemm_ar_op, gemm_ar_out_op, x, weight, workspace, out)


def _call(
    allocating: Operator, writing: Operator, x: object, weight: object, workspace: object, out: object
) -> torch.Tensor:
    """Check the arguments' types and call the operator that allocates, or the one that writes into `out`."""
    if not isinstance(weight, PreparedWeight):
        raise ArgumentError("weight", type(weight).__name__, "a PreparedWeight, from prepare_weight")
    if not isinstance(workspace, Workspace):
        raise ArgumentError("workspace", type(workspace).__name__, "a Workspace, from Workspace.create")
    if out is not None and not isinstance(out, torch.Tensor):
        raise ArgumentError("out", type(out).__name__, "a tensor or None")
    data, scale = _data_and_scale(x)
    fixed = (*weight.memory, workspace.order, workspace.handle, weight.handle)
    if out is None:
        result: torch.Tensor = allocating(data, scale, *fixed)
        return result
    writing(data, scale, *fixed, out)
    return out


def _data_and_scale(x: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(x, torch.Tensor):
        return x, None
    if isinstance(x, Mxfp8):
        return x.data, x.scale
    if isinstance(x, tuple) and len(x) == 2 and all(isinstance(part, torch.Tensor) for part in x):
        return x
    raise ArgumentError("x", type(x).__name__, "a tensor, an Mxfp8, or a pair of tensors")
