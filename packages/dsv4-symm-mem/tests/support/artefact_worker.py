# SPDX-License-Identifier: Apache-2.0
"""Processes that want a kernel at once: `artefact_worker.py FOLDER ARCH COUNT SECONDS`.

Each process prints where its function came from, as a line of JSON. A compilation takes `SECONDS` longer than
it has to, and leaves a line in FOLDER/compilations.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from dsv4_symm_mem.artefacts.store import Recipe, obtain


def build_small(options: str) -> Any:
    """Compile a kernel that stores an integer; takes an address, the integer and a stream."""
    from artefact_kernel import compile_store

    return compile_store(options)


def main(folder: str, arch: str, count: str, seconds: str) -> None:
    """Fork processes that obtain the kernel, and wait for them."""

    def slowly(options: str) -> Any:
        # One write, so that lines of several processes do not mix.
        with (Path(folder).parent / "compilations").open("a", encoding="utf-8") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(float(seconds))
        return build_small(options)

    # Forked after the imports, which take longer than all else; the DSL starts no thread before it compiles.
    importlib.import_module("artefact_kernel")
    children = []
    for _ in range(int(count)):
        child = os.fork()
        if child == 0:
            obtained = obtain(Recipe("small", slowly, ["dsv4_symm_mem"]), arch, folder=Path(folder))
            assert obtained is not None
            line = json.dumps({"origin": obtained.origin.value, "function": callable(obtained.function)})
            os.write(1, f"{line}\n".encode())
            os._exit(0)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
