# SPDX-License-Identifier: Apache-2.0
"""The one check of a call's arguments, made before anything is launched, from facts equal on all ranks.

Ranks of one group pass equal shapes, so they raise alike or not at all, the call sequence stays in step and
the workspace stays usable. What only a device could tell (NaN in activations or their scales) is not
checked: it comes out as NaN in the rows that it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.layout import shard_length

from dsv4_gemm_rs.dispatch import Problem
from dsv4_gemm_rs.quantize import swizzled_scale_numel
from dsv4_gemm_rs.weights import BLOCK, Activation, PreparedWeight, WeightKind
from dsv4_gemm_rs.workspace import Workspace

_ALIGNMENT = 16


@dataclass(frozen=True)
class Operands:
    """A call's checked arguments.

    Attributes:
        x: BF16 or E4M3 [M, K], unit column stride.
        x_scale: E8M0 bytes for E4M3 activations: uint8, swizzled 1-D or row-major [M, K/32]; else None.
        weight: The prepared weight.
        m: Rows of `x`.
    """

    x: torch.Tensor
    x_scale: torch.Tensor | None
    weight: PreparedWeight
    m: int

    @property
    def kind(self) -> WeightKind:
        """What is multiplied: MXFP8 by MXFP8, or BF16 where a side stays in it, see `Activation`."""
        left_alone = self.x_scale is None and self.weight.activation is Activation.BF16
        return WeightKind.BF16 if left_alone else self.weight.kind

    @property
    def problem(self) -> Problem:
        """The call as decisions see it; equal on all ranks where their operands are of one kind."""
        return Problem(self.m, self.weight.n, self.weight.k, self.kind, self.weight.packed is not None)


def check_operands(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: PreparedWeight,
    workspace: Workspace,
    out: torch.Tensor | None,
    *,
    gathered: bool = False,
) -> Operands:
    """Check one call of `gemm_rs`, or of `gemm_ar` (`gathered`), against its weight and its workspace.

    Raises:
        ArgumentError: Names the argument, what it is and what was expected.
        StaleWeightError: The weight's source changed.
        ClosedError: The workspace was closed.
        ExchangeError: An earlier call on this workspace lost a peer.
    """
    workspace.check()
    weight.check()
    check_devices(x, x_scale, weight, workspace, out)
    if weight.n > workspace.n:
        raise ArgumentError("weight", weight.n, f"N of at most {workspace.n}, the workspace's n")
    if x.dim() != 2 or x.shape[1] != weight.k:
        raise ArgumentError("x", tuple(x.shape), f"[M, {weight.k}]")
    m = x.shape[0]
    if m > workspace.max_tokens:
        raise ArgumentError("x", m, f"at most {workspace.max_tokens} rows, the workspace's max_tokens")
    if x.stride(1) != 1 and m > 0:
        raise ArgumentError("x", x.stride(), "unit stride along K")
    row_bytes = x.stride(0) * x.element_size()
    if m > 1 and (row_bytes % _ALIGNMENT or x.stride(0) < x.shape[1]):
        raise ArgumentError("x", x.stride(), f"distinct rows, {_ALIGNMENT}-byte multiples apart")
    if m > 0 and x.data_ptr() % _ALIGNMENT:
        raise ArgumentError("x", f"address {x.data_ptr():#x}", f"a {_ALIGNMENT}-byte aligned address")
    if x.dtype == torch.bfloat16:
        if x_scale is not None:
            raise ArgumentError("x_scale", tuple(x_scale.shape), "None for BF16 activations")
    elif x.dtype == torch.float8_e4m3fn and weight.kind is WeightKind.MXFP8:
        x_scale = _check_scale(x, x_scale)
    else:
        allowed = "bfloat16" if weight.kind is WeightKind.BF16 else "bfloat16 or float8_e4m3fn"
        raise ArgumentError("x", x.dtype, f"{allowed} for {weight.kind.value} weights")
    if out is not None:
        rows = m if gathered else shard_length(m, workspace.world_size)
        _check_out(out, (rows, weight.n), "M rows" if gathered else "ceil(M / P) rows")
    return Operands(x, x_scale, weight, m)


def check_devices(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: PreparedWeight,
    workspace: Workspace,
    out: torch.Tensor | None,
) -> None:
    """Check that every tensor is on the workspace's device.

    Apart from the other checks, since operators are routed by device before those are made.

    Raises:
        ArgumentError: One is elsewhere.
    """
    for name, tensor in (("weight", weight.memory[0]), ("x", x), ("x_scale", x_scale), ("out", out)):
        if tensor is not None and tensor.device != workspace.device:
            raise ArgumentError(name, str(tensor.device), f"{workspace.device}, the workspace's device")


def _check_scale(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    m, k = x.shape
    if not isinstance(scale, torch.Tensor):
        raise ArgumentError("x_scale", scale, "E8M0 scale factors for E4M3 activations")
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ArgumentError("x_scale", scale.dtype, "uint8 or float8_e8m0fnu")
    shapes = [(swizzled_scale_numel(m, k),), (m, k // BLOCK)]
    if tuple(scale.shape) not in shapes:
        raise ArgumentError(
            "x_scale", tuple(scale.shape), f"{shapes[0]} swizzled 128x4 or {shapes[1]} row-major"
        )
    if not scale.is_contiguous():
        raise ArgumentError("x_scale", scale.stride(), "a contiguous tensor")
    if scale.data_ptr() % _ALIGNMENT and scale.dim() == 1 and m > 0:
        raise ArgumentError("x_scale", f"address {scale.data_ptr():#x}", "a 16-byte aligned address")
    return scale.view(torch.uint8)


def _check_out(out: torch.Tensor, shape: tuple[int, int], rows: str) -> None:
    if tuple(out.shape) != shape:
        raise ArgumentError("out", tuple(out.shape), f"{shape}, {rows}")
    if out.dtype != torch.bfloat16:
        raise ArgumentError("out", out.dtype, "bfloat16")
    if not out.is_contiguous():
        raise ArgumentError("out", out.stride(), "a contiguous tensor")
    if out.data_ptr() % _ALIGNMENT and out.numel():
        raise ArgumentError("out", f"address {out.data_ptr():#x}", f"a {_ALIGNMENT}-byte aligned address")
