# SPDX-License-Identifier: Apache-2.0
"""Matrices that a quantiser may get wrong."""

from __future__ import annotations

import torch


def adversarial(rows: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """CPU matrix whose rows cycle through random bits, normal numbers and special values."""
    generator = torch.Generator().manual_seed(seed)
    word = torch.int32 if dtype is torch.float32 else torch.int16
    info = torch.iinfo(word)
    bits = torch.randint(info.min, info.max + 1, (rows, k), dtype=torch.int64, generator=generator)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    x[::4] = bits.to(word).view(dtype)[::4]
    limits = torch.finfo(dtype)
    smallest = limits.smallest_normal * limits.eps
    pool = [0.0, -0.0, smallest, -smallest, limits.tiny, limits.max, limits.min, 448.0, 450.0, 480.0]
    pool += [1.0, float("nan"), float("inf"), -float("inf")]
    special = torch.tensor(pool, dtype=torch.float64).to(dtype)
    x[1::8] = special[torch.randint(0, len(pool), x[1::8].shape, generator=generator)]
    x[2::16] = 0.0
    x[3::16] = -0.0
    x[7::16] = float("nan")
    x[5::16] = (x[5::16].float() * 2.0**-130).to(dtype)
    return x
