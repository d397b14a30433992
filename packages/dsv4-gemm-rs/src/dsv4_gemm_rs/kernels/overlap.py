# SPDX-License-Identifier: Apache-2.0
"""Beginning while the kernel before still runs: programmatic dependent launch (PDL) behind the quantiser.

Contract: with the launch attribute, this kernel's CTAs may start once all CTAs of the kernel before run, and
hide their own start: barriers, tensor memory, tensor maps, and bringing the weight into L2, which nothing
before writes. `wait_for_inputs` comes before everything else that touches global memory: the activations, the
output, and above all the exchange, whose epoch and flags an earlier call may still be changing. Without the
attribute it returns at once.

The attribute is set behind our own quantiser only. That one is launched without it, so everything before it
has ended when it begins, and what `wait_for_inputs` waits for is the whole stream. This kernel allows nobody
to begin early: it spins for peers, and CTAs of the next kernel could take the place of its own.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64
from dsv4_symm_mem.device.bulk import bulk_prefetch


def wait_for_inputs() -> None:
    """Wait, as every thread, until the launches before have ended and what they wrote is visible.

    PTX: `griddepcontrol.wait;` (ISA section of that name).
    """
    cute.arch.griddepcontrol_wait()


@cute.jit
def prefetch_lines(
    address: Int64, stride: Int64, size: Int32, lines: Int32, block: Int32, blocks: Int32
) -> None:
    """Bring CTA `block`'s share of some lines into L2, as one whole warp.

    Args:
        address: Of the first line, a multiple of 16, as the next two are.
        stride: Bytes from one to the next.
        size: Bytes of a line.
        lines: How many there are.
        block: This CTA.
        blocks: CTAs of the launch.
    """
    line = block + cute.arch.lane_idx() * blocks
    while line < lines:
        bulk_prefetch(address + Int64(line) * stride, size)
        line += 32 * blocks
