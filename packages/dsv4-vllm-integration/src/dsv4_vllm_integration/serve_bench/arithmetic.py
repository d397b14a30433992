# SPDX-License-Identifier: Apache-2.0
"""From saved runs to the figures of a comparison. Pure.

Per arm and load, over all nodes and repeats:

    output rate   = sum of output tokens / sum of durations
    TTFT, TPOT    = sum of (mean x completed requests) / sum of completed requests

A change is candidate / baseline - 1. It is paired by node and repeat, which removes what differs between
nodes: the interval is Student's t over the pairs' changes at 95 %. A change whose interval holds 0, or that
has one pair only, is not established, however large the aggregate's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4_vllm_integration.serve_bench.plan import Arm
from dsv4_vllm_integration.statistics import Interval, interval

METRICS = ("output_rate", "ttft_ms", "tpot_ms")
"""Output tokens per second; mean time to the first token; mean time per output token after it."""


@dataclass(frozen=True)
class Run:
    """One load on one arm of one node, once.

    Attributes:
        node: Name of the node.
        arm: Which build.
        repeat: Counted from 0.
        concurrency: Requests at a time.
        requests: Requests that were to be made.
        completed: Requests that succeeded.
        duration: Seconds.
        input_tokens: Of all requests.
        output_tokens: Of all requests.
        ttft_ms: Mean time to the first token.
        tpot_ms: Mean time per output token after it.
        wrong_lengths: Requests whose output had another length than asked for; None if not recorded.
        preemptions: Of the server during the run; None if it does not say.
    """

    node: str
    arm: Arm
    repeat: int
    concurrency: int
    requests: int
    completed: int
    duration: float
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    wrong_lengths: int | None = None
    preemptions: int | None = None

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.duration

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Run:
        """A saved run: an envelope of ours around the JSON of `vllm bench serve`.

        Raises:
            KeyError: Something is missing.
        """
        bench = saved["bench"]
        lengths = bench.get("output_lens")
        wrong = None if lengths is None else sum(length != saved["output_tokens"] for length in lengths)
        return cls(
            node=saved["node"],
            arm=Arm(saved["arm"]),
            repeat=saved["repeat"],
            concurrency=saved["concurrency"],
            requests=saved["requests"],
            completed=bench["completed"],
            duration=bench["duration"],
            input_tokens=bench["total_input_tokens"],
            output_tokens=bench["total_output_tokens"],
            ttft_ms=bench["mean_ttft_ms"],
            tpot_ms=bench["mean_tpot_ms"],
            wrong_lengths=wrong,
            preemptions=saved.get("preemptions"),
        )


@dataclass(frozen=True)
class Aggregate:
    """All runs of one arm under one load."""

    output_rate: float
    ttft_ms: float
    tpot_ms: float
    requests: int
    completed: int
    wrong_lengths: int | None
    preemptions: int | None

    @property
    def sound(self) -> bool:
        """Every request succeeded and every output had the length asked for, as far as recorded."""
        return self.completed == self.requests and not self.wrong_lengths


def aggregate(runs: Sequence[Run]) -> Aggregate:
    """Over `runs`, at least one of which completed a request."""
    completed = sum(run.completed for run in runs)

    def weighted(metric: Callable[[Run], float]) -> float:
        return sum(metric(run) * run.completed for run in runs if run.completed) / completed

    def total(values: Sequence[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    return Aggregate(
        output_rate=sum(run.output_tokens for run in runs) / sum(run.duration for run in runs),
        ttft_ms=weighted(lambda run: run.ttft_ms),
        tpot_ms=weighted(lambda run: run.tpot_ms),
        requests=sum(run.requests for run in runs),
        completed=completed,
        wrong_lengths=total([run.wrong_lengths for run in runs]),
        preemptions=total([run.preemptions for run in runs]),
    )


@dataclass(frozen=True)
class Comparison:
    """Both arms under one load.

    Attributes:
        concurrency: Requests at a time.
        arms: By arm.
        changes: By metric, the aggregates' change, candidate / baseline - 1.
        node_changes: By metric and node, the change of that node's aggregates.
        intervals: By metric, the pairs' changes.
    """

    concurrency: int
    arms: dict[Arm, Aggregate]
    changes: dict[str, float]
    node_changes: dict[str, dict[str, float]]
    intervals: dict[str, Interval]


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """One comparison for each load that both arms ran, in order of concurrency."""
    found = []
    for concurrency in sorted({run.concurrency for run in runs}):
        loaded = [run for run in runs if run.concurrency == concurrency and run.completed]
        by_arm = {arm: [run for run in loaded if run.arm is arm] for arm in Arm}
        if all(by_arm.values()):
            found.append(_compare(concurrency, by_arm))
    return found


def _change(candidate: Any, baseline: Any, metric: str) -> float:
    before: float = getattr(baseline, metric)
    after: float = getattr(candidate, metric)
    return after / before - 1 if before else 0.0


def _compare(concurrency: int, by_arm: dict[Arm, list[Run]]) -> Comparison:
    arms = {arm: aggregate(runs) for arm, runs in by_arm.items()}
    baseline, candidate = by_arm[Arm.BASELINE], by_arm[Arm.CANDIDATE]
    nodes = sorted({run.node for run in baseline} & {run.node for run in candidate})
    of_node = {
        node: (
            aggregate([run for run in candidate if run.node == node]),
            aggregate([run for run in baseline if run.node == node]),
        )
        for node in nodes
    }
    pairs = [
        (after, before)
        for after in candidate
        for before in baseline
        if (after.node, after.repeat) == (before.node, before.repeat)
    ]
    return Comparison(
        concurrency,
        arms,
        {metric: _change(arms[Arm.CANDIDATE], arms[Arm.BASELINE], metric) for metric in METRICS},
        {
            metric: {node: _change(after, before, metric) for node, (after, before) in of_node.items()}
            for metric in METRICS
        },
        {metric: interval([_change(*pair, metric) for pair in pairs]) for metric in METRICS if pairs},
    )
