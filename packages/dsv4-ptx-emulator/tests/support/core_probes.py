# SPDX-License-Identifier: Apache-2.0
"""All groups of probes of the synchronous instructions, and the file of what an H200 made of them.

`record_probes.py data/core_probes.json` writes it: a SHA-256 for each row, by `Group.key`, and the results
themselves of approximate functions. A row without an entry has not been recorded, or has changed since.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import core_atomic_probes
import core_convert_probes
import core_cta_probes
import core_float_probes
import core_integer_probes
import core_memory_probes
import core_warp_probes
import numpy as np
from async_probes import Bytes
from core_rows import Group, Row
from numpy.typing import NDArray

GROUPS: tuple[Group, ...] = (
    *core_integer_probes.groups(),
    *core_float_probes.groups(),
    *core_convert_probes.groups(),
    *core_memory_probes.groups(),
    *core_atomic_probes.groups(),
    *core_warp_probes.groups(),
    *core_cta_probes.groups(),
)
SMALLEST_NORMAL = 2.0**-126


def save(path: Path, results: Mapping[str, Bytes], about: Mapping[str, str]) -> None:
    """Write what rows gave, by their keys; `about` says on what: GPU and versions."""
    approximate = {group.key(row) for group in GROUPS for row in group.rows if row.tolerance}
    hashes = {key: hashlib.sha256(data.tobytes()).hexdigest() for key, data in results.items()}
    arrays = {
        key: base64.b64encode(zlib.compress(data.tobytes(), 9)).decode()
        for key, data in results.items()
        if key in approximate
    }
    whole = {"device": about, "hashes": hashes, "arrays": arrays}
    path.write_text(json.dumps(whole, indent=0, sort_keys=True) + "\n")


class Recordings:
    """What is in the file; empty if there is none.

    Attributes:
        device: The GPU's name ("gpu"), versions of its driver ("driver", "cuda") and of packages.
    """

    def __init__(self, path: Path) -> None:
        whole: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.device: dict[str, str] = whole.get("device", {})
        self._hashes: dict[str, str] = whole.get("hashes", {})
        self._arrays: dict[str, str] = whole.get("arrays", {})

    def has(self, group: Group, row: Row) -> bool:
        """Whether the row has been recorded as it is."""
        return group.key(row) in self._hashes

    def agrees(self, group: Group, row: Row, here: Bytes) -> bool:
        """Whether results are those recorded, or within the row's tolerance of them.

        Where a row's departure says what the GPU does instead of what the ISA says, that must be recorded.
        """
        key = group.key(row)
        here = departed(group, row, here)
        if row.tolerance is None:
            return hashlib.sha256(here.tobytes()).hexdigest() == self._hashes[key]
        there = np.frombuffer(zlib.decompress(base64.b64decode(self._arrays[key])), np.uint8)
        return not apart(group, row, here, there).any()


def departed(group: Group, row: Row, here: Bytes) -> Bytes:
    """The emulator's results as the GPU has them, which departs from the ISA in a few rows."""
    if row.departure is None:
        return here
    results = here.copy()
    values = results.view(f"u{row.size}")
    for thread, value in enumerate(row.departure.results(*group.inputs)):
        if value is not None:
            values[thread] = value
    return results


def apart(group: Group, row: Row, left: Bytes, right: Bytes) -> NDArray[np.bool_]:
    """In which threads two results of a row differ: by a bit, or by more than the row's tolerance."""
    if row.tolerance is None:
        width = group.count
        unlike: NDArray[np.bool_] = (left.reshape(width, -1) != right.reshape(width, -1)).any(axis=1)
        return unlike
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = (data.view(np.float32).astype(np.float64) for data in (left, right))
        # A result at the edge of the subnormals is flushed before or after it is rounded.
        floor = SMALLEST_NORMAL if ".ftz" in row.name else 0.0
        allowed = np.abs(a) * row.tolerance.relative + max(row.tolerance.absolute, floor)
        close = (np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b))
        if row.tolerance.domain is not None:
            inputs = [values.view(np.float32).astype(np.float64) for values in group.inputs[:2]]
            close |= ~row.tolerance.domain(*inputs)
    different: NDArray[np.bool_] = ~close
    return different
