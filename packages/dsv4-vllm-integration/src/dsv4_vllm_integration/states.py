# SPDX-License-Identifier: Apache-2.0
"""What became of each feature in this process, and the one log line that says so.

Contract: a feature's state and reason are logged once per change, under vLLM's own logger so that they
appear wherever vLLM's lines do. Rank 0 of a group speaks for all: ranks have agreed by then.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

from dsv4_vllm_integration.switches import BY_FEATURE, Feature

logger = logging.getLogger("vllm.dsv4_vllm_integration")


class Status(enum.StrEnum):
    """How far a feature has come."""

    UNSET = "unset"
    """Not asked for: stock vLLM."""
    ARMED = "armed"
    """Asked for; decided when the model is built."""
    ON = "on"
    OFF = "off"
    """Asked for and not possible: stock vLLM."""


@dataclass(frozen=True)
class State:
    """A feature's status and the reason for it."""

    status: Status
    reason: str


_states: dict[Feature, State] = {}


def state_of(feature: Feature) -> State:
    """What became of `feature` in this process so far."""
    unset = State(Status.UNSET, f"{BY_FEATURE[feature].name} is not 1")
    return _states.get(feature, unset)


def announce(feature: Feature, status: Status, reason: str, *, speak: bool = True) -> None:
    """Record what became of `feature`; log it if that is news and this process is to `speak`."""
    state = State(status, reason)
    if _states.get(feature) == state:
        return
    _states[feature] = state
    if speak:
        level = logging.WARNING if status is Status.OFF else logging.INFO
        logger.log(level, "dsv4 %s %s: %s", feature.value, status.value, reason)


def forget() -> None:
    """Return to the state of a fresh process."""
    _states.clear()
