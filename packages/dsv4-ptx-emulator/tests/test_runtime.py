# SPDX-License-Identifier: Apache-2.0
"""Compiled CuTe DSL host functions on emulated devices: parameters, attributes, streams, graphs, errors."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from dsv4_ptx_emulator.errors import EmulatorError, OutOfBoundsError, ResourceLimitError
from dsv4_ptx_emulator.runtime.dlpack import on_device
from dsv4_ptx_emulator.runtime.dsl import cubins_of
from dsv4_ptx_emulator.runtime.errors import RuntimeLibraryError, UnknownImageError
from dsv4_ptx_emulator.runtime.host import host_table
from dsv4_ptx_emulator.runtime.library import obstacle
from dsv4_ptx_emulator.runtime.system import System

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())

MakeSystem = Callable[..., System]


@cute.kernel
def add_kernel(data: Int64, count: Int32, step: Int32) -> None:
    """data[i] += step for i below count."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * 32 + thread
    words = cute.make_tensor(
        cute.make_ptr(Int32, data, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(count)
    )
    if index < count:
        words[index] = words[index] + step


@cute.jit
def add(data: Int64, count: Int32, step: Int32, stream: Any) -> None:
    """Launch `add_kernel` with as many CTAs as it takes."""
    add_kernel(data, count, step).launch(grid=((count + 31) // 32, 1, 1), block=(32, 1, 1), stream=stream)


class Scale:
    """y = factor * x in a kernel whose code depends on the factor, under one name for all factors."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: Any) -> None:
        """Launch for tensors of 32 elements."""
        self.kernel(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor) -> None:
        """One element a thread."""
        thread, _, _ = cute.arch.thread_idx()
        y[thread] = x[thread] * Float32(self.factor)


@cute.kernel
def mixed_kernel(where: Int64, small: Int32, flag: Boolean, number: Float32, large: Int64) -> None:
    """Stores its parameters, to see their layout."""
    words = cute.make_tensor(
        cute.make_ptr(Int64, where, cute.AddressSpace.gmem, assumed_align=8), cute.make_layout(5)
    )
    words[0] = where
    words[1] = Int64(small)
    words[2] = Int64(7) if flag else Int64(9)
    words[3] = Int64(Int32(number))
    words[4] = large


@cute.jit
def mixed(where: Int64, small: Int32, flag: Boolean, number: Float32, large: Int64, stream: Any) -> None:
    """Launch `mixed_kernel`."""
    mixed_kernel(where, small, flag, number, large).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)


@cute.kernel
def place_kernel(where: Int64) -> None:
    """Each CTA stores its rank in its cluster."""
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    words = cute.make_tensor(
        cute.make_ptr(Int32, where, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(64)
    )
    if thread == 0:
        words[block] = cute.arch.block_idx_in_cluster()


@cute.jit
def place(where: Int64, shared_bytes: cutlass.Constexpr, pdl: cutlass.Constexpr, stream: Any) -> None:
    """Launch `place_kernel` on 4 CTAs in clusters of 2."""
    place_kernel(where).launch(
        grid=(4, 1, 1), block=(32, 1, 1), cluster=(2, 1, 1), smem=shared_bytes, use_pdl=pdl, stream=stream
    )


@pytest.fixture(scope="module")
def added() -> Any:
    """`add`, compiled."""
    return System(1).compile(add, Int64(0), Int32(1), Int32(1), make_fake_stream())


def test_a_host_function_runs_on_host_memory(added: Any, emulator: MakeSystem) -> None:
    system = emulator()
    data = np.arange(100, dtype=np.int32)
    system.devices[0].stream().launch(added, (data.ctypes.data, 100, 5), [data])
    assert data[0] == 0  # queued, not executed
    assert system.pending == 1
    system.run()
    assert data.tolist() == list(range(5, 105))
    (counts,) = system.counters.launches.values()
    assert (counts.ctas, counts.finished) == (4, True)


def test_parameters_of_all_sizes_arrive(emulator: MakeSystem) -> None:
    example = (Int64(0), Int32(0), Boolean(True), Float32(0.0), Int64(0), make_fake_stream())
    system = emulator()
    function = system.compile(mixed, *example)
    data = np.zeros(5, np.int64)
    arguments = (data.ctypes.data, -3, False, 12.5, 1 << 50)
    system.devices[0].stream().launch(function, arguments, [data])
    system.run()
    assert data.tolist() == [data.ctypes.data, -3, 9, 12, 1 << 50]


def test_tensors_go_in_as_if_on_cuda_and_equal_names_are_told_apart(emulator: MakeSystem) -> None:
    system = emulator()
    example = [make_fake_compact_tensor(Float32, (32,)) for _ in range(2)]
    # All are compiled before the first is launched; the DSL keeps the PTX of each under the same name.
    functions = {factor: system.compile(Scale(factor), *example, make_fake_stream()) for factor in (2, 3)}
    x = np.arange(32, dtype=np.float32)
    for factor, function in functions.items():
        y = np.zeros(32, np.float32)
        system.devices[0].stream().launch(function, (on_device(x), on_device(y)), [x, y])
        system.run()
        assert np.array_equal(y, factor * x)


@pytest.mark.parametrize("pdl", [False, True])
def test_cluster_shared_memory_and_pdl_arrive(pdl: bool, emulator: MakeSystem) -> None:
    system = emulator()
    function = system.compile(place, Int64(0), 100_000, pdl, make_fake_stream())
    data = np.full(64, -1, np.int32)
    system.devices[0].stream().launch(function, (data.ctypes.data,), [data])
    (queued,) = system.queued
    launch = queued.launch
    assert (launch.grid, launch.block, launch.cluster) == ((4, 1, 1), (32, 1, 1), (2, 1, 1))
    assert (launch.shared_bytes, launch.pdl) == (100_000, pdl)
    system.run()
    assert data[:4].tolist() == [0, 1, 0, 1]


def test_ranks_streams_and_order(added: Any, emulator: MakeSystem) -> None:
    system = emulator(ranks=3)
    buffers = [np.zeros(40, np.int32) for _ in system.devices]
    for step in range(1, 4):
        for device, data in zip(system.devices, buffers, strict=True):
            for stream in (device.stream(), device.stream(2)):
                half = data[:20] if stream.number else data[20:]
                stream.launch(added, (half.ctypes.data, 20, step * (device.index + 1)), [half])
    with system.devices[1].using(system.devices[1].stream(1)):
        assert system.devices[1].current_stream().number == 1
    assert system.devices[1].current_stream().number == 0
    system.run()
    for rank, data in enumerate(buffers):
        assert set(data.tolist()) == {6 * (rank + 1)}
    assert [counts.rank for counts in system.counters.launches.values()].count(2) == 6


def test_graphs_replay(added: Any, emulator: MakeSystem) -> None:
    system = emulator(ranks=2)
    data = [np.zeros(32, np.int32) for _ in range(2)]
    with system.capture() as graph:
        for device in system.devices:
            device.stream().launch(
                added, (data[device.index].ctypes.data, 32, 1 + device.index), [data[device.index]]
            )
        with pytest.raises(RuntimeLibraryError, match="capture"), system.capture():
            pass
    assert system.pending == 0
    for _ in range(3):
        graph.replay()
        system.run()
    graph.replay()
    graph.replay()
    system.run()
    assert [set(each.tolist()) for each in data] == [{5}, {10}]


def test_what_was_not_leased_is_out_of_bounds(added: Any, emulator: MakeSystem) -> None:
    system = emulator(ranks=2)
    data = np.zeros(32, np.int32)
    device, other = system.devices
    device.stream().launch(added, (data.ctypes.data, 32, 1), [data[:31]])
    with pytest.raises(OutOfBoundsError) as caught:
        device.synchronize()
    assert caught.value.line > 0
    # Every rank of a program hears of it, once; then there is nothing more to wait for.
    with pytest.raises(OutOfBoundsError):
        other.synchronize()
    device.synchronize()
    other.synchronize()
    with pytest.raises(RuntimeLibraryError, match="ended"):
        device.stream().launch(added, (data.ctypes.data, 32, 1), [data])
    with pytest.raises(OutOfBoundsError):
        system.run()
    assert system.emulator.machine.global_memory.regions == ()


def test_private_memory_of_another_rank_is_not_mapped(added: Any, emulator: MakeSystem) -> None:
    data = np.zeros(32, np.int32)
    system = emulator(ranks=2)
    system.memory.lease(data, home=0)
    system.devices[1].stream().launch(added, (data.ctypes.data, 32, 1))
    with pytest.raises(OutOfBoundsError, match="not mapped on rank 1"):
        system.run()
    system = emulator(ranks=2)
    system.devices[0].share(data)
    system.devices[1].stream().launch(added, (data.ctypes.data, 32, 1))
    system.run()
    # 32 words were read from rank 0 and written back to it.
    assert system.link_bytes() == {(0, 1): 128, (1, 0): 128}
    system.devices[0].unshare(data)
    assert system.emulator.machine.global_memory.regions == ()


def test_memory_lives_until_the_launch_has_run(added: Any, emulator: MakeSystem) -> None:
    system = emulator()
    data = np.zeros(1 << 20, np.int32)
    address = data.ctypes.data
    system.devices[0].stream().launch(added, (address, 64, 3), [data])
    count = sys.getrefcount(data)
    system.run()
    assert sys.getrefcount(data) < count


def test_limits_are_checked_at_the_launch(emulator: MakeSystem) -> None:
    system = emulator()
    function = system.compile(place, Int64(0), 227 * 1024, False, make_fake_stream())
    data = np.zeros(64, np.int32)
    system.devices[0].stream().launch(function, (data.ctypes.data,), [data])
    system.run()
    with pytest.raises(EmulatorError):
        System(1, processors=1000)
    with pytest.raises(EmulatorError):
        System(0)


def test_errors_inside_a_launch_keep_their_type(
    emulator: MakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = emulator()
    function = system.compile(add, Int64(0), Int32(1), Int32(1), make_fake_stream())

    def refuse(*arguments: Any, **options: Any) -> None:
        raise ResourceLimitError("too large")

    monkeypatch.setattr(system.emulator, "program", refuse)
    with pytest.raises(ResourceLimitError, match="too large"):
        system.devices[0].stream().launch(function, (4096, 32, 1))
    # A device takes its own streams only.
    with pytest.raises(RuntimeLibraryError, match="no stream"), system.devices[0].taking():
        function(4096, 32, 1, ctypes.c_void_p(99))


def test_launches_need_a_receiver(added: Any) -> None:
    with pytest.raises(RuntimeError, match="no emulated device"):
        added(4096, 32, 1, ctypes.c_void_p(0))


def test_code_compiled_elsewhere_is_refused(emulator: MakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    system = emulator()
    function = system.compile(add, Int64(0), Int32(1), Int32(1), make_fake_stream())
    monkeypatch.setattr(host_table().store, "_texts", {})
    with pytest.raises(UnknownImageError, match="compiling"):
        system.devices[0].stream().launch(function, (4096, 32, 1))


def test_the_dsl_is_as_it_was_afterwards() -> None:
    from cutlass.cutlass_dsl import CuTeDSL

    before = CuTeDSL._get_dsl().envar
    libraries = before.shared_libs
    with System(1).compiling():
        assert CuTeDSL._get_dsl().envar.shared_libs == str(host_table().library)
    assert CuTeDSL._get_dsl().envar is before
    assert before.shared_libs == libraries


def test_fat_binaries() -> None:
    cubin = b"\x7fELF" + bytes(28)
    entry = b"\x02\x00\x01\x01" + (24).to_bytes(4, "little") + len(cubin).to_bytes(8, "little") + bytes(8)
    other = b"\x01\x00\x01\x01" + (16).to_bytes(4, "little") + (5).to_bytes(8, "little") + b"other" + bytes(3)
    body = other + entry + cubin
    header = (0xBA55ED50).to_bytes(4, "little") + b"\x01\x00\x10\x00" + len(body).to_bytes(8, "little")
    assert cubins_of(header + body) == [cubin]


REAL_FIRST = """
import cutlass
import cutlass.cute as cute
from dsv4_ptx_emulator.runtime.errors import RuntimeLibraryError
from dsv4_ptx_emulator.runtime.system import System

@cute.jit
def host(number: cutlass.Int32):
    pass

cute.compile(host, cutlass.Int32(1))(cutlass.Int32(1))
try:
    System(ranks=1).compile(host, cutlass.Int32(1))
except RuntimeLibraryError as error:
    print(error)
"""


def test_a_process_that_ran_a_host_function_is_told_to_emulate_elsewhere(tmp_path: Path) -> None:
    # The DSL reads the source of what it compiles.
    program = tmp_path / "real_first.py"
    program.write_text(REAL_FIRST, encoding="utf-8")
    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "was loaded in this process before" in ran.stdout
    assert "emulate in a fresh process" in ran.stdout
