# SPDX-License-Identifier: Apache-2.0
"""The benchmark's main loop: every M, every case, one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.protocol.layout import Strategy

from dsv4_gemm_rs.bench.cases import Setup, cases, create_setups
from dsv4_gemm_rs.bench.limits import floor_us
from dsv4_gemm_rs.bench.report import (
    Check,
    Report,
    describe_machine,
    describe_versions,
    sm_clock_mhz,
    this_command,
    today,
)
from dsv4_gemm_rs.bench.targets import targets
from dsv4_gemm_rs.bench.timing import Group, time_case
from dsv4_gemm_rs.dispatch import Exchange, Path, Problem
from dsv4_gemm_rs.weights import Keep, WeightKind


def run_benchmark(
    group: Group,
    *,
    tokens: Sequence[int],
    n: int,
    k: int,
    kind: WeightKind,
    workspaces: int,
    samples: int,
    path: Path | None = None,
    keep: Keep = Keep.BF16,
    exchange: Strategy = Strategy.PUSH,
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
        keep: Form of the weights that cases with kept weights are added for, see `cases`.
        exchange: How fused kernels exchange; rows and checks name it.
        progress: Called with a line for each case as it is done.

    Raises:
        UnsupportedError: The group cannot exchange that way, or `keep` cannot be had; says why.
    """
    virtual = isinstance(group, VirtualGroup)
    how = "virtual ranks on one device; library GEMMs have it whole, one rank after the other"
    machine = describe_machine(group.device, group.size, how if virtual else "processes")
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    for m in tokens:
        setups = create_setups(group, m, n, k, kind, workspaces, path, keep, exchange)
        problem = Problem(m, n, k, kind)
        floor = floor_us(str(machine["device"]), m, n, k, kind, group.size, virtual)
        medians: dict[str, float] = {}
        for case in cases(setups, problem, next(iter(setups.values())).workspaces[0].machine):
            with case.around():
                timing = time_case(group, case.phases, workspaces, samples, case.graph)
            medians[case.name] = timing.median_us
            rows.append(
                {
                    "case": case.name,
                    "m": m,
                    "n": n,
                    "k": k,
                    "kind": kind.value,
                    **asdict(timing),
                    "floor_us": floor,
                    "exchange": exchange.value,
                    "wire_bytes": _sent_bytes(case.decision.exchange, m, n, group.size),
                    "sm_clock_mhz": sm_clock_mhz(group.device),
                    "path": case.decision.path.value,
                    "decision": str(case.decision),
                }
            )
            progress(f"M={m:<6} {case.name:<26} {timing.median_us:>12.1f} us")
        on_gpu = group.device.type == "cuda"
        checks += targets(
            m,
            k,
            medians,
            on_gpu=on_gpu,
            virtual=virtual,
            exchange=exchange,
            n=n,
            world_size=group.size,
        )
        close_all(group, setups)
    return Report(
        name="kernel",
        machine=machine,
        versions=describe_versions(group.device),
        command=this_command(),
        date=today(),
        rows=rows,
        checks=checks,
    )


def wire_bytes(m: int, n: int, world_size: int) -> int:
    """Bytes that one rank must send: S·(P-1)/P for S = 2·m·n."""
    return 2 * m * n * (world_size - 1) // world_size


def _sent_bytes(exchange: Exchange, m: int, n: int, world_size: int) -> int:
    """Bytes that one rank sends: S where its partial is read through multicast, else what it must."""
    return 2 * m * n if exchange is Exchange.MULTICAST else wire_bytes(m, n, world_size)


def close_all(group: Group, setups: dict[int, Setup]) -> None:
    """Close every workspace; collective."""
    if isinstance(group, VirtualGroup):
        group.run(lambda rank: setups[rank.rank].close())
    else:
        setups[group.rank].close()
