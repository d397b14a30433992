# SPDX-License-Identifier: Apache-2.0
"""Timing a case on every rank of a group at once.

On GPUs a sample is one replay of a CUDA graph that holds the case once for each rotating workspace, so the
host is out of the picture and every call finds its operands out of L2, as the model does; its time is
divided by the number of workspaces. On a CPU a sample is one call on the wall clock. Either way a sample is
the longest over ranks, and results are medians with percentiles, never means.

Virtual ranks run as one graph: it forks into the ranks' streams and joins them, and a phase marked `serial`
gives each rank the whole device in turn, which is what a library GEMM would have on a GPU of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.communicator import Communicator

Step = Callable[[Communicator, int], object]
"""One step of one rank; the integer says which of the rotating workspaces to use."""
Group = VirtualGroup | Communicator
"""All ranks of this process, or this process's rank."""


@dataclass(frozen=True)
class Phase:
    """A step, and whether virtual ranks on a GPU take it in turn instead of at once."""

    step: Step
    serial: bool = False


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, over `samples` samples."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise samples given in seconds; at least one."""
        ordered = sorted(second * 1e6 for second in seconds)

        def at(fraction: float) -> float:
            return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)]

        return cls(statistics.median(ordered), at(0.1), at(0.9), len(ordered))


def time_case(group: Group, phases: Sequence[Phase], workspaces: int, samples: int, graph: bool) -> Timing:
    """Time the phases, one after the other, on all ranks; collective.

    Args:
        group: A `VirtualGroup`, or one rank's communicator.
        phases: What to time.
        workspaces: How many workspaces rotate.
        samples: How many samples to keep.
        graph: Whether to replay a CUDA graph; needs steps that never wait for the GPU on the host.
    """
    if graph and group.device.type == "cuda":
        return Timing.of(_graph_samples(group, phases, workspaces, samples))
    if isinstance(group, VirtualGroup):
        per_rank = group.run(lambda rank: _wall_clock_samples(rank, phases, workspaces, samples))
    else:
        per_rank = group.all_gather(_wall_clock_samples(group, phases, workspaces, samples))
    return Timing.of([max(times) for times in zip(*per_rank, strict=True)])


def _wall_clock_samples(
    rank: Communicator, phases: Sequence[Phase], workspaces: int, samples: int
) -> list[float]:
    def call(which: int) -> None:
        for phase in phases:
            phase.step(rank, which)
        if rank.device.type == "cuda":
            torch.cuda.current_stream(rank.device).synchronize()

    for which in range(workspaces):
        call(which)
    times = []
    for sample in range(samples):
        rank.all_gather(None)
        started = time.perf_counter()
        call(sample % workspaces)
        times.append(time.perf_counter() - started)
    return times


def _graph_samples(group: Group, phases: Sequence[Phase], workspaces: int, samples: int) -> list[float]:
    for which in range(workspaces):
        _enqueue(group, phases, which)
    torch.cuda.synchronize(group.device)
    graph = torch.cuda.CUDAGraph()
    # A process group's watchdog thread asks for events of its own, which a stricter mode would count as ours.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for which in range(workspaces):
            _enqueue(group, phases, which)
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(samples)]
    torch.cuda.synchronize(group.device)
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize(group.device)
    mine = [start.elapsed_time(stop) * 1e-3 / workspaces for start, stop in events]
    if isinstance(group, VirtualGroup):
        return mine
    return [max(times) for times in zip(*group.all_gather(mine), strict=True)]


def _enqueue(group: Group, phases: Sequence[Phase], which: int) -> None:
    if not isinstance(group, VirtualGroup):
        for phase in phases:
            phase.step(group, which)
        return
    here = torch.cuda.current_stream(group.device)
    for phase in phases:
        if phase.serial:
            for rank in group.ranks:
                phase.step(rank, which)
            continue
        for rank in group.ranks:
            stream = rank.stream
            if stream is not None:
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    phase.step(rank, which)
        for rank in group.ranks:
            if rank.stream is not None:
                here.wait_stream(rank.stream)
