# SPDX-License-Identifier: Apache-2.0
"""The commands that the documentation, the workflows and .ci/run name are the ones that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.workspace import ROOT, layers

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NOX = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def sessions() -> dict[str, bool]:
    """Every session's name, and whether plain `nox` runs it."""
    listing = subprocess.run([*NOX, "--list"], check=True, capture_output=True, text=True).stdout
    return {name: mark == "*" for mark, name in re.findall(r"^([*-]) (\S+)", listing, re.MULTILINE)}


def test_sessions(sessions: dict[str, bool]) -> None:
    without_gpu = {"lint", "types", "tests", "wheels", "integration", "vllm", "docs"}
    without_gpu |= {f"tests-{package.short_name}" for package in layers()}
    on_request = {"gpu", "gpu_tp2", "gpu_tp4", "gpu_tp8", "demo", "bench", "emulate_long"}
    assert {name for name, default in sessions.items() if default} == without_gpu
    assert {name for name, default in sessions.items() if not default} == on_request


@pytest.mark.parametrize("path", [*DOCUMENTS, *WORKFLOWS], ids=lambda path: path.name)
def test_named_sessions_exist(path: Path, sessions: dict[str, bool]) -> None:
    runs = re.findall(r"nox (?:-r )?-s ([a-z0-9_\- ]+)", text_of(path))
    named = {name for run in runs for name in run.partition(" -- ")[0].split()}
    assert named <= set(sessions)


def test_ci_runs_exactly_the_readme_s_test_command() -> None:
    readme = text_of(ROOT / "README.md")
    match = re.search(r"<!-- command: tests -->\n+```sh\n(.*?)```", readme, re.DOTALL)
    assert match is not None
    script = text_of(ROOT / ".ci" / "run")
    assert script.partition("# readme: tests\n")[2] == match.group(1)


EXAMPLES = [ROOT / "README.md", *(package.root / "README.md" for package in layers())]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_examples_run(path: Path) -> None:
    for program in re.findall(r"```python\n(.*?)```", text_of(path), re.DOTALL):
        subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", text_of(path))
    assert [link for link in links if not (path.parent / link).exists()] == []


def run_with_fake_driver(session: str, devices: int, folder: Path) -> str:
    """What nox prints for `session` on a machine whose nvidia-smi lists `devices` GPUs; it must fail."""
    program = folder / "nvidia-smi"
    lines = "".join(f"echo 'GPU {index}: NVIDIA H200 (UUID: GPU-{index})'\n" for index in range(devices))
    program.write_text(f"#!/bin/sh\n{lines}", encoding="utf-8")
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = [*NOX, "--envdir", str(folder / "envs"), "--session", session]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.parametrize(("session", "needed"), [("gpu", 1), ("gpu_tp2", 2), ("gpu_tp4", 4), ("gpu_tp8", 8)])
def test_too_few_gpus_fail_in_one_line(session: str, needed: int, tmp_path: Path) -> None:
    output = run_with_fake_driver(session, needed - 1, tmp_path)
    lines = [line for line in output.splitlines() if "nvidia-smi lists" in line]
    assert len(lines) == 1
    assert f"needs {needed} GPU(s), nvidia-smi lists {needed - 1}" in lines[0]
    assert "pip install" not in output


PASSING = "def test_one():\n    pass\n"
SKIPPED = "import pytest\n\ndef test_one():\n    pytest.skip('no such hardware')\n"


@pytest.mark.parametrize(("source", "fails"), [(PASSING, False), (SKIPPED, True)], ids=["passed", "skipped"])
def test_require_pass(source: str, fails: bool, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tools.require_pass", "--rootdir", str(tmp_path)]
    command += ["-p", "no:cacheprovider", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, env=environment)
    assert (done.returncode == 1) == fails
    assert ("no test passed here" in done.stdout) == fails
