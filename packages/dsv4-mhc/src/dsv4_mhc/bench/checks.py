# SPDX-License-Identifier: Apache-2.0
"""What the kernels are meant to reach, held against a run's rows. Pure.

Times are those with a cold L2. A ratio to others' kernels counts only where the same run measured them, and a
check whose rows are missing is left out. The chain that a seam competes with is V4's for both wirings: V4.1
needs the same three launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

CHAIN = "seam_coupled/tile_kernels_chain"
TUNED = 5120
"""The hidden size that absolute times are set for, on one H200."""
SEAM_US = {1024: 30.0, 4096: 108.0, 8192: 215.0}
FEW_US = {"seam_shifted": 7.0, "seam_coupled": 9.0}
FEW = 32
FASTER = {"seam_shifted": (1.6, 2048), "seam_coupled": (1.3, 1024)}
"""Times faster than the chain, and from how many tokens on."""
ALONE = {"post": "post/tile_kernels", "collapse_bare": "collapse/tile_kernels"}
PARITY = 1.02
"""What counts as the same time."""
TF32_SHARE = 1 / 3


def at_most(name: str, value: float, target: float) -> dict[str, Any]:
    """A check that holds where `value` does not exceed `target`."""
    return {"name": name, "value": value, "target": target, "holds": value <= target}


def checks(rows: Sequence[dict[str, Any]], errors: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every check that these rows can answer.

    Args:
        rows: Of `run`: case, tokens, hidden, cold_us, floor_us.
        errors: Of `coefficient_errors`: hidden, name, ours, tf32.

    Returns:
        name, value, target and whether it holds; a value must not exceed its target.
    """
    times = {(row["case"], row["hidden"], row["tokens"]): row for row in rows if "cold_us" in row}
    return [*_of_times(times), *_of_errors(errors)]


def _of_times(times: dict[tuple[str, int, int], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for (case, hidden, tokens), row in times.items():
        where, cold = f"H={hidden}, T={tokens}: {case}", row["cold_us"]

        def other(name: str, size: tuple[int, int] = (hidden, tokens)) -> float | None:
            found = times.get((name, *size))
            return None if found is None else float(found["cold_us"])

        if hidden == TUNED and case == "seam_shifted" and tokens in SEAM_US:
            yield at_most(f"{where}, µs", cold, SEAM_US[tokens])
        if hidden == TUNED and case in FEW_US and tokens <= FEW:
            yield at_most(f"{where}, µs", cold, FEW_US[case])
        if case == "seam_shifted" and tokens == 8192:
            yield at_most(f"{where} / floor", cold / row["floor_us"], 1 / 0.9)
        if case.startswith("pre_shifted") and tokens >= 2048:
            yield at_most(f"{where} / floor", cold / row["floor_us"], 1.25)
        chain = other(CHAIN)
        if case in FASTER and chain is not None:
            times_faster, first = FASTER[case]
            if tokens >= first:
                yield at_most(f"{where} / {CHAIN}", cold / chain, 1 / times_faster)
            elif case == "seam_shifted":
                yield at_most(f"{where} / {CHAIN}", cold / chain, 1.0)
        alone = other(ALONE[case]) if case in ALONE else None
        if alone is not None:
            yield at_most(f"{where} / {ALONE[case]}", cold / alone, PARITY)
        plain = other("seam_shifted")
        if case == "seam_shifted_mxfp8" and plain is not None:
            yield at_most(f"{where} / seam_shifted", cold / plain, PARITY)


def _of_errors(errors: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in errors:
        name = f"H={row['hidden']}: largest error of {row['name']} / TF32's"
        yield at_most(name, row["ours"] / row["tf32"], TF32_SHARE)
