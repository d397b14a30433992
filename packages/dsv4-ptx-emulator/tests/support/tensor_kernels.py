# SPDX-License-Identifier: Apache-2.0
"""Kernels that load or store one box of a tensor, and the definition of what they do, element by element."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from dsv4_ptx_emulator.formats import swizzle
from dsv4_ptx_emulator.formats.tensor_map import TensorMap, encode_tensor_map
from layouts import xor_swizzle
from numpy.typing import NDArray


def aligned(size: int) -> NDArray[np.uint8]:
    """Zeros that begin at a multiple of 1024."""
    raw = np.zeros(size + 1024, np.uint8)
    start = -raw.ctypes.data % 1024
    return raw[start : start + size]


def with_map(tensor: TensorMap) -> NDArray[np.uint8]:
    buffer = aligned(128)
    buffer[:] = np.frombuffer(encode_tensor_map(tensor), np.uint8)
    return buffer


def contiguous(data: NDArray[Any], box: tuple[int, ...], element: str, pattern: swizzle.Swizzle) -> TensorMap:
    """A map of a C-contiguous array; its last axis is dimension 0."""
    return TensorMap(
        data.ctypes.data,
        data.shape[::-1],
        data.strides[::-1],
        box,
        element,
        data.itemsize,
        pattern,
    )


def image_bytes(tensor: TensorMap) -> int:
    """Bytes of the image, whose rows are as far apart as the swizzle is wide."""
    row = tensor.box[0] * tensor.element_bytes
    return tensor.box_bytes // row * (tensor.swizzle.row_bytes if tensor.swizzle.bits else row)


def expected_image(data: NDArray[Any], tensor: TensorMap, at: tuple[int, ...]) -> NDArray[np.uint8]:
    """What a load leaves in shared memory, at offsets from a 1024-byte boundary."""
    size = tensor.element_bytes
    pitch = tensor.swizzle.row_bytes if tensor.swizzle.bits else tensor.box[0] * size
    image = np.zeros(image_bytes(tensor), np.uint8)
    for place in itertools.product(*(range(extent) for extent in reversed(tensor.box))):
        inner = place[::-1]
        row = 0
        for axis in range(len(inner) - 1, 0, -1):
            row = row * tensor.box[axis] + inner[axis]
        where = tuple(a + b for a, b in zip(at, inner, strict=True))
        if not all(0 <= w < s for w, s in zip(where, tensor.sizes, strict=True)):
            continue
        value = np.asarray(data[where[::-1]]).reshape(1).view(np.uint8)
        first = xor_swizzle(row * pitch + inner[0] * size, tensor.swizzle.bits)
        image[first : first + size] = value
    return image


def setup(at: tuple[int, ...]) -> str:
    lines = [f"mov.b32 %r{20 + axis}, {value};" for axis, value in enumerate(at)]
    return """
    .shared .align 1024 .b8 data[16384];
    .shared .align 8 .b64 bar;
    mov.u32 %r0, data; mov.u32 %r1, bar; mov.u32 %r2, %tid.x;
    setp.eq.u32 %p0, %r2, 0;
    ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1]; ld.param.b64 %d2, [p2];
    @%p0 mbarrier.init.shared.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    """ + "\n".join(lines)


def coordinates(rank: int) -> str:
    return "{" + ", ".join(f"%r{20 + axis}" for axis in range(rank)) + "}"


WAIT = """
LOOP: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
@!%p1 bra LOOP;
"""


def load_kernel(tensor: TensorMap, at: tuple[int, ...], space: str = "shared::cta", extra: str = "") -> str:
    rank = tensor.rank
    # A box that is narrower than its swizzle leaves gaps.
    clear = "\n".join(
        f"st.shared.v4.b32 [%r3+{at}], {{%r4, %r4, %r4, %r4}};" for at in range(0, image_bytes(tensor), 512)
    )
    return (
        setup(at)
        + f"""
    @%p0 prefetch.tensormap [%d0];
    mad.lo.u32 %r3, %r2, 16, %r0; mov.b32 %r4, 0;
    {clear}
    fence.proxy.async;
    bar.sync 0;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {tensor.box_bytes};
    @%p0 cp.async.bulk.tensor.{rank}d.{space}.global.tile.mbarrier::complete_tx::bytes{extra}
        [%r0], [%d0, {coordinates(rank)}], [%r1];
    """
        + WAIT
        + f"""
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r0], {image_bytes(tensor)};
    @%p0 cp.async.bulk.commit_group;
    @%p0 cp.async.bulk.wait_group 0;
    """
    )


def store_kernel(tensor: TensorMap, at: tuple[int, ...], operation: str = "") -> str:
    rank = tensor.rank
    name = "cp.reduce.async.bulk.tensor" if operation else "cp.async.bulk.tensor"
    return (
        setup(at)
        + f"""
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {image_bytes(tensor)};
    @%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [%r0], [%d1], {image_bytes(tensor)}, [%r1];
    """
        + WAIT
        + f"""
    @%p0 {name}.{rank}d.global.shared::cta{operation}.tile.bulk_group [%d0, {coordinates(rank)}], [%r0];
    @%p0 cp.async.bulk.commit_group;
    @%p0 cp.async.bulk.wait_group 0;
    """
    )


CASES = [
    # sizes (outermost first), box (innermost first), coordinates, element, dtype, swizzle
    ((300,), (64,), (272,), "u8", np.uint8, swizzle.NONE),
    ((300,), (64,), (-8,), "u16", np.uint16, swizzle.NONE),
    ((20, 64), (64, 8), (0, 8), "bf16", np.uint16, swizzle.S128),
    ((20, 64), (32, 16), (40, 9), "f16", np.uint16, swizzle.S64),
    ((20, 64), (16, 16), (-8, -2), "bf16", np.uint16, swizzle.S32),
    ((20, 64), (16, 32), (60, 15), "f32", np.uint32, swizzle.S64),
    ((20, 64), (128, 8), (16, 1), "u8", np.uint8, swizzle.S128),
    # Boxes narrower than their swizzle.
    ((20, 64), (16, 8), (8, 0), "bf16", np.uint16, swizzle.S64),
    ((20, 64), (16, 8), (0, 14), "bf16", np.uint16, swizzle.S128),
    ((20, 64), (8, 8), (0, 0), "bf16", np.uint16, swizzle.S32),
    ((9, 20, 64), (64, 4, 3), (0, 18, 7), "bf16", np.uint16, swizzle.S128),
    ((5, 9, 20, 32), (16, 3, 2, 2), (4, 1, 8, 3), "u64", np.uint64, swizzle.S128),
    ((3, 2, 4, 6, 32), (32, 3, 2, 2, 2), (8, 4, -1, 1, 2), "u16", np.uint16, swizzle.S64),
    ((3, 2, 4, 6, 32), (32, 3, 2, 2, 2), (8, 40, 0, 0, 0), "u16", np.uint16, swizzle.S64),
]


def make(case: Any) -> tuple[NDArray[Any], TensorMap, tuple[int, ...]]:
    sizes, box, at, element, dtype, pattern = case
    raw = aligned(int(np.prod(sizes)) * np.dtype(dtype).itemsize)
    data = raw.view(dtype).reshape(sizes)
    data[...] = np.random.default_rng(7).integers(1, np.iinfo(dtype).max, sizes, dtype=dtype)
    return data, contiguous(data, box, element, pattern), at


STORABLE = [case for case in CASES if min(case[2]) >= 0]
"""Cases that a store may have: none begins at a negative coordinate."""
