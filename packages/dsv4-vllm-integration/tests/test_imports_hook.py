# SPDX-License-Identifier: Apache-2.0
"""Callbacks after imports: once, in time, and never in an import's way."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from dsv4_vllm_integration.imports import after_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "hooked_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "defines.py").write_text("def value():\n    return 'stock'\n")
    (folder / "consumes.py").write_text("from hooked_package.defines import value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "hooked_package"]:
        del sys.modules[name]


def replace(module: ModuleType) -> None:
    module.value = lambda: "ours"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("package")
def test_a_consumer_binds_the_replacement() -> None:
    after_import("hooked_package.defines", replace)
    assert "hooked_package" not in sys.modules
    assert importlib.import_module("hooked_package.consumes").value() == "ours"


@pytest.mark.usefixtures("package")
def test_a_module_that_is_there_already() -> None:
    module = importlib.import_module("hooked_package.defines")
    after_import("hooked_package.defines", replace)
    assert module.value() == "ours"


@pytest.mark.usefixtures("package")
def test_the_module_keeps_its_own_loader_and_source() -> None:
    seen: list[str] = []
    after_import("hooked_package.defines", lambda module: seen.append(module.__name__))
    module = importlib.import_module("hooked_package.defines")
    assert seen == ["hooked_package.defines"]
    assert type(module.__loader__).__module__ != "dsv4_vllm_integration.imports"
    importlib.reload(module)
    assert seen == ["hooked_package.defines"]


@pytest.mark.usefixtures("package")
def test_a_failing_callback_does_not_fail_the_import(caplog: pytest.LogCaptureFixture) -> None:
    def fail(module: ModuleType) -> None:
        raise RuntimeError("injected")

    after_import("hooked_package.defines", fail)
    after_import("hooked_package.defines", replace)
    assert importlib.import_module("hooked_package.defines").value() == "ours"
    assert "injected" in caplog.text


@pytest.mark.usefixtures("package")
def test_who_only_looks_for_the_module_finds_its_source() -> None:
    after_import("hooked_package.defines", replace)
    spec = importlib.util.find_spec("hooked_package.defines")
    assert spec is not None
    source = spec.loader.get_source("hooked_package.defines")  # type: ignore[union-attr]
    assert "stock" in source
    assert importlib.import_module("hooked_package.defines").value() == "ours"


def test_a_missing_module_stays_missing() -> None:
    after_import("hooked_package.nowhere", replace)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_package.nowhere")
