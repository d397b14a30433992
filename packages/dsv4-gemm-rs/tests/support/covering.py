# SPDX-License-Identifier: Apache-2.0
"""Few combinations of several axes' values in which every pair of values of two axes occurs.

Greedy: of some random combinations that contain a pair which is still missing, the one with most of those
that are missing, until none is. Deterministic. A handful more than the least that there could be, which for
a dozen axes nobody knows anyway.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

CANDIDATES = 40

Combination = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def pairs_of(combination: Mapping[str, Any]) -> set[Pair]:
    """The pairs of values that occur in a combination."""
    return {(a, x, b, y) for (a, x), (b, y) in itertools.combinations(combination.items(), 2)}


def everything(axes: Mapping[str, Sequence[Any]]) -> list[Combination]:
    """All combinations."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Combination]:
    """Combinations of the axes' values (hashable) in which every pair of values of two axes occurs."""
    chooser = random.Random(seed)
    missing = sorted(set[Pair]().union(*map(pairs_of, everything(axes))), key=repr)
    chosen = []
    while missing:
        first, x, second, y = missing[0]
        candidates = [
            {name: chooser.choice(values) for name, values in axes.items()} | {first: x, second: y}
            for _ in range(CANDIDATES)
        ]
        best = max(candidates, key=lambda each: len(pairs_of(each).intersection(missing)))
        chosen.append(best)
        found = pairs_of(best)
        missing = [pair for pair in missing if pair not in found]
    return chosen


__all__ = ["Combination", "everything", "pairs_of", "pairwise"]
