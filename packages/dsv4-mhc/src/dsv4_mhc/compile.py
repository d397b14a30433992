# SPDX-License-Identifier: Apache-2.0
"""From a variant to a compiled kernel: in memory, from disk, or compiled now.

TileLang keeps compiled kernels on disk (`TILELANG_CACHE_DIR`, default ~/.tilelang/cache), keyed by the
function, the target and its own version, and any process may fill that folder: `dsv4-mhc compile` needs no
GPU. What it lacks is an agreement between processes: ranks that start together would each compile
everything. Here a file lock for each variant, in the same folder, lets one compile while the others wait and
then load.

Compiled objects are kept by variant, because TileLang's own look-up hashes the function again at each call
(18 ms). A kernel that is not in memory is never loaded while a CUDA graph is captured.

Automatic warp specialisation is off: it makes one CTA an SM with a producer warp out of everything, which is
wrong for kernels that only stream. So are 256-bit accesses (not on SM90), the guards around global accesses,
whose bounds these kernels keep themselves, and the barriers that TileLang finds necessary: kernels name every
one that they need, and it takes a warp's own places in shared memory for the CTA's and puts four into each
step. So no two buffers may share memory either: that needs barriers between their uses, and TileLang knows
nothing of uses by other CTAs of a cluster.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.metadata
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dsv4_mhc.errors import ArgumentError, NotCompiledError, UnsupportedError
from dsv4_mhc.plan import (
    FUSED_TOKENS,
    SPREAD_TOKENS,
    Kernel,
    Quant,
    SeamOptions,
    Tile,
    check_hidden,
    coupled_form,
    finishing,
    tiles,
)

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
TILELANG = ((0, 1, 12), (0, 2))
TVM_FFI = ((0, 1, 11), (0, 1, 13))
"""First version that works and first that does not: newer ones change the interface that TileLang's
libraries were built against, and the process aborts without a word."""


@dataclass(frozen=True)
class Variant:
    """One compiled kernel.

    Attributes:
        module: Name of the module in `dsv4_mhc.kernels`.
        arguments: Of its `build`.
    """

    module: str
    arguments: tuple[Any, ...]


def seam_variant(kernel: Kernel, tile: Tile, options: SeamOptions) -> Variant:
    """The variant of a seam kernel."""
    if kernel is Kernel.HEAD:
        return Variant("coupled", (tile, options, True))
    if kernel is Kernel.PROJECT:
        kept = SeamOptions(
            post=options.post,
            store_residual=options.store_residual,
            collapse=False,
            norm=False,
            mean=options.mean,
            y=False,
        )
        return Variant("shifted", (tile, kept))
    return Variant(kernel.value, (tile, options))


def collapse_variant(hidden: int, tokens: int, options: SeamOptions) -> Variant:
    """The variant of a collapse."""
    return Variant("collapse", (hidden, options, tokens <= SPREAD_TOKENS and not options.norm))


def _version(distribution: str) -> tuple[int, ...]:
    try:
        text = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(f"{distribution} is not installed") from None
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())


@cache
def check_versions() -> None:
    """Refuse versions that are known not to work, before importing them could abort the process.

    Raises:
        UnsupportedError: Names the distribution, its version and the range.
    """
    for distribution, (first, end) in {"tilelang": TILELANG, "apache-tvm-ffi": TVM_FFI}.items():
        version = _version(distribution)
        if not first <= version < end:
            wanted = f">={'.'.join(map(str, first))},<{'.'.join(map(str, end))}"
            raise UnsupportedError(
                f"{distribution} {'.'.join(map(str, version))} is installed; the kernels need {wanted}"
            )


def device_arch(device: torch.device) -> str:
    """The compilation target of a CUDA device.

    Raises:
        UnsupportedError: Neither SM90, SM100 nor SM103.
    """
    major, minor = torch.cuda.get_device_capability(device)
    arch = f"sm_{major}{minor}a"
    if arch not in ARCHITECTURES:
        name = torch.cuda.get_device_name(device)
        raise UnsupportedError(f"{name} is {arch}; kernels exist for {', '.join(ARCHITECTURES)}")
    return arch


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("TILELANG_CACHE_DIR") or Path.home() / ".tilelang" / "cache")


@contextlib.contextmanager
def _between_processes(name: str) -> Iterator[None]:
    folder = cache_folder() / "dsv4-mhc-locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def pass_configs() -> dict[str, Any]:
    """TileLang's settings for all kernels."""
    return {
        "tl.disable_warp_specialized": True,
        "tl.disable_vectorize_256": True,
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_thread_storage_sync": True,
        "tl.disable_shared_memory_reuse": True,
    }


_loaded: dict[tuple[Variant, str], Callable[..., None]] = {}
_lock = threading.Lock()


def compile_variant(variant: Variant, arch: str) -> Any:
    """TileLang's kernel object for a variant, from its disk cache if it is there.

    Raises:
        ArgumentError: An arch that there are no kernels for.
        UnsupportedError: TileLang is missing or of a version that does not work.
    """
    if arch not in ARCHITECTURES:
        raise ArgumentError("arch", arch, f"one of {', '.join(ARCHITECTURES)}")
    check_versions()
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    tilelang = importlib.import_module("tilelang")
    build = importlib.import_module(f"dsv4_mhc.kernels.{variant.module}").build
    key = hashlib.sha256(f"{variant} {arch}".encode()).hexdigest()[:24]
    with _between_processes(key):
        return tilelang.compile(
            build(*variant.arguments), target={"kind": "cuda", "arch": arch}, pass_configs=pass_configs()
        )


def kernel_for(variant: Variant, device: torch.device) -> Callable[..., None]:
    """The callable for a variant on a CUDA device.

    Raises:
        NotCompiledError: It is not in memory and a CUDA graph is being captured.
        UnsupportedError: As for `compile_variant` and `device_arch`.
    """
    key = (variant, device_arch(device))
    found = _loaded.get(key)
    if found is not None:
        return found
    if torch.cuda.is_current_stream_capturing():
        raise NotCompiledError(f"{variant} is not loaded; call warmup before capturing a graph")
    with _lock:
        if key not in _loaded:
            _loaded[key] = compile_variant(*key)
        return _loaded[key]


def variants(hidden: int, *, quants: Sequence[Quant] = (Quant.NONE,), wiring: str = "both") -> list[Variant]:
    """What a model of this hidden size needs.

    Args:
        hidden: H.
        quants: Forms of the sublayers' input.
        wiring: "v4" (coupled seams, head), "v4.1" (shifted seams, Engram, tail) or "both".

    Raises:
        ArgumentError: Another wiring, or an H that is no multiple of 64.
        UnsupportedError: A kernel that has no tile for H.
    """
    check_hidden(hidden)
    if wiring not in ("v4", "v4.1", "both"):
        raise ArgumentError("wiring", wiring, "'v4', 'v4.1' or 'both'")
    found = [Variant(module, (hidden,)) for module in ("expand", "mean", "post")]
    found += [
        collapse_variant(hidden, tokens, SeamOptions(post=post, store_residual=post, norm=norm))
        for post, norm in ((False, False), (False, True), (True, True))
        for tokens in (1, SPREAD_TOKENS + 1)
    ]
    coupled = list(dict.fromkeys(coupled_form(hidden, tokens) for tokens in (1, FUSED_TOKENS + 1)))
    forms = {"v4": coupled, "v4.1": [Kernel.SHIFTED], "both": [*coupled, Kernel.SHIFTED]}[wiring]
    for form in forms:
        for quant in quants:
            for post in (True, False):
                options = SeamOptions(post=post, store_residual=post, y=quant is Quant.NONE, quant=quant)
                found += [seam_variant(form, tile, options) for tile in tiles(form, hidden)]
                if form is Kernel.PROJECT:
                    found.append(collapse_variant(hidden, SPREAD_TOKENS + 1, finishing(options)))
    if wiring != "v4.1":
        options = SeamOptions(post=True, store_residual=False)
        found += [seam_variant(Kernel.HEAD, tile, options) for tile in tiles(Kernel.HEAD, hidden)]
    if wiring != "v4":
        found += [seam_variant(Kernel.ENGRAM, tile, SeamOptions()) for tile in tiles(Kernel.ENGRAM, hidden)]
    return list(dict.fromkeys(found))


def warmup(
    hidden: int,
    device: torch.device | str = "cuda",
    *,
    quants: Sequence[Quant] = (Quant.NONE,),
    wiring: str = "both",
) -> float:
    """Load everything that `variants` lists, compiling what no cache has; seconds that it took.

    Raises:
        ArgumentError: As for `variants`.
        UnsupportedError: As for `kernel_for`.
    """
    start = time.perf_counter()
    for variant in variants(hidden, quants=quants, wiring=wiring):
        kernel_for(variant, torch.device(device))
    return time.perf_counter() - start


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """The tensor's device as the current one, for a launch."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
