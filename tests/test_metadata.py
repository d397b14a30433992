# SPDX-License-Identifier: Apache-2.0
"""What is written in more than one place says the same in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tools.check_release import newest_entry, released_package
from tools.workspace import ROOT, Package, layers, load_toml

LAYERS = layers()
# What users run beside these packages; see CONTRIBUTING.md.
NEIGHBOURS = {
    "apache-tvm-ffi": ["0.1.11", "0.1.12"],
    "nvidia-cutlass-dsl": ["4.7.1", "4.8.0", "4.8.1"],
    "torch": ["2.11.0", "2.13.0"],
}
each_package = pytest.mark.parametrize("package", LAYERS, ids=lambda package: package.name)


def requirements(package: Package) -> dict[str, Requirement]:
    return {parsed.name: parsed for parsed in map(Requirement, package.project["dependencies"])}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


@each_package
def test_changelog_begins_with_the_version(package: Package) -> None:
    assert newest_entry(package)[0] == package.version


@each_package
def test_own_packages_admit_each_other(package: Package) -> None:
    versions = {other.name: other.version for other in LAYERS}
    for name, requirement in requirements(package).items():
        if name in versions:
            assert versions[name] in requirement.specifier


@each_package
def test_neighbours_are_admitted(package: Package) -> None:
    for name, requirement in requirements(package).items():
        versions = NEIGHBOURS.get(name, [])
        assert all(version in requirement.specifier for version in versions), str(requirement)


def test_packages_agree_with_one_another() -> None:
    shared = ["license", "requires-python"]
    assert len({tuple(package.project[key] for key in shared) for package in LAYERS}) == 1
    for name in NEIGHBOURS:
        declared = [requirements(package) for package in LAYERS]
        assert len({str(found[name]) for found in declared if name in found}) <= 1


@each_package
def test_constraints_lie_within_the_ranges(package: Package) -> None:
    pins = constraints()
    for name, requirement in requirements(package).items():
        if name in pins:
            assert pins[name] in requirement.specifier


@each_package
def test_licence_is_the_repository_s(package: Package) -> None:
    assert (package.root / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_settings_name_every_package() -> None:
    settings = load_toml(ROOT / "pyproject.toml")["tool"]
    relative = [package.root.relative_to(ROOT).as_posix() for package in LAYERS]
    test_paths = ["tests", *(f"{path}/tests" for path in relative)]
    assert settings["pytest"]["ini_options"]["testpaths"] == test_paths
    assert {f"$MYPY_CONFIG_FILE_DIR/{path}/src" for path in relative} <= set(settings["mypy"]["mypy_path"])


def test_pre_commit_runs_the_constrained_versions() -> None:
    config: Any = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    pinned = [line for hook in hooks for line in hook.get("additional_dependencies", [])]
    assert pinned
    assert dict(line.split("==") for line in pinned).items() <= constraints().items()


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A package 1.2.3 whose changelog bears a date, in place of this repository's."""
    package = Package("dsv4-thing", tmp_path)
    package.source.mkdir(parents=True)
    (package.source / "_version.py").write_text('__version__ = "1.2.3"\n', encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 1.2.3 (2026-01-31)\n", encoding="utf-8")
    monkeypatch.setattr("tools.check_release.layers", lambda: [package])
    return package


def test_a_release_tag_names_its_package(released: Package) -> None:
    assert released_package("dsv4-thing-v1.2.3") is released


@pytest.mark.parametrize("tag", ["v1.2.3", "dsv4-other-v1.2.3", "dsv4-thing-v1.2.4"])
def test_a_release_tag_that_disagrees_is_refused(released: Package, tag: str) -> None:
    with pytest.raises(ValueError, match=tag):
        released_package(tag)


def test_a_release_without_a_date_is_refused(released: Package) -> None:
    (released.root / "CHANGELOG.md").write_text("## 1.2.3 (unreleased)\n", encoding="utf-8")
    with pytest.raises(ValueError, match="unreleased"):
        released_package("dsv4-thing-v1.2.3")
