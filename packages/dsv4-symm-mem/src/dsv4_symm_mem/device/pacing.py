# SPDX-License-Identifier: Apache-2.0
"""Taking turns on the link, see `protocol.pacing`. One thread of a CTA asks and waits."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

from dsv4_symm_mem.device.address import global_pointer
from dsv4_symm_mem.device.clock import globaltimer
from dsv4_symm_mem.device.flags import store_relaxed
from dsv4_symm_mem.protocol.pacing import CLOCK_OFFSET, DURATION_OFFSET, LONGEST_HOLD_NS
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES


def block_duration_of(words: Int64) -> Int32:
    """Picoseconds for a block, 0 for no turns, from the words at that address."""
    return Int32(cute.arch.load(global_pointer(words + DURATION_OFFSET, Int64, 8), Int64))


@cute.jit
def take_turn(words: Int64, block_ps: Int32, size: Int32) -> Int64:
    """Reserve the link for `size` bytes; the `globaltimer` value from which they may go, 0 for at once.

    Relaxed atomics: the clock orders nothing, a turn too early or late costs time only.
    """
    due = Int64(0)
    if block_ps > 0:
        clock = global_pointer(words + CLOCK_OFFSET, Int64, 8)
        now = globaltimer()
        cute.arch.atomic_max(clock, now, sem="relaxed", scope="gpu")
        duration = Int64(size // BLOCK_BYTES * block_ps // 1000)
        due = cute.arch.atomic_add(clock, duration, sem="relaxed", scope="gpu")
        if due - now > LONGEST_HOLD_NS:
            store_relaxed(words + CLOCK_OFFSET, now, "gpu")
            due = Int64(0)
    return due


@cute.jit
def hold_until(due: Int64) -> None:
    """Wait for the turn."""
    if due != 0:
        while globaltimer() < due:
            pass
