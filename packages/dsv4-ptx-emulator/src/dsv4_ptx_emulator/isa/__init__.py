# SPDX-License-Identifier: Apache-2.0
"""Instruction semantics by group. `load_all` imports every group, which fills the registry."""

from __future__ import annotations

import importlib
import pkgutil


def load_all() -> None:
    """Import every module of this package, so that its instructions are registered."""
    for module in pkgutil.walk_packages(__path__, __name__ + "."):
        importlib.import_module(module.name)
