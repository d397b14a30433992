# SPDX-License-Identifier: Apache-2.0
"""What a step tells the scheduler.

A step returns None (executed, go on) or one of these. A step that returns `Blocked` or `CONVERGE` must
not have changed any state: the same step is called again later. Rejected: exceptions for blocking (three
times as dear, and a deadlock report wants the record at hand, not a traceback).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Wait:
    """What an agent waits for.

    Attributes:
        channel: Hashable name of the event; `Scheduler.wake(channel)` retries everybody who waits on it.
            Wake too often rather than too seldom: a retry that still cannot go on just waits again.
        text: For the deadlock report, such as "mbarrier 0x440 of CTA (0, 0, 0) to leave parity 1
            (phase 3, pending 2, tx -16384)". Computed when the wait began.
    """

    channel: Any
    text: str


@dataclass(frozen=True, slots=True)
class Blocked:
    """The step cannot execute yet; retry it after `wait.channel` is woken."""

    wait: Wait


class _Signal:
    """A step's answer without data."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


CONVERGE = _Signal("CONVERGE")
"""The step needs lanes of the warp that are elsewhere (`.sync` with their bits in the member mask).

`.aligned` needs nothing from a handler: the decoder asks for convergence in front of every opcode with
that word.
"""

YIELD = _Signal("YIELD")
"""The step executed and wants others to run before the warp goes on (nanosleep, an unsuccessful test)."""

POLL = _Signal("POLL")
"""The step executed and read what it read before: run the warp again when what it polls is written."""

BRANCH = _Signal("BRANCH")
"""The step executed and has set the warp's pc (control flow only)."""

EXIT = _Signal("EXIT")
"""The step executed and its lanes are gone (control flow only)."""

Outcome = Blocked | _Signal
