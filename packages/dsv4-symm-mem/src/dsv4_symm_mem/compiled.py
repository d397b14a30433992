# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels of this process: made once, shared by every workspace, rank and thread.

A kernel takes integers only (addresses and sizes) and a stream, so the compiled function is called
without wrapping a tensor. The DSL is imported when the first kernel is asked for.

Trap: the first launch of a kernel loads its module, which may wait for the device; a kernel that spins for a
peer at that time would wait for ever. Who compiles a kernel therefore also launches it once, on an exchange
with itself (`LaunchExchange.scratch`), before anything can spin.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any, Protocol

import torch


class Kernel(Protocol):
    """A compiled host function over integers; launches on `stream` and its device."""

    def __call__(self, *arguments: int, stream: torch.cuda.Stream) -> None:
        """Enqueue the kernel."""
        ...


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
    def call(*arguments: int, stream: torch.cuda.Stream) -> None:
        # The stream belongs to a device, and a launch goes to the current one.
        with (
            nullcontext()
            if stream.device_index == torch.cuda.current_device()
            else torch.cuda.device(stream.device)
        ):
            function(*arguments, ctypes.c_void_p(stream.cuda_stream))

    return call
