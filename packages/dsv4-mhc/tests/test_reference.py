# SPDX-License-Identifier: Apache-2.0
"""Properties of the reference that follow from the formulas, not from another implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dsv4_mhc import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from mhc_support import Problem, assert_input, assert_rounded, ulps

HIDDEN = 192


@given(st.integers(0, 2**31), st.floats(0.01, 4))
@settings(max_examples=12, deadline=None)
def test_many_iterations_approach_doubly_stochastic(seed: int, size: float) -> None:
    logits = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(seed)).double() * size
    matrix = reference.sinkhorn(logits, 1500, 0.0)
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(-2), torch.ones(5, 4).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(5, 4).double(), rtol=0, atol=5e-3)


def test_sinkhorn_ends_on_columns() -> None:
    logits = torch.randn(64, 4, 4, generator=torch.Generator().manual_seed(1)).double() * 4
    matrix = reference.sinkhorn(logits, 20, 1e-6)
    assert (matrix.sum(-2) - 1).abs().max() < 3e-6
    assert (matrix.sum(-1) - 1).abs().max() > 1e-4


def test_equal_logits_give_a_constant_matrix() -> None:
    matrix = reference.sinkhorn(torch.full((2, 4, 4), 3.5).double(), 20, 1e-6)
    torch.testing.assert_close(matrix, torch.full((2, 4, 4), 0.25).double(), rtol=0, atol=1e-6)


def test_a_permutation_survives() -> None:
    permutation = torch.eye(4)[[2, 0, 3, 1]].double()
    matrix = reference.sinkhorn(permutation.expand(1, 4, 4) * 60, 20, 1e-9)
    torch.testing.assert_close(matrix[0], permutation, rtol=0, atol=1e-7)


def test_one_iteration_is_softmax_and_columns() -> None:
    logits = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(2)).double()
    first = logits.exp() / logits.exp().sum(2, keepdim=True) + 0.01
    wanted = first / (first.sum(1, keepdim=True) + 0.01)
    torch.testing.assert_close(reference.sinkhorn(logits, 1, 0.01), wanted)


def test_normaliser_divides_by_all_streams() -> None:
    residual = torch.full((1, 4, HIDDEN), 2.0, dtype=torch.bfloat16)
    fn = torch.zeros(24, 4 * HIDDEN)
    fn[5, 0] = 1
    mixed = reference.mixes(residual, fn, 0.0)
    assert mixed[0, 5].item() == pytest.approx(1.0)


def test_comb_goes_from_source_to_target() -> None:
    problem = Problem.make(2, HIDDEN)
    comb = torch.zeros(2, 4, 4)
    comb[:, 1, 3] = 1
    streams = reference.post(problem.residual, problem.output, torch.zeros(2, 4), comb)
    assert torch.equal(streams[:, 3], problem.residual[:, 1])
    assert not streams[:, :3].any()


def test_first_carried_pre_is_stream_0() -> None:
    problem = Problem.make(3, HIDDEN)
    assert torch.equal(reference.collapse(problem.residual, reference.first_pre(3)), problem.residual[:, 0])


def test_equal_streams_stay_equal_under_the_mean() -> None:
    embedding = Problem.make(3, HIDDEN).output
    assert torch.equal(reference.stream_mean(reference.expand(embedding)), embedding)


def stages(problem: Problem, **options: Any) -> reference.Seam:
    """The reference's seam on a problem."""
    return reference.seam(
        *(problem.residual, problem.output, problem.post, problem.comb),
        problem.fn,
        problem.scale,
        problem.base,
        **options,
    )


def test_shifted_and_coupled_differ_in_the_collapse_only() -> None:
    problem = Problem.make(4, HIDDEN)
    coupled = stages(problem)
    shifted = stages(problem, carried=coupled.coefficients.pre)
    assert torch.equal(coupled.y, shifted.y)
    for one, two in zip(coupled.coefficients, shifted.coefficients, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("size", [1.0, 1e4, 1e-18])
def test_fp32_agrees_with_fp64(size: float) -> None:
    problem = Problem.make(16, HIDDEN, size=size)
    exact = stages(problem, norm_weight=problem.norm_weight)
    single = stages(problem, norm_weight=problem.norm_weight, dtype=torch.float32)
    assert_rounded(single.residual, exact.residual)
    for one, two in zip(single.coefficients, exact.coefficients, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), two, rtol=0, atol=3e-6)


def test_rows_do_not_see_each_other() -> None:
    problem = Problem.make(5, HIDDEN)
    clean = stages(problem, norm_weight=problem.norm_weight)
    problem.residual[2, 3, 5] = float("nan")
    dirty = stages(problem, norm_weight=problem.norm_weight)
    others = [0, 1, 3, 4]
    assert torch.equal(clean.y[others], dirty.y[others])
    assert torch.equal(clean.coefficients.comb[others], dirty.coefficients.comb[others])
    assert dirty.coefficients.pre[2].isnan().all()
    assert dirty.y[2].isnan().all()


def test_head_is_a_gate_without_sinkhorn() -> None:
    problem = Problem.make(3, HIDDEN)
    pre = reference.head_pre(problem.residual, torch.zeros(4, 4 * HIDDEN), problem.scale[:1], torch.zeros(4))
    torch.testing.assert_close(pre, torch.full((3, 4), 0.500001).double())


def test_statistic_of_the_unrounded_sum_differs() -> None:
    problem = Problem.make(64, HIDDEN)
    rounded = reference.sublayer_input(problem.residual, problem.carried, problem.norm_weight)
    exact = reference.sublayer_input(
        problem.residual, problem.carried, problem.norm_weight, exact_statistic=True
    )
    assert not torch.equal(rounded, exact)
    assert ulps(rounded, exact).max() == 1


def test_engram_gate() -> None:
    problem = Problem.make(4, HIDDEN)
    gate = reference.engram_gate(
        problem.residual,
        problem.memory,
        problem.query_weight,
        problem.key_weight,
        mask=problem.open_gate == 0,
    )
    assert not gate[1].any()
    # A key that equals its query scores sqrt(H): both are normalised to mean square 1.
    memory = problem.memory.clone()
    memory[:, :4] = problem.residual
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    gate = reference.engram_gate(problem.residual, memory, ones, ones, eps=0.0)
    torch.testing.assert_close(gate, torch.full((4, 4), HIDDEN**0.25).double().sigmoid())
    memory[:, :4] = -problem.residual
    gate = reference.engram_gate(problem.residual, memory, ones, ones, eps=0.0)
    torch.testing.assert_close(gate, torch.full((4, 4), -(HIDDEN**0.25)).double().sigmoid())


def test_closed_engram_changes_nothing() -> None:
    problem = Problem.make(4, HIDDEN)
    closed = torch.ones(4, dtype=torch.bool)
    streams = reference.engram(
        problem.residual, problem.memory, problem.query_weight, problem.key_weight, mask=closed
    )
    assert torch.equal(streams, problem.residual)


def test_mxfp8_never_saturates_and_keeps_powers_of_two() -> None:
    values = torch.tensor([448.0, 449.0, 1.0, 2.0**-20, 0.0, float("nan"), float("inf")]).bfloat16()
    blocks = torch.zeros(len(values), 32, dtype=torch.bfloat16)
    blocks[:, 3] = values
    codes, bytes_ = reference.quantize_mxfp8(blocks)
    assert bytes_[:, 0].tolist() == [127, 127, 119, 99, 0, 0, 0]
    back = codes.float() * torch.exp2(bytes_.float() - 127)
    assert back[2, 3] == 1
    assert back[3, 3] == 2.0**-20
    assert back[5:, 3].isnan().all()


def test_scale_layout() -> None:
    scale = torch.arange(130 * 5, dtype=torch.int32).remainder(251).to(torch.uint8).view(130, 5)
    flat = reference.swizzle_scales(scale)
    assert flat.numel() == 256 * 8
    for row in (0, 31, 32, 127, 128, 129):
        for block in range(5):
            place = (row // 128 * 2 + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            assert flat[place] == scale[row, block]
    assert int(flat.int().sum()) == int(scale.int().sum())


def test_bounds_of_an_input_leave_no_room_for_a_neighbour() -> None:
    problem = Problem.make(2, HIDDEN)
    arguments = (problem.residual, problem.carried, problem.norm_weight)
    y = reference.sublayer_input(*arguments)
    assert_input(y, *arguments)
    wrong = 0
    for column in range(32):
        moved = y.clone()
        moved.view(torch.int16)[1, column] += 1
        try:
            assert_input(moved, *arguments)
        except AssertionError:
            wrong += 1
    assert wrong >= 31
