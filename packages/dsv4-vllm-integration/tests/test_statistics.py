# SPDX-License-Identifier: Apache-2.0
"""The two tests against values from tables and from enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
from dsv4_vllm_integration.statistics import interval, mcnemar, most_lost, t_quantile


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (120, 1.9799)],
)
def test_t_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(expected, abs=5e-5)


def test_interval() -> None:
    found = interval([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert (found.mean, found.count) == (2.0, 3)
    assert found.low == pytest.approx(2 - half, abs=1e-5)
    assert found.high == pytest.approx(2 + half, abs=1e-5)
    assert not found.established
    assert interval([1.0, 1.1, 0.9]).established
    assert not interval([5.0]).established


def test_mcnemar_is_the_share_of_as_lopsided_tosses() -> None:
    for first, second in [(0, 0), (0, 1), (3, 3), (1, 5), (5, 1), (2, 9)]:
        tosses = list(itertools.product((0, 1), repeat=first + second))
        lopsided = abs(first - second)
        as_much = sum(abs(len(toss) - 2 * sum(toss)) >= lopsided for toss in tosses)
        assert mcnemar(first, second) == pytest.approx(as_much / len(tosses))


def test_mcnemar_of_many() -> None:
    assert mcnemar(5, 15) == pytest.approx(0.0413895, abs=1e-7)


def test_the_loss_s_bound() -> None:
    # No discordant pair among 1319 questions of GSM8K: at most 1.6449 / 1319.
    assert most_lost(0, 0, 1319) == pytest.approx(1.6448536 / 1319, rel=1e-6)
    assert most_lost(30, 10, 1000) > 0.02
    assert most_lost(10, 30, 1000) < 0
