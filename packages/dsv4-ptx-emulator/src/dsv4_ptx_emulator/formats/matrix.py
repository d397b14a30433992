# SPDX-License-Identifier: Apache-2.0
"""Shared-memory matrix descriptors of wgmma, and where the elements of the matrix lie.

A descriptor (PTX ISA 9.4, section 9.7.17.5.1.2.2) says where a matrix of `rows` (M or N) by K starts and by
two strides how its core matrices follow each other. A core matrix is 8 rows of 16 bytes. With T elements in
16 bytes and offsets in bytes, the element (row, k) of a matrix is, before swizzling of the address,

* K major: row%8 · W + row/8 · SBO + k-chunk, with W the swizzle's row width; the k-chunk k/T is 16 bytes
  further in a swizzled row, LBO further without swizzle;
* row (M or N) major: k%8 · W + k/8 · SBO, plus row chunks of 16 bytes inside the swizzled row, LBO for each
  further W bytes of rows. Without swizzle the roles change: row chunks are SBO apart and k/8 is LBO apart.

These are the canonical layouts of CuTe's documentation of its SM90 MMA traits, stated in bytes. The sum is
added to the start address and only then swizzled.

Rejected: reading the base offset (bits 49 to 51), for matrices that start off the swizzle's period. Nothing
we run sets it, and what hardware does with one is not something that could be checked here; a non-zero one is
an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4_ptx_emulator.errors import AsyncMisuseError
from dsv4_ptx_emulator.formats import swizzle
from dsv4_ptx_emulator.formats.swizzle import Swizzle

_SWIZZLES = (swizzle.NONE, swizzle.S128, swizzle.S64, swizzle.S32)
_FIELD = (1 << 14) - 1


@dataclass(frozen=True)
class MatrixDescriptor:
    """A decoded wgmma descriptor.

    Attributes:
        start: Byte address in the shared window, a multiple of 16 below 2^18.
        leading: Leading-dimension byte offset (LBO).
        stride: Stride-dimension byte offset (SBO).
        swizzle: The layout's swizzle.
    """

    start: int
    leading: int
    stride: int
    swizzle: Swizzle


@lru_cache(maxsize=4096)
def decode_descriptor(bits: int) -> MatrixDescriptor:
    """Read a 64-bit wgmma matrix descriptor (section 9.7.17.5.1.2.2).

    Raises:
        AsyncMisuseError: A bit that the ISA reserves is set, or the base offset is not zero.
    """
    start, leading, stride = (bits & _FIELD, bits >> 16 & _FIELD, bits >> 32 & _FIELD)
    reserved = bits & ~(_FIELD | _FIELD << 16 | _FIELD << 32 | 0b111 << 49 | 0b11 << 62)
    if reserved:
        raise AsyncMisuseError(f"matrix descriptor 0x{bits:016x} sets reserved bits 0x{reserved:x}")
    if bits >> 49 & 0b111:
        raise AsyncMisuseError(
            f"matrix descriptor 0x{bits:016x} has base offset {bits >> 49 & 0b111}; "
            "only matrices that are aligned to their swizzle's period are emulated"
        )
    return MatrixDescriptor(start << 4, leading << 4, stride << 4, _SWIZZLES[bits >> 62])


@lru_cache(maxsize=1024)
def chunk_addresses(
    start: int,
    leading: int,
    stride: int,
    bits: int,
    rows: int,
    depth: int,
    row_major: bool,
    element_bytes: int,
) -> npt.NDArray[np.int64]:
    """Swizzled addresses of a matrix's 16-byte chunks.

    Args:
        start: Byte address of the matrix.
        leading: LBO in bytes.
        stride: SBO in bytes.
        bits: The swizzle's `bits`.
        rows: M or N.
        depth: K, in elements.
        row_major: Whether 16-byte chunks run along the rows' dimension (M or N major, "transposed").
        element_bytes: 1, 2 or 4.

    Returns:
        int64: `[rows, K chunks]` if K major; `[depth, row chunks]` if row major.
    """
    pattern = Swizzle(bits)
    per_chunk = 16 // element_bytes
    width = pattern.row_bytes
    if not row_major:
        row = np.arange(rows)[:, None]
        chunk = np.arange(depth // per_chunk)[None, :]
        offset = row % 8 * width + row // 8 * stride
        # A swizzled row holds all of a K step, so LBO has no meaning there.
        offset = offset + chunk * (16 if bits else leading)
    else:
        k = np.arange(depth)[:, None]
        chunk = np.arange(-(-rows // per_chunk))[None, :]
        if bits:
            per_row = width // 16
            offset = k % 8 * width + k // 8 * stride + chunk % per_row * 16 + chunk // per_row * leading
        else:
            offset = k % 8 * 16 + k // 8 * leading + chunk * stride
    addresses = pattern.apply((start + offset).astype(np.int64)).astype(np.int64)
    addresses.setflags(write=False)
    return addresses


def descriptor_chunks(
    descriptor: MatrixDescriptor, rows: int, depth: int, row_major: bool, element_bytes: int
) -> npt.NDArray[np.int64]:
    """`chunk_addresses` of a descriptor."""
    return chunk_addresses(
        descriptor.start,
        descriptor.leading,
        descriptor.stride,
        descriptor.swizzle.bits,
        rows,
        depth,
        row_major,
        element_bytes,
    )


def elements_from_chunks(
    chunks: npt.NDArray[Any], rows: int, depth: int, row_major: bool, storage: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Turn gathered chunks into the matrix.

    Args:
        chunks: uint8 `[..., 16]` as gathered at `chunk_addresses`.
        rows: M or N.
        depth: K.
        row_major: As for `chunk_addresses`.
        storage: Unsigned type of one element.

    Returns:
        `[rows, depth]` of `storage`.
    """
    flat = np.ascontiguousarray(chunks).reshape(chunks.shape[0], -1).view(storage)
    return flat[:, :depth] if not row_major else flat[:, :rows].T
