# SPDX-License-Identifier: Apache-2.0
"""Kernels of one warpgroup around wgmma, and their operands laid out by a second formulation (layouts.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.formats.floats import FORMATS, encode
from layouts import a_place, accumulator_place, canonical, xor_swizzle
from numpy.typing import NDArray
from probe import HEADER

A_AT, B_AT, TILE = 0, 65536, 65536
SWIZZLE_CODES = {0: 0, 3: 1, 2: 2, 1: 3}


@dataclass(frozen=True)
class Case:
    """One wgmma; swizzles are by their bits, majors are 1 where transposed."""

    a: str = "bf16"
    b: str = "bf16"
    n: int = 64
    accumulator: str = "f32"
    a_swizzle: int = 3
    b_swizzle: int = 3
    a_major: int = 0
    b_major: int = 0
    in_registers: bool = False
    scale_d: int = 1
    scale_a: int = 1
    scale_b: int = 1

    def __str__(self) -> str:
        layout = f"{self.a_swizzle}{self.b_swizzle}{self.a_major}{self.b_major}"
        scales = f"{self.scale_d}{self.scale_a:+}{self.scale_b:+}"
        source = "r" if self.in_registers else "s"
        return f"{self.a}.{self.b}.{self.accumulator}-n{self.n}-{layout}-{source}-{scales}"

    @property
    def element(self) -> int:
        return FORMATS[self.a].storage.itemsize

    @property
    def k(self) -> int:
        return 32 // self.element


def offsets(case: Case, which: str) -> tuple[int, int]:
    """LBO and SBO in bytes."""
    bits, major = (case.a_swizzle, case.a_major) if which == "a" else (case.b_swizzle, case.b_major)
    if not major:
        # 8 rows of a swizzled row's width, or core matrices of 128 bytes with K chunks far apart.
        return (16384, 256) if not bits else (16, 8 * (16 << bits))
    return (8192, 128) if not bits else (4096, 8 * (16 << bits))


def descriptor(case: Case, which: str) -> int:
    """The descriptor of A or B without the address that shared memory begins at."""
    start = A_AT if which == "a" else B_AT
    lbo, sbo = offsets(case, which)
    bits = case.a_swizzle if which == "a" else case.b_swizzle
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | SWIZZLE_CODES[bits] << 62


def image(case: Case, which: str, codes: NDArray[Any]) -> NDArray[np.uint8]:
    """The matrix as it must lie in shared memory from a multiple of 1024 on."""
    lbo, sbo = (value // case.element for value in offsets(case, which))
    bits, major = (case.a_swizzle, case.a_major) if which == "a" else (case.b_swizzle, case.b_major)
    data = np.zeros(TILE, np.uint8)
    rows, depth = codes.shape
    for (row, k), offset in canonical(bits, 16 // case.element, bool(major), lbo, sbo, rows, depth).items():
        at = xor_swizzle(offset * case.element, bits)
        data[at : at + case.element] = codes[row, k : k + 1].view(np.uint8)
    return data


def registers(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{number}" for number in range(count)) + "}"


def opcode(case: Case) -> str:
    return f"wgmma.mma_async.sync.aligned.m64n{case.n}k{case.k}.{case.accumulator}.{case.a}.{case.b}"


def instruction(case: Case, a_flaw: int = 0) -> str:
    """The wgmma with what it needs; `a_flaw` is added to A's descriptor."""
    count = case.n // (4 if case.accumulator == "f16" else 2)
    a = registers("%a", 4) if case.in_registers else "%da"
    majors = ""
    if case.element == 2:
        majors = f", {case.b_major}" if case.in_registers else f", {case.a_major}, {case.b_major}"
    return f"""
    cvt.u64.u32 %d5, %r0; shr.u64 %d5, %d5, 4;
    add.u64 %da, %d5, {descriptor(case, "a") + a_flaw}; add.u64 %db, %d5, {descriptor(case, "b")};
    setp.ne.b32 %p1, {case.scale_d}, 0;
    {opcode(case)} {registers("%f", count)}, {a}, %db, %p1, {case.scale_a}, {case.scale_b}{majors};
    """


def kernel(case: Case, body: str, count: int) -> str:
    """Loads both images, each thread's accumulators and A registers; stores the accumulators after `body`."""
    loads = "\n".join(f"ld.global.b32 %f{i}, [%d3+{4 * i}];" for i in range(count))
    loads += "\n".join(f"ld.global.b32 %a{i}, [%d4+{4 * i}];" for i in range(4))
    stores = "\n".join(f"st.global.b32 [%d3+{4 * i}], %f{i};" for i in range(count))
    return (
        HEADER.format(arch="sm_90a")
        + f"""
.extern .shared .align 1024 .b8 smem[];
.visible .entry probe(.param .u64 p0, .param .u64 p1, .param .u64 p2) .reqntid 128, 1, 1
{{
.reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .b64 %da; .reg .b64 %db;
.reg .b32 %f<{2 * count}>; .reg .b32 %a<4>;
.shared .align 8 .b64 bar;
mov.u32 %r0, smem; mov.u32 %r1, bar; mov.u32 %r2, %tid.x;
setp.eq.u32 %p0, %r2, 0;
ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1]; ld.param.b64 %d2, [p2];
@%p0 mbarrier.init.shared.b64 [%r1], 1;
bar.sync 0;
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {2 * TILE};
@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r0], [%d0], {2 * TILE}, [%r1];
mad.wide.u32 %d3, %r2, {4 * count}, %d1;
mad.wide.u32 %d4, %r2, 16, %d2;
{loads}
LOOP: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
@!%p2 bra LOOP;
{body}
{stores}
ret;
}}
"""
    )


def launch(
    text: str,
    matrices: NDArray[np.uint8],
    fragments: NDArray[np.uint32],
    a: NDArray[np.uint32],
    seed: int = 0,
) -> None:
    emulator = Emulator("sm_90a", seed=seed)
    parameters = b""
    for buffer in (matrices, fragments, a):
        emulator.register(buffer.ctypes.data, buffer.nbytes)
        parameters += buffer.ctypes.data.to_bytes(8, "little")
    emulator.launch(
        text, "probe", grid=(1, 1, 1), block=(128, 1, 1), shared_bytes=2 * TILE, parameters=parameters
    )
    emulator.run()


def fragments_of(tile: NDArray[np.float32], case: Case) -> NDArray[np.uint32]:
    """Each thread's accumulator registers: uint32 [128, registers]."""
    half = case.accumulator == "f16"
    values = np.zeros((128, case.n // 2), np.float16 if half else np.float32)
    for thread in range(128):
        for i in range(case.n // 2):
            values[thread, i] = tile[accumulator_place(thread, i)]
    return values.view(np.uint32)


def tile_from(fragments: NDArray[np.uint32], case: Case) -> NDArray[np.float32]:
    values = fragments.view(np.float16 if case.accumulator == "f16" else np.float32)
    tile = np.zeros((64, case.n), np.float32)
    for thread in range(128):
        for i in range(case.n // 2):
            tile[accumulator_place(thread, i)] = values[thread, i]
    return tile


@dataclass
class Problem:
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    c: NDArray[np.float32]
    matrices: NDArray[np.uint8]
    a_registers: NDArray[np.uint32]


def problem(case: Case, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    a = rng.integers(-4, 5, (64, case.k)).astype(np.float32)
    b = rng.integers(-4, 5, (case.n, case.k)).astype(np.float32)
    c = rng.integers(-100, 101, (64, case.n)).astype(np.float32)
    a_codes = encode(FORMATS[case.a], a, saturate=True)
    b_codes = encode(FORMATS[case.b], b, saturate=True)
    parts = [image(case, "a", a_codes), image(case, "b", b_codes)]
    per = 4 // case.element
    in_registers = np.zeros((128, 4), np.uint32)
    for thread in range(128):
        for register in range(4):
            for element in range(per):
                code = int(a_codes[a_place(thread, register, element, per)])
                in_registers[thread, register] |= np.uint32(code << 32 // per * element)
    return Problem(a, b, c, np.concatenate(parts), in_registers)


WHOLE = "wgmma.fence.sync.aligned;\n{mma}\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"

CASES = [
    *(Case(n=n) for n in (8, 24, 160, 256)),
    *(Case(a_swizzle=s, b_swizzle=s) for s in (0, 1, 2)),
    *(Case(a_swizzle=s, b_swizzle=s, a_major=1, b_major=1) for s in (0, 1, 2, 3)),
    Case(a_swizzle=1, b_swizzle=2, b_major=1, n=128),
    Case("f16", "f16", a_swizzle=2),
    Case("f16", "f16", accumulator="f16", n=40, a_swizzle=0),
    Case("e4m3", "e4m3", n=96),
    Case("e4m3", "e5m2", n=32, b_swizzle=1),
    Case("e5m2", "e4m3", n=32, accumulator="f16"),
    Case("tf32", "tf32", n=16, a_swizzle=2),
    *(Case(t, t, n=48, in_registers=True) for t in ("bf16", "f16", "e5m2", "tf32")),
    Case(in_registers=True, b_major=1),
    Case(scale_d=0),
    Case(scale_a=-1),
    Case(scale_a=-1, scale_b=-1),
    Case("e4m3", "e4m3", scale_b=-1),
]
