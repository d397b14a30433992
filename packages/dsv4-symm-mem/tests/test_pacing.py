# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of turns on the link."""

from __future__ import annotations

import math

import pytest
from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.pacing import LONGEST_BLOCK_PS, SHARE, block_duration
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES


def test_a_block_takes_its_bytes_over_a_share_of_the_rate() -> None:
    assert block_duration(357_000.0) == pytest.approx(1e6 * BLOCK_BYTES / (SHARE * 357_000.0), abs=0.5)
    assert block_duration(math.inf) == block_duration(0.0) == 0


def test_extreme_rates_stay_in_range() -> None:
    assert block_duration(1e12) == 1
    assert block_duration(1e-3) == LONGEST_BLOCK_PS


@pytest.mark.parametrize("rate", [-1.0, math.nan])
def test_what_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(ArgumentError, match="link_bytes_per_us"):
        block_duration(rate)
