# SPDX-License-Identifier: Apache-2.0
"""What a campaign has done so far, in a file beside its result, so that an interrupted one goes on.

Contract: one JSON value a line, written as it comes. The first line says what the rest is about; a journal
about anything else (another kernel, scenario, emulator or number of schedules) is not read but begun anew.
A line that a dying process did not finish is passed over.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dsv4_ptx_emulator

SUFFIX = ".partial"


class Journal:
    """A journal that is open for writing.

    Args:
        path: Where; None for nowhere.
        about: What tells this campaign from others; ready for JSON.

    Attributes:
        entries: Of earlier runs of the same campaign, by kind.
    """

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self._path = path
        self.entries: dict[str, list[Any]] = {}
        if path is None:
            return
        lines = _lines(path)
        if not lines or lines[0] != about:
            lines = [about]
        for kind, value in lines[1:]:
            self.entries.setdefault(kind, []).append(value)
        fresh = path.with_name(path.name + ".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        fresh.replace(path)

    def add(self, kind: str, value: Any) -> None:
        """Write an entry; it is on the file when this returns."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([kind, value]) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def remove(self) -> None:
        """The campaign is over."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _lines(path: Path) -> list[Any]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def sources(functions: Sequence[Callable[..., Any]]) -> str:
    """A digest of the emulator's sources and of the files that hold these functions."""
    package = Path(dsv4_ptx_emulator.__file__).parent
    files = {str(path) for path in package.rglob("*.py")}
    files |= {file for each in functions if (file := inspect.getsourcefile(each)) is not None}
    texts = "".join(Path(file).read_text(encoding="utf-8") for file in sorted(files))
    return hashlib.sha256(texts.encode()).hexdigest()
