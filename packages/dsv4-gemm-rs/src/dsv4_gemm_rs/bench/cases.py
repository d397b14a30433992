# SPDX-License-Identifier: Apache-2.0
"""What the benchmark measures: the parts of the operation, the parts one after the other, and the whole.

`gemm-then-reduce-scatter` is the alternative that a fused path is compared with; `dispatched` is what a user
gets. Both stand beside the bare quantiser, GEMM and collective in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.communicator import Communicator
from dsv4_symm_mem.protocol.layout import shard_length

from dsv4_gemm_rs.api import gemm_rs
from dsv4_gemm_rs.bench.timing import Step
from dsv4_gemm_rs.dispatch import Machine, Path, Problem, decide
from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.problems import RankProblem, random_problem
from dsv4_gemm_rs.quantize import quantize_mxfp8
from dsv4_gemm_rs.unfused import exchange_partial, library_gemm, run_unfused
from dsv4_gemm_rs.weights import WeightKind
from dsv4_gemm_rs.workspace import Workspace


@dataclass(frozen=True)
class Setup:
    """One rank's rotating workspaces, operands and outputs."""

    workspaces: list[Workspace]
    problems: list[RankProblem]
    partials: list[torch.Tensor]
    outs: list[torch.Tensor]

    @classmethod
    def create(
        cls, rank: Communicator, m: int, n: int, k: int, kind: WeightKind, count: int, path: Path | None
    ) -> Setup:
        """Make `count` workspaces and problems on this rank; collective."""
        workspaces = [Workspace.create(rank, max_tokens=max(m, 1), n=n, path=path) for _ in range(count)]
        seeds = (1 + rank.rank + rank.size * i for i in range(count))
        problems = [random_problem(m, n, k, kind, rank.device, seed) for seed in seeds]
        partials = [torch.randn(m, n, device=rank.device).to(torch.bfloat16) for _ in range(count)]
        rows = shard_length(m, rank.size)
        outs = [torch.empty(rows, n, dtype=torch.bfloat16, device=rank.device) for _ in range(count)]
        return cls(workspaces, problems, partials, outs)

    def operands(self, which: int) -> Operands:
        """The operands of one workspace, as the paths take them."""
        problem = self.problems[which]
        return Operands(problem.x, None, problem.weight, problem.x.shape[0])

    def close(self) -> None:
        """Close the workspaces; collective."""
        for workspace in self.workspaces:
            workspace.close()


def cases(setups: dict[int, Setup], problem: Problem, machine: Machine) -> Iterator[tuple[str, Step]]:
    """Every case as (name, step), for the ranks of this process in `setups`."""
    unfused = decide(machine, problem, Path.UNFUSED)

    def quantise(rank: Communicator, which: int) -> None:
        quantize_mxfp8(setups[rank.rank].problems[which].x)

    def gemm(rank: Communicator, which: int) -> None:
        library_gemm(setups[rank.rank].operands(which), unfused.gemm)

    def exchange(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        exchange_partial(setup.partials[which], setup.workspaces[which], unfused, setup.outs[which])

    def both(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        run_unfused(setup.operands(which), setup.workspaces[which], unfused, setup.outs[which])

    def dispatched(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        chosen = setup.problems[which]
        gemm_rs(chosen.x, chosen.weight, setup.workspaces[which], out=setup.outs[which])

    if problem.kind is WeightKind.MXFP8:
        yield "quantise", quantise
    yield "gemm", gemm
    if machine.world_size > 1:
        yield "reduce-scatter", exchange
    yield "gemm-then-reduce-scatter", both
    yield "dispatched", dispatched


def create_setups(
    group: VirtualGroup | Communicator,
    m: int,
    n: int,
    k: int,
    kind: WeightKind,
    count: int,
    path: Path | None,
) -> dict[int, Setup]:
    """The setups of this process's ranks by rank; collective."""
    create = partial(Setup.create, m=m, n=n, k=k, kind=kind, count=count, path=path)
    if isinstance(group, VirtualGroup):
        return dict(enumerate(group.run(create)))
    return {group.rank: create(group)}
