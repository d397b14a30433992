# SPDX-License-Identifier: Apache-2.0
"""The documentation's list of emulated instructions is the one that the emulator has."""

from __future__ import annotations

from dsv4_ptx_emulator.report.instructions import markdown_page

from tools.workspace import ROOT

PAGE = ROOT / "docs" / "emulator_instructions.md"


def test_the_page_is_up_to_date() -> None:
    command = "dsv4-emulate list-instructions --markdown > docs/emulator_instructions.md"
    assert PAGE.read_text(encoding="utf-8") == markdown_page(), f"run {command}"
