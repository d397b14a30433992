# SPDX-License-Identifier: Apache-2.0
"""The fused kernel between GPUs: the model's shapes, skew inside the device, graphs, a long run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from dsv4_gemm_rs import WeightKind, Workspace, gemm_ar, gemm_rs
from dsv4_gemm_rs.dispatch import Exchange, Path, Problem
from dsv4_gemm_rs.problems import RankProblem
from dsv4_gemm_rs.reference import gemm_reduce_scatter, tolerance, worst_error
from dsv4_symm_mem.communicator import ProcessGroupCommunicator
from dsv4_symm_mem.errors import CallMismatchError, ExchangeError
from gemm_rs_support import problems_for

pytestmark = [pytest.mark.multi_gpu]

KINDS = list(WeightKind)
LAUNCHES = 20_000


def assert_right(group: ProcessGroupCommunicator, out: torch.Tensor, problems: list[RankProblem]) -> None:
    """This rank's shard against the FP64 reference; every rank makes every rank's operands from the seeds."""
    xs, ws = [p.x_exact for p in problems], [p.weight_exact for p in problems]
    exact = gemm_reduce_scatter(xs, ws)[group.rank]
    assert out.shape == exact.shape
    assert worst_error([out], [exact]) <= tolerance(xs, ws)


def on_gpu(group: ProcessGroupCommunicator, m: int, n: int, k: int, kind: WeightKind) -> list[RankProblem]:
    """Every rank's problem, on this rank's device."""
    return problems_for(group.size, m, n, k, kind, m + k, device=str(group.device), made_on=str(group.device))


def poison(workspace: Workspace) -> None:
    """Fill this rank's slots with BF16 NaN bits while no rank is in a call."""
    assert workspace.exchange is not None
    torch.cuda.synchronize()
    workspace.communicator.all_gather(None)
    layout = workspace.exchange.layout
    workspace.exchange.blocks[workspace.rank][layout.slots_offset :].fill_(0xFF)
    torch.cuda.synchronize()
    workspace.communicator.all_gather(None)


@pytest.mark.parametrize(("n", "k"), [(5120, 2048), (5120, 4096), (7168, 1024), (4096, 128), (576, 384)])
def test_right_on_the_models_shapes(group: ProcessGroupCommunicator, n: int, k: int) -> None:
    size, kind = group.size, KINDS[k // 1024 % 2]
    sizes = {0, 1, size - 1, size, size + 1, 127, 128, 129, 1000, 1023, 1024, 1025, 4097, 8192}
    everything = on_gpu(group, max(sizes), n, k, kind)
    with Workspace.create(group, max_tokens=max(sizes), n=n, path="fused") as workspace:
        decision = workspace.decide(Problem(1, n, k, kind))
        assert (decision.path, decision.exchange) == (Path.FUSED, Exchange.PUSH)
        for m in sorted(sizes):
            problems = [replace(p, x=p.x[:m], x_exact=p.x_exact[:m]) for p in everything]
            poison(workspace)
            mine = problems[group.rank]
            assert_right(group, gemm_rs(mine.x, mine.weight, workspace), problems)


@pytest.mark.parametrize("path", ["fused", "unfused"])
def test_an_all_reduce_gives_every_rank_the_shards(group: ProcessGroupCommunicator, path: str) -> None:
    with Workspace.create(group, max_tokens=4097, n=5120, path=path) as workspace:
        for m in (4097, 1, 0, group.size - 1, 1024, 129):
            problems = on_gpu(group, m, 5120, 256, WeightKind.BF16)
            mine = problems[group.rank]
            poison(workspace)
            shard = gemm_rs(mine.x, mine.weight, workspace)
            assert_right(group, shard, problems)
            out = gemm_ar(mine.x, mine.weight, workspace)
            assert torch.equal(out.cpu(), torch.cat(group.all_gather(shard.cpu()))[:m])


def test_fused_and_unfused_ranks_meet_in_one_call(group: ProcessGroupCommunicator) -> None:
    problems = on_gpu(group, 300, 512, 256, WeightKind.BF16)
    mine = problems[group.rank]
    with Workspace.create(group, max_tokens=300, n=512) as workspace:
        for mask in range(2**group.size):
            workspace._decisions.clear()
            workspace.requested = Path.FUSED if mask >> group.rank & 1 else Path.UNFUSED
            assert_right(group, gemm_rs(mine.x, mine.weight, workspace), problems)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_replay_with_changed_inputs_between_eager_calls(
    group: ProcessGroupCommunicator, kind: WeightKind
) -> None:
    delays = random.Random(group.rank)
    with Workspace.create(group, max_tokens=200, n=512, path="fused") as workspace:
        mine = {m: on_gpu(group, m, 512, 256, kind)[group.rank] for m in (200, 77, 1)}
        fresh = {m: on_gpu(group, m, 512, 256, kind)[group.rank].x.flip(0) for m in mine}
        for problem in mine.values():
            gemm_rs(problem.x, problem.weight, workspace)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = {m: gemm_rs(p.x, p.weight, workspace) for m, p in mine.items()}
        for replay in range(7):
            for m, problem in mine.items():
                problem.x.copy_(fresh[m] if replay % 2 else fresh[m].flip(0))
            torch.cuda._sleep(delays.randrange(400_000))
            expected = {m: gemm_rs(p.x, p.weight, workspace) for m, p in mine.items()}
            torch.cuda._sleep(delays.randrange(400_000))
            graph.replay()
            for m in mine:
                assert torch.equal(captured[m], expected[m])
        workspace.check()


def test_a_long_run_with_changing_shapes_and_delays_repeats_its_bits(group: ProcessGroupCommunicator) -> None:
    common, delays = random.Random(0), random.Random(group.rank)
    shapes = [(m, n, k) for m in (0, 1, 3, 5, 128, 130, 1025) for n in (512, 1280) for k in (128, 512)]
    wrong = torch.zeros(1, dtype=torch.int64, device=group.device)
    with Workspace.create(group, max_tokens=1025, n=1280, path="fused") as workspace:
        problems, kept = {}, {}
        for shape in shapes:
            everyone = on_gpu(group, *shape, WeightKind.BF16)
            mine = problems[shape] = everyone[group.rank]
            kept[shape] = gemm_rs(mine.x, mine.weight, workspace)
            assert_right(group, kept[shape], everyone)
        for launch in range(LAUNCHES):
            shape = common.choice(shapes)
            if delays.random() < 0.2:
                torch.cuda._sleep(delays.randrange(100_000))
            if launch % 2000 == 0:
                poison(workspace)
            out = gemm_rs(problems[shape].x, problems[shape].weight, workspace)
            if out.numel():
                wrong += (out != kept[shape]).any()
        assert wrong.item() == 0
        workspace.check()
        assert workspace.exchange is not None
        assert workspace.exchange.epoch == LAUNCHES + len(shapes)


def test_a_rank_in_another_shape_is_told_on_every_rank(group: ProcessGroupCommunicator) -> None:
    m = 200 + 64 * (group.rank == 0)
    mine = on_gpu(group, m, 512, 256, WeightKind.BF16)[group.rank]
    workspace = Workspace.create(group, max_tokens=300, n=512, path="fused", deadline=5.0)
    out = gemm_rs(mine.x, mine.weight, workspace)
    torch.cuda.synchronize()
    with pytest.raises(ExchangeError) as caught:
        workspace.check()
    assert out.isnan().all()
    kinds = group.all_gather(type(caught.value))
    assert CallMismatchError in kinds
    workspace.close()
