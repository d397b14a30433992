# SPDX-License-Identifier: Apache-2.0
"""How fast staged tiles go onto the link, and the words in front of the staging buffers that say so.

Contract: a GPU's forwarding warps together send no faster than `SHARE` of what its link takes. Each takes its
turn for a piece at the `CLOCK`, the time from which the link is free: the later of now and its value, to
which it adds the piece's duration.

Why: stores that a saturated link cannot take yet fill the queues between the SMs and memory, and the loads of
all others, tensor operands among them, stand behind them. Kept a little below its rate, the link is as busy
and nothing queues. docs/performance.md has what that gave on two H200s.

Rejected: the same share of the rate for every SM (right only while all send; the last tiles then crawl); a
turn for a whole tile (an SM sends slower than the link takes, so the last tile's transfer comes on top); a
release after each piece (halves the rate).
"""

from __future__ import annotations

import math

from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES

PACING_BYTES = 128
"""Bytes in front of the staging buffers."""
CLOCK_OFFSET = 0
"""64-bit word: the `%globaltimer` value from which the link is free."""
DURATION_OFFSET = 8
"""64-bit word: picoseconds for a block of `BLOCK_BYTES`, 0 to send without taking turns."""
LONGEST_HOLD_NS = 1_000_000
"""A turn further off is no queue but a clock from another time, and is not waited for."""
SHARE = 0.95
"""Of the link's rate."""
LONGEST_BLOCK_PS = 100_000_000
"""A piece's duration fits 32 bits: 100 us a block, 5 MB/s."""


def block_duration(link_bytes_per_us: float) -> int:
    """Picoseconds between the starts of two blocks; 0 for a rate of 0, which means unlimited.

    Raises:
        ArgumentError: Negative or not a number.
    """
    if not link_bytes_per_us >= 0:
        raise ArgumentError("link_bytes_per_us", link_bytes_per_us, "bytes per microsecond, 0 for no limit")
    if link_bytes_per_us == 0 or math.isinf(link_bytes_per_us):
        return 0
    return min(max(1, round(1e6 * BLOCK_BYTES / (SHARE * link_bytes_per_us))), LONGEST_BLOCK_PS)
