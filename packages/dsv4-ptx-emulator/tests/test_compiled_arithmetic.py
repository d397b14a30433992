# SPDX-License-Identifier: Apache-2.0
"""A kernel full of arithmetic, as the DSL's compiler writes it for both architectures, against NumPy.

What hand-written probes leave out: the instructions that library code brings along (range reduction with
carries and local memory, packed pairs on sm_100a, selections by NaN), in the mixture that a compiler
makes of them.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream
from dsv4_ptx_emulator.formats.floats import BF16, E4M3, decode, encode
from dsv4_ptx_emulator.runtime.system import System

ROWS, COLUMNS = 64, 16


@cute.kernel
def mixture(source: Int64, target: Int64, divisor: Int32, scale: Float32) -> None:
    """A row per thread: functions of `source` in `target`, integer arithmetic in its last two columns."""
    thread, _, _ = cute.arch.thread_idx()
    layout = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    given = cute.make_tensor(cute.make_ptr(Float32, source, cute.AddressSpace.gmem, assumed_align=16), layout)
    made = cute.make_tensor(cute.make_ptr(Float32, target, cute.AddressSpace.gmem, assumed_align=16), layout)
    row = cute.make_rmem_tensor(cute.make_layout(COLUMNS), Float32)
    cute.autovec_copy(given[thread, None], row)
    values = row.load()
    largest = values.reduce(cute.ReductionOp.MAX, Float32(-1e30), 0)
    total = values.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    weights = cute.exp2((values - largest) * scale)
    results = weights * cute.rsqrt(weights + 1.0) / (total * total + 1.0)
    results = results + cute.sin(values * 1000.0) + cute.tanh(values) + cute.log2(values * values + 1.0)
    rounded = results.to(Float8E4M3FN).to(Float32) + results.to(BFloat16).to(Float32)
    row.store(rounded)
    whole = (thread * 7919 - 100000) // divisor + (thread * 31) % 7 - (divisor >> 1)
    row[COLUMNS - 1] = Float32(whole)
    row[COLUMNS - 2] = Float32(Int32(total * 100.0))
    cute.autovec_copy(row, made[thread, None])


@cute.jit
def launch(source: Int64, target: Int64, divisor: Int32, scale: Float32, stream: Any) -> None:
    """Launch `mixture`."""
    mixture(source, target, divisor, scale).launch(grid=(1, 1, 1), block=(ROWS, 1, 1), stream=stream)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_against_numpy(arch: str, emulator: Callable[..., System]) -> None:
    system = emulator(1, arch=arch)
    fake = (Int64(0), Int64(0), Int32(1), Float32(0.0), make_fake_stream())
    compiled = system.compile(launch, *fake, options="--enable-tvm-ffi")
    rng = np.random.default_rng(1)
    source = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    target = np.zeros_like(source)
    memory = [(array.ctypes.data, array.nbytes) for array in (source, target)]
    arguments = (source.ctypes.data, target.ctypes.data, -13, 0.75)
    system.devices[0].stream().launch(compiled, arguments, memory=memory)
    system.run()

    wide = source.astype(np.float64)
    total = wide.sum(axis=1, keepdims=True)
    weights = np.exp2((wide - wide.max(axis=1, keepdims=True)) * 0.75)
    results = weights / np.sqrt(weights + 1) / (total * total + 1)
    thousand = (source * np.float32(1000)).astype(np.float64)
    results += np.sin(thousand) + np.tanh(wide) + np.log2(wide * wide + 1)
    exact = results.astype(np.float32)
    want = decode(E4M3, encode(E4M3, exact, saturate=True)) + decode(BF16, encode(BF16, exact))
    # A result next to a rounding boundary may land on either side: at most one step of each narrow type.
    steps = np.abs(exact) * (2.0**-3 + 2.0**-7) + 2.0**-8
    close = np.abs(target - want) <= 1e-5 * np.abs(want) + 1e-6
    assert (np.abs(target - want) <= steps)[:, : COLUMNS - 2].all()
    assert close[:, : COLUMNS - 2].mean() > 0.99
    thread = np.arange(ROWS)
    whole = (thread * 7919 - 100000) // -13 + thread * 31 % 7 - (-13 >> 1)
    assert np.array_equal(target[:, -1], whole.astype(np.float32))
    assert (np.abs(target[:, -2] - np.trunc(total[:, 0] * 100)) <= 1).all()
