# SPDX-License-Identifier: Apache-2.0
"""The entry point without vLLM: it never raises, runs any number of times, and says why a feature is off."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from dsv4_vllm_integration import plugin, probe
from dsv4_vllm_integration.states import Status, state_of
from dsv4_vllm_integration.switches import SWITCHES, Feature

ALL = [switch.name for switch in SWITCHES if switch.feature is not None]


@pytest.fixture
def everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALL:
        monkeypatch.setenv(name, "1")


@pytest.fixture
def known_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.33.0")


def test_unset_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    finders, modules = list(sys.meta_path), set(sys.modules)
    plugin.register()
    assert sys.meta_path == finders
    assert set(sys.modules) == modules
    assert {state_of(feature).status for feature in Feature} == {Status.UNSET}


@pytest.mark.usefixtures("everything_on", "known_vllm")
def test_armed_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            plugin.register()
    assert state_of(Feature.GEMM_RS).status is Status.ARMED
    assert state_of(Feature.MHC).status is Status.ARMED
    assert state_of(Feature.GEMM_AR).status is Status.ARMED
    lines = [record for record in caplog.records if record.name == "vllm.dsv4_vllm_integration"]
    assert len(lines) == len(Feature)


@pytest.mark.usefixtures("everything_on")
@pytest.mark.parametrize("version", ["0.32.1", "0.34.0rc1", "0.330.0", "1.0.0", "dev", None])
def test_other_versions(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    finders = list(sys.meta_path)
    plugin.register()
    assert sys.meta_path == finders
    for feature in Feature:
        state = state_of(feature)
        assert state.status is Status.OFF
        assert "0.33.x" in state.reason
        assert version is None or f"found {version}" in state.reason


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1", "0.33.0+cu130", "0.33.1.dev3+gabc"])
def test_versions_that_are_known(version: str) -> None:
    assert probe.version_obstacle(version) == ""


@pytest.mark.usefixtures("everything_on", "known_vllm")
@pytest.mark.parametrize("name", ["_register", "_arm", "vllm_version", "version_obstacle", "announce"])
def test_errors_stay_inside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(plugin, name, fail)
    plugin.register()
    assert state_of(Feature.GEMM_RS).status is not Status.ON


def module_of(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(source, vars(module))
    return module


def test_signatures_are_compared_by_name_and_kind() -> None:
    module = module_of(
        "thing", "def f(a, *, b, c=1): ...\nclass C:\n    def m(self, *rest, k, **more): ...\n"
    )
    names = {"f": "a, *, b, c=", "C.m": "self, *rest, k, **more"}
    assert probe.signature_obstacle(module, names) == ""
    assert probe.signature_obstacle(module, {"f": "a, b, c="}) == (
        "expected thing.f(a, b, c=), found (a, *, b, c=)"
    )
    assert probe.signature_obstacle(module, {"g": ""}) == "expected thing.g, found no such name"
    assert probe.signature_obstacle(module, {"C.n": ""}) == "expected thing.C.n, found no such name"


def test_registering_imports_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, os\n"
        "os.environ.update(VLLM_DSV41_GEMM_RS='1', VLLM_DSV41_GEMM_AR='1', VLLM_DSV41_MHC='1')\n"
        "import dsv4_vllm_integration.plugin as plugin\n"
        "plugin.vllm_version = lambda: '0.33.0'\n"
        "plugin._make_known = lambda names: None\n"
        "plugin.register()\n"
        "heavy = {'torch', 'vllm', 'dsv4_gemm_rs', 'dsv4_mhc', 'cutlass', 'tilelang'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
