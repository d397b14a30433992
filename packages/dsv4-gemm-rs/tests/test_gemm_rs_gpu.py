# SPDX-License-Identifier: Apache-2.0
"""The operation on one GPU with virtual ranks: right, repeatable, in graphs, and when peers fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from dsv4_gemm_rs import WeightKind, gemm_ar, gemm_rs
from dsv4_gemm_rs.dispatch import Exchange, Gemm, Path, Problem
from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.problems import RankProblem, random_problem
from dsv4_gemm_rs.unfused import library_gemm
from dsv4_symm_mem.errors import CallMismatchError, ExchangeError, PeerTimeoutError
from dsv4_symm_mem.protocol.layout import shard_length
from gemm_rs_gpu_support import Ranks, problems_for, ranks
from gemm_rs_support import assert_right

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

KINDS = list(WeightKind)
CALLS = 5000
"""Calls of the long run: 20,000 launches over four ranks."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", list(Path))
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_right_on_awkward_shapes(size: int, path: Path, kind: WeightKind) -> None:
    with ranks(size, 1025, 512, path=path) as group:
        for m in sorted({0, 1, size - 1, size, size + 1, 127, 128, 129, 1000, 1025}):
            if path is Path.HOST and m > 129:
                continue  # the host-driven path is slow, and its tests run on the CPU
            problems = problems_for(size, m, 512, 256, kind, seed=m)
            group.poison()
            outs = [
                torch.full((shard_length(m, size), 512), float("nan"), dtype=torch.bfloat16, device="cuda")
                for _ in range(size)
            ]
            if path is Path.HOST:
                outs = on_threads(group, problems, gemm_rs)
            else:
                group.call(problems, outs)
            torch.cuda.synchronize()
            assert_right(outs, problems)


@pytest.mark.parametrize("k", [128, 1024, 2048, 4096])
@pytest.mark.parametrize("n", [512, 4096, 5120, 7168])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_right_on_the_models_shapes(size: int, n: int, k: int) -> None:
    sizes = {0, 1, size - 1, size, size + 1, 127, 128, 129, 1000, 1023, 1024, 1025, 4097, 8192}
    kind = KINDS[(n // 512 + k // 128 + size) % len(KINDS)]
    with ranks(size, max(sizes), n, path="fused") as group:
        everything = problems_for(size, max(sizes), n, k, kind, made_on="cuda")
        for m in sorted(sizes):
            problems = [replace(p, x=p.x[:m], x_exact=p.x_exact[:m]) for p in everything]
            group.poison()
            assert_right(group.call(problems), problems)


@pytest.mark.parametrize(("n", "k"), [(576, 384), (192, 640)])
@pytest.mark.parametrize("m", [257, 1024])
def test_right_on_odd_widths(m: int, n: int, k: int) -> None:
    with ranks(4, m, n, path="fused") as group:
        problems = problems_for(4, m, n, k, WeightKind.MXFP8)
        assert_right(group.call(problems), problems)


def test_fused_is_what_a_hopper_gets_and_why_is_said() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no fused kernel for this device's architecture")
    with ranks(2, 128, 512) as group:
        decision = group.workspaces[0].decide(Problem(4096, 512, 256, WeightKind.MXFP8))
        assert (decision.path, decision.exchange) == (Path.FUSED, Exchange.PUSH)
        assert decision.capturable


@pytest.mark.parametrize("size", [1, 2])
def test_kernels_begin_early_where_a_rank_has_the_device_alone(size: int) -> None:
    """One virtual rank does, so that what begins behind a quantiser is tested on one GPU."""
    with ranks(size, 128, 512) as group:
        assert [space.overlaps for space in group.workspaces] == [size == 1] * size


def test_launches_with_changing_shapes_and_delays_repeat_their_bits() -> None:
    size, chance = 4, random.Random(7)
    shapes = [(m, n, k) for m in (0, 1, 3, 5, 128, 130, 1025) for n in (512, 1280) for k in (128, 512)]
    cases = {s: problems_for(size, *s, WeightKind.BF16, seed=sum(s)) for s in shapes}
    kept: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    with ranks(size, 1025, 1280, path="fused") as group:
        for shape in shapes:
            kept[shape] = group.call(cases[shape])
            assert_right(kept[shape], cases[shape])
        for call in range(CALLS):
            shape = chance.choice(shapes)
            if chance.random() < 0.3:
                late = group.group.ranks[chance.randrange(size)].stream
                with torch.cuda.stream(late):
                    torch.cuda._sleep(chance.randrange(200_000))
            if call % 50 == 0:
                torch.cuda.synchronize()
                group.poison()
            for got, expected in zip(group.call(cases[shape]), kept[shape], strict=True):
                wrong += (got != expected).any()
        assert wrong.item() == 0
        for space in group.workspaces:
            space.check()
            assert space.exchange is not None
            assert space.exchange.epoch == CALLS + len(shapes)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_replay_with_changed_inputs_between_eager_calls(size: int, kind: WeightKind) -> None:
    with ranks(size, 200, 512, path="fused") as group:
        problems = {m: problems_for(size, m, 512, 256, kind, seed=m) for m in (200, 77, 1)}
        fresh = {m: problems_for(size, m, 512, 256, kind, seed=m + 50) for m in problems}
        for m in problems:
            group.call(problems[m])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = {m: group.call(problems[m]) for m in problems}
        for replay in range(7):
            for m, ps in problems.items():
                for p, f in zip(ps, fresh[m], strict=True):
                    p.x.copy_(f.x if replay % 2 else f.x.flip(0))
            expected = {m: group.call(problems[m]) for m in problems}
            graph.replay()
            for m in problems:
                for got, want in zip(captured[m], expected[m], strict=True):
                    assert torch.equal(got, want)
        eager = [
            random_problem(77, 512, 256, kind, "cuda", 77 * size + 50 * size + r + 1) for r in range(size)
        ]
        group.call(eager)
        for space in group.workspaces:
            space.check()


def on_threads(
    group: Ranks, problems: list[RankProblem], operation: Callable[..., torch.Tensor]
) -> list[torch.Tensor]:
    """One call on every rank, each from a thread of its own, as the host-driven path needs."""
    return group.group.run(
        lambda rank: operation(problems[rank.rank].x, problems[rank.rank].weight, group.workspaces[rank.rank])
    )


@pytest.mark.parametrize("path", list(Path))
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_an_all_reduce_gives_every_rank_the_shards(size: int, path: Path) -> None:
    with ranks(size, 1025, 576, path=path) as group:
        for m in (1025, 1, 0, size - 1, 129):
            problems = problems_for(size, m, 576, 256, WeightKind.MXFP8, seed=m)
            group.poison()
            if path is Path.HOST:
                shards, outs = (on_threads(group, problems, each) for each in (gemm_rs, gemm_ar))
            else:
                shards = group.call(problems)
                outs = group.call(problems, operation=gemm_ar)
            torch.cuda.synchronize()
            assert_right(shards, problems)
            whole = torch.cat(shards)[:m]
            assert all(torch.equal(out, whole) for out in outs)


def test_graphs_of_both_operations_replay_any_number_of_times() -> None:
    with ranks(2, 200, 512, path="fused") as group:
        problems = problems_for(2, 200, 512, 256, WeightKind.BF16)
        group.call(problems)
        group.call(problems, operation=gemm_ar)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = group.call(problems, operation=gemm_ar)
            shards = group.call(problems)
        for _ in range(3):
            for problem in problems:
                problem.x.mul_(-2)
            wanted = torch.cat(group.call(problems))
            graph.replay()
            assert torch.equal(torch.cat(shards), wanted)
            assert all(torch.equal(out, wanted) for out in outs)


def test_outputs_outlive_later_calls() -> None:
    with ranks(4, 130, 512, path="fused") as group:
        problems = problems_for(4, 130, 512, 256, WeightKind.MXFP8)
        outs = group.call(problems)
        for seed in range(1, 6):
            group.call(problems_for(4, 130, 512, 256, WeightKind.MXFP8, seed))
        assert_right(outs, problems)


def test_fused_and_unfused_ranks_meet_in_one_call() -> None:
    size = 4
    problems = problems_for(size, 300, 512, 256, WeightKind.BF16)
    with ranks(size, 300, 512) as group:
        for problem in problems:
            # Libraries load their kernels at first use, which must not meet a kernel that spins.
            library_gemm(Operands(problem.x, None, problem.weight, 300), Gemm.BF16)
        torch.cuda.synchronize()
        for mask in range(1, 15):
            here = torch.cuda.current_stream()
            outs = []
            for member in group.group.ranks:
                space, problem = group.workspaces[member.rank], problems[member.rank]
                space._decisions.clear()
                space.requested = Path.FUSED if mask >> member.rank & 1 else Path.UNFUSED
                stream = member.stream
                assert stream is not None
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    outs.append(gemm_rs(problem.x, problem.weight, space))
            torch.cuda.synchronize()
            assert_right(outs, problems)


def test_a_missing_rank_is_blamed_by_all_and_outputs_are_nan() -> None:
    size, missing = 4, 2
    problems = problems_for(size, 300, 512, 256, WeightKind.BF16)
    with ranks(size, 300, 512, path="fused", deadline=0.3) as group:
        right = group.call(problems)
        torch.cuda.synchronize()
        outs = {}
        for rank in group.group.ranks:
            if rank.rank != missing:
                with torch.cuda.stream(rank.stream):
                    space = group.workspaces[rank.rank]
                    outs[rank.rank] = gemm_rs(problems[rank.rank].x, problems[rank.rank].weight, space)
        torch.cuda.synchronize()
        kinds = set()
        for index, out in outs.items():
            assert out.isnan().all()
            assert not right[index].isnan().any()
            with pytest.raises(ExchangeError, match="call 2") as caught:
                group.workspaces[index].check()
            assert caught.value.blamed == missing
            kinds.add(type(caught.value))
            with pytest.raises(ExchangeError):
                gemm_rs(problems[index].x, problems[index].weight, group.workspaces[index])
        assert PeerTimeoutError in kinds


def test_ranks_that_disagree_on_m_end_with_a_mismatch() -> None:
    with ranks(2, 300, 512, path="fused", deadline=5.0) as group:
        for rank in group.group.ranks:
            (problem,) = problems_for(1, 200 + 64 * rank.rank, 512, 256, WeightKind.BF16)
            with torch.cuda.stream(rank.stream):
                gemm_rs(problem.x, problem.weight, group.workspaces[rank.rank])
        torch.cuda.synchronize()
        kinds = set()
        for space in group.workspaces:
            with pytest.raises(ExchangeError) as caught:
                space.check()
            kinds.add(type(caught.value))
        assert CallMismatchError in kinds


@pytest.mark.parametrize("kind", KINDS)
def test_nan_rows_stay_where_they_are(kind: WeightKind) -> None:
    with ranks(4, 64, 512, path="fused") as group:
        problems = problems_for(4, 64, 512, 256, kind)
        clean = torch.cat(group.call(problems))
        problems[2].x[19, 100] = float("nan")
        dirty = torch.cat(group.call(problems))
        assert dirty[19].isnan().all()
        others = [row for row in range(64) if row != 19]
        assert torch.equal(dirty[others], clean[others])


def test_compiled_models_agree_with_eager_ones() -> None:
    problems = problems_for(1, 96, 512, 256, WeightKind.MXFP8)
    with ranks(1, 96, 512, path="fused") as group:
        space, weight = group.workspaces[0], problems[0].weight

        def model(x: torch.Tensor) -> torch.Tensor:
            return gemm_rs(x * 2, weight, space) + gemm_rs(x + 1, weight, space)

        expected = model(problems[0].x)
        assert torch.equal(torch.compile(model, fullgraph=True)(problems[0].x), expected)
