# SPDX-License-Identifier: Apache-2.0
"""The projection's weights in the form that the kernels read.

A weight w becomes hi = BF16(w) and lo = BF16(w - hi); what is lost is at most 2^-17 of w. The parts are
stacked as rows and cut into chunks of 32 hidden elements, so that a chunk of one CTA is one piece of memory:

    packed[c, p R + r, 32 i + e] = part p of fn[r, i H + 32 c + e]      [H / 32, 2 R, 128] BF16

with i the stream. The same bytes as FP32 weights.
"""

from __future__ import annotations

import torch

from dsv4_mhc.errors import ArgumentError
from dsv4_mhc.plan import CHUNK, DEPTH, STREAMS, check_hidden


def pack_weight(fn: torch.Tensor) -> torch.Tensor:
    """Prepare `fn` once, when a model is loaded.

    Args:
        fn: [24, 4 H] FP32 of a site, or [4, 4 H] FP32 of V4's head; H a multiple of 64. The weight of the
            RMSNorm before the projection, if a checkpoint has one, is folded in already.

    Returns:
        [H / 32, 48, 128] or [H / 32, 8, 128] BF16, contiguous, on the same device.

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
    rows = 2 * fn.shape[0]
    parts = torch.cat([high, low]).view(rows, STREAMS, hidden // CHUNK, CHUNK)
    return parts.permute(2, 0, 1, 3).reshape(hidden // CHUNK, rows, DEPTH).contiguous()


def unpack_weight(packed: torch.Tensor) -> torch.Tensor:
    """The weights that a packed tensor stands for, [R, 4 H] FP32: high plus low part, exact.

    Raises:
        ArgumentError: Not the shape or dtype that `pack_weight` gives.
    """
    if (
        packed.dtype != torch.bfloat16
        or packed.dim() != 3
        or packed.shape[1] not in (8, 48)
        or packed.shape[2] != DEPTH
    ):
        raise ArgumentError("weight", (packed.dtype, tuple(packed.shape)), "the result of pack_weight")
    chunks, rows, _ = packed.shape
    parts = (
        packed.view(chunks, rows, STREAMS, CHUNK).permute(1, 2, 0, 3).reshape(rows, STREAMS * chunks * CHUNK)
    )
    return parts[: rows // 2].float() + parts[rows // 2 :].float()
