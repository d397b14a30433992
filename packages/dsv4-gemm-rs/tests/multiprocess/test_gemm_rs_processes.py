# SPDX-License-Identifier: Apache-2.0
"""The operation between real processes: every path, skew, a long run, and no symmetric memory."""

from __future__ import annotations

import random
import time

import pytest
import torch
from dsv4_gemm_rs import WeightKind, Workspace, gemm_ar, gemm_rs
from dsv4_gemm_rs.dispatch import Exchange, Problem
from dsv4_gemm_rs.problems import RankProblem, random_problem
from dsv4_gemm_rs.reference import gemm_reduce_scatter, tolerance, worst_error
from dsv4_symm_mem.backends import BACKENDS, default_backend
from dsv4_symm_mem.communicator import ProcessGroupCommunicator
from dsv4_symm_mem.errors import GroupError, MismatchError

pytestmark = [pytest.mark.multi_gpu, pytest.mark.multiprocess_cpu]

N, K = 192, 256


def assert_right(
    group: ProcessGroupCommunicator, out: torch.Tensor, m: int, n: int, k: int, kind: WeightKind
) -> None:
    """This rank's shard against the reference; every rank can make every rank's operands from the seeds."""
    problems = [random_problem(m, n, k, kind, "cpu", rank + 1) for rank in range(group.size)]
    xs, ws = [p.x_exact for p in problems], [p.weight_exact for p in problems]
    exact = gemm_reduce_scatter(xs, ws)[group.rank]
    assert out.shape == exact.shape
    assert worst_error([out.cpu()], [exact]) <= tolerance(xs, ws)


def whole(group: ProcessGroupCommunicator, shard: torch.Tensor) -> torch.Tensor:
    """Every rank's shard; objects travel with the device that they were on, so from the CPU."""
    return torch.cat(group.all_gather(shard.cpu())).to(shard.device)


def mine(group: ProcessGroupCommunicator, m: int, n: int, k: int, kind: WeightKind) -> RankProblem:
    return random_problem(m, n, k, kind, group.device, group.rank + 1)


@pytest.mark.parametrize("kind", list(WeightKind))
@pytest.mark.parametrize("path", [None, "host", "unfused"])
def test_right_on_awkward_shapes(group: ProcessGroupCommunicator, path: str | None, kind: WeightKind) -> None:
    with Workspace.create(group, max_tokens=1025, n=N, path=path) as workspace:
        for m in sorted({0, 1, group.size - 1, group.size, group.size + 1, 127, 128, 129, 1025}):
            problem = mine(group, m, N, K, kind)
            assert_right(group, gemm_rs(problem.x, problem.weight, workspace), m, N, K, kind)


@pytest.mark.parametrize("path", [None, "host"])
def test_an_all_reduce_gives_every_rank_the_shards(group: ProcessGroupCommunicator, path: str | None) -> None:
    with Workspace.create(group, max_tokens=300, n=N, path=path) as workspace:
        for m in (300, 1, 0, 129):
            problem = mine(group, m, N, K, WeightKind.MXFP8)
            shard = gemm_rs(problem.x, problem.weight, workspace)
            assert_right(group, shard, m, N, K, WeightKind.MXFP8)
            out = gemm_ar(problem.x, problem.weight, workspace)
            assert torch.equal(out, whole(group, shard)[:m])


def test_without_symmetric_memory_the_process_group_carries_the_exchange(
    group: ProcessGroupCommunicator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object, nbytes: int) -> None:
        raise MemoryError("no shared memory")

    if group.rank == 0:
        monkeypatch.setattr(type(BACKENDS[default_backend(group)](group)), "allocate", fail)
    with Workspace.create(group, max_tokens=64, n=N) as workspace:
        decision = workspace.decide(Problem(33, N, K, WeightKind.MXFP8))
        assert decision.exchange is Exchange.ALL_TO_ALL
        problem = mine(group, 33, N, K, WeightKind.MXFP8)
        shard = gemm_rs(problem.x, problem.weight, workspace)
        assert_right(group, shard, 33, N, K, WeightKind.MXFP8)
        out = gemm_ar(problem.x, problem.weight, workspace)
        assert torch.equal(out, whole(group, shard)[:33])
    lines = [r.message for r in caplog.records if "no symmetric memory" in r.message]
    assert len(lines) == (1 if group.rank == 0 else 0)
    assert all("MemoryError: no shared memory" in line for line in lines)


def test_arguments_that_differ_are_refused_on_every_rank(group: ProcessGroupCommunicator) -> None:
    with pytest.raises(MismatchError, match="max_tokens"):
        Workspace.create(group, max_tokens=64 + group.rank, n=N)


def test_a_back_end_of_another_kind_is_refused_on_every_rank(group: ProcessGroupCommunicator) -> None:
    with pytest.raises(GroupError, match="needs a rank of a VirtualGroup"):
        raise_group_error(group)


def raise_group_error(group: ProcessGroupCommunicator) -> None:
    from dsv4_symm_mem.arena import SymmetricArena

    SymmetricArena.create(group, 128, backend="virtual")


def test_a_long_run_under_skew_repeats_its_bits(group: ProcessGroupCommunicator) -> None:
    chance, delays = random.Random(0), random.Random(group.rank)
    kept: dict[tuple[int, WeightKind], torch.Tensor] = {}
    with Workspace.create(group, max_tokens=130, n=N) as workspace:
        problems = {(m, kind): mine(group, m, N, 128, kind) for m in (0, 1, 5, 130) for kind in WeightKind}
        for _ in range(150):
            key = chance.choice(list(problems))
            time.sleep(delays.random() * 1e-3)
            out = gemm_rs(problems[key].x, problems[key].weight, workspace)
            assert torch.equal(kept.setdefault(key, out), out)
    for (m, kind), out in kept.items():
        assert_right(group, out, m, N, 128, kind)
