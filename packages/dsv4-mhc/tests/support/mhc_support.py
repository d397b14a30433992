# SPDX-License-Identifier: Apache-2.0
"""Inputs of a seam, and what a result is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from dsv4_mhc import Seam, pack_weight, reference

COEFFICIENT_ERROR = 1e-5
"""Largest error of a coefficient against FP64, where scales are of the size of `Problem.make`'s."""
EQUAL_SHARE = 0.999
"""Share of BF16 results that equal those of FP64 arithmetic bit for bit; the others are neighbours."""
SUM_ERROR = 2.0**-22
"""Of a sum of four products in FP32, of the sum of their magnitudes: a rounding of 2^-24 for each."""
NORM_ERROR = 2.0**-20
"""Of y / rms times a weight in FP32 before it is rounded: a sum over H in parts, rsqrt, two products."""
SMALLEST = 2.0**-147
"""What roundings to FP32 add where numbers are denormal."""


@dataclass
class Problem:
    """Everything a seam takes; coefficients are those of a plausible seam before."""

    residual: torch.Tensor
    output: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    carried: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor
    memory: torch.Tensor
    query_weight: torch.Tensor
    key_weight: torch.Tensor
    open_gate: torch.Tensor
    head_fn: torch.Tensor

    @staticmethod
    def make(tokens: int, hidden: int, *, seed: int = 0, device: str = "cpu", size: float = 1.0) -> Problem:
        """Random inputs, the same for the same arguments on the same kind of device."""
        generator = torch.Generator(device).manual_seed(seed * 100_003 + hidden)

        def fixed(*shape: int, gain: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device) * gain

        def rows(*shape: int) -> torch.Tensor:
            return fixed(tokens, *shape)

        streams = rows(4, hidden) * size
        return Problem(
            residual=streams.bfloat16(),
            output=rows(hidden).bfloat16(),
            post=2 * torch.sigmoid(rows(4)),
            comb=reference.sinkhorn(rows(4, 4), 20, 1e-6),
            carried=torch.sigmoid(rows(4)),
            fn=fixed(24, 4 * hidden, gain=(4 * hidden) ** -0.5),
            scale=torch.tensor([0.7, 1.1, 1.9], device=device),
            base=fixed(24, gain=0.5),
            norm_weight=(1 + fixed(hidden, gain=0.2)).bfloat16(),
            memory=rows(5, hidden).bfloat16(),
            query_weight=(1 + fixed(hidden, gain=0.2)).bfloat16(),
            key_weight=(1 + fixed(hidden, gain=0.2)).bfloat16(),
            open_gate=(torch.arange(tokens, device=device) % 3 != 1).to(torch.uint8),
            head_fn=fixed(4, 4 * hidden, gain=(4 * hidden) ** -0.5),
        )

    @property
    def weight(self) -> torch.Tensor:
        """The packed projection."""
        return pack_weight(self.fn)

    def seam_arguments(self) -> tuple[torch.Tensor, ...]:
        """Positional arguments of `seam`."""
        return (self.residual, self.output, self.post, self.comb, self.weight, self.scale, self.base)


def ulps(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Distance in BF16 numbers; 0 between NaNs."""

    def order(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    both = found.isnan() & wanted.isnan()
    return (order(found) - order(wanted)).abs().masked_fill(both, 0)


def assert_rounded(found: torch.Tensor, wanted: torch.Tensor, share: float = EQUAL_SHARE) -> None:
    """BF16 results of one rounding equal the oracle's, but for neighbours in few places."""
    if not found.numel():
        assert found.shape == wanted.shape
        return
    distance = ulps(found, wanted)
    near = (found.float() - wanted.float()).abs() <= 2e-6 * wanted.float().abs().amax().clamp(min=1e-30)
    far = distance.masked_fill(near, 0)
    assert (far <= 1).all(), f"{int(far.max())} BF16 numbers apart"
    equal = (distance == 0).float().mean().item()
    assert equal >= share or int((distance > 0).sum()) <= 2, f"only {equal:.5f} equal"


def assert_input(
    found: torch.Tensor,
    streams: torch.Tensor,
    gains: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    exact_statistic: bool = False,
    gain_error: float = 0.0,
) -> None:
    """A sublayer's input lies where FP32 arithmetic on these streams and gains can lead, and nowhere else.

    It is rounded twice: before the norm and after it. A sum that is a tie to within FP32's error may become
    either neighbour, and one BF16 number before the norm is up to two after it. So the sum's lower and upper
    bound go through the norm, and the result lies between what they give; for nearly all elements both are
    the same number.
    """
    exact = reference.weighted(streams, gains)
    magnitude = reference.weighted(streams.abs(), gains.abs())
    slack = SUM_ERROR * magnitude + gain_error * streams.double().abs().sum(1) + SMALLEST
    low, high = (exact - slack).bfloat16().double(), (exact + slack).bfloat16().double()
    if norm_weight is not None:
        bounds = torch.stack([exact - slack, exact + slack] if exact_statistic else [low, high])
        crosses = bounds[0] * bounds[1] <= 0
        least = bounds.abs().amin(0).masked_fill(crosses, 0).square().mean(-1, keepdim=True)
        most = bounds.abs().amax(0).square().mean(-1, keepdim=True)
        inverses = [torch.rsqrt(square + norm_eps) for square in (most, least)]
        inverses = [inverses[0] * (1 - NORM_ERROR), inverses[1] * (1 + NORM_ERROR)]
        ends = torch.stack([y * inverse * norm_weight.double() for y in (low, high) for inverse in inverses])
        low, high = ends.amin(0) - SMALLEST, ends.amax(0) + SMALLEST
    low, high = low.bfloat16(), high.bfloat16()
    outside = ~((low <= found) & (found <= high))
    assert not outside.any(), (
        f"{int(outside.sum())} of {outside.numel()} outside: {found[outside][:4].tolist()} not between "
        f"{low[outside][:4].tolist()} and {high[outside][:4].tolist()}"
    )


def assert_coefficients(
    found: Seam, wanted: reference.Coefficients, error: float = COEFFICIENT_ERROR
) -> None:
    """Coefficients are within `error` of FP64's."""
    for name in ("pre", "post", "comb"):
        value, exact = getattr(found, name), getattr(wanted, name)
        assert torch.equal(value.isnan(), exact.isnan()), name
        difference = (value.double() - exact).nan_to_num(0).abs().max().item() if value.numel() else 0.0
        assert difference <= error, f"{name}: {difference:.2e}"


def assert_seam(
    found: Seam,
    problem: Problem,
    *,
    shifted: bool,
    start: torch.Tensor | None = None,
    streams: torch.Tensor | None = None,
    error: float = COEFFICIENT_ERROR,
    **options: Any,
) -> None:
    """Each stage against FP64 on what the stages before it gave.

    A BF16 neighbour in the streams would otherwise show up in everything that follows.
    """
    if found.residual is not None:
        wanted = streams
        if wanted is None:
            wanted = reference.post(problem.residual, problem.output, problem.post, problem.comb)
        assert_rounded(found.residual, wanted)
        start = found.residual
    assert start is not None
    carried = problem.carried if shifted else None
    _, coefficients = reference.pre(
        start, problem.fn, problem.scale, problem.base, carried=carried, **options
    )
    assert_coefficients(found, coefficients, error)
    gains = problem.carried if shifted else found.pre
    norm = {name: options[name] for name in ("norm_eps", "exact_statistic") if name in options}
    if found.y is not None:
        assert_input(found.y, start, gains, options.get("norm_weight"), **norm)
    if found.mean is not None:
        assert_rounded(found.mean, reference.stream_mean(start))
    if found.codes is not None and found.scales is not None and found.y is not None:
        assert_quantized(found)


def assert_quantized(found: Seam) -> None:
    """Codes and scales are those of the BF16 result."""
    assert found.y is not None
    assert found.codes is not None
    assert found.scales is not None
    if found.scales.dtype == torch.uint8:
        codes, scales = reference.quantize_mxfp8(found.y)
        assert torch.equal(found.scales, reference.swizzle_scales(scales))
        assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
    else:
        codes, scales = reference.quantize_fp8(found.y)
        torch.testing.assert_close(found.scales, scales, rtol=1e-6, atol=0, equal_nan=True)
        one, two = found.codes.float(), codes.float()
        assert torch.equal(one.isnan(), two.isnan())
        # 448 / amax and the product with it round twice; a tie between codes may fall either way.
        assert ((one == two) | one.isnan()).float().mean() >= 0.99
