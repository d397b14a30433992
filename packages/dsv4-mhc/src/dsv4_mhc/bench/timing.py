# SPDX-License-Identifier: Apache-2.0
"""Time of a call inside a CUDA graph, with a warm or a cold L2.

A graph holds the call several times over; a replay is timed with events and divided by their number. Warm:
always the same operands. Cold: sets of operands in turn, together larger than twice the L2, so none is there
when its turn comes again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_median(calls: Sequence[Callable[[], None]], repeats: int, samples: int) -> float:
    """Median microseconds of one call, over `samples` replays of a graph of `repeats` rounds of `calls`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (repeats * len(calls)))
    return float(statistics.median(times))


def copy_bandwidth(megabytes: int = 512) -> float:
    """Measured bytes a microsecond of a device copy, reads and writes counted.

    The faster of the driver's copy and a kernel that negates: in a graph, the former may reach much less.
    """
    source = torch.zeros(megabytes << 18, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    def negate() -> None:
        torch.neg(source, out=target)

    return 2 * source.nbytes / min(graph_median([call], 4, 9) for call in (copy, negate))
