# SPDX-License-Identifier: Apache-2.0
"""What an artefact was made from, and the name that follows from it.

Contract: two artefacts have one digest only if a compiler would make the same of both. In it: the kernel and
its configuration, every source file of the packages that it is written in, the architecture, the options and
the DSL's own variables, the versions of the DSL, of the CUDA tools inside it and of TVM-FFI, and the host's
machine. Not in it: Python (the functions speak TVM-FFI's C interface), PyTorch (arguments are integers), and
the host's CPU model (see host.py).

Whole packages are hashed, not the modules that a kernel imports: which those are is known only after
importing them, which is what loading wants to avoid, and a file too many costs a compilation where one too
few costs a wrong result.

Trap: the DSL comes with the tools of several CUDA versions and takes the newest that the driver supports, the
newest of all where there is none. Their machine code differs, so the version taken is in the key, and a
server with an older driver than the DSL's newest tools finds nothing that was made without a driver.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FORMAT = 1
OPTIONS = "--enable-tvm-ffi"
DSL_PREFIX = "CUTE_DSL_"
WITHOUT_EFFECT = frozenset(
    DSL_PREFIX + name
    for name in (
        "ARCH",
        "CACHE_DIR",
        "DISABLE_FILE_CACHING",
        "DUMP_DIR",
        "ENABLE_TVM_FFI",
        "JIT_CACHE_MAX_ELEMS",
        "JIT_TIME_PROFILING",
        "KEEP",
        "LIBS",
        "LOG_LEVEL",
        "LOG_TO_CONSOLE",
        "LOG_TO_FILE",
        "NO_CACHE",
    )
)
"""Variables of the DSL that change no code: places and messages, and what the options say anyway."""


@dataclass(frozen=True)
class ArtefactKey:
    """The identity of an artefact.

    Attributes:
        name: The kernel and its architecture, fit for a file name.
        facts: All that the compiled code depends on.
    """

    name: str
    facts: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the facts, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    @property
    def file_name(self) -> str:
        """Name of the artefact's file."""
        return f"{self.name}-{self.digest[:24]}.o"


def artefact_key(kernel: Hashable, arch: str, packages: Iterable[str]) -> ArtefactKey:
    """The key of a kernel's artefact; imports the DSL, whose CUDA version is part of it.

    Args:
        kernel: The kernel and its configuration, by values whose `repr` says all of them.
        arch: Such as "sm_90a".
        packages: Import names of the packages whose sources the kernel depends on.
    """
    facts = {
        "format": FORMAT,
        "kernel": repr(kernel),
        "arch": arch,
        "options": OPTIONS,
        "sources": {package: _package_digest(package) for package in sorted(packages)},
        **_tools(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(DSL_PREFIX) and name not in WITHOUT_EFFECT
        },
    }
    return ArtefactKey(f"{kernel_name(kernel)}-{arch}", facts)


def is_current(facts: Mapping[str, Any]) -> bool:
    """Whether the facts of some artefact are what they would be if it were compiled now."""
    try:
        now = artefact_key("", "", facts["sources"])
    except Exception:  # a package that is gone, or no DSL
        return False
    return {**now.facts, "kernel": facts.get("kernel"), "arch": facts.get("arch")} == {
        name: facts.get(name) for name in now.facts
    }


def kernel_name(kernel: Hashable) -> str:
    """A kernel's key as people and file systems like it."""
    parts = kernel if isinstance(kernel, tuple) else (kernel,)
    return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(str(part) for part in parts)).strip("-")[:128]


def source_digest(root: Path) -> str:
    """SHA-256 of all Python files under `root` and their names."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def _package_digest(package: str) -> str:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is no package that can be found")
    return source_digest(Path(spec.submodule_search_locations[0]))


@functools.cache
def _tools() -> dict[str, str]:
    import cutlass

    return {
        "dsl": metadata.version("nvidia-cutlass-dsl"),
        "cuda": f"{cutlass.CUDA_VERSION.major}.{cutlass.CUDA_VERSION.minor}",
        "tvm_ffi": metadata.version("apache-tvm-ffi"),
        "host": f"{sys.platform} {platform.machine()}",
    }
