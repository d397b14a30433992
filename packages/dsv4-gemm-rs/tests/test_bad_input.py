# SPDX-License-Identifier: Apache-2.0
"""Everything a caller can get wrong: a typed error that names it, alike on every rank, with nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsv4_gemm_rs import PreparedWeight, WeightKind, Workspace, gemm_rs, prepare_weight
from dsv4_gemm_rs.quantize import swizzled_scale_numel
from dsv4_symm_mem import VirtualGroup
from dsv4_symm_mem.errors import (
    ArgumentError,
    CallMismatchError,
    ClosedError,
    ExchangeError,
    MismatchError,
    PeerTimeoutError,
    StaleWeightError,
    UnsupportedError,
)
from gemm_rs_support import assert_right, problems_for, ranks

N, K, M = 128, 128, 12
P = 2

Call = Callable[[torch.Tensor, PreparedWeight, Workspace], object]


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def e4m3(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


SCALE = torch.zeros(M, K // 32, dtype=torch.uint8)

BAD_CALLS: dict[str, tuple[str, Call]] = {
    "x dtype": ("x: got torch.float16", lambda x, w, s: gemm_rs(x.half(), w, s)),
    "x FP32": ("x: got torch.float32", lambda x, w, s: gemm_rs(x.float(), w, s)),
    "x 1-D": (r"x: got \(128,\), expected \[M, 128\]", lambda x, w, s: gemm_rs(x[0], w, s)),
    "x 3-D": (r"x: got \(1, 12, 128\)", lambda x, w, s: gemm_rs(x[None], w, s)),
    "x K": (r"x: got \(12, 64\), expected \[M, 128\]", lambda x, w, s: gemm_rs(bf16(M, 64), w, s)),
    "x device": ("x: got 'meta', expected cpu", lambda x, w, s: gemm_rs(x.to("meta"), w, s)),
    "x rows": ("x: got 17, expected at most 16 rows", lambda x, w, s: gemm_rs(bf16(17, K), w, s)),
    "x transposed": (
        r"x: got \(1, 128\), expected unit",
        lambda x, w, s: gemm_rs(bf16(K, 128)[:, :M].T, w, s),
    ),
    "x row stride": (r"x: got \(129, 1\)", lambda x, w, s: gemm_rs(bf16(M, K + 1)[:, :K], w, s)),
    "x overlapping": (
        r"x: got \(64, 1\)",
        lambda x, w, s: gemm_rs(bf16(4096).as_strided((M, K), (64, 1)), w, s),
    ),
    "x broadcast": (r"x: got \(0, 1\)", lambda x, w, s: gemm_rs(bf16(1, K).expand(M, K), w, s)),
    "x address": ("16-byte aligned", lambda x, w, s: gemm_rs(bf16(M * K + 1)[1:].view(M, K), w, s)),
    "x type": ("x: got 'list'", lambda x, w, s: gemm_rs([x], w, s)),  # type: ignore[arg-type]
    "x triple": ("x: got 'tuple'", lambda x, w, s: gemm_rs((x, x, x), w, s)),  # type: ignore[arg-type]
    "scale for BF16": (r"x_scale: got \(12, 4\), expected None", lambda x, w, s: gemm_rs((x, SCALE), w, s)),
    "no scale": ("x_scale: got None", lambda x, w, s: gemm_rs(e4m3(M, K), w, s)),
    "scale dtype": ("x_scale: got torch.int32", lambda x, w, s: gemm_rs((e4m3(M, K), SCALE.int()), w, s)),
    "scale shape": (r"x_scale: got \(12, 3\)", lambda x, w, s: gemm_rs((e4m3(M, K), SCALE[:, :3]), w, s)),
    "scale flat": (r"x_scale: got \(48,\)", lambda x, w, s: gemm_rs((e4m3(M, K), SCALE.reshape(-1)), w, s)),
    "scale stride": (
        "x_scale: got .* contiguous",
        lambda x, w, s: gemm_rs((e4m3(M, K), SCALE.T.contiguous().T), w, s),
    ),
    "scale address": (
        "x_scale: got 'address .* 16-byte aligned",
        lambda x, w, s: gemm_rs(
            (e4m3(M, K), torch.zeros(swizzled_scale_numel(M, K) + 4, dtype=torch.uint8)[4:]), w, s
        ),
    ),
    "scale device": ("x_scale: got 'meta'", lambda x, w, s: gemm_rs((e4m3(M, K), SCALE.to("meta")), w, s)),
    "weight type": ("weight: got 'Tensor', expected a PreparedWeight", lambda x, w, s: gemm_rs(x, w.data, s)),  # type: ignore[arg-type]
    "workspace type": ("workspace: got 'int'", lambda x, w, s: gemm_rs(x, w, 3)),  # type: ignore[arg-type]
    "out shape": (
        r"out: got \(12, 128\), expected \(6, 128\)",
        lambda x, w, s: gemm_rs(x, w, s, out=bf16(M, N)),
    ),
    "out dtype": ("out: got torch.float32", lambda x, w, s: gemm_rs(x, w, s, out=bf16(6, N).float())),
    "out stride": ("out: got .* contiguous", lambda x, w, s: gemm_rs(x, w, s, out=bf16(N, 6).T)),
    "out device": ("out: got 'meta'", lambda x, w, s: gemm_rs(x, w, s, out=bf16(6, N).to("meta"))),
    "out address": (
        "out: got 'address",
        lambda x, w, s: gemm_rs(x, w, s, out=bf16(6 * N + 1)[1:].view(6, N)),
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_named_on_every_rank_and_cost_nothing(name: str) -> None:
    text, call = BAD_CALLS[name]
    problems = problems_for(P, M, N, K, WeightKind.MXFP8)
    with ranks(P, max_tokens=16, n=N) as group:
        errors = group.errors(lambda s: call(problems[s.rank].x, problems[s.rank].weight, s))
        assert all(isinstance(e, ArgumentError) for e in errors), errors
        for error in errors:
            assert __import__("re").search(text, str(error)), str(error)
        assert group.workspaces[0].counters.calls == {}
        assert_right(group.call(problems), problems)


def test_weights_that_do_not_fit_the_workspace() -> None:
    with ranks(1, max_tokens=16, n=64) as group:
        space = group.workspaces[0]
        wide = prepare_weight(bf16(128, 64))
        with pytest.raises(ArgumentError, match="weight: got 128, expected N of at most 64"):
            gemm_rs(bf16(4, 64), wide, space)
        elsewhere = prepare_weight(bf16(64, 64).to("meta"))
        with pytest.raises(ArgumentError, match="weight: got 'meta'"):
            gemm_rs(bf16(4, 64), elsewhere, space)
        narrow = prepare_weight(bf16(64, 64))
        with pytest.raises(ArgumentError, match=r"x: got torch\.float8_e4m3fn, expected bfloat16 for bf16"):
            gemm_rs((e4m3(4, 64), SCALE[:4, :2]), narrow, space)


def test_a_stale_weight_is_refused_by_the_call() -> None:
    source = bf16(64, 64)
    weight = prepare_weight(source)
    with ranks(1, max_tokens=4, n=64) as group:
        source.fill_(1)
        with pytest.raises(StaleWeightError):
            gemm_rs(bf16(4, 64), weight, group.workspaces[0])
        weight.refresh()
        assert torch.equal(gemm_rs(bf16(4, 64) + 1, weight, group.workspaces[0]), bf16(4, 64) + 64)


def test_a_closed_workspace_is_refused() -> None:
    problems = problems_for(P, M, N, K, WeightKind.BF16)
    with ranks(P, max_tokens=16, n=N) as group:
        group.close()
        errors = group.errors(lambda s: gemm_rs(problems[s.rank].x, problems[s.rank].weight, s))
        assert all(isinstance(e, ClosedError) for e in errors)
        group.close()


def test_operators_refuse_handles_that_are_gone() -> None:
    weight = prepare_weight(bf16(64, 64))
    with ranks(1, max_tokens=4, n=64) as group:
        space = group.workspaces[0]
        op = torch.ops.dsv4.gemm_rs
        with pytest.raises(ArgumentError, match="prepared: got 'weight-0'"):
            op(bf16(4, 64), None, weight.data, None, space.order, space.handle, "weight-0")
        with pytest.raises(ClosedError, match="handle 'workspace-0'"):
            op(bf16(4, 64), None, weight.data, None, space.order, "workspace-0", weight.handle)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_tokens": 0, "n": 64}, "max_tokens: got 0"),
        ({"max_tokens": 64.0, "n": 64}, "max_tokens: got 64.0"),
        ({"max_tokens": 64, "n": -1}, "n: got -1"),
        ({"max_tokens": 64, "n": 64, "deadline": -1.0}, "deadline: got -1.0"),
        ({"max_tokens": 64, "n": 64, "path": "quick"}, "path: got 'quick'"),
        ({"max_tokens": 64, "n": 64, "backend": "mpi"}, "backend: got 'mpi'"),
        ({"max_tokens": 64, "n": 64, "device": "meta"}, "device: got 'meta'"),
    ],
)
def test_bad_workspaces_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        Workspace.create(VirtualGroup(1).ranks[0], **options)
    with pytest.raises(ArgumentError, match="group"):
        Workspace.create(None, max_tokens=1, n=64)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_tokens", "n", "deadline", "path"])
def test_workspaces_that_differ_are_refused_on_every_rank(name: str) -> None:
    values = {"max_tokens": (16, 32), "n": (64, 128), "deadline": (1.0, 2.0), "path": ("host", "unfused")}[
        name
    ]

    def step(rank: Any) -> str:
        options: dict[str, Any] = {"max_tokens": 16, "n": 64, name: values[rank.rank]}
        with pytest.raises(MismatchError, match=name) as caught:
            Workspace.create(rank, **options)
        return str(caught.value)

    assert len(set(VirtualGroup(2).run(step))) == 1


def test_a_path_that_cannot_be_had_is_refused_on_every_rank() -> None:
    def step(rank: Any) -> None:
        with pytest.raises(UnsupportedError, match="'fused' was requested, but fused kernels need a GPU"):
            Workspace.create(rank, max_tokens=16, n=64, path="fused")

    VirtualGroup(2).run(step)


def test_ranks_that_disagree_on_m_end_with_a_mismatch() -> None:
    weight = prepare_weight(bf16(64, 64))
    with ranks(2, max_tokens=64, n=64, deadline=20.0) as group:
        errors = group.errors(lambda s: gemm_rs(bf16(20 + 8 * s.rank, 64), weight, s))
        assert all(isinstance(e, ExchangeError) for e in errors)
        assert any(isinstance(e, CallMismatchError) for e in errors)


def test_a_rank_that_raises_alone_leaves_nobody_waiting_past_the_deadline() -> None:
    weight = prepare_weight(bf16(64, 64))
    with ranks(2, max_tokens=64, n=64, deadline=0.3) as group:
        errors = group.errors(lambda s: gemm_rs(bf16(20, 64 - 8 * s.rank), weight, s))
        assert isinstance(errors[1], ArgumentError)
        assert isinstance(errors[0], PeerTimeoutError)
        assert errors[0].blamed == 1
        with pytest.raises(ExchangeError):
            group.workspaces[1].check()


def test_a_second_thread_is_kept_out() -> None:
    with ranks(1, max_tokens=4, n=64) as group:
        space = group.workspaces[0]
        weight = prepare_weight(bf16(64, 64))
        with (
            space.call(space.decide(__import__("dsv4_gemm_rs").dispatch.Problem(1, 64, 64, WeightKind.BF16))),
            pytest.raises(UnsupportedError, match="another thread"),
        ):
            gemm_rs(bf16(4, 64), weight, space)
