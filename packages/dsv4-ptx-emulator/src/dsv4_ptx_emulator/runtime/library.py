# SPDX-License-Identifier: Apache-2.0
"""The stand-in for the DSL's run-time library, compiled at first use.

Contract: `stand_in_library` returns the path of a shared object built from `stand_in.c`. It is built once per
content and kept in a folder that only its user can write (mode 0700), under a name that hashes all that the
result depends on; a finished file is renamed into place, so processes that start at once never see half of
one.

Rejected: shipping a binary, which would tie a wheel of pure Python to a platform; a build at installation, as
most who install the package never launch a compiled host function.

Trap: a cache folder in a shared directory could be planted by someone else, and what lies there is loaded
into this process. A folder that belongs to another user or that others may write is therefore refused.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from dsv4_ptx_emulator.runtime.errors import CompilerError

SOURCE = Path(__file__).with_name("stand_in.c")
FLAGS = (
    "-std=c11",
    "-O1",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-pthread",
)
COMPILERS = ("cc", "gcc", "clang")
CACHE_VARIABLE = "DSV4_PTX_EMULATOR_CACHE"


def stand_in_library(cache: Path | None = None) -> Path:
    """Path of the compiled stand-in; compiles it where it is not there yet.

    Args:
        cache: Folder to keep it in; default `DSV4_PTX_EMULATOR_CACHE`, else `dsv4-ptx-emulator` in
            `XDG_CACHE_HOME`, else in `~/.cache`.

    Raises:
        CompilerError: There is no C compiler, it failed (with its messages), or the folder cannot be trusted.
    """
    source = SOURCE.read_bytes()
    folder = private_folder(cache or default_cache())
    key = hashlib.sha256(b"\0".join([source, shlex.join(FLAGS).encode(), platform.machine().encode()]))
    library = folder / f"stand-in-{key.hexdigest()[:32]}.so"
    if not library.exists():
        _compile(c_compiler(), library)
    return library


def obstacle() -> str:
    """What keeps the stand-in from being built or kept here; empty if nothing does."""
    try:
        stand_in_library()
    except CompilerError as error:
        return str(error)
    return ""


def default_cache() -> Path:
    """Where compiled libraries are kept unless told otherwise."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dsv4-ptx-emulator"


def private_folder(folder: Path) -> Path:
    """`folder`, made with mode 0700 if need be.

    Raises:
        CompilerError: It cannot be made, belongs to another user, or others may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise CompilerError(f"cannot keep the stand-in in {folder} ({error}); set {CACHE_VARIABLE}") from None
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CompilerError(f"{folder} is not this user's alone; set {CACHE_VARIABLE} to a folder that is")
    return folder


def c_compiler() -> list[str]:
    """The command of a C compiler: `CC`, else the first of cc, gcc and clang on PATH.

    Raises:
        CompilerError: There is none.
    """
    if chosen := shlex.split(os.environ.get("CC", "")):
        return chosen
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise CompilerError(
        f"no C compiler (tried CC and {', '.join(COMPILERS)}): compiled host functions call into a small C "
        "library that is built at first use; install one, or launch PTX with explicit parameters instead"
    )


def _compile(compiler: list[str], library: Path) -> None:
    descriptor, unfinished = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=library.parent)
    os.close(descriptor)
    command = [*compiler, *FLAGS, "-o", unfinished, str(SOURCE)]
    try:
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        except OSError as error:
            raise CompilerError(f"the C compiler {compiler[0]!r} does not start: {error}") from None
        if done.returncode != 0:
            raise CompilerError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
        Path(unfinished).replace(library)
    finally:
        Path(unfinished).unlink(missing_ok=True)
