# SPDX-License-Identifier: Apache-2.0
"""From per-question results of two servers to a verdict. Pure.

The rule, fixed before anything is run. With `margin` the largest loss of accuracy that is tolerated:

* accepted: the one-sided 95 % upper bound of the loss lies below `margin`;
* rejected: the candidate is worse, by McNemar's exact two-sided test at 0.05, and not accepted;
* undecided: neither; more questions are needed.

A small p alone does not reject: with many questions a loss below the margin becomes significant. A large p
alone does not accept: with few questions nothing is significant.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsv4_symm_mem import UnsupportedError

from dsv4_vllm_integration.statistics import mcnemar, most_lost

MARGIN = 0.01
SIGNIFICANT = 0.05

Question = tuple[str, str]
"""Task and number of the question in it."""


class Verdict(enum.StrEnum):
    """What the rule says."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Paired:
    """Both servers on the questions that both answered.

    Attributes:
        questions: How many.
        baseline: Correct answers of the baseline.
        candidate: Correct answers of the candidate.
        only_baseline: Questions that only the baseline answered correctly.
        only_candidate: Questions that only the candidate did.
        margin: Largest tolerated loss, a share of the questions.
    """

    questions: int
    baseline: int
    candidate: int
    only_baseline: int
    only_candidate: int
    margin: float

    @property
    def p(self) -> float:
        """Of McNemar's exact two-sided test."""
        return mcnemar(self.only_baseline, self.only_candidate)

    @property
    def loss_bound(self) -> float:
        """One-sided 95 % upper bound of the loss, a share of the questions."""
        return most_lost(self.only_baseline, self.only_candidate, self.questions)

    @property
    def verdict(self) -> Verdict:
        """By the rule above."""
        if self.loss_bound < self.margin:
            return Verdict.ACCEPTED
        worse = self.only_baseline > self.only_candidate
        return Verdict.REJECTED if worse and self.p < SIGNIFICANT else Verdict.UNDECIDED


def pair(baseline: Mapping[Question, bool], candidate: Mapping[Question, bool], margin: float) -> Paired:
    """Pair results by question.

    Raises:
        UnsupportedError: The servers did not answer the same questions.
    """
    if baseline.keys() != candidate.keys() or not baseline:
        only = len(baseline.keys() - candidate.keys()), len(candidate.keys() - baseline.keys())
        raise UnsupportedError(
            f"results cannot be paired: {only[0]} questions only of the baseline, {only[1]} only of the "
            f"candidate, {len(baseline.keys() & candidate.keys())} of both"
        )
    both = [(baseline[question], candidate[question]) for question in baseline]
    return Paired(
        questions=len(both),
        baseline=sum(first for first, _ in both),
        candidate=sum(second for _, second in both),
        only_baseline=sum(first and not second for first, second in both),
        only_candidate=sum(second and not first for first, second in both),
        margin=margin,
    )


def read_samples(folder: Path, metric: str, chosen_filter: str) -> dict[Question, bool]:
    """Results by question from the `samples_*.jsonl` files that lm-eval writes with `--log_samples`.

    Args:
        folder: Searched with all folders below.
        metric: A metric of 0 or 1, such as `exact_match`.
        chosen_filter: One of lm-eval's answer filters, such as `strict-match`; empty for the only one.

    Raises:
        UnsupportedError: No such file or metric, several filters and none chosen, or a metric that is neither
            0 nor 1.
    """
    results: dict[Question, bool] = {}
    filters: set[str] = set()
    for path in sorted(folder.rglob("samples_*.jsonl")):
        # samples_<task>_<time>.jsonl; the time has no underscore.
        task = path.stem.removeprefix("samples_").rpartition("_")[0]
        for record in _records(path):
            filters.add(str(record.get("filter", "")))
            if chosen_filter and record.get("filter") != chosen_filter:
                continue
            value = record.get(metric)
            if value not in (0, 1):
                raise UnsupportedError(f"{path}: {metric} is {value!r}, expected 0 or 1")
            results[task, str(record.get("doc_id"))] = bool(value)
    if not chosen_filter and len(filters) > 1:
        raise UnsupportedError(f"{folder} has the filters {', '.join(sorted(filters))}; choose one")
    if not results:
        raise UnsupportedError(f"{folder} holds no samples of {metric} {chosen_filter}".rstrip())
    return results


def _records(path: Path) -> Iterable[dict[str, object]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)
