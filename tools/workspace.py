# SPDX-License-Identifier: Apache-2.0
"""Which packages this repository holds, read from where each fact is written down.

The layers' order stands in the root pyproject.toml, everything else in the packages' own files; noxfile,
tools and tests ask here, so that a new package is one line and a folder. Standard library only: nox loads
this from its own environment.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"


def load_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file."""
    with path.open("rb") as file:
        return tomllib.load(file)


def distribution_of(requirement: str) -> str:
    """The normalised distribution name that a requirement string begins with."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ValueError(f"no distribution name in {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


@dataclass(frozen=True)
class Package:
    """One distribution under packages/."""

    name: str
    root: Path

    @property
    def short_name(self) -> str:
        """The name without the family's prefix, as in a session's name."""
        return self.name.removeprefix("dsv4-")

    @property
    def import_name(self) -> str:
        """The one top-level module."""
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        """The folder of the top-level module."""
        return self.root / "src" / self.import_name

    @property
    def tests(self) -> Path:
        """The folder of the package's tests."""
        return self.root / "tests"

    @cached_property
    def project(self) -> dict[str, Any]:
        """The [project] table."""
        table: dict[str, Any] = load_toml(self.root / "pyproject.toml")["project"]
        return table

    @property
    def version(self) -> str:
        """The version that the build reads."""
        text = (self.source / "_version.py").read_text(encoding="utf-8")
        match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
        if match is None:
            raise ValueError(f"{self.source}/_version.py assigns no __version__")
        return match.group(1)

    @property
    def modules(self) -> list[str]:
        """Dotted names of every module, the top-level one first."""
        return sorted(
            ".".join(path.relative_to(self.root / "src").with_suffix("").parts).removesuffix(".__init__")
            for path in self.source.rglob("*.py")
        )


def layers() -> list[Package]:
    """Every package, lowest layer first."""
    names: list[str] = load_toml(ROOT / "pyproject.toml")["tool"]["dsv4"]["layers"]
    return [Package(name, ROOT / "packages" / name) for name in names]


def package(name: str) -> Package:
    """The package called `name`.

    Raises:
        KeyError: There is none; the text lists those that there are.
    """
    known = {candidate.name: candidate for candidate in layers()}
    if name not in known:
        raise KeyError(f"no package {name!r}, only {', '.join(known)}")
    return known[name]


def with_dependencies(top: Package) -> list[Package]:
    """`top` and the packages of this repository that it declares, directly or not, lowest layer first."""
    wanted = {top.name}
    for candidate in reversed(layers()):
        if candidate.name in wanted:
            wanted |= {distribution_of(line) for line in candidate.project["dependencies"]}
    return [candidate for candidate in layers() if candidate.name in wanted]
