# SPDX-License-Identifier: Apache-2.0
"""Timing one step on every rank of a group at once.

A sample is the longest time over ranks, from a common start to the completion of the work. Between samples
the operands rotate over several workspaces (each with its own inputs and outputs), so on a GPU the next
sample finds its operands out of L2 as the model does. Results are medians with percentiles, never means.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.communicator import Communicator


@dataclass(frozen=True)
class Timing:
    """Microseconds over `samples` samples."""

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


Step = Callable[[Communicator, int], object]
"""One step of one rank; the integer says which of the rotating workspaces to use."""


def time_step(group: VirtualGroup | Communicator, step: Step, workspaces: int, samples: int) -> Timing:
    """Time `step` on all ranks: virtual ranks of this process, or this process's rank of a group; collective.

    Args:
        group: A `VirtualGroup`, or one rank's communicator.
        step: What to time.
        workspaces: How many workspaces rotate.
        samples: How many samples to keep, after one unmeasured round over all workspaces.
    """
    if isinstance(group, VirtualGroup):
        per_rank = group.run(lambda rank: _samples(rank, step, workspaces, samples))
    else:
        per_rank = group.all_gather(_samples(group, step, workspaces, samples))
    return Timing.of([max(times) for times in zip(*per_rank, strict=True)])


def _samples(rank: Communicator, step: Step, workspaces: int, samples: int) -> list[float]:
    for which in range(workspaces):
        step(rank, which)
    times = []
    for sample in range(samples):
        _synchronize(rank.device)
        rank.all_gather(None)
        started = time.perf_counter()
        step(rank, sample % workspaces)
        _synchronize(rank.device)
        times.append(time.perf_counter() - started)
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
