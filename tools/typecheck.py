# SPDX-License-Identifier: Apache-2.0
"""Type-check every package with its tests, then the repository's own scripts and tests.

Run as `python -m tools.typecheck [mypy options]`. One run of mypy per package: two packages may each have a
`conftest.py` or a `test_errors.py`, which in one run would be the same module twice.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.workspace import ROOT, layers


def mypy(folders: Sequence[Path], base: Path, options: Sequence[str]) -> int:
    """Check `folders`; module names in them count from `base` where no source folder is nearer."""
    targets = [str(folder.relative_to(ROOT)) for folder in folders if any(folder.rglob("*.py"))]
    environment = os.environ | {"MYPYPATH": str(base)}
    print(f"mypy {' '.join(targets)}", flush=True)
    # What a package imports is checked with its own package, once.
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", *options, *targets]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main(options: Sequence[str]) -> int:
    """The number of runs that found something."""
    failed = 0
    for package in layers():
        failed += mypy([package.source, package.tests], package.tests, options) != 0
    scripts = [ROOT / "tools", ROOT / "tests"]
    return failed + (mypy(scripts, ROOT, [*options, "noxfile.py"]) != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
