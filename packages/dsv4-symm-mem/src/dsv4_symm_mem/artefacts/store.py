# SPDX-License-Identifier: Apache-2.0
"""A compiled kernel from the cache where it is there, else compiled and put there.

Contract: `obtain` returns a working function or raises what the compiler raised; nothing about the cache is
an error. Whatever keeps it from being used is said in one log line, once for each reason. Of processes that
start at once one compiles a kernel and the others load what it made.

What was just compiled is used as the compiler returned it, not loaded again: that is the function that has
always run here, and it is there even when its artefact cannot be written.
"""

from __future__ import annotations

import logging
import shlex
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dsv4_symm_mem.artefacts import host
from dsv4_symm_mem.artefacts.container import Artefact, DamagedError
from dsv4_symm_mem.artefacts.folder import LOCK_SECONDS, CacheFolder, default_folder
from dsv4_symm_mem.artefacts.key import OPTIONS, ArtefactKey, artefact_key, kernel_name

logger = logging.getLogger("dsv4_symm_mem")

_said: set[str] = set()


class Origin(StrEnum):
    """Where a function came from."""

    LOADED = "loaded"
    COMPILED = "compiled"


@dataclass(frozen=True)
class Recipe:
    """How a kernel is identified and compiled.

    Attributes:
        kernel: The kernel and its configuration, by values whose `repr` says all of them.
        build: Compiles it with the options given: `cute.compile(..., options=options)`.
        packages: Import names of the packages whose sources it depends on.
    """

    kernel: Hashable
    build: Callable[[str], Any]
    packages: Sequence[str]

    @property
    def name(self) -> str:
        """For people."""
        return kernel_name(self.kernel)

    def key(self, arch: str) -> ArtefactKey:
        """Identity of the artefact for `arch`."""
        return artefact_key(self.kernel, arch, self.packages)


@dataclass(frozen=True)
class Obtained:
    """A function and how it was come by.

    Attributes:
        function: Takes integers and a stream.
        origin: Whether it was loaded or compiled.
        seconds: How long that took, waiting for other processes included.
    """

    function: Any
    origin: Origin
    seconds: float


def obtain(
    recipe: Recipe, arch: str, *, folder: Path | None = None, wait_seconds: float = LOCK_SECONDS
) -> Obtained | None:
    """The function of a kernel, from the cache if possible.

    Args:
        recipe: The kernel.
        arch: Architecture to run on, such as "sm_90a"; need not be present.
        folder: The cache; default `default_folder()`.
        wait_seconds: How long to wait for another process that is compiling the same.

    Returns:
        The function; None if another process is compiling it and `wait_seconds` is 0.

    Raises:
        Exception: What the compiler raised.
    """
    started = time.perf_counter()

    def obtained(function: Any, origin: Origin) -> Obtained:
        seconds = time.perf_counter() - started
        logger.debug("%s for %s: %s in %.3f s", recipe.name, arch, origin.value, seconds)
        return Obtained(function, origin, seconds)

    cache = CacheFolder(folder or default_folder())
    key = None
    if cache.obstacle:
        _say(f"compiled kernels are not kept: {cache.obstacle}")
    else:
        try:
            key = recipe.key(arch)
        except Exception as error:
            _say(f"compiled kernels are not kept: what they depend on cannot be told ({error})")
    if key is None:
        return obtained(recipe.build(plain_options(arch)), Origin.COMPILED)
    function = _load(cache, key)
    if function is not None:
        return obtained(function, Origin.LOADED)
    if cache.read_only:
        _say(f"compiled kernels are not kept: {cache.read_only}")
        return obtained(recipe.build(plain_options(arch)), Origin.COMPILED)
    with cache.lock(key.name, wait_seconds) as mine:
        function = _load(cache, key)
        if function is not None:
            return obtained(function, Origin.LOADED)
        if not mine:
            if wait_seconds <= 0:
                return None
            logger.warning(
                "another process has been compiling %s for %g s: compiling it here", key.name, wait_seconds
            )
        return obtained(_build(recipe, key, cache), Origin.COMPILED)


def is_there(recipe: Recipe, arch: str, folder: Path | None = None) -> bool:
    """Whether the cache holds a kernel as it would be compiled now."""
    cache = CacheFolder(folder or default_folder())
    if cache.obstacle:
        return False
    try:
        cache.read(recipe.key(arch).file_name, touch=False)
    except (FileNotFoundError, DamagedError):
        return False
    return True


def plain_options(arch: str) -> str:
    """Options of `cute.compile` for a function that only this process uses."""
    return f"{OPTIONS} --gpu-arch {arch}"


def _load(cache: CacheFolder, key: ArtefactKey) -> Any | None:
    try:
        artefact = cache.read(key.file_name)
        # Names are shortened digests; and a file may have been renamed by hand.
        if {name: artefact.facts.get(name) for name in key.facts} != dict(key.facts):
            raise DamagedError("it was made from something else")
        return host.load(cache.file(key.file_name))
    except FileNotFoundError:
        return None
    except Exception as error:
        _say(f"not loading {cache.file(key.file_name)}: {_first_line(error)}")
        return None


def _build(recipe: Recipe, key: ArtefactKey, cache: CacheFolder) -> Any:
    arch = key.facts["arch"]
    try:
        scratch = tempfile.TemporaryDirectory(prefix="dsv4-compile-")
    except OSError as error:
        _say(f"compiled kernels are not kept: there is no room for temporary files ({error})")
        return recipe.build(plain_options(arch))
    with scratch as name:
        options = f"{plain_options(arch)} --keep-ptx --keep-cubin --dump-dir {shlex.quote(name)}"
        function = recipe.build(options)
        try:
            cache.write(key.file_name, _artefact(function, key, Path(name) / "kernel.o"))
        except Exception as error:
            _say(f"{recipe.name} is compiled, but not kept: {_first_line(error)}")
    return function


def _artefact(function: Any, key: ArtefactKey, scratch: Path) -> Artefact:
    # First: marking the host function for export would not be undone by a failure later on.
    ptx, cubin = str(function.__ptx__), bytes(function.__cubin__)
    host.export(function, scratch)
    content = scratch.read_bytes()
    offset = content.find(cubin)
    span = [offset, len(cubin)] if offset >= 0 else [0, 0]
    return Artefact(content, ptx, {**key.facts, "cubin": span})


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _say(line: str) -> None:
    if line not in _said:
        _said.add(line)
        logger.warning("%s", line)
