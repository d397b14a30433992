# SPDX-License-Identifier: Apache-2.0
"""Errors of the coefficients against FP64, beside those of a projection in TF32."""

from __future__ import annotations

from typing import Any

import torch

import dsv4_mhc
from dsv4_mhc import reference


def coefficient_errors(hidden: int, tokens: int = 1024) -> list[dict[str, Any]]:
    """Largest absolute errors of pre, post and comb on normal inputs; the rest after TF32's product is FP32.

    Returns:
        A row for each: measure, hidden, tokens, name, ours, tf32.
    """
    generator = torch.Generator("cuda").manual_seed(hidden)
    residual = torch.randn(tokens, 4, hidden, generator=generator, device="cuda").bfloat16()
    fn = torch.randn(24, 4 * hidden, generator=generator, device="cuda") * (4 * hidden) ** -0.5
    scale, base = torch.ones(3, device="cuda"), torch.zeros(24, device="cuda")
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    ours = dsv4_mhc.pre(residual, dsv4_mhc.pack_weight(fn), scale, base, norm_weight=norm)
    exact = reference.coefficients(reference.mixes(residual, fn, 1e-6), scale, base)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        mixed = reference.mixes(residual, fn, 1e-6, torch.float32)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    tf32 = reference.coefficients(mixed, scale, base)
    rows = []
    for name in ("pre", "post", "comb"):
        wanted = getattr(exact, name)
        one, two = (float((getattr(found, name) - wanted).abs().max()) for found in (ours, tf32))
        row = {"measure": "mhc-error", "hidden": hidden, "tokens": tokens, "name": name}
        rows.append({**row, "ours": one, "tf32": two})
    return rows
