# SPDX-License-Identifier: Apache-2.0
"""The probes of the synchronous instructions: as the ISA has it, and as an H200 has it.

What a row must give is computed in Python's integers and rational numbers where the ISA fixes it, and is
recorded on a GPU for all. Bit for bit, except for approximate functions, which have the ISA's error bounds.
Where the ISA is silent the emulator does as the GPU; where the GPU departs from it, the row says how.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from async_probes import SUMS
from core_probes import GROUPS, Recordings, apart
from core_rows import Group, emulated, integers

DATA = Path(__file__).with_name("data") / "core_probes.json"
ASYNC = DATA.with_name("async_probes.json")
RECORDER = "python tests/support/record_probes.py tests/data/core_probes.json"


@functools.cache
def recordings() -> Recordings:
    return Recordings(DATA)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_as_the_isa_has_it(group: Group) -> None:
    wrong = []
    for row in group.rows:
        if row.expected is None:
            continue
        want = row.expected(*group.inputs)
        assert len(want) == group.count
        assert any(value is not None for value in want)
        for seed in range(group.seeds):
            got = integers(emulated(group, seed)[row.name], row.size)
            bad = [k for k, value in enumerate(want) if value is not None and value != got[k]]
            if bad:
                operands = [hex(int(values[bad[0]])) for values in group.inputs]
                first = f"{operands} gives {got[bad[0]]:#x}, not {want[bad[0]]:#x}"
                wrong.append(f"{row.name}: {len(bad)} threads; {first}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_as_the_gpu_has_it(group: Group) -> None:
    missing = [row.name for row in group.rows if not recordings().has(group, row)]
    wrong = [
        row.name
        for row in group.rows
        for seed in range(group.seeds)
        if row.name not in missing and not recordings().agrees(group, row, emulated(group, seed)[row.name])
    ]
    assert not wrong, f"unlike the GPU: {', '.join(wrong)}"
    if missing:
        which = "nothing of it" if len(missing) == len(group.rows) else ", ".join(missing)
        pytest.skip(
            f"group {group.name}: not recorded on an H200 as it is now: {which}; run {RECORDER} there"
        )


def test_the_documentation_counts_what_was_recorded() -> None:
    page = Path(__file__).parents[3] / "docs" / "emulator.md"
    if not page.exists():
        pytest.skip(f"{page}: the documentation is not part of this tree")
    rows = [(group, row) for group in GROUPS for row in group.rows if recordings().has(group, row)]
    results = sum(group.count for group, _ in rows)
    close = sum(1 for _, row in rows if row.tolerance)
    kernels = {name.split("/")[0] for name in json.loads(ASYNC.read_text())} | {probe.name for probe in SUMS}
    text = " ".join(page.read_text(encoding="utf-8").split())
    for quoted in (
        f"{len(rows):,} instructions, a few of them short sequences, {results:,} results",
        f"{len(rows) - close:,} instructions agree bit for bit",
        f"the other {close} are approximate functions",
        f"a recording of their own, of {len(kernels)} small kernels",
    ):
        assert quoted in text, quoted


def test_what_was_recorded_on() -> None:
    assert recordings().device["gpu"].startswith("NVIDIA H200")
    assert {"driver", "cuda"} <= recordings().device.keys()


def test_departures_bind() -> None:
    """The GPU departs from the ISA in exactly the rows that say so: without that, they are unlike it."""
    departing = [(group, row) for group in GROUPS for row in group.rows if row.departure]
    assert departing
    for group, row in departing:
        if recordings().has(group, row):
            assert not recordings().agrees(group, replace(row, departure=None), emulated(group, 0)[row.name])


def test_tolerances_bind() -> None:
    (group,) = (group for group in GROUPS if group.name == "float-approximate")
    for row in group.rows:
        here = emulated(group, 0)[row.name]
        assert not apart(group, row, here, here).any()
        other = here.view(np.float32) * np.float32(1 + 2.0**-10)
        assert apart(group, row, here, other.view(np.uint8)).sum() > 200, row.name
