# SPDX-License-Identifier: Apache-2.0
"""The operation through its public API on virtual ranks: right on every shape, repeatable, safe to reuse."""

from __future__ import annotations

import random
import time

import pytest
import torch
from dsv4_gemm_rs import Mxfp8, Path, WeightKind, Workspace, gemm_rs, prepare_weight, quantize_mxfp8
from dsv4_gemm_rs.quantize import ScaleLayout
from gemm_rs_support import Ranks, assert_right, problems_for, ranks

N, K = 192, 256
KINDS = list(WeightKind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [Path.HOST, Path.UNFUSED])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_right_on_awkward_shapes(size: int, path: Path, kind: WeightKind) -> None:
    with ranks(size, max_tokens=1100, n=N, path=path) as group:
        for m in sorted({0, 1, size - 1, size, size + 1, 127, 128, 129, 1025}):
            problems = problems_for(size, m, N, K, kind, seed=m)
            assert_right(group.call(problems), problems)


@pytest.mark.parametrize("m", [1023, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_right_on_a_wider_shape(m: int, kind: WeightKind) -> None:
    with ranks(4, max_tokens=m, n=512) as group:
        problems = problems_for(4, m, 512, 512, kind)
        assert_right(group.call(problems), problems)


def test_exact_on_integers() -> None:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randint(-2, 3, (37, 64), generator=generator).bfloat16() for _ in range(3)]
    ws = [torch.randint(-1, 2, (64, 64), generator=generator).bfloat16() for _ in range(3)]
    weights = [prepare_weight(w) for w in ws]
    with ranks(3, max_tokens=64, n=64) as group:
        outs = group.run(lambda s: gemm_rs(xs[s.rank], weights[s.rank], s))
    total = sum((x.float() @ w.float().T for x, w in zip(xs, ws, strict=True)), torch.zeros(37, 64))
    assert total.abs().max() < 256
    assert torch.equal(torch.cat(outs)[:37].float(), total)


def test_the_paths_agree_on_what_each_promises() -> None:
    problems = problems_for(4, 130, N, K, WeightKind.MXFP8)
    with (
        ranks(4, max_tokens=130, n=N, path="host") as host,
        ranks(4, max_tokens=130, n=N, path="unfused") as unfused,
    ):
        assert_right(host.call(problems), problems)
        assert_right(unfused.call(problems), problems)
        assert host.workspaces[0].counters.calls == {"host": 1}
        assert unfused.workspaces[0].counters.calls == {"unfused": 1}


@pytest.mark.parametrize("layout", list(ScaleLayout))
def test_quantised_activations_give_the_same_bits_as_quantising_inside(layout: ScaleLayout) -> None:
    problems = problems_for(2, 70, N, K, WeightKind.MXFP8)
    with ranks(2, max_tokens=70, n=N) as group:
        inside = group.call(problems)
        quantised = [quantize_mxfp8(p.x, layout=layout) for p in problems]
        for form in (quantised, [(q.data, q.scale) for q in quantised]):
            outs = group.run(lambda s, form=form: gemm_rs(form[s.rank], problems[s.rank].weight, s))  # type: ignore[misc]
            assert all(torch.equal(a, b) for a, b in zip(outs, inside, strict=True))


def test_unquantised_activations_are_used_as_they_are() -> None:
    problems = problems_for(2, 70, N, K, WeightKind.MXFP8)
    weights = [prepare_weight(p.weight.data, p.weight.scale, activation="bf16") for p in problems]
    exact = [type(p)(p.x, w, p.x.double(), p.weight_exact) for p, w in zip(problems, weights, strict=True)]
    for path in ("host", "unfused"):
        with ranks(2, max_tokens=70, n=N, path=path) as group:
            assert_right(group.call(exact), exact)


def test_strided_rows_are_read_in_place() -> None:
    problems = problems_for(2, 50, N, K, WeightKind.BF16)
    wide = [torch.full((50, K + 64), float("nan"), dtype=torch.bfloat16) for _ in range(2)]
    for w, p in zip(wide, problems, strict=True):
        w[:, :K] = p.x
    with ranks(2, max_tokens=50, n=N) as group:
        outs = group.run(lambda s: gemm_rs(wide[s.rank][:, :K], problems[s.rank].weight, s))
        assert all(torch.equal(a, b) for a, b in zip(outs, group.call(problems), strict=True))


def test_nan_activations_poison_their_own_rows_only() -> None:
    problems = problems_for(4, 64, N, K, WeightKind.MXFP8)
    with ranks(4, max_tokens=64, n=N) as group:
        clean = torch.cat(group.call(problems))
        problems[2].x[19, 100] = float("nan")
        problems[3].x[40, 3] = float("inf")
        dirty = torch.cat(group.call(problems))
    assert dirty[[19, 40]].isnan().all()
    others = [row for row in range(64) if row not in (19, 40)]
    assert torch.equal(dirty[others], clean[others])


def test_a_nan_scale_of_activations_comes_out_as_nan() -> None:
    problems = problems_for(2, 8, N, K, WeightKind.MXFP8)
    quantised = [quantize_mxfp8(p.x, layout=ScaleLayout.ROW_MAJOR) for p in problems]
    quantised[1].scale[5, 2] = 255
    with ranks(2, max_tokens=8, n=N) as group:
        out = torch.cat(group.run(lambda s: gemm_rs(quantised[s.rank], problems[s.rank].weight, s)))
    assert out[5].isnan().all()
    assert out.isnan().any(dim=1).sum() == 1


def test_a_callers_output_is_filled_whole_and_returned() -> None:
    problems = problems_for(4, 10, N, K, WeightKind.BF16)
    outs = [torch.full((3, N), float("nan"), dtype=torch.bfloat16) for _ in range(4)]
    with ranks(4, max_tokens=10, n=N) as group:
        returned = group.run(
            lambda s: gemm_rs(problems[s.rank].x, problems[s.rank].weight, s, out=outs[s.rank])
        )
    assert all(r is o for r, o in zip(returned, outs, strict=True))
    assert_right(outs, problems)


def test_many_calls_of_changing_shape_under_skew_repeat_their_bits() -> None:
    size = 4
    chance = random.Random(3)
    cases = {
        (m, n, kind): problems_for(size, m, n, 128, kind, seed=m + n)
        for m in (0, 1, 3, 4, 5, 130)
        for n in (64, 192)
        for kind in KINDS
    }
    expected: dict[object, list[torch.Tensor]] = {}
    with ranks(size, max_tokens=130, n=192) as group:
        for call in range(120):
            key = chance.choice(list(cases))
            problems = cases[key]
            delays = [chance.random() * 1e-3 for _ in range(size)]
            if call % 5 == 0:
                poison(group)

            def step(space: Workspace, problems=problems, delays=delays) -> torch.Tensor:  # type: ignore[no-untyped-def]
                time.sleep(delays[space.rank])
                return gemm_rs(problems[space.rank].x, problems[space.rank].weight, space)

            outs = group.run(step)
            if key not in expected:
                assert_right(outs, problems)
                expected[key] = outs
            assert all(torch.equal(a, b) for a, b in zip(outs, expected[key], strict=True))
        assert group.workspaces[2].counters.calls == {"host": 120}


def poison(group: Ranks) -> None:
    """Fill all slots of all ranks with BF16 NaN bits."""
    for space in group.workspaces:
        assert space.exchange is not None
        block = space.exchange.blocks[space.rank]
        block[space.exchange.layout.slots_offset :].fill_(0xFF)


def test_layers_share_one_workspace() -> None:
    shapes = [(64, 128), (192, 256), (128, 384)]
    with ranks(2, max_tokens=33, n=192) as group:
        for n, k in shapes * 2:
            problems = problems_for(2, 33, n, k, WeightKind.MXFP8, seed=n)
            assert_right(group.call(problems), problems)


def test_outputs_outlive_later_calls_and_the_workspace() -> None:
    problems = problems_for(2, 33, N, K, WeightKind.BF16)
    with ranks(2, max_tokens=33, n=N) as group:
        outs = group.call(problems)
        for seed in range(1, 4):
            group.call(problems_for(2, 33, N, K, WeightKind.BF16, seed))
    assert_right(outs, problems)


def test_an_mxfp8_value_carries_its_layout() -> None:
    quantised = quantize_mxfp8(torch.ones(3, 64, dtype=torch.bfloat16))
    assert isinstance(quantised, Mxfp8)
    assert quantised.layout is ScaleLayout.SWIZZLED
    assert quantised.scale.dim() == 1
