# SPDX-License-Identifier: Apache-2.0
"""`verify`: calls of many shapes on this machine's GPUs, each against FP64 and against itself.

Under torchrun one process a rank, else virtual ranks on one device. Beside the call as dispatched every tile
configuration is launched by itself, so that none goes unchecked because the cost model never takes it here.
Operands of every rank are made on every rank from the seeds, and the reference is computed where they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from dsv4_symm_mem.accelerator import accelerator_of
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.communicator import Communicator

from dsv4_gemm_rs.api import gemm_ar, gemm_rs
from dsv4_gemm_rs.cli.groups import (
    add_group_options,
    add_out_features,
    command_group,
    require_positive,
    speaks,
)
from dsv4_gemm_rs.dispatch.decide import operand_for
from dsv4_gemm_rs.dispatch.plan import plan_with
from dsv4_gemm_rs.fused import factors_of
from dsv4_gemm_rs.kernels.families import Operand, Strategy, family_of, members
from dsv4_gemm_rs.kernels.launch import launch
from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.problems import RankProblem, default_k, random_problem
from dsv4_gemm_rs.quantize import quantize_mxfp8
from dsv4_gemm_rs.reference import allowed_error, gemm_reduce_scatter, rounded, worst_error
from dsv4_gemm_rs.weights import Keep, WeightKind
from dsv4_gemm_rs.workspace import Workspace

Step = Callable[[torch.Tensor], object]
"""One call into the given output."""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser("verify", help="check results of many shapes and every tile configuration")
    add_group_options(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=None, help="values of M (default: many)")
    add_out_features(parser, default=None, help="output features N (default: several shapes)")
    parser.add_argument("--k", type=int, default=None, help="input features of a rank (default: several)")
    parser.add_argument(
        "--exchange", type=Strategy, choices=list(Strategy), default=Strategy.PUSH, help="default push"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check and print; returns 1 if a result is wrong."""
    require_positive(n=options.n, k=options.k, tokens=min(options.tokens or [1]))

    def checked(rank: Communicator) -> list[dict[str, Any]]:
        return verify(rank, _shapes(options, rank.size), options.tokens, options.exchange)

    with command_group(options) as group:
        by_rank = group.run(checked) if isinstance(group, VirtualGroup) else group.all_gather(checked(group))
    rows = worst_of(by_rank)
    wrong = [row for row in rows if not row["passed"]]
    if speaks(group) and options.json:
        print(json.dumps({"checked": len(rows), "wrong": len(wrong), "rows": rows}))
    elif speaks(group):
        for row in wrong:
            print(f"WRONG: {row}")
        repeat = " and repeat their bits" if options.exchange is Strategy.PUSH else ""
        print(f"{len(rows) - len(wrong)} of {len(rows)} calls are right{repeat}")
    return int(bool(wrong))


def _shapes(options: argparse.Namespace, size: int) -> list[tuple[int, int]]:
    """(N, K): the model's, another model's, one with few k steps, one with a narrow last tile."""
    usual = [(5120, default_k(size)), (7168, 1024), (4096, 128), (576, 384)]
    if options.n is None and options.k is None:
        return usual
    return [(options.n or usual[0][0], options.k or usual[0][1])]


def verify(
    rank: Communicator,
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int] | None,
    exchange: Strategy = Strategy.PUSH,
) -> list[dict[str, Any]]:
    """This rank's outcomes, in an order equal on all ranks; collective."""
    size = rank.size
    usual = {0, 1, size - 1, size + 1, 127, 128, 129, 1000, 1025, 4097, 8192}
    counts = sorted(usual if tokens is None else set(tokens))
    rows = []
    for n, k in shapes:
        with Workspace.create(rank, max_tokens=max(*counts, 1), n=n, exchange=exchange) as workspace:
            for kind, keep in _kept(workspace.machine.arch):
                everything = [
                    random_problem(counts[-1], n, k, kind, rank.device, 1 + each, rank.device, keep)
                    for each in range(size)
                ]
                workspace.warm_up(everything[rank.rank].weight)
                for m in counts:
                    shown = {"m": m, "n": n, "k": k, "kind": kind.value, "keep": keep.value}
                    rows += [shown | row for row in _check(rank, workspace, everything, m)]
    return rows


def _kept(arch: int | None) -> list[tuple[WeightKind, Keep]]:
    """Kinds of operands, and forms in which a weight is kept where that makes a difference."""
    kinds = [(kind, Keep.BF16) for kind in WeightKind]
    packed = operand_for(arch, WeightKind.MXFP8, packed=True) is Operand.FP8_WEIGHT
    return [*kinds, (WeightKind.MXFP8, Keep.FP8)] if packed and family_of(arch) else kinds


def _check(
    rank: Communicator, workspace: Workspace, everything: Sequence[RankProblem], m: int
) -> Iterator[dict[str, Any]]:
    xs, weights = [p.x_exact[:m] for p in everything], [p.weight_exact for p in everything]
    exact = gemm_reduce_scatter(xs, weights)
    multicast = workspace.machine.strategy is Strategy.MULTICAST
    allowed = allowed_error(worst_error(rounded(xs, weights, multicast=multicast), exact))
    mine = everything[rank.rank]
    operands = Operands(mine.x[:m], None, mine.weight, m)
    everywhere = torch.cat(exact)[:m]
    for name, gathered, step in _steps(workspace, operands):
        wanted = everywhere if gathered else exact[rank.rank]
        outs = [torch.full_like(wanted, float("nan"), dtype=torch.bfloat16) for _ in range(2)]
        for out in outs:
            # Nothing may be under way on any rank that a kernel which waits for a peer could hold up.
            _settle(rank)
            step(out)
        _settle(rank)
        workspace.check()
        error = worst_error([outs[0]], [wanted])
        repeated = torch.equal(*outs)
        # The switch adds in an order of its own.
        passed = error <= allowed and (repeated or multicast)
        yield {"call": name, "error": error, "allowed": allowed, "repeated": repeated, "passed": passed}


def _settle(rank: Communicator) -> None:
    """Let all ranks come here, and finish what they have launched; the first executes what is emulated."""
    rank.all_gather(None)
    accelerator = accelerator_of(rank)
    if accelerator is not None:
        accelerator.synchronize()
    rank.all_gather(None)


def _steps(workspace: Workspace, operands: Operands) -> Iterator[tuple[str, bool, Step]]:
    """The ways to perform one call: a name, whether every rank gets all rows, the call."""
    x, weight = operands.x, operands.weight
    path = workspace.decide(operands.problem).path.value
    yield f"gemm_rs, {path}", False, lambda out: gemm_rs(x, weight, workspace, out)
    yield f"gemm_ar, {path}", True, lambda out: gemm_ar(x, weight, workspace, out)
    if weight.kind is WeightKind.MXFP8:
        quantised = quantize_mxfp8(x)
        name = f"gemm_rs on quantised activations, {path}"
        yield name, False, lambda out: gemm_rs(quantised, weight, workspace, out)
    launches, machine = workspace.launches, workspace.machine
    if launches is None:
        return
    factors = factors_of(operands, machine.arch)
    operand = operand_for(machine.arch, operands.kind, packed=weight.packed is not None)
    for config in members(machine.arch, operand, machine.strategy):
        if config.cluster <= machine.multiprocessors:
            plan = plan_with(config, machine, operands.problem)
            tile = f"tile {config.tile_m * config.cluster}x{config.tile_n}"
            yield tile, False, lambda out, plan=plan: launch(plan, factors, launches, out)  # type: ignore[misc]
            if machine.strategy is Strategy.MULTICAST and machine.world_size > 1:
                # Of a pushed all-reduce the second half is the same kernel for all tiles.
                plan = plan_with(config, machine, operands.problem, gathered=True)
                name = f"all-reduce, {tile}"
                yield name, True, lambda out, plan=plan: launch(plan, factors, launches, out)  # type: ignore[misc]


def worst_of(by_rank: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each call: the largest error of any rank, and whether all ranks passed."""
    rows = []
    for same in zip(*by_rank, strict=True):
        worst = max(same, key=lambda row: (not row["passed"], row["error"]))
        rows.append(worst | {"passed": all(row["passed"] for row in same)})
    return rows
