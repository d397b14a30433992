# SPDX-License-Identifier: Apache-2.0
"""Calls of the SM90 GEMM + reduce-scatter kernel that are run on an H200 once and in the emulator ever after.

`record_gemm_rs.py` runs them on a GPU and keeps what came out in data/gemm_rs_h200.json (integer operands,
hashes) and data/gemm_rs_h200.npz (other operands, results); test_recorded_gemm_rs.py compares.

With integer operands each FP32 sum is exact in whatever order a matrix instruction takes, and the rest is
rounding to BF16, so results are equal bit for bit. With others the FP32 sums of two implementations differ
in their last bits. Such a difference shows where it moves a sum across the middle between two BF16 numbers:
`difference_allowed` bounds what that can do to a result, element by element.

Operands are made of NumPy's integers, because what PyTorch makes of a seed may change with its version; a
fingerprint of the operands goes with each recording all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig
from dsv4_gemm_rs.problems import RankProblem
from dsv4_gemm_rs.quantize import ScaleLayout, quantize_mxfp8, unswizzle_scales
from dsv4_gemm_rs.reference import dequantize, gemm_reduce_scatter
from dsv4_gemm_rs.weights import WeightKind, prepare_weight

CONFIGS = (KernelConfig(64, 128), KernelConfig(64, 256), KernelConfig(128, 160), KernelConfig(128, 128))
"""One and two instructions to a tile's rows, the narrowest and the widest."""
FP32_SUM = 2.0**-17
"""Bound of what two FP32 accumulations of one sum differ by, relative to the sum of its terms' magnitudes.

The longest sum here has 256 terms, 16 of them in one instruction. One instruction on standard normal values
was measured to differ by at most 2^-18 in a sum whose magnitudes add up to some 10, hence 2^-21 of them; 16
instructions follow each other.
"""
CHANGED = 1 / 64
"""Bound of the share of elements that differ at all.

FP32 sums that differ by d round to different BF16 numbers with probability d over a BF16 unit. One
instruction was measured to be off by 2^-18 where that unit is 2^-6, so 16 of them are by 2^-8 of it, times P
roundings. (Sums in FP32 in the opposite order, and FP64 sums, change one element in 10,000.)
"""


@dataclass(frozen=True)
class Case:
    """One call on P virtual ranks.

    Attributes:
        size: P.
        m: Rows.
        n: Output features.
        k: Input features of each rank.
        config: Tiles.
        kind: Operand type of the weight.
        exact: Whether operands are small integers.
    """

    size: int
    m: int
    n: int
    k: int
    config: KernelConfig
    kind: WeightKind
    exact: bool

    @property
    def name(self) -> str:
        """Of the recording."""
        tile = f"{self.config.tile_m}x{self.config.tile_n}"
        operands = "integers" if self.exact else "random"
        return f"P{self.size}-{self.m}x{self.n}x{self.k}-{tile}-{self.kind.value}-{operands}"

    def problems(self) -> list[RankProblem]:
        """The operands of each rank, on the CPU."""
        return [self._problem(rank) for rank in range(self.size)]

    def _problem(self, rank: int) -> RankProblem:
        rng = np.random.default_rng([self.size, self.m, self.n, self.k, rank, self.exact])
        if self.exact:
            x = torch.from_numpy(rng.integers(-4, 5, (self.m, self.k), dtype=np.int32)).to(torch.bfloat16)
            w = torch.from_numpy(rng.integers(-3, 4, (self.n, self.k), dtype=np.int32)).to(torch.bfloat16)
        else:
            # Rows of x differ in magnitude by powers of two; BF16 rounds both.
            spread = torch.from_numpy(np.exp2(rng.integers(-3, 4, (self.m, 1)))).double()
            x = (_uniform(rng, self.m, self.k) * spread).to(torch.bfloat16)
            w = (_uniform(rng, self.n, self.k) * self.k**-0.5).to(torch.bfloat16)
        if self.kind is WeightKind.BF16:
            return RankProblem(x, prepare_weight(w), x.double(), w.double())
        quantised, seen = quantize_mxfp8(w), quantize_mxfp8(x, layout=ScaleLayout.ROW_MAJOR)
        return RankProblem(
            x,
            prepare_weight(quantised.data, quantised.scale),
            dequantize(seen.data, seen.scale),
            dequantize(quantised.data, unswizzle_scales(quantised.scale, self.n, self.k)),
        )


def _uniform(rng: np.random.Generator, rows: int, columns: int) -> torch.Tensor:
    """FP64 from -2 to 2."""
    return torch.from_numpy(rng.integers(-(2**20), 2**20, (rows, columns))).double() / 2**19


def _cases() -> list[Case]:
    narrow, wide, two, square = CONFIGS
    bf16, mxfp8 = WeightKind.BF16, WeightKind.MXFP8
    exact = [
        *(Case(size, m, 192, 128, narrow, bf16, True) for size, m in ((1, 65), (2, 131), (4, 129))),
        Case(2, 201, 128, 128, square, bf16, True),
        *(Case(size, m, 320, 64, two, bf16, True) for size, m in ((1, 129), (2, 257), (4, 3))),
        *(Case(size, m, 320, 64, wide, bf16, True) for size, m in ((2, 131), (4, 257))),
        *(Case(size, m, 128, 256, narrow, mxfp8, True) for size, m in ((1, 67), (2, 131), (4, 131))),
        Case(4, 129, 320, 128, two, mxfp8, True),
    ]
    other = [
        Case(1, 65, 192, 256, narrow, bf16, False),
        Case(2, 131, 128, 256, square, bf16, False),
        Case(4, 131, 192, 256, two, bf16, False),
        Case(2, 67, 320, 256, wide, mxfp8, False),
        Case(4, 131, 128, 256, narrow, mxfp8, False),
    ]
    return exact + other


CASES = tuple(_cases())


def on_tiles(config: KernelConfig) -> mock._patch[mock.MagicMock | mock.AsyncMock]:
    """Have every call choose `config`, for as long as this is entered."""
    return mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=config)


def fingerprint(problems: Sequence[RankProblem]) -> str:
    """Of the operands."""
    digest = hashlib.sha256()
    for problem in problems:
        for tensor in (problem.x, problem.weight.data, problem.weight.scale):
            if tensor is not None:
                digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def joined(outs: Sequence[torch.Tensor]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """The ranks' BF16 shards one below the other, as bits."""
    bits: np.ndarray[tuple[int, ...], np.dtype[np.uint16]] = (
        torch.cat([out.cpu() for out in outs]).view(torch.uint16).numpy()
    )
    return bits


def values(bits: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]) -> torch.Tensor:
    """BF16 bits as FP64."""
    return torch.from_numpy(bits.astype(np.int32) << 16).view(torch.float32).double()


def difference_allowed(problems: Sequence[RankProblem]) -> torch.Tensor:
    """Largest difference of two right results of one call, as `joined`: FP64 [P * ceil(M / P), N].

    A remote partial and the result each may round to the next BF16 number: one unit in the last place, at
    most 2^-7 of the value. The FP32 sums below them differ by `FP32_SUM` of the magnitudes.
    """
    xs, ws = [p.x_exact for p in problems], [p.weight_exact for p in problems]
    partials = [gemm_reduce_scatter([x], [w])[0] for x, w in zip(xs, ws, strict=True)]
    magnitudes = sum(x.abs() @ w.abs().T for x, w in zip(xs, ws, strict=True))
    assert isinstance(magnitudes, torch.Tensor)
    length = -(-xs[0].shape[0] // len(problems))
    owners = torch.arange(xs[0].shape[0]) // length
    allowed = FP32_SUM * magnitudes
    wire = torch.zeros_like(allowed)
    for rank, partial in enumerate(partials):
        wire += torch.where(owners[:, None] == rank, 0.0, partial.abs() * 2.0**-7)
    total = sum(partials[1:], start=partials[0]).abs()
    allowed = allowed + wire + (total + wire) * 2.0**-7
    padded = torch.zeros(length * len(problems), allowed.shape[1], dtype=torch.float64)
    padded[: allowed.shape[0]] = allowed
    return padded
