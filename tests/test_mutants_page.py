# SPDX-License-Identifier: Apache-2.0
"""The page of mutants is what the result files say; every mutant in it is accounted for, none is missing."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from dsv4_ptx_emulator.mutation.mutants import mutants
from dsv4_ptx_emulator.mutation.trial import clean, load
from dsv4_ptx_emulator.ptx.parser import parse
from dsv4_ptx_emulator.runtime import library

from tools.mutants_page import PAGE, PATTERN, TITLES, page
from tools.workspace import RESULTS

FILES = sorted(RESULTS.glob(PATTERN))
COMPILER = "nvidia-cutlass-dsl"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.mutants_page"
    assert {path.stem for path in FILES} == set(TITLES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_mutant_is_noticed_or_argued(path: Path) -> None:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert result["rows"]
    assert [row["mutant"] for row in result["rows"] if row["status"] not in ("caught", "equivalent")] == []
    assert all(row["argument"] for row in result["rows"] if row["status"] == "equivalent")
    assert [finding["text"] for finding in result["schema"]["findings"] if not finding["argument"]] == []
    assert result["schema"]["failures"] == []
    assert result["schema"]["clean_seeds"] >= 200


@pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_kernels_of_today_synchronise_as_the_tables_say(path: Path) -> None:
    """Not that their texts are the same: what they compute between two synchronisations is free to change."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    compiled, here = result["versions"][COMPILER], metadata.version(COMPILER)
    if compiled != here:
        pytest.skip(f"{path.name} is about what {COMPILER} {compiled} compiles; installed is {here}")
    options = shlex.split(result["command"])
    part = options[options.index("--kernel") + 1]
    run = clean(load(options[options.index("mutate") + 1]), [0])
    assert run.failures == []
    (today,) = (
        [mutant.name for mutant in mutants(text, entry)]
        for text in run.texts
        for entry in parse(text).kernels
        if part in entry
    )
    assert today == [row["mutant"] for row in result["rows"]], (
        f"{path.name} is out of date: run nox -s emulate_long"
    )
