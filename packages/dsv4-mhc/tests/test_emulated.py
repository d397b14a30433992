# SPDX-License-Identifier: Apache-2.0
"""The compiled SM90 kernels behind the operators, in the PTX emulator: right, and the same for every tile.

The emulator executes the PTX of the generated CUDA source, clusters, asynchronous copies and tensor cores
included, checks each access, and interleaves warps at random. Sizes are small: seconds here are microseconds
on a GPU. TileLang's host code is not run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from dsv4_mhc import Quant, Seam, pack_weight, reference
from dsv4_mhc import compile as compilation
from dsv4_mhc.compile import Variant, compile_variant
from dsv4_mhc.ops import collapse as collapse_op
from dsv4_mhc.ops import engram as engram_op
from dsv4_mhc.ops import expand as expand_op
from dsv4_mhc.ops import head as head_op
from dsv4_mhc.ops import mean as mean_op
from dsv4_mhc.ops import post as post_op
from dsv4_mhc.ops import seam as seam_op
from dsv4_mhc.plan import Kernel, Tile, forced_tile, row_threads, slice_count
from mhc_emulated import EmulatedKernel
from mhc_support import (
    COEFFICIENT_ERROR,
    Problem,
    assert_input,
    assert_quantized,
    assert_rounded,
    assert_seam,
)

pytest.importorskip("tilelang", reason="tilelang is not installed")
pytest.importorskip("dsv4_ptx_emulator.emulator", reason="dsv4-ptx-emulator is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH"),
]

EPS = (1e-6, 1e-6, 1e-6)


@cache
def compiled(variant: Variant) -> Any:
    return compile_variant(variant, "sm_90a")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel_for(variant: Variant, device: torch.device) -> Callable[..., None]:
        first = variant.arguments[0]
        if isinstance(first, Tile):
            return EmulatedKernel(compiled(variant), cluster=first.cluster, rows=first.tokens)
        columns = -(-first // 1024)
        if variant.module == "collapse":
            columns = -(-first // (8 * row_threads(first))) if variant.arguments[2] else 1
        return EmulatedKernel(compiled(variant), columns=columns)

    monkeypatch.setattr(compilation, "kernel_for", kernel_for)


Take = Callable[..., None]


@pytest.fixture
def take() -> Iterator[Take]:
    """Makes launches of a kernel use a tile: the kernel, H, and the tile's other numbers."""
    with ExitStack() as stack:

        def taking(kernel: Kernel, hidden: int, cluster: int, *rest: int) -> None:
            tile = Tile(hidden, min(cluster, slice_count(hidden)), *rest)
            stack.enter_context(forced_tile(kernel, tile))

        yield taking


def nan(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def run_seam(
    problem: Problem,
    *,
    shifted: bool,
    post: bool = True,
    norm: bool = True,
    mean: bool = False,
    quant: Quant = Quant.NONE,
    exact: bool = False,
    iterations: int = 20,
) -> Seam:
    before = (problem.output, problem.post, problem.comb) if post else (None, None, None)
    inputs = (
        *(problem.residual, *before, problem.weight, problem.scale, problem.base),
        *(problem.carried if shifted else None, problem.norm_weight if norm else None),
        *(*EPS, iterations, 2.0, exact, mean, True, str(quant)),
    )
    results = seam_op._describe(*inputs)
    outs: list[Any] = []
    for result in results:
        if result is None:
            outs.append(None)
        elif result.zeroed or result.dtype == torch.float8_e4m3fn:
            outs.append(result.allocate(torch.device("cpu")))
        else:
            outs.append(nan(*result.shape, dtype=result.dtype))
    arguments: list[Any] = [*inputs, *outs]
    seam_op.launch(*arguments)
    return Seam(*outs)


@pytest.mark.parametrize("hidden", [64, 1088])
def test_rowwise_operators(hidden: int) -> None:
    problem = Problem.make(3, hidden)
    streams, row = nan(3, 4, hidden), nan(3, hidden)
    expand_op.launch(problem.output, streams)
    assert torch.equal(streams, reference.expand(problem.output))
    mean_op.launch(problem.residual, row)
    assert_rounded(row, reference.stream_mean(problem.residual))
    post_op.launch(problem.residual, problem.output, problem.post, problem.comb, streams)
    assert_rounded(streams, reference.post(problem.residual, problem.output, problem.post, problem.comb))


@pytest.mark.parametrize("exact", [False, True])
def test_tail(exact: bool) -> None:
    problem = Problem.make(2, 1088)
    streams, y, mean = nan(2, 4, 1088), nan(2, 1088), nan(2, 1088)
    post = (problem.output, problem.post, problem.comb)
    collapse_op.launch(
        problem.residual,
        problem.carried,
        *post,
        problem.norm_weight,
        1e-6,
        exact,
        True,
        True,
        y,
        streams,
        mean,
    )
    assert_rounded(streams, reference.post(problem.residual, *post))
    assert_input(y, streams, problem.carried, problem.norm_weight, exact_statistic=exact)
    assert_rounded(mean, reference.stream_mean(streams))


@pytest.mark.parametrize("spread", [True, False])
def test_bare_collapse(monkeypatch: pytest.MonkeyPatch, spread: bool) -> None:
    monkeypatch.setattr(compilation, "SPREAD_TOKENS", 2 if spread else 1)
    problem = Problem.make(2, 5120)
    y = nan(2, 5120)
    options: tuple[Any, ...] = (None, None, None, None, 1e-6, False, False, False)
    arguments: list[Any] = [problem.residual, problem.carried, *options, y, None, None]
    collapse_op.launch(*arguments)
    assert_input(y, problem.residual, problem.carried)


TILES = {
    "shifted": ((8, 8, 2), (4, 16, 1, 2, 3), (2, 8, 1, 3)),
    "coupled": ((8, 8, 2), (4, 16, 1)),
}


@pytest.mark.parametrize("wiring", list(TILES))
def test_seam_is_right_and_the_same_for_every_tile(
    monkeypatch: pytest.MonkeyPatch, take: Take, wiring: str
) -> None:
    problem = Problem.make(11, 1024)
    shifted = wiring == "shifted"
    found = []
    for tile in TILES[wiring]:
        take(Kernel(wiring), 1024, *tile)
        found.append(run_seam(problem, shifted=shifted, mean=True))
    if not shifted:
        monkeypatch.setattr(seam_op, "coupled_form", lambda hidden, tokens: Kernel.PROJECT)
        take(Kernel.PROJECT, 1024, 4, 8, 1, 2)
        found.append(run_seam(problem, shifted=False, mean=True))
    assert_seam(found[0], problem, shifted=shifted, norm_weight=problem.norm_weight)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one is None or two is None or torch.equal(one, two)


@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "coupled"])
@pytest.mark.parametrize("quant", [Quant.MXFP8, Quant.FP8])
def test_quantized_input(take: Take, shifted: bool, quant: Quant) -> None:
    problem = Problem.make(3, 1024)
    problem.residual[1, :, 70] = float("inf")
    take(Kernel.SHIFTED if shifted else Kernel.COUPLED, 1024, 8, 8, 2)
    found = run_seam(problem, shifted=shifted, quant=quant, norm=False)
    assert_quantized(found)
    assert found.codes is not None
    assert found.codes[1].float().isnan().any()
    assert not found.codes[2].float().isnan().any()


@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "coupled"])
@pytest.mark.parametrize("hidden", [64, 320])
def test_hidden_sizes_that_fill_no_cluster(shifted: bool, hidden: int) -> None:
    problem = Problem.make(5, hidden)
    found = run_seam(problem, shifted=shifted, post=False, exact=True, iterations=3)
    options: dict[str, Any] = {"norm_weight": problem.norm_weight, "exact_statistic": True, "iterations": 3}
    assert_seam(found, problem, shifted=shifted, start=problem.residual, **options)


@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "coupled"])
def test_a_row_of_nan_touches_no_other(take: Take, shifted: bool) -> None:
    take(Kernel.SHIFTED if shifted else Kernel.COUPLED, 512, 4, 8, 1)
    problem = Problem.make(4, 512)
    clean = run_seam(problem, shifted=shifted)
    problem = replace(problem, residual=problem.residual.clone())
    problem.residual[2, 1, 300] = float("nan")
    dirty = run_seam(problem, shifted=shifted)
    others = [0, 1, 3]
    for one, two in zip(clean, dirty, strict=True):
        assert one is None or two is None or torch.equal(one[others], two[others])
    assert dirty.pre[2].isnan().all()
    assert dirty.comb[2].isnan().all()
    assert dirty.y is not None
    assert dirty.y[2].isnan().all()


def test_head(take: Take) -> None:
    problem = Problem.make(9, 512)
    take(Kernel.HEAD, 512, 4, 16, 1)
    done = (problem.output, problem.post, problem.comb)
    weight, scale, base = pack_weight(problem.head_fn), problem.scale[:1], problem.base[:4].contiguous()

    def run(residual: torch.Tensor, before: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        y = nan(9, 512)
        inputs: tuple[Any, ...] = (residual, *before, weight, scale, base, problem.norm_weight)
        arguments: list[Any] = [*inputs, *EPS, False, y]
        head_op.launch(*arguments)
        return y

    nothing = (None, None, None)
    gains = reference.head_pre(problem.residual, problem.head_fn, scale, base)
    y = run(problem.residual, nothing)
    assert_input(y, problem.residual, gains, problem.norm_weight, gain_error=COEFFICIENT_ERROR)
    streams = nan(9, 4, 512)
    post_op.launch(problem.residual, *done, streams)
    assert torch.equal(run(problem.residual, done), run(streams, nothing))


@pytest.mark.parametrize("tile", [(8, 8, 2), (4, 16, 2)], ids=str)
def test_engram(take: Take, tile: tuple[int, int, int]) -> None:
    problem = Problem.make(9, 1024)
    take(Kernel.ENGRAM, 1024, *tile)
    streams, y = nan(9, 4, 1024), nan(9, 1024)
    pre, post, comb = (nan(9, *shape, dtype=torch.float32) for shape in ((4,), (4,), (4, 4)))
    inputs: tuple[Any, ...] = (
        *(problem.residual, problem.output, problem.post, problem.comb, problem.memory),
        *(problem.query_weight, problem.key_weight, problem.open_gate, problem.carried),
        *(problem.weight, problem.scale, problem.base, problem.norm_weight),
        *(1e-6, 1e-6, 1e-6, 1e-6, 20, 2.0, False),
    )
    arguments: list[Any] = [*inputs, pre, post, comb, streams, y]
    engram_op.launch(*arguments)
    before = reference.post(problem.residual, problem.output, problem.post, problem.comb)
    wanted = reference.engram(
        before, problem.memory, problem.query_weight, problem.key_weight, mask=problem.open_gate == 0
    )
    found = Seam(pre, post, comb, streams, y)
    assert_seam(found, problem, shifted=True, streams=wanted, norm_weight=problem.norm_weight)
