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

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64
from dsv4_symm_mem.device.bulk import bulk_prefetch

from dsv4_gemm_rs.kernels.sm100.config import ATOM_BYTES, KernelConfig


def wait_for_inputs() -> None:
    """Wait, as every thread, until the launches before have ended and what they wrote is visible.

    PTX: `griddepcontrol.wait;` (ISA section of that name).
    """
    cute.arch.griddepcontrol_wait()


@cute.jit
def prefetch_weight(
    config: Constexpr[KernelConfig],
    weight: Int64,
    stride: Int64,
    scales: Int64,
    n: Int32,
    k: Int32,
    block: Int32,
    blocks: Int32,
) -> None:
    """Bring CTA `block`'s share of W's rows and of its scales into L2, as one whole warp.

    Args:
        config: The kernel's configuration.
        weight: Address of W.
        stride: Its row stride in elements.
        scales: Address of its scales, if the configuration has any.
        n: Rows of W.
        k: Its columns; a row's bytes are a multiple of 16.
        block: This CTA.
        blocks: CTAs of the launch.
    """
    row = block + cute.arch.lane_idx() * blocks
    while row < n:
        bulk_prefetch(weight + Int64(row) * stride * config.element_bytes, k * config.element_bytes)
        row += 32 * blocks
    if cutlass.const_expr(config.scaled):
        line = (k + 127) // 128 * ATOM_BYTES
        atom = block + cute.arch.lane_idx() * blocks
        while atom < (n + 127) // 128:
            bulk_prefetch(scales + Int64(atom) * Int64(line), line)
            atom += 32 * blocks
