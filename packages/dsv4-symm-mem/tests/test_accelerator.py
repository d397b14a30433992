# SPDX-License-Identifier: Apache-2.0
"""The seam for kernels that do not run on CUDA: streams, compilation per target, virtual ranks, memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4_symm_mem import ArgumentError, SymmetricArena, VirtualGroup
from dsv4_symm_mem.accelerator import accelerator_of, installed_emulators
from dsv4_symm_mem.compiled import compiled
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.layout import ExchangeLayout


class Recorder:
    """An `Accelerator` and its one `LaunchStream`: remembers what it is asked for."""

    emulated = True
    name = "recorder"
    arch = 90
    multiprocessors = 3

    def __init__(self, target: Hashable = "recorder") -> None:
        self.target = target
        self.log: list[Any] = []

    def current_stream(self) -> Recorder:
        return self

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def share(self, memory: torch.Tensor) -> None:
        self.log.append(("share", memory.data_ptr(), memory.numel()))

    def unshare(self, memory: torch.Tensor) -> None:
        self.log.append(("unshare", memory.data_ptr(), memory.numel()))

    def compile(self, build: Callable[[], Any]) -> Any:
        return (self.target, build())

    def launch(
        self, function: Callable[..., Any], arguments: Sequence[int], memory: Sequence[torch.Tensor]
    ) -> None:
        self.log.append((function, tuple(arguments), tuple(memory)))


class Range:
    """A `MulticastRange` that is somewhere."""

    address = 1 << 50

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Recorders:
    """An `Emulation` of recorders."""

    def __init__(self, ranks: int) -> None:
        self.accelerators = [Recorder() for _ in range(ranks)]
        self.ranges: list[tuple[Range, list[int]]] = []

    def map_multicast(self, memory: Sequence[torch.Tensor]) -> Range:
        self.ranges.append((Range(), [each.data_ptr() for each in memory]))
        return self.ranges[-1][0]

    def obstacle(self) -> str:
        return ""

    def link_bytes(self) -> Mapping[tuple[int, int], int]:
        return {}

    def summary(self) -> str:
        return ""

    def write_trace(self, path: Path) -> None:
        raise NotImplementedError


def test_a_kernel_is_compiled_once_for_each_target() -> None:
    built: list[int] = []

    def build(options: str) -> int:
        assert options == "--enable-tvm-ffi"
        built.append(len(built))
        return built[-1]

    kernel = compiled(("test_accelerator", 1), build)
    assert compiled(("test_accelerator", 1), build) is kernel
    assert not built
    first, second = Recorder("a"), Recorder("b")
    data = torch.zeros(3)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: kernel(5, 6, stream=first, memory=(data,)), range(4)))
    kernel(7, stream=second)
    assert first.log == [(("a", 0), (5, 6), (data,))] * 4
    assert second.log == [(("b", 1), (7,), ())]


def test_virtual_ranks_know_their_devices() -> None:
    emulation = Recorders(2)
    group = VirtualGroup(2, emulation=emulation)
    assert group.run(accelerator_of) == emulation.accelerators
    assert all(rank.stream is None for rank in group.ranks)
    group.ranks[1].synchronize()
    assert [device.log for device in emulation.accelerators] == [[], ["synchronize"]]
    plain = VirtualGroup(2)
    assert plain.run(accelerator_of) == [None, None]
    plain.ranks[0].synchronize()
    with pytest.raises(ArgumentError, match="emulation"):
        VirtualGroup(3, emulation=emulation)
    with pytest.raises(ArgumentError, match="device"):
        VirtualGroup(2, "meta", emulation=emulation)


def test_symmetric_memory_is_shared_until_the_arena_is_closed() -> None:
    emulation = Recorders(2)
    group = VirtualGroup(2, emulation=emulation)
    arenas = group.run(lambda rank: SymmetricArena.create(rank, 1000))
    block = arenas[0].allocate((1000,), torch.uint8, "block")
    memory = [("share", pointer, 1024) for pointer in block.pointers]
    assert [device.log for device in emulation.accelerators] == [[memory[0]], [memory[1]]]
    group.run(lambda rank: arenas[rank.rank].close())
    for device, (_, pointer, nbytes) in zip(emulation.accelerators, memory, strict=True):
        assert device.log[1:] == ["synchronize", ("unshare", pointer, nbytes)]


def test_emulated_memory_has_a_multicast_address_until_the_arena_is_closed() -> None:
    emulation = Recorders(3)
    group = VirtualGroup(3, emulation=emulation)
    arenas = group.run(lambda rank: SymmetricArena.create(rank, 1024))
    for arena in arenas:
        assert arena.multicast_reason == ""
        arena.allocate((128,), torch.uint8, "first")
    blocks = [arena.allocate((128,), torch.uint8, "second") for arena in arenas]
    ((mapped, members),) = emulation.ranges
    assert members == [pointer - 128 for pointer in blocks[0].pointers]
    assert {block.multicast_pointer for block in blocks} == {Range.address + 128}
    assert mapped.closed == 0
    group.run(lambda rank: arenas[rank.rank].close())
    assert mapped.closed == 1
    plain = VirtualGroup(2)
    arenas = plain.run(lambda rank: SymmetricArena.create(rank, 128))
    assert all("multicast needs several" in arena.multicast_reason for arena in arenas)
    assert arenas[0].allocate((1,), torch.uint8, "piece").multicast_pointer == 0


def test_an_exchange_on_host_memory_names_what_its_kernels_touch() -> None:
    emulation = Recorders(1)
    group = VirtualGroup(1, emulation=emulation)
    layout = ExchangeLayout(1, 0, 0)
    (arena,) = group.run(lambda rank: SymmetricArena.create(rank, layout.total_bytes))
    block = arena.allocate((layout.total_bytes,), torch.uint8, "block")
    launches = LaunchExchange(layout, block, 0, 1.0, emulation.accelerators[0])
    assert launches.stream() is emulation.accelerators[0]
    own, bases, report = launches.arguments(0)[:3]
    assert own == block.pointers[0]
    addresses = {tensor.data_ptr() for tensor in launches.memory}
    assert {bases, report} <= addresses
    launches.check()


def test_emulators_are_found_by_their_entry_points() -> None:
    pytest.importorskip("dsv4_ptx_emulator", reason="dsv4-ptx-emulator is not installed")
    made = installed_emulators()["ptx"].load()(2, seed=1)
    assert len(made.accelerators) == 2
    group = VirtualGroup(2, emulation=made)
    assert group.run(accelerator_of) == list(made.accelerators)
