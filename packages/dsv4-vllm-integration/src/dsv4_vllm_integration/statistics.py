# SPDX-License-Identifier: Apache-2.0
"""The two tests that the reports use, from their definitions: Student's t interval and McNemar's exact test.

Written out instead of taken from SciPy: two formulas, and nothing else of the plugin needs that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


def t_cumulative(t: float, freedom: int) -> float:
    """P(T <= t) for Student's t with `freedom` degrees of freedom.

    From the finite series for integer degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    theta = math.atan2(t, math.sqrt(freedom))
    cosine, sine = math.cos(theta), math.sin(theta)
    if freedom % 2:
        term, total = cosine, 0.0
        for index in range(3, freedom + 1, 2):
            total += term
            term *= cosine * cosine * (index - 1) / index
        two_sided = 2 / math.pi * (theta + sine * total)
    else:
        term, total = 1.0, 0.0
        for index in range(2, freedom + 1, 2):
            total += term
            term *= cosine * cosine * (index - 1) / index
        two_sided = sine * total
    return 0.5 + two_sided / 2


def t_quantile(probability: float, freedom: int) -> float:
    """The t whose cumulative probability is `probability`, at least 0.5."""
    low, high = 0.0, 1.0
    while t_cumulative(high, freedom) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cumulative(middle, freedom) < probability else (low, middle)
    return high


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval; the bounds are infinite for a single value."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def established(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


def interval(values: Sequence[float]) -> Interval:
    """Mean of independent `values`, at least one, and its 95 % t interval."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = t_quantile((1 + CONFIDENCE) / 2, count - 1) * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half, count)


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p of McNemar's exact test: as many or more lopsided discordant pairs under a fair coin.

    Args:
        only_first: Items that only the first answered correctly.
        only_second: Items that only the second did.
    """
    discordant = only_first + only_second
    tail = sum(math.comb(discordant, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2.0 * tail / float(2**discordant))


def most_lost(only_first: int, only_second: int, items: int) -> float:
    """Upper 95 % bound of how much less often the second is correct than the first, as a share of `items`.

    One-sided normal bound for a difference of paired proportions, with a half-count added to each kind of
    discordant pair so that equal answers everywhere do not claim certainty.
    """
    lost, won = only_first + 0.5, only_second + 0.5
    difference = (lost - won) / items
    variance = (lost + won - (lost - won) ** 2 / items) / items**2
    return difference + 1.6448536269514722 * math.sqrt(variance)
