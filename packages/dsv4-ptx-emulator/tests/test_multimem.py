# SPDX-License-Identifier: Apache-2.0
"""multimem instructions over ranks' copies, and multicast ranges; 256-bit loads and stores."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.errors import ArgumentError, MisalignedError, OutOfBoundsError, UnsupportedInstruction
from dsv4_ptx_emulator.formats.floats import FORMATS, decode, encode
from dsv4_ptx_emulator.runtime.multicast import MulticastMapping
from dsv4_ptx_emulator.runtime.system import System
from numpy.typing import NDArray
from probe import kernel, run

RANKS = 4
RANGE = 1 << 50
"""Where the multicast range lies: no host address is as large."""

PLACE = "ld.param.b64 %d0, [p0]; mov.u32 %r40, %laneid; mad.wide.u32 %d0, %r40, {size}, %d0;\n"
OUT = "ld.param.b64 %d1, [p1]; mad.wide.u32 %d1, %r40, {size}, %d1;\n"


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    found: NDArray[Any] = raw[start : start + size].view(dtype)
    return found.reshape(shape)


def execute(
    body: str,
    copies: list[NDArray[Any]],
    outs: list[NDArray[Any]] | None = None,
    *,
    seed: int = 0,
    arch: str = "sm_100a",
    members: list[int] | None = None,
    ranks: list[int] | None = None,
) -> None:
    """Run `body` on one warp of each rank; p0 is the multicast address, p1 the rank's own output."""
    emulator = Emulator(arch, ranks=RANKS, seed=seed, max_steps=1_000_000)
    for rank, copy in enumerate(copies):
        emulator.register(copy.ctypes.data, copy.nbytes, f"copy {rank}", rank=rank)
    mapped = {rank: copies[rank].ctypes.data for rank in (range(RANKS) if members is None else members)}
    emulator.map_multicast(RANGE, copies[0].nbytes, mapped)
    text = kernel(body, arch=arch, params=2)
    for rank in range(RANKS) if ranks is None else ranks:
        own = 0
        if outs is not None:
            own = outs[rank].ctypes.data
            emulator.register(own, outs[rank].nbytes, f"out {rank}", rank=rank)
        parameters = struct.pack("<QQ", RANGE, own)
        emulator.launch(text, "probe", grid=(1, 1, 1), block=(32, 1, 1), parameters=parameters, rank=rank)
    emulator.run()


def registers(count: int) -> str:
    return "{" + ", ".join(f"%r{i}" for i in range(count)) + "}" if count > 1 else "%r0"


def reduced(words: str, count: int, copies: list[NDArray[Any]], seed: int = 0) -> list[NDArray[np.uint32]]:
    """Every rank's `multimem.ld_reduce` of 32 lanes by `count` registers."""
    outs = [aligned((32, count), np.uint32) for _ in range(RANKS)]
    body = PLACE.format(size=4 * count) + OUT.format(size=4 * count)
    body += f"multimem.ld_reduce.{words} {registers(count)}, [%d0];\n"
    body += "".join(f"st.global.b32 [%d1+{4 * i}], %r{i};\n" for i in range(count))
    execute(body, copies, outs, seed=seed)
    return outs


def narrow_copies(name: str, count: int) -> list[NDArray[Any]]:
    rng = np.random.default_rng(3)
    fmt = FORMATS[name]
    found = []
    for _ in range(RANKS):
        copy = aligned((32, count), fmt.storage)
        copy[:] = encode(fmt, rng.normal(size=(32, count)).astype(np.float32), saturate=name[0] == "e")
        found.append(copy)
    return found


@pytest.mark.parametrize(
    ("name", "words", "count"),
    [
        ("bf16", "relaxed.sys.global.add.acc::f32.v4.bf16x2", 4),
        ("bf16", "weak.global.add.acc::f32.bf16x2", 1),
        ("f16", "acquire.gpu.global.add.acc::f32.v2.f16x2", 2),
        ("e4m3", "weak.global.add.acc::f16.v4.e4m3x4", 4),
    ],
)
def test_sums_are_accumulated_as_asked(name: str, words: str, count: int) -> None:
    """In float32 (float16 for FP8), rank after rank, and rounded once to the type."""
    fmt = FORMATS[name]
    copies = narrow_copies(name, count * 4 // fmt.storage.itemsize)
    total = np.zeros(copies[0].shape, np.float32)
    for copy in copies:
        total = total + decode(fmt, copy)
        if name == "e4m3":
            total = total.astype(np.float16).astype(np.float32)
    expected = encode(fmt, total)
    for out in reduced(words, count, copies):
        np.testing.assert_array_equal(out.view(fmt.storage), expected)


def test_sums_in_the_types_own_precision() -> None:
    """Without .acc every addition is rounded: 256 + 1 + 1 + 1 stays 256 in BF16."""
    copies = [aligned((32, 2), np.uint16) for _ in range(RANKS)]
    for copy, value in zip(copies, (256.0, 1.0, 1.0, 1.0), strict=True):
        copy[:] = encode(FORMATS["bf16"], np.full((32, 2), value, np.float32))
    for words, expected in (("add.bf16x2", 256.0), ("add.acc::f32.bf16x2", 260.0)):
        for out in reduced(f"relaxed.sys.global.{words}", 1, copies):
            assert (decode(FORMATS["bf16"], out.view(np.uint16)) == expected).all()


def test_float32_and_integers() -> None:
    rng = np.random.default_rng(4)
    floats = [aligned((32, 4), np.float32) for _ in range(RANKS)]
    for copy in floats:
        copy[:] = rng.normal(size=(32, 4))
    expected = ((floats[0] + floats[1]) + floats[2]) + floats[3]
    for out in reduced("relaxed.sys.global.add.v4.f32", 4, floats):
        np.testing.assert_array_equal(out.view(np.float32), expected)
    words = [aligned((32, 1), np.uint32) for _ in range(RANKS)]
    for copy in words:
        copy[:] = rng.integers(0, 1 << 32, (32, 1), dtype=np.uint32)
    stack = np.stack(words)
    cases: dict[str, NDArray[Any]] = {
        "add.u32": stack.sum(axis=0, dtype=np.uint32),
        "min.s32": stack.view(np.int32).min(axis=0).view(np.uint32),
        "max.u32": stack.max(axis=0),
        "xor.b32": np.bitwise_xor.reduce(stack),
        "and.b32": np.bitwise_and.reduce(stack),
    }
    for name, found in cases.items():
        np.testing.assert_array_equal(reduced(name, 1, words)[2], found)


@pytest.mark.parametrize("seed", range(3))
def test_stores_reach_every_member(seed: int) -> None:
    copies = [aligned((32, 4), np.uint32) for _ in range(RANKS)]
    body = PLACE.format(size=16) + "".join(f"mad.lo.u32 %r{i}, %r40, 4, {i};\n" for i in range(4))
    body += "multimem.st.relaxed.sys.global.v4.f32 [%d0], {%r0, %r1, %r2, %r3};"
    execute(body, copies, seed=seed, ranks=[2])
    for copy in copies:
        np.testing.assert_array_equal(copy.reshape(-1), np.arange(128))


def test_members_may_be_fewer_than_ranks() -> None:
    copies = [aligned((32, 1), np.uint32) for _ in range(RANKS)]
    body = PLACE.format(size=4) + "mov.b32 %r0, 7; multimem.st.weak.global.u32 [%d0], %r0;"
    execute(body, copies, members=[1, 3], ranks=[1])
    assert [int(copy.max()) for copy in copies] == [0, 7, 0, 7]
    with pytest.raises(OutOfBoundsError, match="rank 0 is no member of the multicast range of ranks 1, 3"):
        execute(body, copies, members=[1, 3], ranks=[0])


@pytest.mark.parametrize("seed", range(3))
def test_reductions_on_every_member(seed: int) -> None:
    """All lanes of all ranks add to one word of every member."""
    copies = [aligned((32, 1), np.uint32) for _ in range(RANKS)]
    body = (
        "ld.param.b64 %d0, [p0]; mov.u32 %r0, %laneid; multimem.red.release.sys.global.add.u32 [%d0], %r0;\n"
    )
    body += "multimem.red.relaxed.gpu.global.add.s32 [%d0+4], 1;"
    execute(body, copies, seed=seed)
    for copy in copies:
        assert copy[0, 0] == RANKS * 496
        assert copy[1, 0] == RANKS * 32
    halves = [aligned((32, 2), np.uint16) for _ in range(RANKS)]
    body = PLACE.format(size=4) + "mov.b32 %r0, 0x3f803f80; multimem.red.add.bf16x2 [%d0], %r0;"
    execute(body, halves, seed=seed)
    assert (decode(FORMATS["bf16"], halves[1]) == RANKS).all()


def test_a_flag_that_is_raised_on_all_ranks() -> None:
    """Each rank adds 1 to everybody's flag and polls its own copy: nobody sees fewer than all."""
    copies = [aligned((4,), np.uint32) for _ in range(RANKS)]
    outs = [copy for copy in copies]
    body = """
ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1]; mov.u32 %r1, %laneid; setp.ne.u32 %p0, %r1, 0;
@%p0 bra DONE;
multimem.red.release.sys.global.add.u32 [%d0], 1;
AGAIN: ld.acquire.sys.global.u32 %r2, [%d1];
setp.lt.u32 %p1, %r2, 4;
@%p1 bra AGAIN;
DONE:
"""
    for seed in range(4):
        for copy in copies:
            copy[:] = 0
        emulator = Emulator("sm_90a", ranks=RANKS, seed=seed, max_steps=1_000_000)
        for rank, copy in enumerate(copies):
            emulator.register(copy.ctypes.data, copy.nbytes, rank=rank)
        emulator.map_multicast(RANGE, 16, {rank: copy.ctypes.data for rank, copy in enumerate(copies)})
        for rank in range(RANKS):
            parameters = struct.pack("<QQ", RANGE, outs[rank].ctypes.data)
            text = kernel(body, params=2)
            emulator.launch(text, "probe", grid=(1, 1, 1), block=(32, 1, 1), parameters=parameters, rank=rank)
        emulator.run()
        assert all(copy[0] == RANKS for copy in copies)


def test_misuse_is_named() -> None:
    copies = [aligned((32, 4), np.uint32) for _ in range(RANKS)]
    load = PLACE.format(size=16) + "ld.global.u32 %r0, [%d0];"
    with pytest.raises(OutOfBoundsError, match=r"multicast range of ranks 0, 1, 2, 3 .* not mapped on rank"):
        execute(load, copies)
    beyond = PLACE.format(size=16) + "multimem.ld_reduce.add.u32 %r0, [%d0+512];"
    with pytest.raises(OutOfBoundsError, match="not in a multicast range"):
        execute(beyond, copies)
    odd = PLACE.format(size=4) + "multimem.ld_reduce.add.v4.f32 {%r0, %r1, %r2, %r3}, [%d0];"
    with pytest.raises(MisalignedError, match="not a multiple of 16"):
        execute(odd, copies)
    emulator = Emulator("sm_90a", ranks=2)
    emulator.map_multicast(RANGE, 64, {0: 1 << 20, 1: 1 << 21})
    with pytest.raises(ValueError, match="overlaps"):
        emulator.map_multicast(RANGE + 32, 64, {0: 1 << 20})
    with pytest.raises(ArgumentError, match="multiples of 16"):
        emulator.map_multicast(1 << 51, 64, {0: 8})
    with pytest.raises(ArgumentError, match="rank"):
        emulator.map_multicast(1 << 51, 64, {2: 16})
    emulator.unmap_multicast(RANGE)
    emulator.map_multicast(RANGE + 32, 64, {0: 1 << 20})


@pytest.mark.parametrize(
    "text",
    [
        "multimem.ld_reduce.add.acc::f32.f32 %r0, [%d0];",
        "multimem.ld_reduce.min.f32 %r0, [%d0];",
        "multimem.ld_reduce.add.s64 %d1, [%d0];",
        "multimem.ld_reduce.and.u32 %r0, [%d0];",
        "multimem.ld_reduce.add.v2.u32 {%r0, %r1}, [%d0];",
        "multimem.ld_reduce.add.v8.f32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%d0];",
        "multimem.red.max.bf16x2 [%d0], %r0;",
        "multimem.red.acquire.gpu.add.u32 [%d0], %r0;",
        "multimem.st.acquire.gpu.u32 [%d0], %r0;",
        "multimem.cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r0], %r1;",
    ],
)
def test_forms_that_are_not_implemented(text: str) -> None:
    with pytest.raises(UnsupportedInstruction, match="multimem"):
        run(text)


def test_mapping_of_a_system() -> None:
    """The range is nobody's memory; closing it gives everything back."""
    system = System(2, arch="sm_90a")
    copies = {rank: aligned((16,), np.uint32) for rank in range(2)}
    mapping = MulticastMapping(system, copies)
    text = kernel("ld.param.b64 %d0, [p0]; multimem.red.relaxed.sys.global.add.u32 [%d0], 5;")
    system.emulator.launch(
        text, "probe", grid=(1, 1, 1), block=(32, 1, 1), parameters=struct.pack("<Q", mapping.address)
    )
    system.emulator.run()
    assert [int(copy[0]) for copy in copies.values()] == [160, 160]
    mapping.close()
    mapping.close()
    assert not system.emulator.machine.global_memory.regions
    with pytest.raises(ArgumentError, match="one size"):
        MulticastMapping(system, {0: copies[0], 1: copies[1][:8]})


@pytest.mark.parametrize(("vector", "width"), [("v8.b32", 4), ("v4.b64", 8), ("v8.f32", 4)])
def test_256_bit_accesses(vector: str, width: int) -> None:
    """sm_100 moves 32 bytes of a lane at once; sm_90 does not know the form."""
    data, out = aligned((32, 8), np.uint32), aligned((32, 8), np.uint32)
    data[:] = np.arange(256).reshape(32, 8)
    prefix = "%r" if width == 4 else "%d1"
    names = "{" + ", ".join(f"{prefix}{i}" for i in range(32 // width)) + "}"
    body = "mov.u32 %r40, %laneid; ld.param.b64 %d0, [p0]; mad.wide.u32 %d0, %r40, 32, %d0;\n"
    body += "ld.param.b64 %d1, [p1]; mad.wide.u32 %d1, %r40, 32, %d1;\n"
    body += f"ld.global.{vector} {names}, [%d0]; st.global.{vector} [%d1], {names};"
    run(body, data, out, arch="sm_100a")
    np.testing.assert_array_equal(out, data)
    with pytest.raises(UnsupportedInstruction, match="32 bytes per lane"):
        run(body, data, out)
    with pytest.raises(MisalignedError):
        run(body.replace("[%d0]; st", "[%d0+16]; st"), data, out, arch="sm_100a")
