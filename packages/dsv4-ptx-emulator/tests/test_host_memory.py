# SPDX-License-Identifier: Apache-2.0
"""Leases on host memory: exact bounds, overlaps, who may see what; and tensors that claim to be on CUDA."""

from __future__ import annotations

import mmap
import random
from typing import Any

import numpy as np
import pytest
from dsv4_ptx_emulator.errors import ArgumentError
from dsv4_ptx_emulator.machine.memory import Memory
from dsv4_ptx_emulator.runtime.dlpack import CUDA, on_device
from dsv4_ptx_emulator.runtime.memory import HostMemory, extent_of


def spans(memory: Memory) -> list[tuple[int, int]]:
    return [(region.start, region.end) for region in memory.regions]


def test_extents_are_exact() -> None:
    base = np.zeros((8, 16), np.float32)
    address = base.ctypes.data
    view = base[2:5, 3:7]
    found = extent_of(view)
    assert (found.start, found.end) == (address + 4 * (2 * 16 + 3), address + 4 * (4 * 16 + 7))
    backwards = extent_of(base[::-1, ::-1])
    assert (backwards.start, backwards.end) == (address, address + base.nbytes)
    empty = extent_of(base[3:3])
    assert empty.start == empty.end
    assert extent_of((4096, 64)).end == 4160
    pages = mmap.mmap(-1, 8192)
    assert extent_of(pages).end - extent_of(pages).start == 8192
    with pytest.raises(ArgumentError, match="data"):
        extent_of("text")


def test_lease_and_release() -> None:
    memory = Memory("global")
    host = HostMemory(memory)
    data = np.zeros(64, np.uint8)
    lease = host.lease(data, home=3)
    (region,) = memory.regions
    assert (region.start, region.end - region.start, region.home) == (data.ctypes.data, 64, 3)
    assert region.visible == frozenset({3})
    again = host.lease(data, home=3)
    host.release(lease)
    host.release(lease)
    assert len(memory.regions) == 1
    host.release(again)
    assert not memory.regions
    shared = host.lease(data, home=1, shared=True)
    other = host.lease(data, home=2)
    (region,) = memory.regions
    assert (region.home, region.visible) == (1, None)
    host.release(shared)
    (region,) = memory.regions
    assert (region.home, region.visible) == (2, frozenset({2}))
    host.release(other)


def test_an_empty_tensor_needs_no_room() -> None:
    memory = Memory("global")
    host = HostMemory(memory)
    host.release(host.lease(np.zeros(0), home=0))
    assert not memory.regions


def test_overlapping_leases_against_a_model() -> None:
    chance = random.Random(5)
    memory = Memory("global")
    host = HostMemory(memory)
    base = np.zeros(256, np.uint8)
    start = base.ctypes.data
    held: list[Any] = []
    for _ in range(400):
        if held and chance.random() < 0.5:
            host.release(held.pop(chance.randrange(len(held))))
        else:
            low = chance.randrange(250)
            held.append(host.lease(base[low : low + chance.randrange(1, 12)], home=0))
        covered = {byte for lease in held for byte in range(lease.extent.start, lease.extent.end)}
        mapped = [byte for low, high in spans(memory) for byte in range(low, high)]
        assert sorted(mapped) == sorted(covered)
        # Leases that only touch are apart: an access across the border is nobody's.
        borders = {low for low, _ in spans(memory)}
        assert borders <= {lease.extent.start for lease in held}
    assert all(start <= low and high <= start + 256 for low, high in spans(memory))


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_wrapped_tensor_claims_cuda_and_shares_its_memory(version: tuple[int, int] | None) -> None:
    class Consumer:
        """Reads what a consumer would; NumPy itself takes host tensors only."""

        def __init__(self, tensor: Any) -> None:
            self.device = tensor.__dlpack_device__()
            self.capsule = tensor.__dlpack__(
                stream=7, **({} if version is None else {"max_version": version})
            )

    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    consumer = Consumer(on_device(data, 5))
    assert consumer.device == (CUDA, 5)
    with pytest.raises((BufferError, RuntimeError)):
        np.from_dlpack(on_device(data, 5))
