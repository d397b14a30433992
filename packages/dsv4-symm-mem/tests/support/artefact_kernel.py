# SPDX-License-Identifier: Apache-2.0
"""The smallest kernel whose effect can be seen: it stores an integer."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream


@cute.kernel  # type: ignore[untyped-decorator]
def store_kernel(address: Int64, value: Int32) -> None:
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit  # type: ignore[untyped-decorator]
def store(address: Int64, value: Int32, stream: cuda.CUstream) -> None:
    store_kernel(address, value).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def compile_store(options: str) -> Any:
    """Compile `store`."""
    return cute.compile(store, Int64(0), Int32(0), make_fake_stream(), options=options)
