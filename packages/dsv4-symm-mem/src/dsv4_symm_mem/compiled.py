# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels of this process: made once, shared by every workspace, rank and thread.

A kernel takes integers only (addresses, sizes, and the stream last), so the compiled function is called
without wrapping a tensor. The DSL is imported when the first kernel is asked for.

Trap: the first launch of a kernel loads its module, which may wait for the device; a kernel that spins for a
peer at that time would wait for ever. `warm` therefore runs before anything can spin.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable
from typing import Any

Kernel = Callable[..., None]
"""A compiled host function over integers, the last of them the CUDA stream's handle."""

_lock = threading.Lock()
_kernels: dict[Hashable, Kernel] = {}


def compiled(key: Hashable, build: Callable[[], Any]) -> Kernel:
    """The kernel remembered under `key`, built at first use.

    Args:
        key: Identifies the kernel and everything that its code depends on.
        build: Compiles it: a DSL host function compiled with `--enable-tvm-ffi`, whose last argument is a
            stream.
    """
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _with_stream(build())
    return kernel


def _with_stream(function: Any) -> Kernel:
    def call(*arguments: int) -> None:
        function(*arguments[:-1], ctypes.c_void_p(arguments[-1]))

    return call
