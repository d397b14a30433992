# SPDX-License-Identifier: Apache-2.0
"""Bytes that each operation must move: every input once in, every output once out. Pure.

With d = 2 H bytes, a BF16 hidden vector: streams are 4 d. Coefficients are 96 bytes a token each way, and the
projection's weights are read once a call.
"""

from __future__ import annotations

COEFFICIENTS = 96
PRE = 16
STREAM_UNITS = {
    "expand": 5.0,
    "mean": 5.0,
    "post": 9.0,
    "collapse": 5.0,
    "collapse_bare": 5.0,
    "pre_coupled": 5.0,
    "pre_shifted": 5.0,
    "seam_coupled": 10.0,
    "seam_shifted": 10.0,
    "seam_shifted_mxfp8": 9.0 + 0.5 + 1 / 64,
    "tail_shifted": 6.0,
    "tail_head": 6.0,
    "engram_seam": 15.0,
}
"""Multiples of d a token."""

COEFFICIENT_BYTES = {
    "post": 80,
    "collapse": PRE,
    "collapse_bare": PRE,
    "pre_coupled": COEFFICIENTS,
    "pre_shifted": COEFFICIENTS + PRE,
    "seam_coupled": 80 + COEFFICIENTS,
    "seam_shifted": 80 + PRE + COEFFICIENTS,
    "seam_shifted_mxfp8": 80 + PRE + COEFFICIENTS,
    "tail_shifted": 80 + PRE,
    "tail_head": 80,
    "engram_seam": 80 + PRE + COEFFICIENTS,
}
PROJECTED = (
    "pre_coupled",
    "pre_shifted",
    "seam_coupled",
    "seam_shifted",
    "seam_shifted_mxfp8",
    "engram_seam",
)


def floor_bytes(case: str, tokens: int, hidden: int) -> float:
    """Bytes of a call, weights included."""
    rows = 24 if case in PROJECTED else 4 if case == "tail_head" else 0
    per_token = STREAM_UNITS[case] * 2 * hidden + COEFFICIENT_BYTES.get(case, 0)
    return tokens * per_token + rows * 4 * hidden * 4
