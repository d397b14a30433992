# SPDX-License-Identifier: Apache-2.0
"""Argument checks that operators share. All raise `ArgumentError` before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dsv4_mhc.errors import ArgumentError
from dsv4_mhc.plan import CHUNK, FP8_GROUP, MAX_ELEMENTS, STREAMS, Quant, check_hidden, slice_count
from dsv4_mhc.weights import SHAPES


def check_tensor(
    name: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse another shape, dtype or device, and strides: rows of a larger matrix must be copied first."""
    if tensor.dtype != dtype:
        raise ArgumentError(f"{name}.dtype", tensor.dtype, str(dtype))
    if tuple(tensor.shape) != tuple(shape):
        raise ArgumentError(f"{name}.shape", tuple(tensor.shape), str(tuple(shape)))
    if tensor.device != device:
        raise ArgumentError(f"{name}.device", tensor.device, str(device))
    if not tensor.is_contiguous():
        raise ArgumentError(f"{name}.stride()", tensor.stride(), "a contiguous tensor")


def check_residual(residual: torch.Tensor, name: str = "residual") -> tuple[int, int]:
    """Tokens and hidden size of [T, 4, H] BF16."""
    if residual.dim() != 3 or residual.shape[1] != STREAMS:
        raise ArgumentError(f"{name}.shape", tuple(residual.shape), f"(T, {STREAMS}, H)")
    tokens, _, hidden = residual.shape
    check_hidden(hidden)
    if residual.numel() > MAX_ELEMENTS:
        raise ArgumentError(f"{name}.shape", tuple(residual.shape), f"at most {MAX_ELEMENTS} elements a call")
    check_tensor(name, residual, (tokens, STREAMS, hidden), torch.bfloat16, residual.device)
    return tokens, hidden


def check_post(
    residual: torch.Tensor,
    output: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
) -> None:
    """The finished sublayer's output and coefficients: all three or none."""
    given = [tensor is not None for tensor in (output, post, comb)]
    if any(given) and not all(given):
        raise ArgumentError("output, post, comb", given, "all three or none")
    if output is None or post is None or comb is None:
        return
    tokens, _, hidden = residual.shape
    check_tensor("output", output, (tokens, hidden), torch.bfloat16, residual.device)
    check_tensor("post", post, (tokens, STREAMS), torch.float32, residual.device)
    check_tensor("comb", comb, (tokens, STREAMS, STREAMS), torch.float32, residual.device)


def check_weight(
    residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, rows: int
) -> None:
    """A packed projection with its gates' scale and base; `rows` is 24, or 4 for V4's head."""
    hidden = residual.shape[2]
    check_tensor("weight", weight, (hidden // CHUNK, *SHAPES[rows]), torch.bfloat16, residual.device)
    check_tensor("scale", scale, (3 if rows > STREAMS else 1,), torch.float32, residual.device)
    check_tensor("base", base, (rows,), torch.float32, residual.device)


def check_norm(residual: torch.Tensor, norm_weight: torch.Tensor | None, name: str = "norm_weight") -> None:
    """An RMSNorm's weight, or None."""
    if norm_weight is not None:
        check_tensor(name, norm_weight, (residual.shape[2],), torch.bfloat16, residual.device)


def check_carried(residual: torch.Tensor, carried: torch.Tensor | None) -> None:
    """The pre that a seam carries to the next, or None."""
    if carried is not None:
        check_tensor("carried", carried, (residual.shape[0], STREAMS), torch.float32, residual.device)


def check_eps(**eps: float) -> None:
    """Small numbers that are added to denominators and gates."""
    for name, value in eps.items():
        if not (math.isfinite(value) and value >= 0):
            raise ArgumentError(name, value, "a finite number, 0 or more")


def check_quant(hidden: int, quant: str, y: bool) -> Quant:
    """The form of a sublayer's input."""
    try:
        form = Quant(quant)
    except ValueError:
        raise ArgumentError("quant", quant, f"one of {', '.join(Quant)}") from None
    if form is Quant.NONE and not y:
        raise ArgumentError("bf16", y, "True where nothing quantised is written")
    if form is Quant.FP8 and hidden // slice_count(hidden) % FP8_GROUP:
        raise ArgumentError(
            "quant", quant, f"none or mxfp8: a CTA's part of {hidden} is no multiple of {FP8_GROUP}"
        )
    return form


def check_alignment(**tensors: torch.Tensor | None) -> None:
    """Kernels access 16 bytes at a time."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % 16:
            raise ArgumentError(f"{name}.data_ptr()", tensor.data_ptr() % 16, "a multiple of 16")
