# SPDX-License-Identifier: Apache-2.0
"""From how many rows a call is faster fused: a small table of measurements, and which of them a call goes by.

Contract: an entry holds what was measured of one shape, fused kernel against library GEMM and reduce-scatter
on the same operands, and the threshold that follows: the least measured M from which on fused was never
slower. An entry is made only where that lies between two measurements, or fused was slower to the last one:
where the fewest rows measured were faster fused, nothing is known below them.

A call goes by the entry nearest in shape among those of its architecture, kind of operands and kind of ranks:
the least sum of |log2| of the ratios of P, N and K, among equals the larger threshold. A user's entry
replaces one of the same shape. All of this is the same on all ranks, so they decide alike.

The package's own entries are `thresholds.json`, written from docs/results by `python -m tools.thresholds`, a
user's are written by `dsv4-gemm-rs tune` (`tuning.file`).

Rejected: interpolating between shapes. The crossing jumps with the library's choice of kernels (it splits K
where tiles are few), so two shapes say little of one between them; the nearest at least was measured.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from dsv4_symm_mem.errors import ArgumentError

SCHEMA = 1
PACKAGED = "thresholds.json"


@dataclass(frozen=True)
class Timed:
    """One M: microseconds of the fused kernel, and of the library's GEMM and the reduce-scatter."""

    m: int
    fused_us: float
    unfused_us: float


@dataclass(frozen=True)
class Shape:
    """What a threshold belongs to; equal on all ranks.

    Attributes:
        arch: Compute capability as 10 * major + minor.
        world_size: Ranks P.
        shared: Whether the ranks share one GPU.
        operand: What the fused kernel multiplies, see `kernels.families.Operand`.
        n: Columns of the product.
        k: Its summed length on one rank.
    """

    arch: int
    world_size: int
    shared: bool
    operand: str
    n: int
    k: int

    def __str__(self) -> str:
        where = "one GPU" if self.shared else "a GPU each"
        return f"sm_{self.arch}, {self.world_size} ranks of {where}, {self.operand}, N={self.n}, K={self.k}"


@dataclass(frozen=True)
class Entry:
    """The threshold of one shape.

    Attributes:
        shape: Which.
        least_tokens: Rows from which a call is faster fused; None where it was slower at every M measured.
        measured: What that follows from, by rising M.
        device: The GPU's name.
        date: Of the measurement.
        source: The result file, or the command.
    """

    shape: Shape
    least_tokens: int | None
    measured: tuple[Timed, ...]
    device: str
    date: str
    source: str


Table = tuple[Entry, ...]


def threshold(measured: Sequence[Timed]) -> int | None:
    """The least M from which on fused was never slower; None where it was slower at the largest.

    Raises:
        ArgumentError: Nothing was measured, or fused was faster at the least M already.
    """
    least: int | None = None
    ordered = sorted(measured, key=lambda each: each.m)
    for each in reversed(ordered):
        if each.fused_us > each.unfused_us:
            break
        least = each.m
    if not ordered or least == ordered[0].m:
        found = f"{ordered[0].m} rows" if ordered else "nothing"
        raise ArgumentError(
            "measured", found, "an M at which fused is slower, so that the threshold is known"
        )
    return least


def nearest(table: Iterable[Entry], shape: Shape) -> Entry | None:
    """The entry that calls of `shape` go by; None where no entry is of its kind."""
    alike = [
        entry
        for entry in table
        if (entry.shape.arch, entry.shape.shared, entry.shape.operand)
        == (shape.arch, shape.shared, shape.operand)
    ]

    def far(entry: Entry) -> tuple[float, float]:
        known = entry.shape
        ratios = (known.world_size / shape.world_size, known.n / shape.n, known.k / shape.k)
        # Rounded, so that shapes equally far are so in floating point, too.
        distance = round(sum(abs(math.log2(ratio)) for ratio in ratios), 6)
        return distance, -math.inf if entry.least_tokens is None else -entry.least_tokens

    return min(alike, key=far, default=None)


def merged(base: Table, own: Table) -> Table:
    """`base` with the entries of `own` added, or in the place of those of the same shapes."""
    replaced = {entry.shape for entry in own}
    return (*(entry for entry in base if entry.shape not in replaced), *own)


def as_json(table: Table) -> list[dict[str, Any]]:
    """The entries as plain values."""
    return [asdict(entry) for entry in table]


def from_json(held: Any) -> Table:
    """The entries of `as_json`.

    Raises:
        ArgumentError: They are something else, or a threshold is not what its measurements say.
    """
    try:
        table = tuple(_entry(each) for each in held)
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError("thresholds", type(held).__name__, f"a list of entries ({error!r})") from None
    for entry in table:
        if entry.least_tokens != threshold(entry.measured):
            expected = f"{threshold(entry.measured)}, as its measurements say"
            raise ArgumentError(f"least_tokens of {entry.shape}", entry.least_tokens, expected)
    return table


def _entry(held: Mapping[str, Any]) -> Entry:
    shape = Shape(**held["shape"])
    if not all(type(extent) is int and extent > 0 for extent in (shape.world_size, shape.n, shape.k)):
        raise ValueError(f"a shape of {shape}")
    measured = tuple(
        Timed(int(each["m"]), float(each["fused_us"]), float(each["unfused_us"])) for each in held["measured"]
    )
    return Entry(
        shape,
        measured=measured,
        **{name: held[name] for name in ("least_tokens", "device", "date", "source")},
    )


@functools.cache
def packaged() -> Table:
    """The entries that come with the package."""
    held = json.loads((files(__package__) / PACKAGED).read_text(encoding="utf-8"))
    if held.get("schema") != SCHEMA:
        raise ArgumentError(PACKAGED, held.get("schema"), f"schema {SCHEMA}")
    return from_json(held["entries"])
