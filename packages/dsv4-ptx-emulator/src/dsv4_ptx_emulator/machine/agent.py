# SPDX-License-Identifier: Apache-2.0
"""The protocol of an asynchronous agent: a copy engine, a matrix pipe.

A warp enqueues work on an agent with a method of the agent's own and then calls
`machine.scheduler.activate(agent)`. The scheduler picks an active agent at random among ready warps and
agents and calls `step` as long as `ready()`; an agent that is not ready when picked is dropped from the
pool until it is activated again (or until nobody else can go on, when everybody is asked once more before
a deadlock is reported). One `step` is one observable thing: one box row written, one barrier signalled,
one MMA.
"""

from __future__ import annotations

import random
from typing import Protocol


class AsyncAgent(Protocol):
    """An asynchronous engine that shares the machine with the warps."""

    rank: int
    """Whose link and counters its accesses count for."""

    def ready(self) -> bool:
        """Whether `step` can do something now."""

    def step(self, rng: random.Random) -> None:
        """Do one observable thing; `rng` decides what is open (which box first, when it becomes visible)."""

    def describe(self) -> str:
        """Who it is and what is outstanding, such as "TMA of CTA (0, 0, 0): 2 loads"; "" if idle."""
