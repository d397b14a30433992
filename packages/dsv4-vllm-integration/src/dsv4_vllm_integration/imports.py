# SPDX-License-Identifier: Apache-2.0
"""Run a function when a module has been imported, or at once if it has been already.

Contract: nothing is imported early. vLLM's model and kernel modules are heavy and are imported only by the
processes that need them; a plugin that imported them to change them would slow every front end down. The
function runs right after the module's own code, so before any consumer can bind a name from it. It must not
let exceptions out (an import of vLLM's would fail); `after_import` logs those that it does.

Rejected: importing vLLM's modules in `register` (seconds in processes that never build a model), replacing
`builtins.__import__` (every import of the process would pay), a stub in `sys.modules` (stock must stay the
delegate).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from dsv4_vllm_integration.states import logger

Callback = Callable[[ModuleType], None]

_callbacks: dict[str, list[Callback]] = {}
_looking = threading.local()


def _run(callback: Callback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception:
        logger.exception("dsv4: preparing %s failed; vLLM goes on unchanged there", module.__name__)


class _Loader(importlib.abc.Loader):
    """The module's own loader, followed by the callbacks."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        # Who finds the module without importing it asks its loader for source, code or resources.
        return getattr(self.inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What inspects the module later (resources, source) is to find its own loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        module.__loader__ = self.inner
        self.inner.exec_module(module)
        for callback in _callbacks.pop(module.__name__, []):
            _run(callback, module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _callbacks or getattr(_looking, "name", None) == name:
            return None
        _looking.name = name
        try:
            spec = _find(name, path, target)
        finally:
            _looking.name = None
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)
        return spec


_finder = _Finder()


def _find(
    name: str, path: Sequence[str] | None, target: ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is _finder:
            continue
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def after_import(name: str, callback: Callback) -> None:
    """Call `callback` with the module `name` once that has been imported.

    Exceptions of `callback` are logged, never raised.
    """
    module = sys.modules.get(name)
    if module is not None:
        _run(callback, module)
        return
    _callbacks.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget() -> None:
    """Drop callbacks that have not run."""
    _callbacks.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
