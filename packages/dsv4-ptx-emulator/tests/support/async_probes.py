# SPDX-License-Identifier: Apache-2.0
"""Small kernels of the asynchronous instruction groups, with inputs, for a GPU and for the emulator alike.

`record_probes.py` runs them on an H200 and keeps what came out in data/async_probes.json (hashes) and
data/async_sums.npz; test_async_probes.py compares. Results must not depend on timing. Inputs are integers
wherever a matrix instruction sums, because no text fixes the rounding inside it. `SUMS` are the exception:
random values, to measure how far the emulator is off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensor_kernels as tensors
import wgmma_kernels as matrices
from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.formats import swizzle
from dsv4_ptx_emulator.formats.floats import FORMATS, decode, encode
from dsv4_ptx_emulator.formats.tensor_map import MAP_BYTES, TensorMap, encode_tensor_map
from numpy.typing import NDArray
from probe import kernel

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class MapOf:
    """A tensor map of buffer `buffer`; the map's address is relative to it."""

    buffer: int
    tensor: TensorMap

    def encoded(self, address: int) -> bytes:
        """The map for the buffer's address."""
        return encode_tensor_map(replace(self.tensor, address=address + self.tensor.address))


@dataclass(frozen=True)
class Probe:
    """One launch: the buffers' addresses are the 64-bit parameters of `probe`."""

    name: str
    text: str
    buffers: tuple[Bytes | MapOf, ...]
    threads: int = 32
    grid: int = 1
    cluster: int = 1
    shared: int = 0
    seeds: int = 2


def emulate(probe: Probe, seed: int = 0) -> list[Bytes]:
    """What is in the buffers (not the maps) after the launch."""
    emulator = Emulator("sm_90a", seed=seed)
    held: list[Bytes] = []
    for buffer in probe.buffers:
        place = tensors.aligned(MAP_BYTES if isinstance(buffer, MapOf) else buffer.size)
        if not isinstance(buffer, MapOf):
            place[:] = buffer
        held.append(place)
        emulator.register(place.ctypes.data, place.nbytes)
    for place, buffer in zip(held, probe.buffers, strict=True):
        if isinstance(buffer, MapOf):
            place[:] = np.frombuffer(buffer.encoded(held[buffer.buffer].ctypes.data), np.uint8)
    emulator.launch(
        probe.text,
        "probe",
        grid=(probe.grid, 1, 1),
        block=(probe.threads, 1, 1),
        cluster=(probe.cluster, 1, 1) if probe.cluster > 1 else None,
        shared_bytes=probe.shared,
        parameters=b"".join(place.ctypes.data.to_bytes(8, "little") for place in held),
    )
    emulator.run()
    return [place for place, buffer in zip(held, probe.buffers, strict=True) if not isinstance(buffer, MapOf)]


def fingerprint(probe: Probe) -> str:
    """Of what a recording depends on."""
    parts = [probe.text.encode()]
    parts += [
        repr(buffer).encode() if isinstance(buffer, MapOf) else buffer.tobytes() for buffer in probe.buffers
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _tensor(
    name: str,
    build: Callable[..., str],
    data: NDArray[Any],
    tensor: TensorMap,
    at: Sequence[int],
    image: Bytes,
    *extra: str,
) -> Probe:
    relative = replace(tensor, address=tensor.address - data.ctypes.data)
    text = kernel(build(tensor, tuple(at), *extra), params=3)
    return Probe(name, text, (MapOf(2, relative), image, data.view(np.uint8).reshape(-1)))


def _tensor_probes() -> Iterator[Probe]:
    for number, case in enumerate(tensors.CASES):
        data, tensor, at = tensors.make(case)
        blank = np.full(tensors.image_bytes(tensor), 0xEE, np.uint8)
        yield _tensor(f"tensor-load-{number}", tensors.load_kernel, data, tensor, at, blank)
        if case not in tensors.STORABLE:
            continue
        other = tensors.expected_image(data ^ np.array(0x55, data.dtype), tensor, at)
        yield _tensor(f"tensor-store-{number}", tensors.store_kernel, data, tensor, at, other)
    for element, dtype in (("f16", np.uint16), ("bf16", np.uint16), ("f32", np.uint32), ("f64", np.uint64)):
        data = tensors.aligned(8 * 64 * np.dtype(dtype).itemsize).view(dtype).reshape(8, 64)
        tensor = replace(tensors.contiguous(data, (16, 8), element, swizzle.NONE), nan_fill=True)
        blank = np.zeros(tensor.box_bytes, np.uint8)
        yield _tensor(f"nan-fill-{element}", tensors.load_kernel, data, tensor, (56, 4), blank)
    data = tensors.aligned(8 * 64 * 4).view(np.float32).reshape(8, 64)
    data[...] = np.arange(512).reshape(8, 64)
    tensor = tensors.contiguous(data, (32, 8), "f32", swizzle.S128)
    image = tensors.expected_image(np.full((8, 64), 1000, np.float32), tensor, (0, 0))
    yield _tensor("tensor-reduce", tensors.store_kernel, data, tensor, (40, 2), image, ".add")


def _matrix_probes() -> Iterator[Probe]:
    for case in matrices.CASES:
        given = matrices.problem(case)
        yield _wgmma(f"wgmma-{case}", case, given.matrices, given.c, given.a_registers)


def _wgmma(
    name: str, case: matrices.Case, images: Bytes, c: NDArray[np.float32], a_registers: NDArray[np.uint32]
) -> Probe:
    fragments = matrices.fragments_of(c, case)
    body = matrices.WHOLE.format(mma=matrices.instruction(case))
    text = matrices.kernel(case, body, fragments.shape[1])
    buffers = (images, fragments.view(np.uint8).reshape(-1), a_registers.view(np.uint8).reshape(-1))
    return Probe(name, text, buffers, threads=128, shared=2 * matrices.TILE, seeds=1)


def _sums() -> Iterator[Probe]:
    for a, b in (("bf16", "bf16"), ("f16", "f16"), ("e4m3", "e4m3"), ("tf32", "tf32")):
        case = matrices.Case(a, b, n=64)
        rng = np.random.default_rng(11)
        images = [
            matrices.image(
                case,
                which,
                encode(FORMATS[kind], rng.standard_normal((rows, case.k)).astype(np.float32), saturate=True),
            )
            for which, kind, rows in (("a", a, 64), ("b", b, case.n))
        ]
        c = rng.standard_normal((64, case.n)).astype(np.float32)
        yield _wgmma(f"sum-{case}", case, np.concatenate(images), c, np.zeros((128, 4), np.uint32))


def _conversions() -> Iterator[Probe]:
    """Each of 1024 threads converts four float32 (or f16x2 bits) near ties, limits, infinities and NaN."""
    grids: list[NDArray[Any]] = [
        np.arange(0, 1 << 16, 31, dtype=np.uint16).view(np.float16).astype(np.float32)
    ]
    for name in ("e4m3", "e5m2", "bf16"):
        fmt = FORMATS[name]
        codes = np.arange(0, fmt.maximum + 1, 1 if fmt.width == 8 else 97).astype(fmt.storage)
        values = decode(fmt, codes)
        grids += [values, values[1:] / 2 + values[:-1] / 2]
    special = np.array([np.inf, np.nan, 448, 449, 464, 465, 480, 57344, 61440, 65504, 65520, 1e38, 1e-45])
    flat = np.concatenate([*grids, special.astype(np.float32)]).astype(np.float32)
    flat = np.concatenate([flat, -flat, (flat.view(np.uint32) + np.uint32(1)).view(np.float32)])
    bits = np.resize(flat, 16384).view(np.uint32)
    bits[:4] = [0x7FC00001, 0xFFC12345, 0x7F800001, 0xFF8FFFFF]
    for number, operation in enumerate(
        (
            "cvt.rn.bf16.f32 %h0, %r5; cvt.u32.u16 %r7, %h0;",
            "cvt.rz.bf16.f32 %h0, %r5; cvt.u32.u16 %r7, %h0;",
            "cvt.rn.relu.bf16.f32 %h0, %r5; cvt.u32.u16 %r7, %h0;",
            "cvt.rn.f16.f32 %h0, %r5; cvt.u32.u16 %r7, %h0;",
            "cvt.rn.bf16x2.f32 %r7, %r5, %r6;",
            "cvt.rn.satfinite.e4m3x2.f32 %h0, %r5, %r6; cvt.u32.u16 %r7, %h0;",
            "cvt.rn.satfinite.e5m2x2.f32 %h0, %r5, %r6; cvt.u32.u16 %r7, %h0;",
            "cvt.rn.satfinite.relu.e4m3x2.f32 %h0, %r5, %r6; cvt.u32.u16 %r7, %h0;",
            "cvt.rn.satfinite.e4m3x2.f16x2 %h0, %r5; cvt.u32.u16 %r7, %h0;",
            "cvt.rn.satfinite.e5m2x2.f16x2 %h0, %r5; cvt.u32.u16 %r7, %h0;",
            "cvt.u16.u32 %h0, %r5; cvt.rn.f16x2.e4m3x2 %r7, %h0;",
            "cvt.u16.u32 %h0, %r5; cvt.rn.f16x2.e5m2x2 %r7, %h0;",
            "cvt.u16.u32 %h0, %r5; cvt.f32.bf16 %r7, %h0;",
            "cvt.u16.u32 %h0, %r5; cvt.f32.f16 %r7, %h0;",
            "cvt.rna.tf32.f32 %r7, %r5;",
        )
    ):
        source = bits
        if "f16x2 %h0" in operation or "e4m3x2 %r7" in operation or "%h0, %r5; cvt.f" in operation:
            codes = np.arange(16384, dtype=np.uint32)
            source = codes * 4 + (codes & 3) | (codes * 4 + 2 ^ 0x00A5) << 16
        if "e5m2x2 %r7" in operation:
            source = np.arange(16384, dtype=np.uint32) * 4 + 1
        body = f"""
        ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1];
        mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r1, %r2, 1024, %r1;
        add.u32 %r3, %r1, 1; and.b32 %r3, %r3, 0x3fff;
        mad.wide.u32 %d2, %r1, 4, %d0; mad.wide.u32 %d3, %r3, 4, %d0; mad.wide.u32 %d4, %r1, 4, %d1;
        ld.global.b32 %r5, [%d2]; ld.global.b32 %r6, [%d3];
        {operation}
        st.global.b32 [%d4], %r7;
        """
        buffers = (source.view(np.uint8), np.zeros(4 * 16384, np.uint8))
        text = kernel(body, params=2, threads=1024)
        yield Probe(f"convert-{number}", text, buffers, threads=1024, grid=16, seeds=1)


_SETUP = """
.shared .align 128 .b8 data[4096];
.shared .align 8 .b64 bar;
mov.u32 %r0, data; mov.u32 %r1, bar; mov.u32 %r2, %tid.x; mov.u32 %r6, %cluster_ctarank;
setp.eq.u32 %p0, %r2, 0;
ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1];
mad.wide.u32 %d2, %r2, 16, %d0; mad.wide.u32 %d3, %r2, 16, %d1;
mad.lo.u32 %r3, %r2, 16, %r0;
@%p0 mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
_LOAD = """
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 4096;
@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%d0], 4096, [%r1];
"""
_WAIT = """
LOOP: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
@!%p1 bra LOOP;
"""
_STORE = """
@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r0], 4096;
@%p0 cp.async.bulk.commit_group;
@%p0 cp.async.bulk.wait_group 0;
"""
_MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
_REDUCTIONS = (
    ("add.u32", np.uint32),
    ("add.s32", np.int32),
    ("add.u64", np.uint64),
    ("min.s32", np.int32),
    ("max.s64", np.int64),
    ("and.b32", np.uint32),
    ("or.b32", np.uint32),
    ("xor.b64", np.uint64),
    ("add.f32", np.float32),
    ("add.noftz.f16", np.float16),
    ("add.noftz.bf16", np.uint16),
    ("min.f16", np.float16),
    ("max.f16", np.float16),
)


def _moves() -> Iterator[Probe]:
    rng = np.random.default_rng(8)
    noise = rng.integers(0, 256, 4096, dtype=np.uint8)
    blank = np.zeros(8192, np.uint8)
    yield Probe("bulk-copy", kernel(_SETUP + _LOAD + _WAIT + _STORE, params=2), (noise, blank))
    for operation, dtype in _REDUCTIONS:
        bits = 8 * np.dtype(dtype).itemsize
        if operation.endswith("bf16"):
            operands = rng.integers(0x3F00, 0x4300, (2, 2048)).astype(np.uint16)
        elif dtype in (np.float16, np.float32):
            operands = rng.standard_normal((2, 4096 * 8 // bits)).astype(dtype)
        else:
            operands = rng.integers(0, 256, (2, 4096), dtype=np.uint8).view(dtype)
        body = (
            _SETUP
            + _LOAD
            + _WAIT
            + _STORE.replace("cp.async.bulk.global", "cp.reduce.async.bulk.global").replace(
                "bulk_group [", f"bulk_group.{operation} ["
            )
        )
        new, old = operands.view(np.uint8)
        yield Probe(f"bulk-{operation}", kernel(body, params=2), (new, old))
    multicast = (
        _SETUP
        + "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1024;\n"
        + _MEET
        + """
    setp.eq.and.u32 %p2, %r6, 1, %p0;
    mov.u16 %h0, 3;
    @%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r0], [%d0], 1024, [%r1], %h0;
    """
        + _WAIT
        + """
    ld.shared.b32 %r7, [%r3];
    shl.b32 %r8, %r6, 5; add.u32 %r8, %r8, %r2;
    mad.wide.u32 %d3, %r8, 4, %d1;
    st.global.b32 [%d3], %r7;
    """
        + _MEET
    )
    yield Probe("bulk-multicast", kernel(multicast, params=2), (noise, blank), grid=2, cluster=2)
    between = (
        _SETUP
        + """
    ld.global.b32 %r7, [%d2];
    add.u32 %r7, %r7, %r6;
    st.shared.v4.b32 [%r3], {%r7, %r6, %r2, %r7};
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
    fence.proxy.async;
    """
        + _MEET
        + """
    xor.b32 %r8, %r6, 1;
    mapa.shared::cluster.u32 %r9, %r0, %r8;
    mapa.shared::cluster.u32 %r10, %r1, %r8;
    add.u32 %r9, %r9, 1024;
    @%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r9], [%r0], 512, [%r10];
    """
        + _WAIT
        + """
    ld.shared.b32 %r7, [%r3+1024];
    shl.b32 %r8, %r6, 5; add.u32 %r8, %r8, %r2;
    mad.wide.u32 %d3, %r8, 4, %d1;
    st.global.b32 [%d3], %r7;
    """
        + _MEET
    )
    yield Probe("bulk-between-ctas", kernel(between, params=2), (noise, blank), grid=2, cluster=2)
    into = "ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%d2];\n"
    out = "st.global.v4.b32 [%d3], {%r20, %r21, %r22, %r23};\n"
    put = "st.shared.v4.b32 [%r3], {%r20, %r21, %r22, %r23};\nbar.warp.sync 0xffffffff;\n"
    get = "bar.warp.sync 0xffffffff;\nld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r3];\n"
    four = "{%r20, %r21, %r22, %r23}"
    for trans in ("", ".trans"):
        load = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {four}, [%r3];\n"
        store = f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r3], {four};\n"
        yield Probe(f"ldmatrix{trans}", kernel(_SETUP + into + put + load + out, params=2), (noise, blank))
        yield Probe(f"stmatrix{trans}", kernel(_SETUP + into + store + get + out, params=2), (noise, blank))
    copies = "min.u32 %r4, %r2, 16;\ncp.async.cg.shared.global [%r3], [%d2], 16, %r4;\ncp.async.wait_all;\n"
    yield Probe("cp.async", kernel(_SETUP + copies + get + out, params=2), (noise, blank))
    tokens = """
    .shared .align 8 .b64 many;
    mov.u32 %r5, many;
    @%p0 mbarrier.init.shared.b64 [%r5], 64;
    bar.sync 0;
    setp.eq.u32 %p3, %r2, 5;
    @%p3 mbarrier.arrive.shared.b64 %d5, [%r5], 3;
    @%p3 mbarrier.pending_count.b64 %r7, %d5;
    bar.sync 0;
    @%p3 mbarrier.arrive_drop.shared.b64 %d6, [%r5];
    @%p3 mbarrier.pending_count.b64 %r8, %d6;
    @%p3 mbarrier.arrive.shared.b64 %d7, [%r5], 60;
    @%p3 mbarrier.test_wait.shared.b64 %p4, [%r5], %d7;
    @%p3 mbarrier.arrive.shared.b64 %d8, [%r5], 1;
    @%p3 mbarrier.pending_count.b64 %r9, %d8;
    @%p3 mbarrier.test_wait.shared.b64 %p5, [%r5], %d8;
    @%p3 mbarrier.test_wait.parity.shared.b64 %p6, [%r5], 0;
    @%p3 mbarrier.test_wait.parity.shared.b64 %p7, [%r5], 1;
    selp.b32 %r10, 1, 0, %p4; selp.b32 %r11, 2, 0, %p5; selp.b32 %r12, 4, 0, %p6; selp.b32 %r13, 8, 0, %p7;
    or.b32 %r10, %r10, %r11; or.b32 %r12, %r12, %r13; or.b32 %r10, %r10, %r12;
    @%p3 st.global.v4.b32 [%d3], {%r7, %r8, %r9, %r10};
    """
    yield Probe("mbarrier-counts", kernel(_SETUP + tokens, params=2), (noise, blank))


MOVES = tuple(_moves())
TENSORS = tuple(_tensor_probes())
MATRICES = tuple(_matrix_probes())
SUMS = tuple(_sums())
CONVERSIONS = tuple(_conversions())
