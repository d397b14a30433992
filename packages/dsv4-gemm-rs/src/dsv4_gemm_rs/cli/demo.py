# SPDX-License-Identifier: Apache-2.0
"""`demo`: the real operation through the public API, checked against the FP64 reference.

On a machine without a GPU the compiled kernel runs in an emulator, where one is installed: on smaller shapes
by default, as that is slow, but it is the code that a GPU would run, and what it sends can be counted.
Without one, or with `--device cpu`, the reference back end shows the same exchange.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path as FilePath
from typing import Any

import torch
from dsv4_symm_mem.accelerator import Emulation, installed_emulators
from dsv4_symm_mem.backends import VirtualGroup, VirtualRank
from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs.api import gemm_rs
from dsv4_gemm_rs.bench.run import wire_bytes
from dsv4_gemm_rs.cli.groups import default_device, device_option, require_positive
from dsv4_gemm_rs.dispatch import Path, Problem
from dsv4_gemm_rs.problems import WO_B_K, WO_B_N, RankProblem, default_k, random_problem
from dsv4_gemm_rs.reference import allowed_error, gemm_reduce_scatter, rounded, worst_error
from dsv4_gemm_rs.weights import WeightKind
from dsv4_gemm_rs.workspace import Workspace

EMULATED_N = 512
EMULATED_K = 256
CALLS = 2


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser("demo", help="run the operation on virtual ranks and check it against FP64")
    parser.add_argument("--ranks", type=int, default=4, help="virtual ranks P (default 4)")
    parser.add_argument("--tokens", type=int, default=250, help="M; need not divide by P (default 250)")
    parser.add_argument(
        "--n", type=int, default=None, help=f"output features N (default {WO_B_N}, emulated {EMULATED_N})"
    )
    parser.add_argument(
        "--k",
        type=int,
        default=None,
        help=f"input features of a rank (default {WO_B_K} / P, emulated {EMULATED_K})",
    )
    parser.add_argument("--kind", type=WeightKind, choices=list(WeightKind), default=WeightKind.MXFP8)
    parser.add_argument("--path", choices=["auto", *Path], default=None, help="default: the best one")
    parser.add_argument(
        "--device",
        type=device_option,
        default=None,
        help="default: cuda if there is one, else the kernels in an emulator if one is installed, else cpu",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trace",
        type=FilePath,
        default=None,
        help="where an emulated schedule goes (default: a new temporary file)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demonstration; returns 0 when the result is within tolerance, else 1."""
    require_positive(n=options.n, k=options.k)
    if options.tokens < 0:
        raise ArgumentError("--tokens", options.tokens, "0 or more")
    ranks, m = options.ranks, options.tokens
    device = options.device or default_device()
    group = VirtualGroup(ranks, device)
    emulation = None
    if options.device is None and device.type == "cpu" and options.path != Path.HOST:
        emulation = _emulation(options)
        group = VirtualGroup(ranks, device, emulation=emulation)
    n = options.n or (WO_B_N if emulation is None else EMULATED_N)
    k = options.k or (default_k(ranks) if emulation is None else EMULATED_K)
    where = group.device if emulation is None else emulation.accelerators[0].name
    _say(options, f"{ranks} virtual ranks, {where}: {options.kind.value} GEMM [{m}, {k}] x [{n}, {k}] each")
    problems = group.run(
        lambda rank: random_problem(m, n, k, options.kind, rank.device, options.seed * ranks + rank.rank + 1)
    )
    _say(options, "creating workspaces and running twice ...")
    started = time.perf_counter()
    results = group.run(lambda rank: _call(rank, problems[rank.rank], n, options))
    seconds = time.perf_counter() - started
    _say(options, "computing the FP64 reference ...")
    xs, ws = [p.x_exact for p in problems], [p.weight_exact for p in problems]
    exact = gemm_reduce_scatter(xs, ws)
    error = worst_error([r["out"] for r in results], exact)
    rounding = worst_error(rounded(xs, ws), exact)
    allowed = allowed_error(rounding)
    repeated = all(torch.equal(r["out"], r["again"]) for r in results)
    passed = error <= allowed and repeated
    summary = {
        "ranks": ranks,
        "device": str(where),
        "shape": {"m": m, "n": n, "k_per_rank": k},
        "kind": options.kind.value,
        "decision": results[0]["decision"],
        "calls": results[0]["calls"],
        "error": error,
        "rounding_error": rounding,
        "tolerance": allowed,
        "bit_equal_repeat": repeated,
        "wire_bytes_per_rank": wire_bytes(m, n, ranks),
        "seconds": seconds,
        "passed": passed,
    }
    if emulation is not None:
        summary |= _observed(emulation, ranks, options)
    if options.json:
        print(json.dumps(summary, indent=1))
    else:
        print(f"path:       {summary['decision']}")
        print(f"output:     [{results[0]['out'].shape[0]}, {n}] BF16 on each rank")
        print(f"error:      {error:.3e} against FP64, allowed {allowed:.3e}; rounding alone: {rounding:.3e}")
        print(f"repeatable: {'the second run gave the same bits' if repeated else 'NO, the runs differ'}")
        print(f"wire:       {summary['wire_bytes_per_rank']:,} bytes sent by each rank, S·(P-1)/P")
        if emulation is not None:
            sent = ", ".join(f"{nbytes:,.0f}" for nbytes in summary["link_bytes_per_rank"])
            print(f"links:      {sent} bytes really sent by ranks 0 to {ranks - 1} in a call, flags included")
        print(f"time:       {seconds:.2f} s for set-up and two calls on {ranks} ranks")
        if emulation is not None:
            print(emulation.summary())
            print(f"trace:      {summary['trace']}, for chrome://tracing or ui.perfetto.dev; steps, not time")
        print("PASSED" if passed else "FAILED")
    return 0 if passed else 1


def _emulation(options: argparse.Namespace) -> Emulation | None:
    """An emulated device for each rank, or None with a line that says why not."""
    for _, entry in sorted(installed_emulators().items()):
        made: Emulation = entry.load()(options.ranks, seed=options.seed, trace=True)
        obstacle = made.obstacle()
        if not obstacle:
            return made
        _say(options, f"no GPU, and the emulator cannot be used ({obstacle}): the reference back end instead")
        return None
    _say(
        options,
        "no GPU, and dsv4-ptx-emulator is not installed: the reference back end instead of the kernel",
    )
    return None


def _observed(emulation: Emulation, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """What the emulator counted, for a call of each rank, and where the schedule is."""
    path = options.trace
    if path is None:
        descriptor, name = tempfile.mkstemp(prefix="dsv4-gemm-rs-demo-", suffix=".json")
        os.close(descriptor)
        path = FilePath(name)
    emulation.write_trace(path)
    links = emulation.link_bytes()
    sent = [sum(n for (source, _), n in links.items() if source == rank) / CALLS for rank in range(ranks)]
    return {"link_bytes_per_rank": sent, "trace": str(path)}


def _call(rank: VirtualRank, problem: RankProblem, n: int, options: argparse.Namespace) -> dict[str, Any]:
    with Workspace.create(rank, max_tokens=max(options.tokens, 1), n=n, path=options.path) as workspace:
        workspace.warm_up(problem.weight)
        first, second = (gemm_rs(problem.x, problem.weight, workspace) for _ in range(CALLS))
        # Emulated launches are executed by whoever synchronises first, and all of them are to take part.
        rank.all_gather(None)
        rank.synchronize()
        workspace.check()
        weight = problem.weight
        decision = workspace.decide(Problem(options.tokens, weight.n, weight.k, weight.kind))
        return {
            "out": first.cpu(),
            "again": second.cpu(),
            "decision": str(decision),
            "calls": workspace.counters.as_dict(),
        }


def _say(options: argparse.Namespace, line: str) -> None:
    print(line, file=sys.stderr if options.json else sys.stdout, flush=True)
