# SPDX-License-Identifier: Apache-2.0
"""The environment variables of this package, read in one place."""

from __future__ import annotations

import os

from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs.dispatch import Path

PATH_VARIABLE = "DSV4_GEMM_RS_PATH"
DEADLINE_VARIABLE = "DSV4_GEMM_RS_DEADLINE"
LINK_VARIABLE = "DSV4_GEMM_RS_LINK_GBPS"
TABLE_VARIABLE = "DSV4_GEMM_RS_TABLE"
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
    seconds = _number(DEADLINE_VARIABLE, MAX_DEADLINE, "seconds from 0 (none)")
    return DEFAULT_DEADLINE if seconds is None else seconds


def link_rate() -> float | None:
    """Bytes per microsecond from `DSV4_GEMM_RS_LINK_GBPS`, None when unset; 0 means not to pace.

    Raises:
        ArgumentError: It is no non-negative number.
    """
    gigabytes = _number(LINK_VARIABLE, MAX_LINK_GBPS, "GB/s from 0 (do not pace)")
    return None if gigabytes is None else gigabytes * 1e3


def table_setting() -> str:
    """What `DSV4_GEMM_RS_TABLE` says: the file of a user's thresholds, "off" for none, empty when unset."""
    return os.environ.get(TABLE_VARIABLE, "").strip()


def _number(variable: str, most: float, expected: str) -> float | None:
    """The variable's value in [0, most], None when it is unset or blank."""
    value = os.environ.get(variable, "")
    if not value.strip():
        return None
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:
        raise ArgumentError(variable, value, f"{expected} to {most:g}")
    return number
