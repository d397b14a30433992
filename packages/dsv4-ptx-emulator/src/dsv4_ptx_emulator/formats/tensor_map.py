# SPDX-License-Identifier: Apache-2.0
"""The 128 opaque bytes of a tensor map (CUtensorMap) of a tiled tensor, decoded and encoded.

The layout is not documented. It was read off `cuTensorMapEncodeTiled` of driver 580.159 on an H200 (every
data type, swizzle, interleave, L2 promotion, fill, ranks 1 to 5, extreme sizes) and off what CuTe DSL 4.8
writes inline for sm_90a; tests/data/tensor_maps.json holds both sweeps. As 32-bit little-endian words:

| word | bits | meaning |
| --- | --- | --- |
| 0, 1 | | global address |
| 2 | 4-6 | rank - 1 |
| 2 | 7-10 | element type, in the hardware's numbering (`_TYPES`) |
| 2 | 11-12 | interleave: none, 16B, 32B |
| 2 | 13-14 | swizzle: none, 32B, 64B, 128B |
| 2 | 15 | out-of-bounds elements are NaN instead of zero |
| 2 | 16 | TF32 |
| 2 | 17-18 | L2 promotion |
| 2 | 19-20 | what the swizzle exchanges: not 16-byte chunks if not zero |
| 3-6 | | strides of dimensions 1 to 4 / 16, low 32 bits |
| 7 | 4 each | the same strides' bits 32 to 35 |
| 8-12 | | sizes - 1, in elements |
| 13 | 3 each | traversal strides - 1 |
| 13 | 24-31 | box size - 1 of dimension 0 |
| 14 | 8 each | box sizes - 1 of dimensions 1 to 4 |

Bytes 64 to 127 are no part of it: the driver writes something there, the DSL leaves them as they were, and an
H200 copies the same with other bytes there. Two bits of word 2 are set by the DSL and never by the driver: 1
always, 21 where a dimension above the first is longer than 1. An H200 copies the same with and without them,
so they are ignored; everything else that is not in the table is an error.

Refused by name: interleave, traversal strides other than 1, im2col, sub-byte elements, types that change
values on the way (TF32 rounds, FTZ flushes) and swizzles of units other than 16 bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NoReturn

from dsv4_ptx_emulator.errors import AsyncMisuseError
from dsv4_ptx_emulator.formats import swizzle
from dsv4_ptx_emulator.formats.swizzle import Swizzle

MAP_BYTES = 128
"""Size of a tensor map."""

PAYLOAD_BYTES = 64
"""How many of them mean something."""

_TYPES = {
    0: ("u8", 1),
    1: ("u16", 2),
    2: ("u32", 4),
    3: ("s32", 4),
    4: ("u64", 8),
    5: ("s64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
}
_SWIZZLES = (swizzle.NONE, swizzle.S32, swizzle.S64, swizzle.S128)
_IGNORED = 1 << 1 | 1 << 21


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor in global memory and the box that one copy moves.

    Attributes:
        address: Of element zero.
        sizes: Elements per dimension, innermost first.
        strides: Bytes from element to element, per dimension; the innermost is the element's size.
        box: Elements of the box per dimension.
        element: Type name: "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64" or "bf16".
        element_bytes: Its size.
        swizzle: How the box lies in shared memory.
        nan_fill: Whether elements outside of the tensor arrive as NaN rather than zero.
        promotion: L2 promotion in bytes: 0, 64, 128, 256.
    """

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: str
    element_bytes: int
    swizzle: Swizzle
    nan_fill: bool = False
    promotion: int = 0

    @property
    def rank(self) -> int:
        """Number of dimensions, 1 to 5."""
        return len(self.sizes)

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy moves, those outside of the tensor included."""
        return prod(self.box) * self.element_bytes


@lru_cache(maxsize=1024)
def decode_tensor_map(data: bytes) -> TensorMap:
    """Read a tensor map.

    Args:
        data: Its first 64 bytes at least.

    Raises:
        AsyncMisuseError: A field has a value that is not understood, is refused (see the module), or that
            the ISA and the driver API forbid; the field is named.
    """
    words = struct.unpack_from("<16I", data)
    control = words[2] & ~_IGNORED
    rank = (control >> 4 & 0b111) + 1
    if rank > 5:
        _bad("rank", rank, "1 to 5")
    if control & 0b1111:
        _bad("word 2, bits 0 to 3", control & 0b1111, "0")
    if control >> 22:
        _bad("word 2, bits 22 to 31", control >> 22, "0")
    if control >> 11 & 0b11:
        _bad("interleave", control >> 11 & 0b11, "0 (none)")
    if control >> 19 & 0b11:
        _bad("swizzle atom", control >> 19 & 0b11, "0 (16 bytes)")
    if control >> 16 & 1:
        _bad("element type", "tf32", "one that is copied unchanged")
    if (code := control >> 7 & 0b1111) not in _TYPES:
        _bad("element type", code, "one that is copied unchanged")
    name, size = _TYPES[code]
    address = words[0] | words[1] << 32
    if address & 15:
        _bad("global address", hex(address), "a multiple of 16")
    strides = [size]
    for dimension in range(4):
        stride = (words[3 + dimension] | (words[7] >> 4 * dimension & 0xF) << 32) << 4
        if dimension < rank - 1:
            strides.append(stride)
        elif stride:
            _bad(f"stride of dimension {dimension + 1}", stride, f"0 for a tensor of rank {rank}")
    if words[7] >> 16:
        _bad("word 7, bits 16 to 31", words[7] >> 16, "0")
    traversal = [words[13] >> 3 * dimension & 0b111 for dimension in range(5)]
    if any(traversal):
        _bad("traversal strides", [value + 1 for value in traversal], "1 each")
    if words[13] >> 15 & 0x1FF:
        _bad("word 13, bits 15 to 23", words[13] >> 15 & 0x1FF, "0")
    if words[15]:
        _bad("word 15", words[15], "0")
    box = [(words[13] >> 24) + 1] + [(words[14] >> 8 * dimension & 0xFF) + 1 for dimension in range(4)]
    for dimension in range(rank, 5):
        if words[8 + dimension] or box[dimension] != 1:
            _bad(f"size or box of dimension {dimension}", (words[8 + dimension] + 1, box[dimension]), "1")
    pattern = _SWIZZLES[control >> 13 & 0b11]
    inner = box[0] * size
    if inner % 16:
        _bad("inner box size in bytes", inner, "a multiple of 16")
    if pattern.bits and inner > pattern.row_bytes:
        _bad("inner box size in bytes", inner, f"at most {pattern.row_bytes} with swizzle {pattern.name}")
    nan_fill = bool(control >> 15 & 1)
    if nan_fill and name[0] in "us":
        _bad("out-of-bounds fill", "NaN", f"zero for elements of type {name}")
    return TensorMap(
        address,
        tuple(size + 1 for size in words[8 : 8 + rank]),
        tuple(strides),
        tuple(box[:rank]),
        name,
        size,
        pattern,
        nan_fill,
        (0, 64, 128, 256)[control >> 17 & 0b11],
    )


def encode_tensor_map(tensor: TensorMap) -> bytes:
    """The 128 bytes of a tensor map, for programs that are launched without a host function.

    Args:
        tensor: What `decode_tensor_map` returns for the result.

    Raises:
        AsyncMisuseError: It cannot be expressed, or `decode_tensor_map` would refuse it.
    """
    rank = tensor.rank
    codes = {name: code for code, (name, _) in _TYPES.items()}
    words = [0] * 32
    words[0], words[1] = tensor.address & 0xFFFFFFFF, tensor.address >> 32
    words[2] = (
        rank - 1 << 4
        | codes[tensor.element] << 7
        | _SWIZZLES.index(tensor.swizzle) << 13
        | int(tensor.nan_fill) << 15
        | (0, 64, 128, 256).index(tensor.promotion) << 17
    )
    for dimension, stride in enumerate(tensor.strides[1:]):
        if stride % 16 or stride >> 40:
            _bad(f"stride of dimension {dimension + 1}", stride, "a multiple of 16 below 2^40")
        words[3 + dimension] = stride >> 4 & 0xFFFFFFFF
        words[7] |= (stride >> 36) << 4 * dimension
    for dimension, (size, box) in enumerate(zip(tensor.sizes, tensor.box, strict=True)):
        if not (1 <= size <= 1 << 32 and 1 <= box <= 256):
            _bad(f"size or box of dimension {dimension}", (size, box), "1 to 2^32 and 1 to 256")
        words[8 + dimension] = size - 1
        if dimension:
            words[14] |= box - 1 << 8 * (dimension - 1)
        else:
            words[13] = box - 1 << 24
    data = struct.pack("<32I", *words)
    if decode_tensor_map(data) != tensor:
        _bad("strides", tensor.strides, "the element's size first")
    return data


def _bad(field: str, value: object, expected: str) -> NoReturn:
    raise AsyncMisuseError(f"tensor map: {field} is {value}, expected {expected}")
