# SPDX-License-Identifier: Apache-2.0
"""Observers that look for what hardware hides."""

from __future__ import annotations

from dsv4_ptx_emulator.checkers.barriers import UnbalancedBarriers
from dsv4_ptx_emulator.checkers.in_flight import InFlight
from dsv4_ptx_emulator.checkers.tensor_memory import TensorMemoryUse
from dsv4_ptx_emulator.checkers.uninitialised import UninitialisedShared
from dsv4_ptx_emulator.machine.observer import Observer


def standard_checkers() -> list[Observer]:
    """A fresh one of every checker that is on by default."""
    return [UninitialisedShared(), UnbalancedBarriers(), InFlight(), TensorMemoryUse()]
