# SPDX-License-Identifier: Apache-2.0
"""Other projects' kernels, where they are installed, as calls to measure beside ours.

`tile_kernels` (DeepSeek's TileKernels, from 2.0 on) has the post map, the collapse, and coefficients with
collapse from a projection that it leaves to others. A seam competes with the chain that it makes with the
fastest projection at hand, cuBLAS in BF16 with high and low parts of the weights, and torch's RMSNorm. That
chain is flattered: nobody in it computes the sum of squares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dsv4_mhc.bench.run import Operands

EPS = 1e-6


def tile_kernels_calls(o: Operands) -> dict[str, Callable[[], None]]:
    """Calls by the name of the case that they compare with; empty where TileKernels is missing or older."""
    try:
        from tile_kernels.mhc import mhc_post_fwd, mhc_pre_apply_mix_fwd, mhc_pre_big_fuse_fwd
    except ImportError:
        return {}
    tokens, hidden = o.output.shape
    w = o.weights
    partial = torch.zeros(1, tokens, 24, device="cuda")
    squares = torch.ones(1, tokens, device="cuda")
    comb = torch.empty(tokens, 16, device="cuda")
    narrow = torch.randn(48, 4 * hidden, device="cuda", dtype=torch.bfloat16)
    product = torch.empty(tokens, 48, device="cuda", dtype=torch.bfloat16)

    def post() -> None:
        streams = (o.residual.unsqueeze(0), o.post.view(1, tokens, 4, 1), o.comb.unsqueeze(0))
        mhc_post_fwd(o.output.unsqueeze(0), *streams, out=o.residual_out.unsqueeze(0))

    def fuse(residual: torch.Tensor) -> None:
        outs = (o.coefficients[1], comb, o.y)
        inputs = (partial, squares, w["scale"], w["base"], residual)
        mhc_pre_big_fuse_fwd(*inputs, *outs, EPS, EPS, EPS, 2.0, 20, n_splits=1)

    def chain() -> None:
        post()
        torch.mm(o.residual_out.flatten(1), narrow.T, out=product)
        fuse(o.residual_out)
        torch.nn.functional.rms_norm(o.y, (hidden,), w["norm"], EPS)

    return {
        "post/tile_kernels": post,
        "collapse/tile_kernels": lambda: mhc_pre_apply_mix_fwd(o.residual, o.carried, o.y),
        "pre_coupled/tile_kernels_without_projection": lambda: fuse(o.residual),
        "seam_coupled/tile_kernels_chain": chain,
    }
