# SPDX-License-Identifier: Apache-2.0
"""Tensor copies against a copy of the definition (support/tensor_kernels.py), and their misuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dsv4_ptx_emulator.errors import (
    AsyncMisuseError,
    DeadlockError,
    MisalignedError,
    OutOfBoundsError,
    UnsupportedInstruction,
)
from dsv4_ptx_emulator.formats import swizzle
from dsv4_ptx_emulator.formats.tensor_map import TensorMap
from probe import run
from tensor_kernels import (
    CASES,
    STORABLE,
    aligned,
    contiguous,
    expected_image,
    image_bytes,
    load_kernel,
    make,
    store_kernel,
    with_map,
)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case[0])}d-{case[3]}-{case[5].name}")
def test_loads(case: Any, seed: int) -> None:
    data, tensor, at = make(case)
    image = aligned(image_bytes(tensor))
    run(load_kernel(tensor, at), with_map(tensor), image, data.view(np.uint8).reshape(-1), seed=seed)
    np.testing.assert_array_equal(image, expected_image(data, tensor, at))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", STORABLE, ids=lambda case: f"{len(case[0])}d-{case[3]}-{case[5].name}")
def test_stores_write_what_is_inside_and_nothing_else(case: Any, seed: int) -> None:
    """Storing the image of other data changes exactly the elements that a load would have read."""
    data, tensor, at = make(case)
    other = data ^ np.array(0x55, data.dtype)
    image = aligned(image_bytes(tensor))
    image[:] = expected_image(other, tensor, at)
    before = data.copy()
    run(store_kernel(tensor, at), with_map(tensor), image, data.view(np.uint8).reshape(-1), seed=seed)
    expected = before.copy()
    region = tuple(
        slice(max(0, a), max(0, a + extent))
        for a, extent in zip(reversed(at), reversed(tensor.box), strict=True)
    )
    expected[region] = other[region]
    np.testing.assert_array_equal(data, expected)


@pytest.mark.parametrize("at", [(-8, 0), (0, -1), (-64, 1)])
def test_a_store_that_begins_before_the_tensor_is_refused(at: tuple[int, ...]) -> None:
    data, tensor, _ = make(CASES[2])
    with pytest.raises(AsyncMisuseError, match="begins before the tensor"):
        run(store_kernel(tensor, at), with_map(tensor), aligned(2048), data.view(np.uint8).reshape(-1))


def test_a_strided_view_and_a_map_in_the_parameters() -> None:
    """Strides that are no products of sizes, and `__grid_constant__` maps."""
    raw = aligned(64 * 256)
    raw[:] = np.random.default_rng(3).integers(0, 255, len(raw), dtype=np.uint8)
    whole = raw.view(np.uint16).reshape(64, 128)
    view = whole[::2, 16:80]
    tensor = TensorMap(view.ctypes.data, (64, 32), (2, 512), (64, 8), "bf16", 2, swizzle.S128)
    image = aligned(image_bytes(tensor))
    run(load_kernel(tensor, (0, 5)), with_map(tensor), image, raw)
    np.testing.assert_array_equal(image, expected_image(view, tensor, (0, 5)))


@pytest.mark.parametrize("element", ["f16", "bf16", "f32"])
def test_nan_fill(element: str) -> None:
    dtype = np.uint32 if element == "f32" else np.uint16
    data = aligned(8 * 64 * np.dtype(dtype).itemsize).view(dtype).reshape(8, 64)
    tensor = replace(contiguous(data, (16, 8), element, swizzle.NONE), nan_fill=True)
    image = aligned(image_bytes(tensor))
    run(load_kernel(tensor, (56, 4)), with_map(tensor), image, data.view(np.uint8).reshape(-1))
    words = image.view(dtype).reshape(8, 16)
    outside = np.ones((8, 16), bool)
    outside[:4, :8] = False
    fill = {"f16": 0x7FF7, "bf16": 0x7FF7, "f32": 0x7FF77FF7}[element]
    np.testing.assert_array_equal(words, np.where(outside, fill, 0))


@pytest.mark.parametrize("seed", range(6))
def test_multicast(seed: int) -> None:
    data, tensor, _ = make(CASES[2])
    body = load_kernel(tensor, (0, 8), "shared::cluster", ".multicast::cluster")
    body = body.replace("[%r1];\n    \nLOOP", "[%r1], %h0;\n    \nLOOP")
    body = body.replace(
        "@%p0 cp.async.bulk.tensor",
        """mov.u32 %r6, %cluster_ctarank;
    mov.u16 %h0, 3;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    setp.eq.and.u32 %p2, %r6, 1, %p0;
    mad.wide.u32 %d1, %r6, 1024, %d1;
    @%p2 cp.async.bulk.tensor""",
    )
    body += "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    image = aligned(2048)
    run(body, with_map(tensor), image, data.view(np.uint8).reshape(-1), grid=2, cluster=2, seed=seed)
    for part in image.reshape(2, 1024):
        np.testing.assert_array_equal(part, expected_image(data, tensor, (0, 8)))


def test_reductions_combine_what_is_inside() -> None:
    data = aligned(8 * 64 * 4).view(np.float32).reshape(8, 64)
    data[...] = np.arange(512).reshape(8, 64)
    tensor = contiguous(data, (32, 8), "f32", swizzle.S128)
    image = aligned(image_bytes(tensor))
    image[:] = expected_image(np.full((8, 64), 1000, np.float32), tensor, (0, 0))
    run(store_kernel(tensor, (40, 2), ".add"), with_map(tensor), image, data.view(np.uint8).reshape(-1))
    expected = np.arange(512, dtype=np.float32).reshape(8, 64)
    expected[2:, 40:] += 1000
    np.testing.assert_array_equal(data, expected)


def test_bytes_outside_of_the_tensor_count_for_the_barrier() -> None:
    """A barrier that expects only the bytes inside waits for ever: its count passes zero the other way."""
    data, tensor, _ = make(CASES[2])
    body = load_kernel(tensor, (0, 16)).replace(f"_, [%r1], {tensor.box_bytes}", "_, [%r1], 512")
    with pytest.raises(DeadlockError, match="-512 bytes pending"):
        run(body, with_map(tensor), aligned(2048), data.view(np.uint8).reshape(-1))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (("[%r0], [%d0", "[%r0+64], [%d0"), MisalignedError, "multiple of 128"),
        (("[%d0, {", "[%d0+32, {"), MisalignedError, "multiple of 64"),
        (("[%d0, {", "[%d1, {"), AsyncMisuseError, "tensor map: inner box size"),
        (("mov.b32 %r20, 0", "mov.b32 %r20, 4"), MisalignedError, "coordinate 4 of dimension 0 is 8 bytes"),
        ((".2d.", ".3d."), UnsupportedInstruction, "2 coordinates"),
        ((".tile.", ".im2col."), UnsupportedInstruction, "modifier .im2col"),
        ((".tile.", ".tile::gather4."), UnsupportedInstruction, "modifier .tile::gather4"),
        (("[%r0], [%d0", "[%r0+15872], [%d0"), OutOfBoundsError, "1024 bytes at shared"),
    ],
)
def test_misuse_is_named(change: tuple[str, str], error: type[Exception], message: str) -> None:
    data, tensor, _ = make(CASES[2])
    body = load_kernel(tensor, (0, 0)).replace("@%p0 prefetch.tensormap [%d0];", "")
    assert change[0] in body
    with pytest.raises(error, match=message):
        run(body.replace(*change), with_map(tensor), aligned(2048), data.view(np.uint8).reshape(-1))


def test_a_map_of_memory_that_is_not_there() -> None:
    data, tensor, _ = make(CASES[2])
    beyond = replace(tensor, sizes=(64, 4000))
    with pytest.raises(OutOfBoundsError, match="not mapped"):
        run(load_kernel(beyond, (0, 3000)), with_map(beyond), aligned(2048), data.view(np.uint8).reshape(-1))


def test_rank_of_map_and_instruction_differ() -> None:
    data, tensor, _ = make(CASES[2])
    body = load_kernel(tensor, (0, 0)).replace("tensor.2d", "tensor.1d").replace("{%r20, %r21}", "{%r20}")
    with pytest.raises(AsyncMisuseError, match="the tensor map is of rank 2"):
        run(body, with_map(tensor), aligned(2048), data.view(np.uint8).reshape(-1))
