# SPDX-License-Identifier: Apache-2.0
"""The environment variables of this package, read in one place."""

from __future__ import annotations

import os

from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs.dispatch import Path

PATH_VARIABLE = "DSV4_GEMM_RS_PATH"
DEADLINE_VARIABLE = "DSV4_GEMM_RS_DEADLINE"
LINK_VARIABLE = "DSV4_GEMM_RS_LINK_GBPS"
DEFAULT_DEADLINE = 30.0
MAX_DEADLINE = 1e9
"""Longest deadline in seconds: in nanoseconds it fits 64 bits on top of any clock."""

MAX_LINK_GBPS = 1e6
"""Far beyond any link; a block's duration is then still above zero."""


def under_torchrun() -> bool:
    """Whether this process was started by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def requested_path() -> Path | None:
    """The path that `DSV4_GEMM_RS_PATH` asks for; None when unset, empty or "auto".

    Raises:
        ArgumentError: It names no path.
    """
    value = os.environ.get(PATH_VARIABLE, "auto").strip().lower()
    if value in ("", "auto"):
        return None
    try:
        return Path(value)
    except ValueError:
        raise ArgumentError(PATH_VARIABLE, value, f"auto or one of {[path.value for path in Path]}") from None


def default_deadline() -> float:
    """Seconds from `DSV4_GEMM_RS_DEADLINE`, 30 when unset; 0 means no deadline.

    Raises:
        ArgumentError: It is no non-negative number.
    """
    value = os.environ.get(DEADLINE_VARIABLE, "")
    if not value.strip():
        return DEFAULT_DEADLINE
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_DEADLINE:
        raise ArgumentError(DEADLINE_VARIABLE, value, f"seconds from 0 (none) to {MAX_DEADLINE:g}")
    return seconds


def link_rate() -> float | None:
    """Bytes per microsecond from `DSV4_GEMM_RS_LINK_GBPS`, None when unset; 0 means not to pace.

    Raises:
        ArgumentError: It is no non-negative number.
    """
    value = os.environ.get(LINK_VARIABLE, "")
    if not value.strip():
        return None
    try:
        gigabytes = float(value)
    except ValueError:
        gigabytes = -1.0
    if not 0 <= gigabytes <= MAX_LINK_GBPS:
        raise ArgumentError(LINK_VARIABLE, value, f"GB/s from 0 (do not pace) to {MAX_LINK_GBPS:g}")
    return gigabytes * 1e3
