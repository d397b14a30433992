# SPDX-License-Identifier: Apache-2.0
"""mma.sync: a warp's matrix product from registers.

PTX ISA 9.4, section 9.7.16.5.14; fragments of m16n8k16 with 16-bit elements in 9.7.16.5.8. With g = lane / 4
and t = lane % 4, a register holds two elements, the lower first: A's four are rows g, g + 8, g, g + 8 at k =
2t, 2t, 2t + 8, 2t + 8; B's two are column g at k = 2t and 2t + 8; an accumulator's four are columns 2t and
2t + 1 of row g, then of row g + 8.

Products are exact in FP32; they are added in FP64 and rounded once, where the order on a device is not
specified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.machine.warp import LANES

if TYPE_CHECKING:
    from dsv4_ptx_emulator.isa.context import DecodeContext
    from dsv4_ptx_emulator.machine.outcome import Outcome
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Instruction

FORM = ("sync", "aligned", "m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32")
GROUP, MEMBER = np.arange(LANES) // 4, np.arange(LANES) % 4


@instruction("mma", section="9.7.16.5.14", observable=True)
def mma(instruction: Instruction, context: DecodeContext) -> Step:
    """D = A B + C of BF16 matrices of 16 x 16 and 16 x 8, in FP32."""
    context.require(*FORM)
    if context.modifiers != FORM:
        context.unsupported(f"a form other than {'.'.join(FORM)}")
    writes = context.destinations(context.operand(0), 32)
    left = context.sources(context.operand(1), 32)
    right = context.sources(context.operand(2), 32)
    added = context.sources(context.operand(3), 32)
    if (len(writes), len(left), len(right), len(added)) != (4, 4, 2, 4):
        context.unsupported("another number of registers")

    def step(warp: Warp) -> Outcome | None:
        a = np.empty((16, 16), np.float64)
        b = np.empty((8, 16), np.float64)
        c = np.empty((16, 8), np.float64)
        for index, read in enumerate(left):
            rows, columns = GROUP + 8 * (index % 2), 2 * MEMBER + 8 * (index // 2)
            a[rows, columns], a[rows, columns + 1] = _pair(read(warp))
        for index, read in enumerate(right):
            columns = 2 * MEMBER + 8 * index
            b[GROUP, columns], b[GROUP, columns + 1] = _pair(read(warp))
        for index, read in enumerate(added):
            c[GROUP + 8 * (index // 2), 2 * MEMBER + index % 2] = _bits(read(warp)).view(np.float32)
        with np.errstate(all="ignore"):
            d = (a @ b.T + c).astype(np.float32)
        for index, write in enumerate(writes):
            write(warp, d[GROUP + 8 * (index // 2), 2 * MEMBER + index % 2].view(np.uint32))
        return None

    return step


def _bits(value: object) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    return np.ascontiguousarray(np.broadcast_to(np.asarray(value, np.uint32), (LANES,)))


def _pair(
    value: object,
) -> tuple[
    np.ndarray[tuple[int, ...], np.dtype[np.float32]], np.ndarray[tuple[int, ...], np.dtype[np.float32]]
]:
    bits = _bits(value)
    return (bits << np.uint32(16)).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)
