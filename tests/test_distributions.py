# SPDX-License-Identifier: Apache-2.0
"""A wheel holds its package, whole, and nothing else; an sdist holds what builds and tests it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.workspace import Package, layers

each_package = pytest.mark.parametrize("package", layers(), ids=lambda package: package.name)


def build(package: Package, target: str, folder: Path) -> Path:
    """The one distribution of kind `target` that the build back end writes into `folder`."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=package.root, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


def files_below(folder: Path, base: Path) -> set[str]:
    """What git would keep below `folder`, relative to `base`."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(base).as_posix() for path in found}


@each_package
def test_wheel(package: Package, tmp_path: Path) -> None:
    wheel = build(package, "wheel", tmp_path)
    assert wheel.name == f"{package.import_name}-{package.version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    assert names - metadata == files_below(package.source, package.root / "src")
    assert f"{package.import_name}/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in metadata)


@each_package
def test_sdist(package: Package, tmp_path: Path) -> None:
    sdist = build(package, "sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = files_below(package.source, package.root) | files_below(package.tests, package.root)
    root_files = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    # Hatchling adds the ignore file that it obeyed.
    assert names - {".gitignore"} == wanted | root_files
