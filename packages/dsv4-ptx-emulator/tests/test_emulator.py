# SPDX-License-Identifier: Apache-2.0
"""The front: arguments, regions, observers, several launches."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.errors import ArgumentError, OutOfBoundsError, ResourceLimitError
from dsv4_ptx_emulator.machine.observer import Access, Observer
from dsv4_ptx_emulator.machine.warp import Warp
from probe import FIRST_LINE, kernel

STORE = "ld.param.b64 %d0, [p0]; elect.sync %r1|%p1, -1; @%p1 st.global.b32 [%d0], 5;"


def launch(emulator: Emulator, text: str, address: int, **options: Any) -> None:
    given: dict[str, Any] = {"grid": (1, 1, 1), "block": (32, 1, 1), "parameters": struct.pack("<Q", address)}
    emulator.launch(text, "probe", **(given | options))


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"arch": "sm_80"}, "arch"), ({"ranks": 0}, "ranks")],
)
def test_bad_machines(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Emulator(**options)
    assert caught.value.argument == argument


def test_bad_launches() -> None:
    emulator, text = Emulator(ranks=2), kernel(STORE)
    with pytest.raises(ArgumentError, match="one of probe"):
        emulator.launch(text, "prob", grid=(1, 1, 1), block=(32, 1, 1))
    with pytest.raises(ArgumentError, match="8 bytes"):
        launch(emulator, text, 0, parameters=bytes(4))
    with pytest.raises(ArgumentError, match="0 to 1"):
        launch(emulator, text, 0, rank=2)
    with pytest.raises(ResourceLimitError, match="reqntid"):
        launch(emulator, text, 0, block=(64, 1, 1))
    with pytest.raises(ResourceLimitError, match="grid"):
        launch(emulator, text, 0, grid=(1, 1 << 16, 1))
    emulator.run()
    assert emulator.steps == 0


def test_regions_come_and_go() -> None:
    data = np.zeros(32, np.uint32)
    emulator, text = Emulator(), kernel(STORE)
    emulator.register(data.ctypes.data, data.nbytes, "data")
    with pytest.raises(ValueError, match=r"data overlaps|overlaps data"):
        emulator.register(data.ctypes.data + 64, 4)
    with pytest.raises(ArgumentError, match="rank"):
        emulator.register(data.ctypes.data + 4096, 4, rank=1)
    launch(emulator, text, data.ctypes.data)
    emulator.run()
    assert data[0] == 5
    emulator.unregister(data.ctypes.data)
    with pytest.raises(KeyError):
        emulator.unregister(data.ctypes.data)
    launch(emulator, text, data.ctypes.data)
    with pytest.raises(OutOfBoundsError):
        emulator.run()


class Everything(Observer):
    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self.told: list[tuple[str, int]] = []
        self.ends: list[str] = []

    def on_access(self, access: Access) -> None:
        self.accesses.append(access)

    def on_fence(self, warp: Warp, name: str, line: int) -> None:
        self.told.append((name, line))

    def on_sync(self, warp: Warp, name: str, channel: Any, line: int) -> None:
        self.told.append((name, line))

    def on_cta_begin(self, cta: Any) -> None:
        self.ends.append("begin cta")

    def on_cta_end(self, cta: Any) -> None:
        self.ends.append("end cta")

    def on_launch_begin(self, launch: Any) -> None:
        self.ends.append("begin launch")

    def on_launch_end(self, launch: Any) -> None:
        self.ends.append("end launch")


def test_observers_hear_of_everything() -> None:
    data = np.zeros(32, np.uint64)
    emulator = Emulator(ranks=2)
    emulator.register(data.ctypes.data, data.nbytes, "data", rank=1)
    seen = Everything()
    emulator.attach(seen)
    body = """ld.param.b64 %d0, [p0]; mov.b32 %r1, cell; mov.u32 %r2, %laneid; setp.lt.u32 %p1, %r2, 4;
    @%p1 st.shared.b32 [%r1], %r2;
    fence.acq_rel.sys;
    bar.sync 0;
    ld.acquire.gpu.global.b64 %d1, [%d0+8];
    @!%p1 ret;
    atom.release.sys.global.add.u64 %d2, [%d0], 1;"""
    text = kernel(body, module=".shared .align 4 .b8 cell[64];")
    launch(emulator, text, data.ctypes.data)
    emulator.run()
    shared, load, *atomics = seen.accesses
    assert (shared.action, shared.space, len(shared.addresses), shared.size) == ("write", "shared", 4, 4)
    assert shared.owner is not None
    assert (load.action, load.space, load.size, load.rank, load.home) == ("read", "global", 8, 0, 1)
    assert (load.kind.semantics, load.kind.scope, load.kind.proxy) == ("acquire", "gpu", "generic")
    assert load.kind.opcode == "ld.acquire.gpu.global.b64"
    assert {(access.action, access.kind.semantics, access.kind.scope) for access in atomics} == {
        ("atomic", "release", "sys")
    }
    assert len(atomics) == 4
    assert data[0] == 4
    assert seen.told == [
        ("fence.acq_rel.sys", FIRST_LINE + 2),
        ("bar.arrive", FIRST_LINE + 3),
        ("bar.pass", FIRST_LINE + 3),
    ]
    assert seen.ends == ["begin launch", "begin cta", "end cta", "end launch"]
