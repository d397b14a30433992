# SPDX-License-Identifier: Apache-2.0
"""The projection's weights in the form that the kernels read.

A weight w becomes hi = BF16(w) and lo = BF16(w - hi); what is lost is at most 2^-17 of w. High and low parts
of eight rows are the sixteen rows of a matrix instruction (V4's head, which has four rows, fills up with
zeros). For each chunk of 32 hidden elements and each stream, the operand's fragments follow each other as the
lanes of a warp hold them (PTX ISA 9.4, 9.7.16.5.8, A of m16n8k16): eight elements a lane, which are two of
high parts, two of low parts, and the same of the next two elements.

    packed[c, i, b, s, r, l, 4 m + 2 p + e] = part p of fn[8 b + r, i H + 32 c + 8 l + 4 s + 2 m + e]

with i the stream, b a block of eight rows, and r, l the lane. [H / 32, 4, 3 or 1, 2, 256] BF16: the same
bytes as FP32 weights.
"""

from __future__ import annotations

import torch

from dsv4_mhc.errors import ArgumentError
from dsv4_mhc.plan import CHUNK, LANES, STREAMS, check_hidden

ROWS = 8
"""Rows of a block."""
FRAGMENT = 2 * ROWS * CHUNK // 2
"""Elements of an operand: high and low parts of half a chunk."""
SHAPES = {24: (STREAMS, 3, 2, FRAGMENT), 4: (STREAMS, 1, 2, FRAGMENT)}
"""Packed shape behind the chunks, for each number of rows."""


def pack_weight(fn: torch.Tensor) -> torch.Tensor:
    """Prepare `fn` once, when a model is loaded.

    Args:
        fn: [24, 4 H] FP32 of a site, or [4, 4 H] FP32 of V4's head; H a multiple of 64. The weight of the
            RMSNorm before the projection, if a checkpoint has one, is folded in already.

    Returns:
        [H / 32, 4, 3, 2, 256] or [H / 32, 4, 1, 2, 256] BF16, contiguous, on the same device.

    Raises:
        ArgumentError: Another shape or dtype.
    """
    if fn.dtype != torch.float32:
        raise ArgumentError("fn.dtype", fn.dtype, "torch.float32")
    if fn.dim() != 2 or fn.shape[0] not in (4, 24) or fn.shape[1] % STREAMS:
        raise ArgumentError("fn.shape", tuple(fn.shape), "(24, 4 H) or (4, 4 H)")
    hidden = fn.shape[1] // STREAMS
    check_hidden(hidden)
    high = fn.to(torch.bfloat16)
    low = (fn - high.float()).to(torch.bfloat16)
    blocks = -(-fn.shape[0] // ROWS)
    parts = torch.zeros(2, blocks * ROWS, STREAMS * hidden, dtype=torch.bfloat16, device=fn.device)
    parts[:, : fn.shape[0]] = torch.stack([high, low])
    split = parts.view(2, blocks, ROWS, STREAMS, hidden // CHUNK, LANES, 2, 2, 2)
    return (
        split.permute(4, 3, 1, 6, 2, 5, 7, 0, 8).reshape(hidden // CHUNK, STREAMS, blocks, 2, -1).contiguous()
    )


def unpack_weight(packed: torch.Tensor) -> torch.Tensor:
    """The weights that a packed tensor stands for, [R, 4 H] FP32: high plus low part, exact.

    Raises:
        ArgumentError: Not the shape or dtype that `pack_weight` gives.
    """
    shape = tuple(packed.shape)
    if packed.dtype != torch.bfloat16 or len(shape) != 5 or shape[1:] not in SHAPES.values():
        raise ArgumentError("weight", (packed.dtype, shape), "the result of pack_weight")
    rows = next(rows for rows, rest in SHAPES.items() if rest == shape[1:])
    split = packed.view(*shape[:4], ROWS, LANES, 2, 2, 2).permute(7, 2, 4, 1, 0, 5, 3, 6, 8)
    parts = split.reshape(2, -1, STREAMS * shape[0] * CHUNK)[:, :rows]
    return parts[0].float() + parts[1].float()
