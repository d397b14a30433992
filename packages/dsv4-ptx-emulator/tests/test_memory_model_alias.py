# SPDX-License-Identifier: Apache-2.0
"""Multicast addresses are aliases of the copies' own: fence.proxy.alias between accesses of the two kinds."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.errors import MemoryModelError
from litmus import SEEDS
from probe import kernel

RANGE = 1 << 50


def rules(body: str) -> set[str]:
    """Verdicts of two ranks that run `body`: %d0 multicast address, %d1 own copy, %d2 flag, %r9 rank."""
    found = set()
    for seed in range(SEEDS):
        emulator = Emulator("sm_100a", ranks=2, seed=seed, max_steps=100_000, checks="memory-model")
        storage = [np.zeros(512 + 64, np.uint8) for _ in range(3)]
        places = [each.ctypes.data + -each.ctypes.data % 64 for each in storage]
        for place, home in zip(places, (0, 1, 0), strict=True):
            emulator.register(place, 512, rank=home)
        emulator.map_multicast(RANGE, 512, {0: places[0], 1: places[1]})
        load = "".join(f"ld.param.b64 %d{number}, [p{number}];" for number in range(4))
        lane = "mov.u32 %r1, %laneid; setp.eq.u32 %p0, %r1, 0; cvt.u32.u64 %r9, %d3; mov.b32 %r4, 1;"
        text = kernel(f"{load} {lane} @!%p0 bra END; {body}\nEND:", arch="sm_100a", params=4)
        for rank in range(2):
            parameters = struct.pack("<4Q", RANGE, places[rank], places[2], rank)
            emulator.launch(text, "probe", grid=(1, 1, 1), block=(32, 1, 1), parameters=parameters, rank=rank)
        try:
            emulator.run()
            found.add("")
        except MemoryModelError as error:
            found.add(error.rule)
    return found


MEET = """
red.release.sys.global.add.u32 [%d2], 1;
SPIN: ld.acquire.sys.global.b32 %r5, [%d2]; setp.ne.u32 %p2, %r5, 2; @%p2 bra SPIN;
"""
ALIAS = "fence.proxy.alias;"


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [(ALIAS, ALIAS, ""), ("", "", "alias-fence"), ("fence.proxy.async;", "", "alias-fence")],
)
def test_a_reduction_over_what_ordinary_stores_wrote(before: str, after: str, rule: str) -> None:
    reduce = "multimem.ld_reduce.relaxed.sys.global.add.u32 %r6, [%d0];"
    assert rules(f"st.global.b32 [%d1], %r4; {before} {MEET} {after} {reduce}") == {rule}


@pytest.mark.parametrize(("fence", "rule"), [(ALIAS, ""), ("", "alias-fence")])
def test_an_ordinary_load_of_what_a_multicast_store_wrote(fence: str, rule: str) -> None:
    store = "setp.eq.u32 %p1, %r9, 0; @%p1 multimem.st.weak.global.u32 [%d0], %r4;"
    assert rules(f"{store} {fence} {MEET} {fence} ld.global.b32 %r6, [%d1];") == {rule}


def test_without_a_barrier_the_fence_does_not_help() -> None:
    store = "setp.eq.u32 %p1, %r9, 0; @%p1 multimem.st.weak.global.u32 [%d0], %r4;"
    found = rules(f"{store} {ALIAS} ld.global.b32 %r6, [%d1];")
    assert "race" in found
    assert found <= {"race", "alias-fence", ""}
