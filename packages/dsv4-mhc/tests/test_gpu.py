# SPDX-License-Identifier: Apache-2.0
"""On a GPU: against FP64 at many T and each H, adversarial inputs, and bit-equality where it is promised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dsv4_mhc
import pytest
import torch
from dsv4_mhc import NotCompiledError, Quant, Seam, Tail, pack_weight, reference
from dsv4_mhc import compile as compilation
from mhc_support import (
    COEFFICIENT_ERROR,
    Problem,
    assert_input,
    assert_quantized,
    assert_rounded,
    assert_seam,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"),
]

TOKENS = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 1023, 1025, 4097]
HIDDEN = [4096, 5120, 7168]
EPS: dict[str, Any] = {"rms_eps": 1e-6, "hc_eps": 1e-6, "norm_eps": 1e-6}

wirings = pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "coupled"])
every_size = pytest.mark.parametrize("hidden", HIDDEN)
every_count = pytest.mark.parametrize("tokens", TOKENS)


def seam(problem: Problem, shifted: bool, **options: Any) -> Seam:
    carried = problem.carried if shifted else None
    return dsv4_mhc.seam(
        *problem.seam_arguments(), carried=carried, norm_weight=problem.norm_weight, **options
    )


def same(one: Seam, two: Seam, rows: slice = slice(None)) -> None:
    for name, first, second in zip(Seam._fields, one, two, strict=True):
        if first is not None and second is not None:
            left, right = first[rows], second[rows]
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name


@every_count
@every_size
@wirings
def test_seam(tokens: int, hidden: int, shifted: bool) -> None:
    problem = Problem.make(tokens, hidden, device="cuda")
    found = seam(problem, shifted, mean=True)
    assert_seam(found, problem, shifted=shifted, norm_weight=problem.norm_weight)


@pytest.mark.parametrize("tokens", [0, 1, 33, 129, 1025])
@every_size
@wirings
def test_pre(tokens: int, hidden: int, shifted: bool) -> None:
    problem = Problem.make(tokens, hidden, device="cuda")
    carried = problem.carried if shifted else None
    found = dsv4_mhc.pre(problem.residual, problem.weight, problem.scale, problem.base, carried=carried)
    assert_seam(found, problem, shifted=shifted, start=problem.residual)


@pytest.mark.parametrize("hidden", [64, 320, 1088, 2560])
@wirings
def test_other_hidden_sizes(hidden: int, shifted: bool) -> None:
    problem = Problem.make(70, hidden, device="cuda")
    assert_seam(seam(problem, shifted), problem, shifted=shifted, norm_weight=problem.norm_weight)


@every_count
@every_size
def test_rowwise_operators(tokens: int, hidden: int) -> None:
    problem = Problem.make(tokens, hidden, device="cuda")
    done = (problem.output, problem.post, problem.comb)
    assert torch.equal(dsv4_mhc.expand(problem.output), reference.expand(problem.output))
    assert_rounded(dsv4_mhc.stream_mean(problem.residual), reference.stream_mean(problem.residual))
    assert_rounded(dsv4_mhc.post(problem.residual, *done), reference.post(problem.residual, *done))
    found = dsv4_mhc.collapse(problem.residual, problem.carried, norm_weight=problem.norm_weight)
    assert_input(found, problem.residual, problem.carried, problem.norm_weight)
    tail = dsv4_mhc.tail(
        problem.residual,
        *done,
        problem.carried,
        norm_weight=problem.norm_weight,
        keep_residual=True,
        mean=True,
    )
    assert tail.residual is not None
    assert tail.mean is not None
    assert_input(tail.y, tail.residual, problem.carried, problem.norm_weight)
    assert_rounded(tail.mean, reference.stream_mean(tail.residual))


@pytest.mark.parametrize("tokens", [0, 1, 33, 129, 1025])
@every_size
def test_head(tokens: int, hidden: int) -> None:
    problem = Problem.make(tokens, hidden, device="cuda")
    done = (problem.output, problem.post, problem.comb)
    weight, scale, base = pack_weight(problem.head_fn), problem.scale[:1], problem.base[:4].contiguous()
    projection: dict[str, Any] = {"weight": weight, "scale": scale, "base": base}
    projection["norm_weight"] = problem.norm_weight
    y = dsv4_mhc.head(problem.residual, **projection)
    gains = reference.head_pre(problem.residual, problem.head_fn, scale, base)
    assert_input(y, problem.residual, gains, problem.norm_weight, gain_error=COEFFICIENT_ERROR)
    fused = dsv4_mhc.head(
        problem.residual, **projection, output=problem.output, post=problem.post, comb=problem.comb
    )
    assert torch.equal(fused, dsv4_mhc.head(dsv4_mhc.post(problem.residual, *done), **projection))


@pytest.mark.parametrize("tokens", [0, 1, 33, 129, 1025])
@every_size
def test_engram(tokens: int, hidden: int) -> None:
    problem = Problem.make(tokens, hidden, device="cuda")
    memory = (problem.memory, problem.query_weight, problem.key_weight)
    others = (*memory, problem.open_gate, problem.carried, problem.weight, problem.scale, problem.base)
    found = dsv4_mhc.engram_seam(problem.residual, *others, norm_weight=problem.norm_weight)
    wanted = reference.engram(problem.residual, *memory, mask=problem.open_gate == 0)
    assert_seam(found, problem, shifted=True, streams=wanted, norm_weight=problem.norm_weight)
    done = (problem.output, problem.post, problem.comb)
    fused = dsv4_mhc.engram_seam(
        *(problem.residual, *others),
        output=problem.output,
        post=problem.post,
        comb=problem.comb,
        norm_weight=problem.norm_weight,
    )
    before = dsv4_mhc.post(problem.residual, *done)
    same(fused, dsv4_mhc.engram_seam(before, *others, norm_weight=problem.norm_weight))


@wirings
@pytest.mark.parametrize("quant", [Quant.MXFP8, Quant.FP8])
@pytest.mark.parametrize("tokens", [1, 129, 1025])
@every_size
def test_quantized_input(tokens: int, hidden: int, quant: Quant, shifted: bool) -> None:
    problem = Problem.make(tokens, hidden, device="cuda")
    both = seam(problem, shifted, quant=quant)
    assert_quantized(both)
    only = seam(problem, shifted, quant=quant, bf16=False)
    assert only.y is None
    same(both, only)


@wirings
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e-3, 6e4, 1e15])
def test_extreme_sizes(shifted: bool, size: float) -> None:
    problem = Problem.make(65, 5120, device="cuda", size=size)
    assert_seam(seam(problem, shifted), problem, shifted=shifted, norm_weight=problem.norm_weight)


@wirings
@pytest.mark.parametrize("logits", ["equal", "one-hot", "sharp"])
def test_extreme_logits(shifted: bool, logits: str) -> None:
    problem = Problem.make(65, 5120, device="cuda")
    scale = problem.scale * (0 if logits != "sharp" else 20)
    base = torch.zeros_like(problem.base)
    if logits == "one-hot":
        base[8:] = 50 * torch.eye(4, device="cuda")[[2, 0, 3, 1]].flatten()
    problem = replace(problem, scale=scale, base=base)
    # A logit's error grows with the logit.
    error = COEFFICIENT_ERROR * (20 if logits == "sharp" else 1)
    found = seam(problem, shifted)
    assert_seam(found, problem, shifted=shifted, error=error, norm_weight=problem.norm_weight)


@wirings
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [9, 130])
def test_a_bad_row_touches_no_other(shifted: bool, value: float, tokens: int) -> None:
    problem = Problem.make(tokens, 5120, device="cuda")
    clean = seam(problem, shifted)
    problem.residual[5, 2, 1234] = value
    dirty = seam(problem, shifted)
    same(clean, dirty, slice(0, 5))
    same(clean, dirty, slice(6, None))
    assert dirty.pre[5].isnan().all()
    assert dirty.comb[5].isnan().all()
    assert dirty.y is not None
    assert dirty.y[5].isnan().any()


@wirings
@every_size
def test_results_do_not_depend_on_the_batch(shifted: bool, hidden: int) -> None:
    problem = Problem.make(1025, hidden, device="cuda")
    whole = seam(problem, shifted, mean=True)
    rows = ("residual", "output", "post", "comb", "carried")
    for tokens in (1, 8, 9, 16, 17, 65, 129, 257, 513):
        part = replace(problem, **{name: getattr(problem, name)[:tokens].contiguous() for name in rows})
        few = seam(part, shifted, mean=True)
        for name, one, two in zip(Seam._fields, whole, few, strict=True):
            assert one is None or two is None or torch.equal(one[:tokens], two), f"{name}, {tokens} tokens"


@wirings
def test_runs_repeat(shifted: bool) -> None:
    problem = Problem.make(1000, 5120, device="cuda")
    first = seam(problem, shifted)
    for _ in range(20):
        same(first, seam(problem, shifted))


@wirings
@pytest.mark.parametrize("tokens", [1, 33, 1000])
def test_graph_replays(shifted: bool, tokens: int) -> None:
    problem = Problem.make(tokens, 5120, device="cuda")
    wanted = seam(problem, shifted)
    poisoned: list[Any] = [
        None if tensor is None else torch.full_like(tensor, float("nan")) for tensor in wanted
    ]
    out = Seam(*poisoned)
    graph = torch.cuda.CUDAGraph()
    weight = problem.seam_arguments()
    carried = problem.carried if shifted else None
    with torch.cuda.graph(graph):
        dsv4_mhc.seam(*weight, carried=carried, norm_weight=problem.norm_weight, out=out)
    for _ in range(3):
        for tensor in out:
            if tensor is not None:
                tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        same(wanted, out)


def test_capture_before_warmup_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_loaded", {})
    row = torch.zeros(1, 5120, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(1, 4, 5120, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotCompiledError, match="warmup"), torch.cuda.graph(graph):
        dsv4_mhc.expand(row, out=out)


def test_tail_without_streams_writes_none() -> None:
    problem = Problem.make(5, 5120, device="cuda")
    out = Tail(torch.full_like(problem.output, float("nan")), None, None)
    dsv4_mhc.tail(problem.residual, problem.output, problem.post, problem.comb, problem.carried, out=out)
    assert not out.y.isnan().any()
