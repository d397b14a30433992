# SPDX-License-Identifier: Apache-2.0
"""Every file of the repository bears its licence, and the check that says so can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_spdx import HASH, MARKUP, complaint, repository_files


def test_every_file_bears_the_licence() -> None:
    paths = repository_files()
    assert len(paths) > 20
    assert [text for path in paths if (text := complaint(path))] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", f"{HASH}\n"),
        ("a.md", f"{MARKUP}\n# Title\n"),
        ("run", f"#!/usr/bin/env bash\n{HASH}\n"),
        (".gitignore", f"{HASH}\n"),
        ("py.typed", ""),
        ("result.json", "{}\n"),
    ],
)
def test_accepted(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert complaint(tmp_path / name) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", ""),
        ("a.py", f'"""Docstring first."""\n{HASH}\n'),
        ("a.py", f"{HASH}-or-later\n"),
        ("a.md", f"{HASH}\n"),
        ("run", "#!/usr/bin/env bash\nset -e\n"),
        ("a.unknown", f"{HASH}\n"),
    ],
)
def test_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert name in str(complaint(tmp_path / name))
