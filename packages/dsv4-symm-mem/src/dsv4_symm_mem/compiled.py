# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels of this process: made once per target, shared by every workspace, rank and thread.

A kernel takes integers only (addresses and sizes) and a stream, so the compiled function is called
without wrapping a tensor. For CUDA it comes from the cache of artefacts or is compiled and put there (see
artefacts/store.py); an emulator has it compiled in this process, with PTX that its own run-time library can
find. The DSL is imported when the first function is needed.

`prepare` makes many ready. Processes that start at once share the work then: who finds a kernel being
compiled by another takes the next one, and comes back.

Trap: the first launch of a kernel loads its module, which may wait for the device; a kernel that spins for a
peer at that time would wait for ever. Who makes a kernel ready therefore also launches it once, on an
exchange with itself (`LaunchExchange.scratch`), before anything can spin.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsv4_symm_mem.accelerator import Stream
from dsv4_symm_mem.artefacts.folder import LOCK_SECONDS
from dsv4_symm_mem.artefacts.key import OPTIONS
from dsv4_symm_mem.artefacts.store import Obtained, Origin, Recipe, is_there, obtain

_lock = threading.Lock()
_kernels: dict[Hashable, Kernel] = {}


class Kernel:
    """A host function over integers that launches a kernel, loaded or compiled once for each target.

    Args:
        recipe: How it is identified and compiled; the function's last argument is a stream.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._functions: dict[Hashable, Any] = {}
        self._on_device: dict[int, Any] = {}

    def __call__(self, *arguments: int, stream: Stream, memory: Sequence[torch.Tensor] = ()) -> None:
        """Enqueue the kernel on `stream` and its device.

        Args:
            arguments: What the host function takes, the stream left out.
            stream: Where to.
            memory: Tensors that addresses among the arguments point into, for streams that ask (see
                `LaunchStream.launch`); on CUDA the caller keeps them as for any stream.
        """
        if not isinstance(stream, torch.cuda.Stream):
            stream.launch(self._emulated(stream.target, stream.compile), arguments, memory)
            return
        index = stream.device_index
        function = self._on_device.get(index)
        if function is None:
            arch = gpu_arch(torch.cuda.get_device_capability(index))
            function = self._on_device[index] = self.function(arch)
        # The stream belongs to a device, and a launch goes to the current one.
        with nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(stream.device):
            function(*arguments, ctypes.c_void_p(stream.cuda_stream))

    def function(self, arch: str) -> Any:
        """The host function for CUDA devices of `arch`.

        Raises:
            Exception: What the compiler raised.
        """
        self.obtain(arch)
        return self._functions[arch]

    def obtain(
        self, arch: str, *, folder: Path | None = None, wait_seconds: float = LOCK_SECONDS
    ) -> Obtained | None:
        """Make the function for `arch` ready, unless it is; arguments and result as of `store.obtain`.

        Returns:
            How it was come by, with no time at all if it was ready; None if another process is at it.
        """
        with _lock:
            known = self._functions.get(arch)
            if known is not None:
                return Obtained(known, Origin.LOADED, 0.0)
            obtained = obtain(self.recipe, arch, folder=folder, wait_seconds=wait_seconds)
            if obtained is not None:
                self._functions[arch] = obtained.function
            return obtained

    def is_ready(self, arch: str) -> bool:
        """Whether this process has the function for `arch`."""
        return arch in self._functions

    def is_cached(self, arch: str, folder: Path | None = None) -> bool:
        """Whether the cache holds the function for `arch` as it would be compiled now."""
        return is_there(self.recipe, arch, folder)

    def _emulated(self, target: Hashable, compile_for: Callable[[Callable[[], Any]], Any]) -> Any:
        function = self._functions.get(target)
        if function is None:
            with _lock:
                function = self._functions.get(target)
                if function is None:
                    made = compile_for(lambda: self.recipe.build(OPTIONS))
                    function = self._functions[target] = made
        return function


def compiled(key: Hashable, build: Callable[[str], Any], *packages: str) -> Kernel:
    """The kernel remembered under `key`.

    Args:
        key: Identifies the kernel and everything that its code depends on beside sources and versions, by
            values whose `repr` says all of it: it names the artefact too.
        build: Compiles the host function, with its argument as options of `cute.compile`.
        packages: Import names of the packages whose sources the kernel depends on, beside this one.
    """
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels.setdefault(key, Kernel(Recipe(key, build, ("dsv4_symm_mem", *packages))))
    return kernel


def gpu_arch(capability: tuple[int, int]) -> str:
    """The architecture to compile for on a device of compute `capability`, such as "sm_90a"."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@dataclass
class Tally:
    """How kernels were made ready.

    Attributes:
        counts: Number of kernels by `Origin`.
        seconds: Time it took, imports and waits included.
    """

    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """A plain dictionary, ready for JSON."""
        return {**{origin.value: self.counts[origin.value] for origin in Origin}, "seconds": self.seconds}

    def __str__(self) -> str:
        counts = ", ".join(f"{self.counts[origin.value]} {origin.value}" for origin in Origin)
        return f"{counts} in {self.seconds:.2f} s"


def prepare(
    kernels: Sequence[Kernel],
    arch: str,
    *,
    folder: Path | None = None,
    progress: Callable[[Kernel, Obtained], None] = lambda kernel, obtained: None,
) -> Tally:
    """Make kernels ready, sharing the work with other processes that do the same.

    Args:
        kernels: Those that are ready already count as nothing.
        arch: Architecture to run on; need not be present.
        folder: The cache; default `default_folder()`.
        progress: Called for each kernel that was made ready.

    Raises:
        Exception: What the compiler raised.
    """
    started = time.perf_counter()
    tally = Tally()

    def attempt(kernel: Kernel, wait_seconds: float) -> bool:
        obtained = kernel.obtain(arch, folder=folder, wait_seconds=wait_seconds)
        if obtained is not None:
            tally.counts[obtained.origin.value] += 1
            progress(kernel, obtained)
        return obtained is not None

    waiting = [kernel for kernel in kernels if not kernel.is_ready(arch)]
    while waiting:
        others = [kernel for kernel in waiting if not attempt(kernel, 0.0)]
        if len(others) == len(waiting):
            attempt(others.pop(0), LOCK_SECONDS)
        waiting = others
    tally.seconds = time.perf_counter() - started
    return tally
