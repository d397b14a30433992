# SPDX-License-Identifier: Apache-2.0
"""The libraries' block-scaled products as the unfused path calls them, held to what they accept.

No CPU has either. Stand-ins refuse what the real ones refuse (FlashInfer 0.6.18: what `mm_mxfp8` checks and
its CUTLASS binding; PyTorch 2.13: `_scaled_mm` with a scale for each 32 elements), and multiply what they
were given in FP64.
"""

from __future__ import annotations

import builtins
import logging
import sys
import types
from typing import Any

import pytest
import torch
from dsv4_gemm_rs import WeightKind, workspace
from dsv4_gemm_rs.dispatch import Gemm, Machine, Path, Problem, decide
from dsv4_gemm_rs.dispatch.decide import FLASHINFER_LEAST_N
from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.problems import RankProblem, random_problem
from dsv4_gemm_rs.quantize import quantize_mxfp8, swizzled_scale_numel, unswizzle_scales
from dsv4_gemm_rs.reference import dequantize
from dsv4_gemm_rs.unfused import library_gemm
from dsv4_gemm_rs.workspace import FUSED_ARCHS

BLOCK_SCALED = (Gemm.FLASHINFER, Gemm.SCALED_MM)
B200 = Machine(100, 4, True, True, True, True, 148, FUSED_ARCHS)


def multiplied(x: torch.Tensor, weight: torch.Tensor, scales: list[torch.Tensor]) -> torch.Tensor:
    plain = [
        dequantize(data, unswizzle_scales(scale, *data.shape))
        for data, scale in zip((x, weight), scales, strict=True)
    ]
    return (plain[0] @ plain[1].T).to(torch.bfloat16)


def mm_mxfp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    m, k = a.shape
    n = b.shape[1]
    assert not use_8x4_sf_layout
    assert backend == "auto"
    if m < 1 or n < 128 or k < 128 or b.shape[0] != k:
        raise ValueError(f"MXFP8 requires n >= 128 and k >= 128, got m={m}, n={n}, k={k}")
    for matrix, scale in ((a, a_descale), (b.T, b_descale)):
        if matrix.dtype != torch.float8_e4m3fn or not matrix.is_contiguous():
            raise ValueError("a dense E4M3 matrix, b column-major")
        if scale.dtype != torch.uint8 or scale.shape != (swizzled_scale_numel(*matrix.shape),):
            raise ValueError("1-D swizzled scales")
    product = multiplied(a, b.T, [a_descale, b_descale])
    if out is None:
        return product
    if out.shape != (m, n) or out.dtype != out_dtype:
        raise ValueError("out")
    return out.copy_(product)


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    assert out_dtype == torch.bfloat16
    for matrix, scale in ((a, scale_a), (b.T, scale_b)):
        if matrix.dtype != torch.float8_e4m3fn or matrix.stride(1) != 1 or matrix.stride(0) % 16:
            raise RuntimeError("row-major by column-major, leading dimensions multiples of 16")
        if scale.dtype != torch.float8_e8m0fnu or not scale.is_contiguous():
            raise RuntimeError("contiguous E8M0 scales")
        if scale.numel() != swizzled_scale_numel(*matrix.shape) or 0 in matrix.shape:
            raise RuntimeError("scales of whole 128x4 blocks")
    return multiplied(a, b.T, [scale.view(torch.uint8) for scale in (scale_a, scale_b)])


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flashinfer")
    module.mm_mxfp8 = mm_mxfp8  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


def strided(matrix: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(matrix.shape[0], matrix.shape[1] + 64, dtype=matrix.dtype)
    wide[:, : matrix.shape[1]] = matrix
    return wide[:, : matrix.shape[1]]


def operands_of(problem: RankProblem, form: str) -> Operands:
    m = problem.x.shape[0]
    if form == "bf16":
        return Operands(problem.x, None, problem.weight, m)
    quantised = quantize_mxfp8(problem.x)
    if form == "quantised":
        return Operands(quantised.data, quantised.scale, problem.weight, m)
    return Operands(strided(quantised.data), quantised.scale, problem.weight, m)


@pytest.mark.parametrize("given_out", [False, True])
@pytest.mark.parametrize("form", ["bf16", "quantised", "strided"])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 128, 128), (1, 192, 128), (127, 128, 384), (130, 320, 128)])
@pytest.mark.parametrize("gemm", BLOCK_SCALED)
def test_right_within_what_they_accept(
    gemm: Gemm, m: int, n: int, k: int, form: str, given_out: bool
) -> None:
    problem = random_problem(m, n, k, WeightKind.MXFP8, "cpu", seed=m + n)
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16) if given_out else None
    product = library_gemm(operands_of(problem, form), gemm, out)
    assert out is None or product is out
    assert torch.equal(product, (problem.x_exact @ problem.weight_exact.T).to(torch.bfloat16))


def test_few_columns_go_to_pytorch() -> None:
    narrow, wide = (
        Problem(8, n, 128, WeightKind.MXFP8) for n in (FLASHINFER_LEAST_N - 64, FLASHINFER_LEAST_N)
    )
    assert [decide(B200, problem, Path.UNFUSED).gemm for problem in (narrow, wide)] == [
        Gemm.SCALED_MM,
        Gemm.FLASHINFER,
    ]
    problem = random_problem(8, narrow.n, narrow.k, WeightKind.MXFP8, "cpu", seed=1)
    assert library_gemm(operands_of(problem, "bf16"), Gemm.SCALED_MM).shape == (8, narrow.n)
    with pytest.raises(ValueError, match="n >= 128"):
        library_gemm(operands_of(problem, "bf16"), Gemm.FLASHINFER)


class Device:
    """As much of an accelerator as decides about FlashInfer."""

    def __init__(self, arch: int, emulated: bool = False) -> None:
        self.arch, self.emulated = arch, emulated


def test_flashinfer_counts_where_its_product_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def found(device: Any) -> bool:
        return workspace._flashinfer_multiplies(device)

    assert [found(each) for each in (Device(100), Device(103))] == [True, True]
    assert not any(found(each) for each in (None, Device(90), Device(100, emulated=True)))
    monkeypatch.delattr(sys.modules["flashinfer"], "mm_mxfp8")
    monkeypatch.setattr(workspace, "find_spec", lambda name: object())
    with caplog.at_level(logging.WARNING, "dsv4_gemm_rs"):
        assert not found(Device(100))
    assert "its mm_mxfp8 cannot be used: cannot import name" in caplog.text


def test_what_a_broken_installation_raises_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = builtins.__import__

    def importing(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "flashinfer":
            raise RuntimeError("flashinfer-cubin has another version")
        return right(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", importing)
    monkeypatch.setattr(workspace, "find_spec", lambda name: None)
    assert not workspace._flashinfer_multiplies(Device(100))  # type: ignore[arg-type]
    assert caplog.text == ""
