# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels of this process: made once per target, shared by every workspace, rank and thread.

A kernel takes integers only (addresses and sizes) and a stream, so the compiled function is called
without wrapping a tensor. The DSL is imported when the first kernel is launched.

Trap: the first launch of a kernel loads its module, which may wait for the device; a kernel that spins for a
peer at that time would wait for ever. Who compiles a kernel therefore also launches it once, on an exchange
with itself (`LaunchExchange.scratch`), before anything can spin.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dsv4_symm_mem.accelerator import Stream

CUDA_TARGET = "cuda"

_lock = threading.Lock()
_kernels: dict[Hashable, Kernel] = {}


class Kernel:
    """A host function over integers that launches a kernel, compiled at the first launch for each target.

    Args:
        build: Compiles it: a DSL host function compiled with `--enable-tvm-ffi`, whose last argument is a
            stream.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._functions: dict[Hashable, Any] = {}

    def __call__(self, *arguments: int, stream: Stream, memory: Sequence[torch.Tensor] = ()) -> None:
        """Enqueue the kernel on `stream` and its device.

        Args:
            arguments: What the host function takes, the stream left out.
            stream: Where to.
            memory: Tensors that addresses among the arguments point into, for streams that ask (see
                `LaunchStream.launch`); on CUDA the caller keeps them as for any stream.
        """
        if not isinstance(stream, torch.cuda.Stream):
            stream.launch(self._function(stream.target, stream.compile), arguments, memory)
            return
        function = self._function(CUDA_TARGET, _as_it_is)
        # The stream belongs to a device, and a launch goes to the current one.
        with (
            nullcontext()
            if stream.device_index == torch.cuda.current_device()
            else torch.cuda.device(stream.device)
        ):
            function(*arguments, ctypes.c_void_p(stream.cuda_stream))

    def _function(self, target: Hashable, compile_for: Callable[[Callable[[], Any]], Any]) -> Any:
        function = self._functions.get(target)
        if function is None:
            with _lock:
                function = self._functions.get(target)
                if function is None:
                    function = self._functions[target] = compile_for(self._build)
        return function


def compiled(key: Hashable, build: Callable[[], Any]) -> Kernel:
    """The kernel remembered under `key`.

    Args:
        key: Identifies the kernel and everything that its code depends on.
        build: See `Kernel`.
    """
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels.setdefault(key, Kernel(build))
    return kernel


def _as_it_is(build: Callable[[], Any]) -> Any:
    return build()
