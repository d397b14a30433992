# SPDX-License-Identifier: Apache-2.0
"""`stream_mean`: auxiliary hidden states, and the head of models that have no learned one."""

from __future__ import annotations

from typing import cast

import torch

from dsv4_mhc import compile as compilation
from dsv4_mhc import reference
from dsv4_mhc.ops.checks import check_alignment, check_residual
from dsv4_mhc.ops.library import Result, Results, copy_to, define


def _describe(residual: torch.Tensor) -> Results:
    return (Result(check_residual(residual), torch.bfloat16),)


def _cpu(residual: torch.Tensor, mean_out: torch.Tensor) -> None:
    copy_to([mean_out], [reference.stream_mean(residual, torch.float32)])


def launch(residual: torch.Tensor, mean_out: torch.Tensor) -> None:
    """Run the kernel on checked arguments."""
    check_alignment(residual=residual, mean_out=mean_out)
    variant = compilation.Variant("mean", (residual.shape[2],))
    with compilation.on_device(residual):
        compilation.kernel_for(variant, residual.device)(residual, mean_out)


define("stream_mean", "Tensor residual", ["mean_out"], describe=_describe, cpu=_cpu, cuda=launch)


def stream_mean(residual: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Mean of the streams.

    Args:
        residual: [T, 4, H] BF16, contiguous; H a multiple of 64.
        out: [T, H] BF16 to write into.

    Returns:
        [T, H] BF16, FP32 sum rounded once.

    Raises:
        ArgumentError: Another shape, dtype, stride or device.
        UnsupportedError: No kernel for this device.
    """
    if out is None:
        return cast(torch.Tensor, torch.ops.dsv4_mhc.stream_mean(residual))
    torch.ops.dsv4_mhc.stream_mean_out(residual, out)
    return out
