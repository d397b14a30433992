# SPDX-License-Identifier: Apache-2.0
"""What the operation means, written once more from the definitions and sharing no code with the kernels.

E4M3 and E8M0 are decoded here by table from their bit fields (OCP MX specification v1.0, tables 2 and 7),
the partial is a plain matrix product in FP32 or FP64, and the sum runs over whole matrices. Nothing of
`quantize`, of the exchange or of the schedule is used.

`rounded` repeats the operation's own two roundings (a remote partial to BF16 for the wire, the sum to BF16)
on FP64 partials (where sums are read through multicast, of every partial); a result is accepted when its
error is below twice that of `rounded`, plus 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

ABSOLUTE_TOLERANCE = 1e-5


def decode_e4m3(data: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Values of E4M3 bytes: sign, 4 exponent bits of bias 7, 3 fraction bits; 0x7F and 0xFF are NaN."""
    table = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, fraction = (code >> 3) & 0xF, code & 0x7
        if code & 0x7F == 0x7F:
            table.append(math.nan)
        elif exponent == 0:
            table.append(sign * fraction * 2.0**-9)
        else:
            table.append(sign * (8 + fraction) * 2.0 ** (exponent - 10))
    values = torch.tensor(table, dtype=dtype, device=data.device)
    return values[data.view(torch.uint8).int()]


def decode_e8m0(scale: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Values of E8M0 bytes: 2^(byte - 127); 255 is NaN."""
    table = [2.0 ** (code - 127) for code in range(255)] + [math.nan]
    return torch.tensor(table, dtype=dtype, device=scale.device)[scale.view(torch.uint8).int()]


def dequantize(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """An MXFP8 matrix as plain numbers.

    Args:
        data: E4M3 [R, K].
        scale: E8M0 bytes, row-major [R, K/32].
        dtype: float32 or float64; both hold every product exactly except FP32 below its smallest subnormal.
    """
    rows, k = data.shape
    blocks = decode_e4m3(data, dtype).view(rows, k // 32, 32)
    return (blocks * decode_e8m0(scale, dtype).unsqueeze(-1)).view(rows, k)


def gemm_reduce_scatter(
    activations: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Every rank's shard of the summed product, without any rounding but `dtype`'s.

    Args:
        activations: Each rank's [M, K], already dequantised.
        weights: Each rank's [N, K], already dequantised.
        dtype: Precision of the products and sums.

    Returns:
        Each rank's [ceil(M / P), N] of `dtype`; rows at or past M are zero.
    """
    partials = (a.to(dtype) @ w.to(dtype).T for a, w in zip(activations, weights, strict=True))
    return _split(sum(partials, start=next(partials)), len(activations))


def rounded(
    activations: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *, multicast: bool = False
) -> list[torch.Tensor]:
    """Every rank's shard as BF16, with the operation's own roundings applied to FP64 partials.

    A rank's own partial is rounded, too, where its sum is read through `multicast`.
    """
    partials = [a.double() @ w.double().T for a, w in zip(activations, weights, strict=True)]
    world_size = len(partials)
    shards = [_split(partial, world_size) for partial in partials]
    results = []
    for rank in range(world_size):
        terms = [
            shards[source][rank]
            if source == rank and not multicast
            else shards[source][rank].to(torch.bfloat16).double()
            for source in range(world_size)
        ]
        results.append(sum(terms[1:], start=terms[0]).to(torch.bfloat16))
    return results


def worst_error(results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Largest absolute difference over all ranks; NaN anywhere gives NaN."""
    errors = [(r.double() - e.double()).abs().max() for r, e in zip(results, exact, strict=True) if e.numel()]
    return float(torch.stack(errors).max()) if errors else 0.0


def allowed_error(rounding: float) -> float:
    """Largest error of a correct result, given that of `rounded`: twice it, plus 1e-5."""
    return 2 * rounding + ABSOLUTE_TOLERANCE


def tolerance(
    activations: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *, multicast: bool = False
) -> float:
    """Largest error that a correct result of this problem may have, by `allowed_error`; see `rounded`."""
    exact = gemm_reduce_scatter(activations, weights)
    return allowed_error(worst_error(rounded(activations, weights, multicast=multicast), exact))


def _split(total: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    m, n = total.shape
    length = (m + world_size - 1) // world_size
    padded = total.new_zeros(length * world_size, n)
    padded[:m] = total
    return list(padded.view(world_size, length, n).unbind(0))
