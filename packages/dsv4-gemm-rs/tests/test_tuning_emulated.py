# SPDX-License-Identifier: Apache-2.0
"""The timer of `tune` on emulated ranks: both sides are performed, and give times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dsv4_gemm_rs import WeightKind
from dsv4_gemm_rs.dispatch.thresholds import Shape
from dsv4_gemm_rs.tuning.measure import graph_timer
from dsv4_symm_mem.backends import VirtualGroup

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())


def test_both_sides_are_timed(emulator: Callable[..., Any]) -> None:
    group = VirtualGroup(2, "cpu", emulation=emulator(2, processors=2))
    timed = graph_timer(group, WeightKind.MXFP8, 1, 1)(Shape(90, 2, False, "bf16", 128, 128), 8)
    assert timed.m == 8
    assert timed.fused_us > 0
    assert timed.unfused_us > 0
