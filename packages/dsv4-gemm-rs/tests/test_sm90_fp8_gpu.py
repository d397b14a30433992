# SPDX-License-Identifier: Apache-2.0
"""Weights kept in FP8 on one Hopper GPU with virtual ranks: right, exact, repeatable, with other ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from dsv4_gemm_rs import Keep, Path, WeightKind, gemm_ar, prepare_weight
from dsv4_gemm_rs.kernels.sm90.swapped_config import FAMILY, SwappedConfig
from dsv4_gemm_rs.problems import RankProblem
from dsv4_gemm_rs.quantize import dequantize_mxfp8
from gemm_rs_gpu_support import problems_for, ranks
from gemm_rs_support import assert_right

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="no CUDA device of compute capability 9.0"),
]


def packed(size: int, m: int, n: int, k: int, seed: int = 0) -> list[RankProblem]:
    problems = problems_for(size, m, n, k, WeightKind.MXFP8, seed)
    return [
        RankProblem(p.x, prepare_weight(p.weight.data, p.weight.scale, keep="fp8"), p.x_exact, p.weight_exact)
        for p in problems
    ]


@pytest.mark.parametrize("path", [Path.FUSED, Path.UNFUSED])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_right_on_awkward_shapes(size: int, path: Path) -> None:
    with ranks(size, 1025, 576, path=path) as group:
        for m in (0, 1, size + 1, 127, 129, 1025):
            problems = packed(size, m, 576, 384, seed=m)
            group.poison()
            assert_right(group.call(problems), problems)


@pytest.mark.parametrize("config", FAMILY, ids=lambda c: f"{c.tile_m}x{c.tile_n}")
def test_every_tile_is_right_and_repeats_its_bits(config: SwappedConfig) -> None:
    with (
        mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=config),
        ranks(4, 1025, 5120, path="fused") as group,
    ):
        for m in (3, 1025):
            problems = packed(4, m, 5120, 256, seed=m)
            kept = group.call(problems)
            assert_right(kept, problems)
            for _ in range(20):
                group.poison()
                again = group.call(problems)
                assert all(torch.equal(got, want) for got, want in zip(again, kept, strict=True))


@pytest.mark.parametrize("config", FAMILY, ids=lambda c: f"{c.tile_m}x{c.tile_n}")
@pytest.mark.parametrize("high", [134, 246], ids=["one-factor", "split"])
def test_every_code_with_every_scale_is_exact(high: int, config: SwappedConfig) -> None:
    n, k = 2048, 128
    codes = torch.arange(n * k, device="cuda").remainder(254)
    codes = torch.where(codes >= 127, codes + 1, codes).to(torch.uint8).view(n, k)
    scale = torch.arange(n * k // 32, device="cuda").mul(97).remainder(high - 2).add(3)
    scale = scale.to(torch.uint8).view(n, k // 32)
    data = codes.view(torch.float8_e4m3fn)
    x = torch.eye(k, dtype=torch.bfloat16, device="cuda")
    weight = prepare_weight(data, scale, activation="bf16", keep="fp8")
    exact = dequantize_mxfp8(data, scale, torch.float64)
    with (
        mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=config),
        ranks(1, k, n, path="fused") as group,
    ):
        (out,) = group.call([RankProblem(x, weight, x.double(), exact)])
        assert torch.equal(out.double(), exact.T)


def test_a_graph_sees_what_a_refresh_brings() -> None:
    (problem,) = packed(1, 300, 512, 256)
    weight = problem.weight
    with ranks(1, 300, 512, path="fused") as group:
        out = torch.empty(300, 512, dtype=torch.bfloat16, device="cuda")
        group.call([problem], [out])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            group.call([problem], [out])
        weight.data.view(torch.uint8).bitwise_xor_(0x80)
        weight.refresh()
        graph.replay()
        torch.cuda.synchronize()
        assert_right([-out], [problem])


def test_gathered_and_mixed_ranks() -> None:
    with ranks(4, 512, 512) as group:
        problems = packed(4, 512, 512, 256)
        for space in group.workspaces[2:]:
            space.requested = Path.UNFUSED
        outs = group.call(problems)
        assert_right(outs, problems)
        wholes = group.call(problems, operation=gemm_ar)
        torch.cuda.synchronize()
        assert all(torch.equal(whole, wholes[0]) for whole in wholes)


def test_the_packed_form_takes_half_the_memory() -> None:
    data = torch.zeros(5120, 4096, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.full((5120, 128), 127, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    taken = {}
    for keep in Keep:
        weight = prepare_weight(data, scale, keep=keep)
        taken[keep] = torch.cuda.memory_allocated() - before
        del weight
    elements = data.numel()
    assert taken[Keep.FP8] < 1.1 * elements
    assert taken[Keep.BF16] >= 2 * elements
