# SPDX-License-Identifier: Apache-2.0
"""What the benchmark measures: the parts of the operation, the parts one after the other, and the whole.

`gemm-then-reduce-scatter` is the alternative that a fused kernel is compared with; `fused` is the kernel
where there is one, also where it would not be chosen; `dispatched` is what a user gets, and `unfused-call`
what the unfused path would give. What memory alone bounds (`memory`), the library's GEMM, the fused kernel
without its exchange (`gemm-ours`, on the same share of the multiprocessors) and the bare collective stand
beside them in the same run, and between processes what `alternatives` holds. The library's GEMM is the one
that the unfused path takes, on operands that need no preparation: `gemm-cublas` in BF16, `gemm-mxfp8` with
block scales.
With `keep` FP8, `gemm-ours-fp8-weights`, `fused-fp8-weights` and `dispatched-fp8-weights` stand beside those
of the same weights in BF16.
`batch-invariant` is what a workspace that was created so performs on the same operands: our product, then
the reduce-scatter. `fused-unpaced` is the fused kernel whose SMs do not take turns on the link;
`fused-all-reduce` is followed by the gather of the shards, which `all-gather` shows by itself.

The workspaces exchange one way for a whole run. Where owners read sums through multicast, `fused`,
`gemm-ours`, `fused-all-reduce` (a single launch there) and `dispatched` are of the kernel that does that;
SMs take no turns, so nothing is unpaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from dsv4_symm_mem.accelerator import accelerator_of
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.communicator import Communicator, ProcessGroupCommunicator
from dsv4_symm_mem.errors import UnsupportedError
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.layout import Strategy, shard_length

from dsv4_gemm_rs.api import gemm_rs
from dsv4_gemm_rs.bench.alternatives import Alternatives
from dsv4_gemm_rs.bench.memory import Memory, bandwidth_copy
from dsv4_gemm_rs.bench.timing import Group, Phase
from dsv4_gemm_rs.dispatch import Decision, Exchange, Gemm, Machine, Path, Problem, decide
from dsv4_gemm_rs.fused import factors_of, launch_fused
from dsv4_gemm_rs.kernels.families import Operand, members
from dsv4_gemm_rs.kernels.launch import Factors, launch
from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.perform import gather_shards
from dsv4_gemm_rs.problems import random_operands
from dsv4_gemm_rs.unfused import (
    activations_bf16,
    activations_mxfp8,
    exchange_partial,
    library_gemm,
    run_unfused,
)
from dsv4_gemm_rs.weights import Keep, WeightKind, prepare_weight
from dsv4_gemm_rs.workspace import Workspace


@dataclass(frozen=True)
class Case:
    """A named sequence of phases, how its path was decided, and what holds while it is measured."""

    name: str
    phases: tuple[Phase, ...]
    decision: Decision
    graph: bool
    around: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Setup:
    """One rank's rotating workspaces, operands and outputs.

    Attributes:
        workspaces: Of the rank.
        operands: As a caller has them.
        ready: The same, with activations that a library's GEMM takes as they are.
        factors: The same as the fused kernel takes them.
        kept: The same with weights kept in FP8; empty unless asked for.
        packed: These as their kernel takes them.
        partials: Products.
        outs: Results.
        wholes: Results of all ranks.
        alternatives: Between processes, what else there is.
        memory: Quantisers and copies of the activations.
    """

    workspaces: list[Workspace]
    operands: list[Operands]
    ready: list[Operands]
    factors: list[Factors]
    kept: list[Operands]
    packed: list[Factors]
    partials: list[torch.Tensor]
    outs: list[torch.Tensor]
    wholes: list[torch.Tensor]
    alternatives: Alternatives | None
    memory: Memory

    @classmethod
    def create(
        cls,
        rank: Communicator,
        m: int,
        n: int,
        k: int,
        kind: WeightKind,
        count: int,
        path: Path | None,
        keep: Keep = Keep.BF16,
        exchange: Strategy = Strategy.PUSH,
    ) -> Setup:
        """Make `count` workspaces and problems on this rank; collective.

        Raises:
            UnsupportedError: `keep` is FP8 and no kernel takes such weights here, or the group cannot
                exchange that way.
        """
        workspaces = [
            Workspace.create(rank, max_tokens=max(m, 1), n=n, path=path, exchange=exchange)
            for _ in range(count)
        ]
        seeds = (1 + rank.rank + rank.size * i for i in range(count))
        operands = [
            Operands(x, None, weight, m)
            for x, weight in (random_operands(m, n, k, kind, rank.device, seed) for seed in seeds)
        ]
        machine = workspaces[0].machine
        gemm = decide(machine, operands[0].problem, Path.UNFUSED).gemm
        ready = [_ready(each, gemm) for each in operands]
        factors = [factors_of(each, machine.arch) for each in operands]
        kept = [_kept(each, machine) for each in operands] if keep is Keep.FP8 else []
        packed = [factors_of(each, machine.arch) for each in kept]
        partials = [torch.randn(m, n, device=rank.device).to(torch.bfloat16) for _ in range(count)]
        rows = shard_length(m, rank.size)
        outs = [torch.empty(rows, n, dtype=torch.bfloat16, device=rank.device) for _ in range(count)]
        wholes = [torch.empty_like(partial) for partial in partials]
        alternatives = None
        if isinstance(rank, ProcessGroupCommunicator) and rank.device.type == "cuda" and rank.size > 1 and m:
            xs = [activations_bf16(each) for each in operands]
            alternatives = Alternatives(rank, xs, [each.weight.bf16() for each in operands])
        if rank.device.type == "cuda":
            torch.cuda.synchronize(rank.device)
        made = (workspaces, operands, ready, factors, kept, packed, partials, outs, wholes, alternatives)
        return cls(*made, Memory([each.x for each in operands]))

    def alone(self) -> LaunchExchange:
        """An exchange of this rank with itself, for a kernel that only multiplies."""
        communicator = self.workspaces[0].communicator
        return LaunchExchange.scratch(communicator.device, accelerator_of(communicator))

    def close(self) -> None:
        """Close the workspaces; collective."""
        if self.alternatives is not None:
            self.alternatives.close()
        for workspace in self.workspaces:
            workspace.close()


def _ready(operands: Operands, gemm: Gemm) -> Operands:
    """The same product, of operands that `gemm` takes as they are."""
    if gemm in (Gemm.FLASHINFER, Gemm.SCALED_MM):
        return Operands(*activations_mxfp8(operands), operands.weight, operands.m)
    plain = prepare_weight(operands.weight.bf16())
    return Operands(activations_bf16(operands), None, plain, operands.m)


def _kept(operands: Operands, machine: Machine) -> Operands:
    """The same product, of a weight kept in FP8."""
    weight = operands.weight
    if weight.kind is not WeightKind.MXFP8 or not members(machine.arch, Operand.FP8_WEIGHT):
        raise UnsupportedError("weights are kept in FP8 on SM90 alone, and only those of MXFP8")
    return replace(operands, weight=prepare_weight(weight.data, weight.scale, keep=Keep.FP8))


def cases(setups: dict[int, Setup], problem: Problem, machine: Machine) -> Iterator[Case]:
    """Every case for the ranks of this process in `setups`."""
    unfused = decide(machine, problem, Path.UNFUSED)
    chosen = next(iter(setups.values())).workspaces[0].decide(problem)
    device = next(iter(setups.values())).outs[0].device

    def bounded(rank: Communicator, which: int, *, name: str) -> None:
        dict(setups[rank.rank].memory.cases())[name](rank, which)

    def gemm(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        library_gemm(setup.ready[which], unfused.gemm, setup.partials[which])

    def exchange(rank: Communicator, which: int) -> None:
        if machine.world_size == 1:
            return
        setup = setups[rank.rank]
        workspace, out = setup.workspaces[which], setup.outs[which]
        exchange_partial(setup.partials[which], workspace, unfused, out, problem)

    def library(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        setup.partials[which] = library_gemm(setup.operands[which], unfused.gemm)

    def both(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        run_unfused(setup.operands[which], setup.workspaces[which], unfused, setup.outs[which])

    def bare(rank: Communicator, which: int, *, packed: bool = False) -> None:
        setup = setups[rank.rank]
        plan = setup.workspaces[which].plan(replace(problem, packed=packed))
        factors = setup.packed if packed else setup.factors
        launch(plan, factors[which], alone[rank.rank], setup.partials[which])

    def fused(rank: Communicator, which: int, *, packed: bool = False) -> None:
        setup = setups[rank.rank]
        factors = setup.packed if packed else setup.factors
        kept = replace(problem, packed=packed)
        launch_fused(factors[which], kept, setup.workspaces[which], setup.outs[which])

    def product(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        plan = setup.workspaces[which].product_plan(problem)
        launch(plan, setup.factors[which], alone[rank.rank], setup.partials[which])

    def reduce(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        workspace, whole = setup.workspaces[which], setup.wholes[which]
        launch_fused(setup.factors[which], problem, workspace, whole, gathered=True)

    def gather(rank: Communicator, which: int) -> None:
        setup = setups[rank.rank]
        gather_shards(setup.outs[which], setup.workspaces[which], unfused, setup.wholes[which])

    @contextmanager
    def unpaced() -> Iterator[None]:
        words = [
            workspace.launches.pacing
            for setup in setups.values()
            for workspace in setup.workspaces
            if workspace.launches is not None
        ]
        kept = [word.clone() for word in words]
        for word in words:
            word.zero_()
        try:
            yield
        finally:
            for word, before in zip(words, kept, strict=True):
                word.copy_(before)

    def dispatched(rank: Communicator, which: int, *, packed: bool = False) -> None:
        setup = setups[rank.rank]
        mine = (setup.kept if packed else setup.operands)[which]
        gemm_rs(mine.x, mine.weight, setup.workspaces[which], out=setup.outs[which])

    def case(
        name: str,
        decision: Decision,
        *phases: Phase,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Case:
        return Case(name, phases, decision, decision.capturable, around)

    if problem.kind is WeightKind.MXFP8:
        for name in dict(next(iter(setups.values())).memory.cases()):
            yield case(name, unfused, Phase(partial(bounded, name=name), serial=True))
    yield case(
        "gemm-cublas" if unfused.gemm is Gemm.BF16 else "gemm-mxfp8", unfused, Phase(gemm, serial=True)
    )
    if machine.world_size > 1:
        if device.type == "cuda" and len(setups) > 1:
            yield case("copy", unfused, Phase(bandwidth_copy(device, min(setups)), serial=True))
        yield case("reduce-scatter", unfused, Phase(exchange))
        yield case("all-gather", unfused, Phase(gather))
    yield case("gemm-then-reduce-scatter", unfused, Phase(gemm, serial=True), Phase(exchange))
    with suppress(UnsupportedError):
        decision = decide(machine, problem, Path.FUSED)
        alone = {rank: setup.alone() for rank, setup in setups.items()}
        yield case("gemm-ours", decision, Phase(bare))
        yield case("fused", decision, Phase(fused))
        if all(setup.packed for setup in setups.values()):
            kept = decide(machine, replace(problem, packed=True), Path.FUSED)
            yield case("gemm-ours-fp8-weights", kept, Phase(partial(bare, packed=True)))
            yield case("fused-fp8-weights", kept, Phase(partial(fused, packed=True)))
        if decision.exchange is Exchange.PUSH:
            yield case("batch-invariant", decision, Phase(product), Phase(exchange))
        if machine.process_group and decision.exchange is Exchange.PUSH:
            yield case("fused-unpaced", decision, Phase(fused), around=unpaced)
        if decision.exchange is Exchange.MULTICAST:
            yield case("fused-all-reduce", decision, Phase(reduce))
        elif machine.world_size > 1:
            yield case("fused-all-reduce", decision, Phase(fused), Phase(gather))
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
    if all(setup.kept for setup in setups.values()):
        held = next(iter(setups.values())).workspaces[0].decide(replace(problem, packed=True))
        yield case("dispatched-fp8-weights", held, Phase(partial(dispatched, packed=True)))


def create_setups(
    group: Group,
    m: int,
    n: int,
    k: int,
    kind: WeightKind,
    count: int,
    path: Path | None,
    keep: Keep = Keep.BF16,
    exchange: Strategy = Strategy.PUSH,
) -> dict[int, Setup]:
    """The setups of this process's ranks by rank; collective."""
    create = partial(
        Setup.create, m=m, n=n, k=k, kind=kind, count=count, path=path, keep=keep, exchange=exchange
    )
    if isinstance(group, VirtualGroup):
        return dict(enumerate(group.run(create)))
    return {group.rank: create(group)}
