# SPDX-License-Identifier: Apache-2.0
"""Importing is free: no cutlass, no CUDA, no output, and no more than a second beyond PyTorch's own time.

Each case runs in a fresh interpreter, because this one has long imported everything.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tools.workspace import Package, layers

SECONDS_BEYOND_TORCH = 1.0
HOST_PROGRAM = """
import importlib, json, sys, time
import torch
start = time.perf_counter()
importlib.import_module(sys.argv[1])
seconds = time.perf_counter() - start
for module in sys.argv[2:]:
    importlib.import_module(module)
cutlass = sorted(name for name in sys.modules if name.partition(".")[0] == "cutlass")
print(json.dumps({"seconds": seconds, "cutlass": cutlass, "cuda": torch.cuda.is_initialized()}))
"""
EVERY_MODULE_PROGRAM = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


def is_device_code(module: str) -> bool:
    """Whether the module is written in the DSL, and so may import it."""
    parts = module.split(".")
    names_a_kernel = parts[-1] == "kernel" or parts[-1].endswith("_kernel")
    return names_a_kernel or bool({"device", "kernels"} & set(parts[1:]))


def run(program: str, *arguments: str) -> str:
    """Standard output of `program`; anything on standard error is a failure."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("package", layers(), ids=lambda package: package.name)
def test_host_modules_import_lightly(package: Package) -> None:
    modules = [module for module in package.modules if not is_device_code(module)]
    # The first run may have byte code to write.
    runs = [run(HOST_PROGRAM, package.import_name, *modules) for _ in range(2)]
    answers = [json.loads(output) for output in runs]
    assert answers[-1]["cutlass"] == []
    assert not answers[-1]["cuda"]
    assert min(answer["seconds"] for answer in answers) < SECONDS_BEYOND_TORCH


@pytest.mark.parametrize("package", layers(), ids=lambda package: package.name)
def test_every_module_imports_silently(package: Package) -> None:
    assert run(EVERY_MODULE_PROGRAM, *package.modules) == ""
