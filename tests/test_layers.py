# SPDX-License-Identifier: Apache-2.0
"""Lower layers never import higher ones, and no package imports what it doesn't declare.

Read from the syntax trees, so an import inside a function or under TYPE_CHECKING counts too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.workspace import ROOT, Package, distribution_of, layers

LAYERS = layers()
ORDER = {package.import_name: position for position, package in enumerate(LAYERS)}
DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl", "flashinfer": "flashinfer-python", "pynvml": "nvidia-ml-py"}
DECLARED_ELSEWHERE = {"cuda": "nvidia-cutlass-dsl"}
"""Modules that come with a distribution which another name stands for."""


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and top-level name of every absolute import."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]


def test_every_package_has_a_layer() -> None:
    folders = {path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml")}
    assert folders == {package.name for package in LAYERS}


@pytest.mark.parametrize("package", LAYERS, ids=lambda package: package.name)
def test_no_import_from_a_higher_layer(package: Package) -> None:
    upwards = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in [*package.source.rglob("*.py"), *package.tests.rglob("*.py")]
        for line, name in imported_modules(path)
        if ORDER.get(name, -1) > ORDER[package.import_name]
    ]
    assert not upwards


@pytest.mark.parametrize("package", LAYERS, ids=lambda package: package.name)
def test_no_dependency_on_a_higher_layer(package: Package) -> None:
    higher = {other.name for other in LAYERS if ORDER[other.import_name] >= ORDER[package.import_name]}
    assert not higher & {distribution_of(line) for line in package.project["dependencies"]}


@pytest.mark.parametrize("package", LAYERS, ids=lambda package: package.name)
def test_every_import_is_declared(package: Package) -> None:
    project = package.project
    extras = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
    declared = {distribution_of(line) for line in [*project["dependencies"], *extras]} | {package.name}
    distributions = DISTRIBUTIONS | DECLARED_ELSEWHERE
    undeclared = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in package.source.rglob("*.py")
        for line, name in imported_modules(path)
        if name not in sys.stdlib_module_names
        and distributions.get(name, name.replace("_", "-")) not in declared
    ]
    assert not undeclared
