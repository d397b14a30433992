# SPDX-License-Identifier: Apache-2.0
"""The probes of the asynchronous instructions against what an H200 (driver 580.159, PTX 8.6) made of them.

Bit for bit, except for sums of values that are no integers, whose differences are bounded by what was
measured.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import wgmma_kernels as matrices
from async_probes import CONVERSIONS, MATRICES, MOVES, SUMS, TENSORS, MapOf, Probe, emulate, fingerprint

DATA = Path(__file__).with_name("data")
HASHES: dict[str, str] = json.loads((DATA / "async_probes.json").read_text())
ABSOLUTE = {"bf16": 2.0**-18, "f16": 2.0**-18, "tf32": 2.0**-19, "e4m3": 2.0**-8}
"""Largest difference seen for one instruction on standard normal values, rounded up to a power of two."""


@pytest.mark.parametrize("probe", [*MOVES, *TENSORS, *MATRICES, *CONVERSIONS], ids=lambda probe: probe.name)
def test_bit_for_bit(probe: Probe) -> None:
    given = [buffer for buffer in probe.buffers if not isinstance(buffer, MapOf)]
    recorded = {
        name.split("/")[1]: value for name, value in HASHES.items() if name.startswith(f"{probe.name}/")
    }
    assert recorded, "nothing was recorded: run support/record_probes.py on a GPU"
    assert f"{probe.name}/{next(iter(recorded))}/{fingerprint(probe)}" in HASHES, (
        "the probe has changed since"
    )
    for seed in range(probe.seeds):
        for number, (after, before) in enumerate(zip(emulate(probe, seed), given, strict=True)):
            wanted = recorded.get(str(number), hashlib.sha256(before.tobytes()).hexdigest())
            assert hashlib.sha256(after.tobytes()).hexdigest() == wanted, f"buffer {number}"


@pytest.mark.parametrize("probe", SUMS, ids=lambda probe: probe.name)
def test_sums_of_other_values_are_close(probe: Probe) -> None:
    kind = probe.name.removeprefix("sum-").split(".")[0]
    case = matrices.Case(kind, kind, n=64)
    here = emulate(probe)[1].view(np.uint32).reshape(128, -1)
    there = np.load(DATA / "async_sums.npz")[probe.name].view(np.uint32).reshape(128, -1)
    difference = np.abs(matrices.tile_from(here, case).astype(np.float64) - matrices.tile_from(there, case))
    assert 0 < difference.max() <= ABSOLUTE[kind]
