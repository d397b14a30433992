# SPDX-License-Identifier: Apache-2.0
"""Layouts of matrices written a second time, as CuTe states them; no code is shared with the package."""

from __future__ import annotations

import itertools


def xor_swizzle(address: int, bits: int) -> int:
    """Byte address with chunk bits 4.. exchanged by row bits 7.., bit by bit."""
    for bit in range(bits):
        if address >> (7 + bit) & 1:
            address ^= 1 << (4 + bit)
    return address


def canonical(
    bits: int, t: int, row_major: bool, lbo: int, sbo: int, rows: int, depth: int
) -> dict[tuple[int, int], int]:
    """Element offset of (row, k): coordinate times stride, summed over nested modes.

    Args:
        bits: Of the swizzle: 0 (none) to 3 (128 bytes).
        t: Elements in 16 bytes.
        row_major: M or N major rather than K major.
        lbo: Leading-dimension offset in elements.
        sbo: Stride-dimension offset in elements.
        rows: M or N.
        depth: K.
    """
    w = 1 << bits
    offsets = {}
    for row, k in itertools.product(range(rows), range(depth)):
        if not row_major:
            mode = [(row % 8, w * t), (row // 8, sbo), (k % t, 1), (k // t, lbo if w == 1 else t)]
        elif w == 1:
            mode = [(row % t, 1), (row // t, sbo), (k % 8, t), (k // 8, lbo)]
        else:
            mode = [(row % t, 1), (row // t % w, t), (row // (t * w), lbo), (k % 8, w * t), (k // 8, sbo)]
        offsets[row, k] = sum(coordinate * stride for coordinate, stride in mode)
    return offsets


def accumulator_place(thread: int, i: int) -> tuple[int, int]:
    """Row and column of a warpgroup's D that thread 0 to 127 holds as element i."""
    warp, lane = divmod(thread, 32)
    return 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2


def a_place(thread: int, register: int, element: int, per: int) -> tuple[int, int]:
    """Row and column of A that thread 0 to 127 holds as element of a register with `per` elements."""
    warp, lane = divmod(thread, 32)
    row = 16 * warp + lane // 4 + 8 * (register % 2)
    return row, per * (lane % 4) + 4 * per * (register // 2) + element
