# SPDX-License-Identifier: Apache-2.0
"""Kernels of one CTA or a pair around tcgen05.mma, and operands laid out by a second formulation.

Layouts are written per element here, from the figures of the ISA, and share no code with the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.formats.floats import FORMATS, decode, encode
from layouts import canonical, xor_swizzle
from numpy.typing import NDArray
from probe import HEADER

CODES = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5, "f16": 0, "bf16": 1, "tf32": 2}
SWIZZLES = {0: 0, 1: 6, 2: 4, 3: 2}
STAGE = 128
"""Bytes of K in a stage: one swizzled row."""


@dataclass(frozen=True)
class Case:
    """One D = A B with or without block scaling; A and B are K major with 128-byte swizzle."""

    m: int = 128
    n: int = 128
    k: int = 128
    kind: str = "mxf8f6f4"
    a: str = "e4m3"
    b: str = "e4m3"
    half: bool = False
    a_shift: int = 0
    b_shift: int = 0
    negate: int = 0

    def __str__(self) -> str:
        ids = f"-ids{self.a_shift}{self.b_shift}" if self.scaled else ""
        shape = f"{self.m}x{self.n}x{self.k}"
        return f"{self.kind}-{self.a}.{self.b}-{shape}{ids}{'-half' * self.half}-n{self.negate}"

    @property
    def scaled(self) -> bool:
        return self.kind == "mxf8f6f4"

    @property
    def ctas(self) -> int:
        return 2 if self.m == 256 else 1

    @property
    def size(self) -> int:
        return FORMATS[self.a].storage.itemsize

    @property
    def depth(self) -> int:
        """K of one instruction."""
        return 32 // self.size

    @property
    def steps(self) -> int:
        return self.k // self.depth

    @property
    def stages(self) -> int:
        return -(-self.k * self.size // STAGE)

    @property
    def rows_a(self) -> int:
        return self.m // self.ctas

    @property
    def rows_b(self) -> int:
        return self.n // self.ctas

    @property
    def offsets(self) -> dict[str, int]:
        """Where the operands begin in shared memory."""
        atoms = -(-self.steps // 4)
        a = self.stages * self.rows_a * STAGE
        b = a + -(-self.stages * self.rows_b * STAGE // 1024) * 1024
        sfb = b + atoms * 512
        end = sfb + atoms * 512 * -(-self.n // 128)
        return {"a": 0, "b": a, "sfa": b, "sfb": sfb, "end": end}

    def instruction_descriptor(self, step: int) -> int:
        bits = CODES[self.a] << 7 | CODES[self.b] << 10 | self.negate << 13
        bits |= self.n // 8 << 17 | self.m // 16 << 24
        if self.scaled:
            return bits | 1 << 23 | (step + self.b_shift) % 4 << 4 | (step + self.a_shift) % 4 << 29
        return bits | (0 if self.half else 1) << 4


def shared_descriptor(start: int, lbo: int, sbo: int, swizzle: int) -> int:
    """Without the address that shared memory begins at; the swizzle by its bits."""
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | SWIZZLES[swizzle] << 61


def padded(codes: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """Rows of codes as bytes of shared memory: 4- and 6-bit ones 16 to each 16 bytes, packed in front."""
    width = FORMATS[name].width
    if width >= 8:
        return np.ascontiguousarray(codes).view(np.uint8)
    out = np.zeros(codes.shape, np.uint8)
    for row in range(codes.shape[0]):
        for first in range(0, codes.shape[1], 16):
            value = sum(int(codes[row, first + i]) << width * i for i in range(16))
            out[row, first : first + 16] = np.frombuffer(value.to_bytes(16, "little"), np.uint8)
    return out


def stages_image(data: NDArray[np.uint8], stages: int) -> NDArray[np.uint8]:
    """Rows of bytes in stages of 128 bytes of K, each with 128-byte swizzle."""
    rows, width = data.shape
    image = np.zeros(stages * rows * STAGE, np.uint8)
    for row in range(rows):
        for chunk in range(width // 16):
            stage, inner = divmod(chunk, 8)
            at = stage * rows * STAGE + row // 8 * 1024 + row % 8 * 128 + (inner ^ row % 8) * 16
            image[at : at + 16] = data[row, chunk * 16 : chunk * 16 + 16]
    return image


def scales_image(codes: NDArray[np.uint8], steps: int, shift: int) -> NDArray[np.uint8]:
    """Scale factors [rows, steps] as copies of 32 lanes by 16 bytes want them, 128 rows after the other."""
    blocks, atoms = -(-len(codes) // 128), -(-steps // 4)
    image = np.full((atoms, blocks, 32, 4, 4), 0xFF, np.uint8)
    for row in range(len(codes)):
        for step in range(steps):
            block, inner = divmod(row, 128)
            image[step // 4, block, inner % 32, inner // 32, (step + shift) % 4] = codes[row, step]
    return image.reshape(-1)


def prologue(case: Case, *, size: int, alloc: int = 512) -> str:
    """Up to where everything is in shared memory and %t0 is tensor memory's address."""
    group = f"cta_group::{case.ctas}"
    cluster = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if case.ctas == 2 else ""
    return (
        HEADER.format(arch="sm_100a")
        + f"""
.extern .shared .align 1024 .b8 smem[];
.visible .entry probe(.param .u64 p0, .param .u64 p1) .reqntid 128, 1, 1
{{
.reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .b32 %t<9>; .reg .b64 %d<20>; .reg .b32 %f<128>;
.shared .align 8 .b64 bar; .shared .align 8 .b64 done; .shared .align 4 .b32 tmem;
mov.u32 %r0, smem; mov.u32 %r1, bar; mov.u32 %r2, %tid.x; mov.u32 %r3, %cluster_ctarank; mov.u32 %r4, done;
mov.u32 %r5, tmem; shr.u32 %r6, %r2, 5;
setp.eq.u32 %p0, %r2, 0; setp.eq.u32 %p1, %r6, 0;
ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1];
mad.wide.u32 %d0, %r3, {size}, %d0;
@%p0 mbarrier.init.shared.b64 [%r1], 1;
@%p0 mbarrier.init.shared.b64 [%r4], 1;
@!%p1 bra ALLOCATED;
tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%r5], {alloc};
ALLOCATED:
bar.sync 0;
{cluster}
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {size};
@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r0], [%d0], {size}, [%r1];
LOADED: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
@!%p2 bra LOADED;
{cluster}
ld.shared.b32 %t0, [%r5];
and.b32 %r7, %r0, 0x3ffff; cvt.u64.u32 %d5, %r7; shr.u64 %d5, %d5, 4;
setp.eq.and.u32 %p3, %r3, 0, %p0;
"""
    )


def epilogue(case: Case, columns: int, *, alloc: int = 512) -> str:
    """Stores columns 0.. of all lanes, gives tensor memory back."""
    text = ["mad.wide.u32 %d1, %r3, " + str(512 * columns) + ", %d1;"]
    text += [f"mad.wide.u32 %d2, %r2, {4 * columns}, %d1;", "shl.b32 %r8, %r6, 21; add.u32 %t1, %t0, %r8;"]
    step = next(size for size in (64, 32, 16, 8, 4) if columns % size == 0)
    registers = ", ".join(f"%f{i}" for i in range(step))
    for column in range(0, columns, step):
        text.append(f"add.u32 %t2, %t1, {column};")
        text.append(f"tcgen05.ld.sync.aligned.32x32b.x{step}.b32 {{{registers}}}, [%t2];")
        text.append("tcgen05.wait::ld.sync.aligned;")
        text += [f"st.global.b32 [%d2+{4 * (column + i)}], %f{i};" for i in range(step)]
    text.append("tcgen05.fence::before_thread_sync; bar.sync 0;")
    if case.ctas == 2:
        text.append("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;")
    text.append("@!%p1 bra GONE;")
    text.append(f"tcgen05.relinquish_alloc_permit.cta_group::{case.ctas}.sync.aligned;")
    text.append(f"tcgen05.dealloc.cta_group::{case.ctas}.sync.aligned.b32 %t0, {alloc};\nGONE: ret;\n}}\n")
    return "\n".join(text)


def commit(case: Case) -> str:
    if case.ctas == 2:
        return (
            "mov.b16 %h0, 3;\ntcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
            ".multicast::cluster.b64 [%r4], %h0;"
        )
    return "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];"


WAIT = """COMPUTED: mbarrier.try_wait.parity.shared.b64 %p4, [%r4], 0;
@!%p4 bra COMPUTED;
tcgen05.fence::after_thread_sync;"""


def multiplications(case: Case) -> str:
    """What thread 0 issues: scale factors of four steps into columns 256 and 264, then these steps."""
    group, at = f"cta_group::{case.ctas}", case.offsets
    blocks = -(-case.n // 128)
    scale = "add.u32 %t3, %t0, 256; add.u32 %t4, %t0, 264;" if case.scaled else ""
    lines = [scale]
    for step in range(case.steps):
        if case.scaled and step % 4 == 0:
            for which, count, target in (("sfa", 1, 256), ("sfb", blocks, 264)):
                for block in range(count):
                    start = at[which] + (step // 4 * count + block) * 512
                    lines.append(f"add.u64 %d6, %d5, {shared_descriptor(start, 0, 128, 0)};")
                    lines.append(f"add.u32 %t5, %t0, {target + 4 * block};")
                    lines.append(f"tcgen05.cp.{group}.32x128b.warpx4 [%t5], %d6;")
        stage, inner = divmod(step * 32, STAGE)
        a = shared_descriptor(at["a"] + stage * case.rows_a * STAGE + inner, 16, 1024, 3)
        b = shared_descriptor(at["b"] + stage * case.rows_b * STAGE + inner, 16, 1024, 3)
        lines.append(f"add.u64 %d6, %d5, {a}; add.u64 %d7, %d5, {b};")
        lines.append(f"mov.b32 %r9, {case.instruction_descriptor(step)};")
        lines.append(f"setp.ne.b32 %p5, {step}, 0;")
        if case.scaled:
            lines.append(
                f"tcgen05.mma.{group}.kind::mxf8f6f4.block_scale.block32.collector::a::discard "
                "[%t0], %d6, %d7, %r9, [%t3], [%t4], %p5;"
            )
        else:
            lines.append(f"tcgen05.mma.{group}.kind::{case.kind} [%t0], %d6, %d7, %r9, %p5;")
    return "\n".join(lines)


def filled(columns: int) -> str:
    """Zeros in all lanes of the first columns."""
    text = "shl.b32 %r8, %r6, 21; add.u32 %t1, %t0, %r8; mov.b32 %f0, 0;\n"
    zeros = ", ".join(["%f0"] * 8)
    for column in range(0, columns, 8):
        text += f"add.u32 %t2, %t1, {column}; tcgen05.st.sync.aligned.32x32b.x8.b32 [%t2], {{{zeros}}};\n"
    return text + (
        "tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0;\n"
        "tcgen05.fence::after_thread_sync;\n"
    )


def whole(case: Case, issue: str | None = None, *, columns: int | None = None, wait: str = WAIT) -> str:
    """The kernel: load, `issue` by one thread, commit, wait, store D."""
    issued = multiplications(case) if issue is None else issue
    text = prologue(case, size=case.offsets["end"])
    if case.m == 64:
        # Every other 16 lanes are not D's, and the epilogue reads them all.
        text += filled(case.n)
    text += f"@!%p3 bra ISSUED;\n{issued}\n{commit(case)}\nISSUED:\n{wait}\n"
    return text + epilogue(case, columns or case.n)


def launch(
    text: str, case: Case, image: NDArray[np.uint8], out: NDArray[np.uint32], seed: int = 0
) -> Emulator:
    """Run it; `image` is shared memory's contents, CTA after CTA."""
    emulator = Emulator("sm_100a", seed=seed, max_steps=2_000_000)
    for name, buffer in (("image", image), ("out", out)):
        emulator.register(buffer.ctypes.data, buffer.nbytes, name)
    parameters = b"".join(buffer.ctypes.data.to_bytes(8, "little") for buffer in (image, out))
    emulator.launch(
        text,
        "probe",
        grid=(case.ctas, 1, 1),
        block=(128, 1, 1),
        cluster=(case.ctas, 1, 1) if case.ctas > 1 else None,
        shared_bytes=len(image) // case.ctas,
        parameters=parameters,
    )
    emulator.run()
    return emulator


@dataclass
class Problem:
    """Values in float64, their images, and D's bound on rounding."""

    a: NDArray[np.float64]
    b: NDArray[np.float64]
    image: NDArray[np.uint8]

    @property
    def exact(self) -> NDArray[np.float64]:
        return self.a @ self.b.T

    @property
    def magnitude(self) -> NDArray[np.float64]:
        return np.abs(self.a) @ np.abs(self.b).T


def problem(case: Case, seed: int = 0, *, integers: bool = False) -> Problem:
    """Random operands; integers with scales of 1 to 4 give sums that every order gets exactly."""
    rng = np.random.default_rng(seed)
    sides: dict[str, Any] = {}
    for side, name, rows in (("a", case.a, case.m), ("b", case.b, case.n)):
        raw = rng.integers(-2, 3, (rows, case.k)) if integers else rng.normal(size=(rows, case.k))
        codes = encode(FORMATS[name], raw.astype(np.float32), "rn", saturate=name not in ("f16", "bf16"))
        low, high = (127, 129) if integers else (112, 142)
        scales = rng.integers(low, high, (rows, case.steps)).astype(np.uint8)
        values = decode(FORMATS[name], codes).astype(np.float64)
        if case.scaled:
            values = values * 2.0 ** (np.repeat(scales, 32, axis=1).astype(np.float64) - 127)
        sides[side] = (codes, scales, values)
    at = case.offsets
    image = np.zeros((case.ctas, at["end"]), np.uint8)
    for rank in range(case.ctas):
        own_a = slice(rank * case.rows_a, (rank + 1) * case.rows_a)
        own_b = slice(rank * case.rows_b, (rank + 1) * case.rows_b)
        parts = {
            "a": stages_image(padded(sides["a"][0][own_a], case.a), case.stages),
            "b": stages_image(padded(sides["b"][0][own_b], case.b), case.stages),
        }
        if case.scaled:
            parts["sfa"] = scales_image(sides["a"][1][own_a], case.steps, case.a_shift)
            parts["sfb"] = scales_image(sides["b"][1], case.steps, case.b_shift)
        for name, part in parts.items():
            image[rank, at[name] : at[name] + len(part)] = part
    sign = -1.0 if case.negate in (1, 2) else 1.0
    return Problem(sign * sides["a"][2], sides["b"][2], image.reshape(-1))


def result(case: Case, text: str, given: Problem, seed: int = 0) -> NDArray[np.uint32]:
    """Cells [CTAs, 128 lanes, N] after the kernel."""
    out = np.zeros((case.ctas, 128, case.n), np.uint32)
    launch(text, case, given.image, out, seed)
    return out


def matrix_of(case: Case, cells: NDArray[np.uint32]) -> NDArray[np.float64]:
    """D from the cells, lane by lane (layouts A, D and F)."""
    d = np.zeros((case.m, case.n))
    for row in range(case.m):
        rank, inner = divmod(row, 128)
        lane = inner // 16 * 32 + inner % 16 if case.m == 64 else inner
        found = cells[rank, lane]
        d[row] = found.astype(np.uint16).view(np.float16) if case.half else found.view(np.float32)
    return d


def canonical_image(
    codes: NDArray[Any], swizzle: int, transposed: bool, lbo: int, sbo: int, size: int
) -> NDArray[np.uint8]:
    """A matrix in any of the layouts that a descriptor names, in `size` bytes."""
    width = codes.itemsize
    image = np.zeros(size, np.uint8)
    places = canonical(swizzle, 16 // width, transposed, lbo // width, sbo // width, *codes.shape)
    for (row, k), offset in places.items():
        at = xor_swizzle(offset * width, swizzle)
        image[at : at + width] = codes[row, k : k + 1].view(np.uint8)
    return image
