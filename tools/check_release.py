# SPDX-License-Identifier: Apache-2.0
"""Which package a release tag names, once the tag agrees with the package's version and changelog.

Run as `python -m tools.check_release TAG`, the tag being `<package>-v<version>`; prints the package's name.
"""

from __future__ import annotations

import re
import sys
from datetime import date

from tools.workspace import Package, layers


def newest_entry(package: Package) -> tuple[str, str]:
    """Version and date of the changelog's first entry; the date is `unreleased` until the day."""
    text = (package.root / "CHANGELOG.md").read_text(encoding="utf-8")
    match = re.search(r"^## (\S+) \(([^)]+)\)$", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"{package.name}: CHANGELOG.md has no entry like '## 1.2.3 (2026-01-31)'")
    return match.group(1), match.group(2)


def released_package(tag: str) -> Package:
    """The package that `tag` releases.

    Raises:
        ValueError: The tag names no package, or its version, the package's and the changelog's differ, or
            the changelog's entry bears no date.
    """
    for package in layers():
        if tag.startswith(f"{package.name}-v"):
            break
    else:
        raise ValueError(f"{tag}: not <package>-v<version> for any package here")
    version = tag.removeprefix(f"{package.name}-v")
    entry, day = newest_entry(package)
    if not version == package.version == entry:
        raise ValueError(f"{tag}: _version.py says {package.version}, the changelog's first entry is {entry}")
    try:
        date.fromisoformat(day)
    except ValueError:
        raise ValueError(f"{tag}: the changelog's entry says {day!r} where a date belongs") from None
    return package


if __name__ == "__main__":
    try:
        print(released_package(sys.argv[1]).name)
    except ValueError as error:
        sys.exit(str(error))
