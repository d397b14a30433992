# SPDX-License-Identifier: Apache-2.0
"""The torch operators on a CPU: registration, shapes without data, both forms, refusals, empty batches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import dsv4_mhc
import pytest
import torch
from dsv4_mhc import ArgumentError, Quant, Seam, Tail, pack_weight, reference
from mhc_support import Problem, assert_seam

HIDDEN = 256
SCALARS = (1e-6, 1e-6, 1e-6, 20, 2.0, False)


def seam_inputs(problem: Problem, **changes: Any) -> tuple[Any, ...]:
    names = {
        "residual": problem.residual,
        "output": problem.output,
        "post": problem.post,
        "comb": problem.comb,
        "weight": problem.weight,
        "scale": problem.scale,
        "base": problem.base,
        "carried": problem.carried,
        "norm_weight": problem.norm_weight,
        "rms_eps": 1e-6,
        "hc_eps": 1e-6,
        "norm_eps": 1e-6,
        "iterations": 20,
        "multiplier": 2.0,
        "exact_statistic": False,
        "mean": False,
        "bf16": True,
        "quant": "none",
    }
    return tuple((names | changes).values())


def calls(problem: Problem) -> dict[str, tuple[Any, ...]]:
    post = (problem.output, problem.post, problem.comb)
    head = (pack_weight(problem.head_fn), problem.scale[:1], problem.base[:4].contiguous())
    return {
        "expand": (problem.output,),
        "stream_mean": (problem.residual,),
        "post": (problem.residual, *post),
        "collapse": (problem.residual, problem.carried, *post, problem.norm_weight, 1e-6, False, True, True),
        "seam": seam_inputs(problem, mean=True, quant="mxfp8"),
        "head": (problem.residual, *post, *head, problem.norm_weight, 1e-6, 1e-6, 1e-6, False),
        "engram_seam": (
            *(problem.residual, *post, problem.memory, problem.query_weight, problem.key_weight),
            *(problem.open_gate, problem.carried, problem.weight, problem.scale, problem.base),
            *(problem.norm_weight, 1e-6, 1e-6, 1e-6, 1e-6, 20, 2.0, False),
        ),
    }


NAMES = list(calls(Problem.make(1, 64)))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    problem = Problem.make(3, HIDDEN)
    # opcheck multiplies outputs, which torch cannot do with FP8.
    inputs = seam_inputs(problem, mean=True) if name == "seam" else calls(problem)[name]
    functional = getattr(torch.ops.dsv4_mhc, name).default
    found = functional(*inputs)
    outs = [found] if isinstance(found, torch.Tensor) else list(found)
    torch.library.opcheck(functional, inputs)
    mutable = [torch.empty_like(out) if out.numel() else None for out in outs]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        getattr(torch.ops.dsv4_mhc, f"{name}_out").default, (*inputs, *mutable), test_utils=checks
    )


@pytest.mark.parametrize("name", NAMES)
def test_out_form_equals_functional_form(name: str) -> None:
    inputs = calls(Problem.make(3, HIDDEN))[name]
    found = getattr(torch.ops.dsv4_mhc, name)(*inputs)
    outs = [found] if isinstance(found, torch.Tensor) else list(found)
    given = [torch.zeros_like(out) if out.numel() else None for out in outs]
    assert getattr(torch.ops.dsv4_mhc, f"{name}_out")(*inputs, *given) is None
    for out, wanted in zip(given, outs, strict=True):
        assert out is None or torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name: str) -> None:
    found = getattr(torch.ops.dsv4_mhc, name)(*calls(Problem.make(0, HIDDEN))[name])
    outs = [found] if isinstance(found, torch.Tensor) else list(found)
    assert not any(out.numel() for out in outs)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_graph_breaks(name: str) -> None:
    inputs = calls(Problem.make(2, HIDDEN))[name]
    operator = getattr(torch.ops.dsv4_mhc, name)
    compiled = torch.compile(lambda *arguments: operator(*arguments), fullgraph=True, backend="eager")
    found, wanted = compiled(*inputs), operator(*inputs)
    pairs = [(found, wanted)] if isinstance(found, torch.Tensor) else zip(found, wanted, strict=True)
    for one, two in pairs:
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("quant", list(Quant))
def test_seam_on_a_cpu_is_the_reference(shifted: bool, quant: Quant) -> None:
    problem = Problem.make(5, 512)
    if quant is Quant.FP8 and not shifted:
        problem = Problem.make(5, 1024)
    found = dsv4_mhc.seam(
        *problem.seam_arguments(),
        carried=problem.carried if shifted else None,
        norm_weight=problem.norm_weight,
        mean=True,
        quant=quant if problem.residual.shape[2] >= 1024 or quant is not Quant.FP8 else Quant.NONE,
    )
    assert_seam(found, problem, shifted=shifted, norm_weight=problem.norm_weight)


def test_pre_has_no_streams_and_head_no_coefficients() -> None:
    problem = Problem.make(3, HIDDEN)
    found = dsv4_mhc.pre(problem.residual, problem.weight, problem.scale, problem.base)
    assert found.residual is None
    y, _ = reference.pre(problem.residual, problem.fn, problem.scale, problem.base)
    assert found.y is not None
    assert (found.y.float() - y.float()).abs().max() < 0.05
    tail = dsv4_mhc.tail(problem.residual, problem.output, problem.post, problem.comb, problem.carried)
    assert tail.residual is None
    assert tail.mean is None


def test_given_outputs_are_returned() -> None:
    problem = Problem.make(3, HIDDEN)
    out = Seam(
        torch.empty(3, 4),
        torch.empty(3, 4),
        torch.empty(3, 4, 4),
        torch.empty_like(problem.residual),
        torch.empty_like(problem.output),
    )
    assert dsv4_mhc.seam(*problem.seam_arguments(), carried=problem.carried, out=out) is out
    tail = Tail(torch.empty_like(problem.output), None, None)
    assert (
        dsv4_mhc.tail(problem.residual, problem.output, problem.post, problem.comb, problem.carried, out=tail)
        is tail
    )
    row = torch.empty_like(problem.output)
    assert dsv4_mhc.collapse(problem.residual, problem.carried, out=row) is row
    assert dsv4_mhc.stream_mean(problem.residual, out=row) is row
    streams = torch.empty_like(problem.residual)
    assert dsv4_mhc.expand(problem.output, out=streams) is streams
    assert dsv4_mhc.post(problem.residual, problem.output, problem.post, problem.comb, out=streams) is streams


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("residual", lambda p: {"residual": p.residual.float()}),
        ("residual", lambda p: {"residual": p.residual[:, :3].contiguous()}),
        ("residual", lambda p: {"residual": p.residual.transpose(0, 1).contiguous().transpose(0, 1)}),
        ("output", lambda p: {"output": p.output[:2]}),
        ("output", lambda p: {"output": torch.empty(3, 2 * HIDDEN).bfloat16()[:, :HIDDEN]}),
        ("post", lambda p: {"post": None}),
        ("comb", lambda p: {"comb": p.comb.double()}),
        ("weight", lambda p: {"weight": p.weight[:, :3]}),
        ("scale", lambda p: {"scale": p.scale[:2]}),
        ("base", lambda p: {"base": p.base.half()}),
        ("carried", lambda p: {"carried": p.carried[:, :3]}),
        ("norm_weight", lambda p: {"norm_weight": p.norm_weight.float()}),
        ("rms_eps", lambda p: {"rms_eps": -1e-6}),
        ("hc_eps", lambda p: {"hc_eps": float("nan")}),
        ("iterations", lambda p: {"iterations": 0}),
        ("quant", lambda p: {"quant": "int4"}),
        ("quant", lambda p: {"quant": "fp8"}),
        ("bf16", lambda p: {"bf16": False}),
    ],
)
def test_bad_input_is_named(argument: str, change: Callable[[Problem], dict[str, Any]]) -> None:
    problem = Problem.make(3, HIDDEN)
    with pytest.raises(ArgumentError, match=argument):
        torch.ops.dsv4_mhc.seam(*seam_inputs(problem, **change(problem)))


def test_hidden_sizes_are_checked() -> None:
    with pytest.raises(ArgumentError, match="multiple of 64"):
        dsv4_mhc.expand(torch.zeros(2, 96, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(3, 4, HIDDEN),
        torch.empty(2, 4, HIDDEN, dtype=torch.bfloat16),
        torch.empty(3, HIDDEN, 4, dtype=torch.bfloat16).transpose(1, 2),
    ],
    ids=["dtype", "shape", "stride"],
)
def test_bad_outputs_are_refused(out: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match="residual_out"):
        dsv4_mhc.expand(Problem.make(3, HIDDEN).output, out=out)


def test_an_output_may_not_be_an_input() -> None:
    problem = Problem.make(3, HIDDEN)
    with pytest.raises(ArgumentError, match="memory"):
        dsv4_mhc.post(problem.residual, problem.output, problem.post, problem.comb, out=problem.residual)


def test_absent_outputs_are_checked() -> None:
    problem = Problem.make(3, HIDDEN)
    with pytest.raises(ArgumentError, match="mean_out"):
        torch.ops.dsv4_mhc.collapse_out(
            *(problem.residual, problem.carried, None, None, None, None, 1e-6, False, False, True),
            *(problem.output.clone(), None, None),
        )


def test_import_is_quiet_and_light() -> None:
    program = "import sys, dsv4_mhc; print([m for m in ('tilelang', 'tvm_ffi', 'tvm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
    assert not done.stderr
