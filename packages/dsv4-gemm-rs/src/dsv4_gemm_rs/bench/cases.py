# SPDX-License-Identifier: Apache-2.0
"""What the benchmark measures: the parts of the operation, the parts one after the other, and the whole.

`gemm-then-reduce-scatter` is the alternative that a fused kernel is compared with; `fused` is the kernel
where there is one, also where it would not be chosen; `dispatched` is what a user gets, and `unfused-call`
what the unfused path would give. The bare quantiser, the library's GEMM, the fused kernel without its
exchange (`gemm-ours`, on the same share of the multiprocessors) and the bare collective stand beside them in
the same run, and between processes what `alternatives` holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.communicator import Communicator, ProcessGroupCommunicator
from dsv4_symm_mem.errors import UnsupportedError
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.layout import shard_length

from dsv4_gemm_rs.api import gemm_rs
from dsv4_gemm_rs.bench.alternatives import Alternatives
from dsv4_gemm_rs.bench.timing import Group, Phase
from dsv4_gemm_rs.dispatch import Decision, Machine, Path, Problem, decide
from dsv4_gemm_rs.fused import launch_fused
from dsv4_gemm_rs.kernels.launch import launch
from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.problems import random_operands
from dsv4_gemm_rs.quantize import quantize_mxfp8
from dsv4_gemm_rs.unfused import activations_bf16, exchange_partial, library_gemm, run_unfused
from dsv4_gemm_rs.weights import WeightKind
from dsv4_gemm_rs.workspace import Workspace


@dataclass(frozen=True)
class Case:
    """A named sequence of phases, and how its path was decided."""

    name: str
    phases: tuple[Phase, ...]
    decision: Decision
    graph: bool


@dataclass(frozen=True)
class Setup:
    """One rank's rotating workspaces, operands and outputs."""

    workspaces: list[Workspace]
    operands: list[Operands]
    quantised: list[torch.Tensor]
    partials: list[torch.Tensor]
    outs: list[torch.Tensor]
    alternatives: Alternatives | None

    @classmethod
    def create(
        cls, rank: Communicator, m: int, n: int, k: int, kind: WeightKind, count: int, path: Path | None
    ) -> Setup:
        """Make `count` workspaces and problems on this rank; collective."""
        workspaces = [Workspace.create(rank, max_tokens=max(m, 1), n=n, path=path) for _ in range(count)]
        seeds = (1 + rank.rank + rank.size * i for i in range(count))
        operands = [
            Operands(x, None, weight, m)
            for x, weight in (random_operands(m, n, k, kind, rank.device, seed) for seed in seeds)
        ]
        quantised = [activations_bf16(each) for each in operands]
        weights = [each.weight.bf16() for each in operands]
        partials = [torch.randn(m, n, device=rank.device).to(torch.bfloat16) for _ in range(count)]
        rows = shard_length(m, rank.size)
        outs = [torch.empty(rows, n, dtype=torch.bfloat16, device=rank.device) for _ in range(count)]
        alternatives = None
        if isinstance(rank, ProcessGroupCommunicator) and rank.device.type == "cuda" and rank.size > 1 and m:
            alternatives = Alternatives(rank, quantised, weights)
        if rank.device.type == "cuda":
            torch.cuda.synchronize(rank.device)
        return cls(workspaces, operands, quantised, partials, outs, alternatives)

    def close(self) -> None:
        """Close the workspaces; collective."""
        if self.alternatives is not None:
            self.alternatives.close()
        for workspace in self.workspaces:
            workspace.close()


def cases(setups: dict[int, Setup], problem: Problem, machine: Machine) -> Iterator[Case]:
    """Every case for the ranks of this process in `setups`."""
    unfused = decide(machine, problem, Path.UNFUSED)
    chosen = next(iter(setups.values())).workspaces[0].decide(problem)

    def quantise(rank: Communicator, which: int) -> None:
        quantize_mxfp8(setups[rank.rank].operands[which].x)

    def gemm(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        torch.matmul(setup.quantised[which], setup.operands[which].weight.bf16().T, out=setup.partials[which])

    def exchange(rank: Communicator, which: int) -> None:
        if machine.world_size == 1:
            return
        setup = setups[rank.rank]
        workspace, out = setup.workspaces[which], setup.outs[which]
        exchange_partial(setup.partials[which], workspace, unfused, out, problem.k)

    def library(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        setup.partials[which] = library_gemm(setup.operands[which], unfused.gemm)

    def both(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        run_unfused(setup.operands[which], setup.workspaces[which], unfused, setup.outs[which])

    def bare(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        plan = setup.workspaces[which].plan(problem.m, problem.n, problem.k)
        weight = setup.operands[which].weight.bf16()
        launch(plan, setup.quantised[which], weight, alone[rank.rank], setup.partials[which])

    def fused(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        weight = setup.operands[which].weight.bf16()
        launch_fused(setup.quantised[which], weight, setup.workspaces[which], setup.outs[which])

    def dispatched(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        mine = setup.operands[which]
        gemm_rs(mine.x, mine.weight, setup.workspaces[which], out=setup.outs[which])

    def case(name: str, decision: Decision, *phases: Phase) -> Case:
        return Case(name, phases, decision, decision.capturable)

    if problem.kind is WeightKind.MXFP8:
        yield case("quantise", unfused, Phase(quantise, serial=True))
    yield case("gemm-cublas", unfused, Phase(gemm, serial=True))
    if machine.world_size > 1:
        yield case("reduce-scatter", unfused, Phase(exchange))
    yield case("gemm-then-reduce-scatter", unfused, Phase(gemm, serial=True), Phase(exchange))
    with suppress(UnsupportedError):
        decision = decide(machine, problem, Path.FUSED)
        alone = {rank: LaunchExchange.scratch(setup.outs[0].device) for rank, setup in setups.items()}
        yield case("gemm-ours", decision, Phase(bare))
        yield case("fused", decision, Phase(fused))
    if machine.arch is None:
        yield case("unfused-call", unfused, Phase(both))
    else:
        yield case("unfused-call", unfused, Phase(library, serial=True), Phase(exchange))
    for setup in setups.values():
        if setup.alternatives is not None:
            for name, step in setup.alternatives.cases():
                yield case(name, unfused, Phase(step))
            yield case("unfused-call-nccl", unfused, Phase(library), Phase(setup.alternatives.nccl))
    yield case("dispatched", chosen, Phase(dispatched))


def create_setups(
    group: Group, m: int, n: int, k: int, kind: WeightKind, count: int, path: Path | None
) -> dict[int, Setup]:
    """The setups of this process's ranks by rank; collective."""
    create = partial(Setup.create, m=m, n=n, k=k, kind=kind, count=count, path=path)
    if isinstance(group, VirtualGroup):
        return dict(enumerate(group.run(create)))
    return {group.rank: create(group)}
