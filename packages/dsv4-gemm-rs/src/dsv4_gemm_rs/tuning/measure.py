# SPDX-License-Identifier: Apache-2.0
"""Measures, for one shape after the other, from how many rows the fused kernel is faster.

Contract: both sides multiply the same operands, ready-made as each takes them, so neither counts the
quantiser; what the fused kernel has to beat is the library's GEMM and then our reduce-scatter. Each M takes
rotating workspaces and operands and CUDA graphs, as the benchmark does, and the medians count.

The search only asks `Timer` for times, so it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs.bench.cases import cases, create_setups
from dsv4_gemm_rs.bench.run import close_all
from dsv4_gemm_rs.bench.timing import Group, time_case
from dsv4_gemm_rs.dispatch import Problem
from dsv4_gemm_rs.dispatch.thresholds import Entry, Shape, Timed, threshold
from dsv4_gemm_rs.weights import WeightKind

FUSED, UNFUSED = "fused", "gemm-then-reduce-scatter"

Timer = Callable[[Shape, int], Timed]
"""Times one M of a shape; collective, and the same on every rank."""


def tune(
    shapes: Iterable[Shape],
    tokens: Sequence[int],
    timer: Timer,
    *,
    device: str,
    date: str,
    source: str,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Entry]:
    """Measure every shape at every M; the entries of those whose threshold lies within.

    Args:
        shapes: What to measure.
        tokens: Values of M, in any order.
        timer: Measures.
        device: The GPU's name, for the entries.
        date: For the entries.
        source: The command, for the entries.
        progress: Called with a line for each measurement and each shape.
    """
    entries = []
    for shape in shapes:
        measured = []
        for m in sorted(set(tokens)):
            measured.append(timed := timer(shape, m))
            faster = "fused" if timed.fused_us <= timed.unfused_us else "unfused"
            times = f"fused {timed.fused_us:.1f} us, unfused {timed.unfused_us:.1f} us"
            progress(f"{shape}: M={m:<6} {times}: {faster}")
        try:
            least = threshold(measured)
        except ArgumentError as error:
            progress(f"{shape}: no entry, {error}")
            continue
        said = "fused at no M measured" if least is None else f"fused from {least} tokens on"
        progress(f"{shape}: {said}")
        entries.append(Entry(shape, least, tuple(measured), device, date[:10], source))
    return entries


def graph_timer(group: Group, kind: WeightKind, workspaces: int, samples: int) -> Timer:
    """A timer on the group's GPUs: medians over CUDA graphs.

    Args:
        group: A `VirtualGroup`, or one rank's communicator.
        kind: Operand type of the weight.
        workspaces: Workspaces and operands that rotate.
        samples: Samples per case.
    """

    def measure(shape: Shape, m: int) -> Timed:
        setups = create_setups(group, m, shape.n, shape.k, kind, workspaces, None)
        try:
            machine = next(iter(setups.values())).workspaces[0].machine
            medians = {
                case.name: time_case(group, case.phases, workspaces, samples, case.graph).median_us
                for case in cases(setups, Problem(m, shape.n, shape.k, kind), machine)
                if case.name in (FUSED, UNFUSED)
            }
        finally:
            close_all(group, setups)
        return Timed(m, round(medians[FUSED], 2), round(medians[UNFUSED], 2))

    return measure


def shared(group: Group) -> bool:
    """Whether the group's ranks share one GPU."""
    return isinstance(group, VirtualGroup)
