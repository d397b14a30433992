# SPDX-License-Identifier: Apache-2.0
"""The benchmark's main loop: every M, every case, one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.communicator import Communicator

from dsv4_gemm_rs.bench.cases import cases, create_setups
from dsv4_gemm_rs.bench.report import (
    Check,
    Report,
    describe_machine,
    describe_versions,
    this_command,
    today,
)
from dsv4_gemm_rs.bench.timing import time_step
from dsv4_gemm_rs.dispatch import Path, Problem
from dsv4_gemm_rs.weights import WeightKind

NEVER_SLOWER = 1.05
"""Largest ratio of the dispatched call to GEMM-then-reduce-scatter that still counts as not slower."""


def run_benchmark(
    group: VirtualGroup | Communicator,
    *,
    tokens: Sequence[int],
    n: int,
    k: int,
    kind: WeightKind,
    workspaces: int,
    samples: int,
    path: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Measure every case at every M; collective.

    Args:
        group: A `VirtualGroup` (all ranks in this process) or one rank's communicator.
        tokens: Values of M.
        n: Output features N.
        k: Input features of a rank.
        kind: Operand type of the weight.
        workspaces: Workspaces and operands that rotate between samples.
        samples: Samples per case.
        path: Path that the dispatched case is held to; None for the dispatcher's choice.
        progress: Called with a line for each case as it is done.
    """
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    for m in tokens:
        setups = create_setups(group, m, n, k, kind, workspaces, path)
        workspace = next(iter(setups.values())).workspaces[0]
        problem = Problem(m, n, k, kind)
        decision = workspace.decide(problem)
        medians = {}
        for name, step in cases(setups, problem, workspace.machine):
            timing = time_step(group, step, workspaces, samples)
            medians[name] = timing.median_us
            row = {"case": name, "m": m, "n": n, "k": k, "kind": kind.value, **asdict(timing)}
            row |= {"path": decision.path.value, "wire_bytes": wire_bytes(m, n, group.size)}
            row["reason"] = str(decision) if name == "dispatched" else ""
            rows.append(row)
            progress(f"M={m:<6} {name:<26} {timing.median_us:>12.1f} us")
        ratio = medians["dispatched"] / medians["gemm-then-reduce-scatter"]
        checks.append(
            Check(f"M={m}: dispatched / gemm-then-reduce-scatter", ratio, NEVER_SLOWER, ratio <= NEVER_SLOWER)
        )
        close_all(group, setups)
    how = "virtual ranks on one device" if isinstance(group, VirtualGroup) else "processes"
    return Report(
        name="kernel",
        machine=describe_machine(group.device, group.size, how),
        versions=describe_versions(group.device),
        command=this_command(),
        date=today(),
        rows=rows,
        checks=checks,
    )


def wire_bytes(m: int, n: int, world_size: int) -> int:
    """Bytes that one rank must send: S·(P-1)/P for S = 2·m·n."""
    return 2 * m * n * (world_size - 1) // world_size


def close_all(group: VirtualGroup | Communicator, setups: dict[int, Any]) -> None:
    """Close every workspace; collective."""
    if isinstance(group, VirtualGroup):
        group.run(lambda rank: setups[rank.rank].close())
    else:
        setups[group.rank].close()
