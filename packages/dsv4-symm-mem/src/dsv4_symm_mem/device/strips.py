# SPDX-License-Identifier: Apache-2.0
"""Strips: 8 rows by a few blocks of 32 columns of BF16, which a warp moves with one 16-byte access a block.

Lane l has the eight columns 8·(l % 4) of row l // 4 in each block, as in a block of `protocol.slots`. In a
row-major matrix the blocks of a strip are 64 bytes apart, in a slot's tile as far as a column of blocks.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, Uint32

from dsv4_symm_mem.device.vectors import Words, load_16, store_16

ROW_MAJOR_STEP = 64
"""Bytes from block to block in a row-major BF16 matrix."""


@cute.jit
def load_strip(blocks: Constexpr[int], address: Int64, step: Int32, columns: Int32) -> list[Words]:
    """The lane's words of `blocks` blocks, `step` bytes apart; zeros past `columns`.

    All loads come before any use, so they are in flight together.
    """
    words = []
    for i in cutlass.range_constexpr(blocks):
        zero = Uint32(0)
        block = (zero, zero, zero, zero)
        if 32 * i < columns:
            block = load_16(address + Int64(step * i))
        words.append(block)
    return words


@cute.jit
def store_strip(address: Int64, step: Int32, columns: Int32, words: list[Words]) -> None:
    """Store what `load_strip` loaded, up to `columns`."""
    for i in cutlass.range_constexpr(len(words)):
        if 32 * i < columns:
            store_16(address + Int64(step * i), words[i])
