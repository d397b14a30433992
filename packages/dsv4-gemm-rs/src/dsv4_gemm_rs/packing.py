# SPDX-License-Identifier: Apache-2.0
"""MXFP8 weights packed for a kernel that converts them in registers: E4M3 codes in the order of its lanes.

Contract: `pack` is a bijection of a weight [N, K] and its scales, N padded to a multiple of 128 with zeros. A
block holds 128 features by 64 elements of K, 8704 bytes that a single bulk copy brings in:

    8192 bytes of codes    [4 steps of 16 along K][128 threads][4 rows][4 elements]
     512 bytes of factors  [2 halves of 32 along K][4 warps][8 lanes][4 rows] BF16

Blocks are ordered [N / 128, K / 64]. Thread 32·w + 4·r + q of a math warpgroup holds, as A of
`wgmma.m64nNk16` (PTX ISA, "Register fragments for wgmma.mma_async"), rows r and r + 8 of warp w and elements
2·q, 2·q + 1, 2·q + 8, 2·q + 9 of K, in each of two MMAs. Its four rows m = 0..3 are features

    32·w + 8·m + r

of the block: so the four 8 x 8 matrices that a warp's accumulators make of eight tokens, transposed, are the
tokens' 32 neighbouring features. Sixteen bytes a step bring all of a thread's codes, without bank conflicts.

A code is E4M3's s eeee mmm turned into s emmm eee: the bits of a BF16 value's two bytes, s 0000 eee and
emmm 0000, then stand where a mask, and a mask after one shift, find them, and two byte permutations make four
values. What comes out is the E4M3 value times 2^-120, subnormals included. The factor 2^(scale - 7) brings it
to size; it is beyond BF16 from scale byte 135 on. Then the factors of the whole weight are 2^(scale - 127),
and the kernel multiplies by 2^120 first (`split`).

A NaN among the codes cannot be told from 480 by such bits. As a NaN weight makes all of its feature's outputs
NaN, the factor of its block is NaN instead.

Rejected: factors as bytes, half as long, which take two more instructions each and cases for NaN and byte 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP_FEATURES = 128
"""Features of a block."""
BLOCK_K = 64
"""Elements of K of a block."""
CODE_BYTES = GROUP_FEATURES * BLOCK_K
FACTOR_BYTES = GROUP_FEATURES * BLOCK_K // 32 * 2
BLOCK_BYTES = CODE_BYTES + FACTOR_BYTES
"""Bytes of a block; 1.0625 per element."""
LARGEST_WHOLE_SCALE = 134
"""Largest scale byte whose factor is one BF16 number."""
_NAN = 0x7F
_BF16_NAN = 0x7FC0


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k] in packed form.

    Attributes:
        blocks: Bytes [ceil(n / 128), k / 64, 8704].
        n, k: Shape of the weight.
        split: Whether the kernel multiplies by 2^120 and then by the factor.
    """

    blocks: torch.Tensor
    n: int
    k: int
    split: bool


def packed_bytes(n: int, k: int) -> int:
    """Bytes of a packed weight [n, k]."""
    return -(-n // GROUP_FEATURES) * (k // BLOCK_K) * BLOCK_BYTES


def pack(data: torch.Tensor, scale: torch.Tensor, split: bool = False) -> PackedWeight:
    """Pack E4M3 `data` [N, K] and its E8M0 bytes `scale` [N, K/32]; K a multiple of 64.

    `split` has the factors split even where no scale needs it.
    """
    n, k = data.shape
    split = split or bool((scale[scale != 255] > LARGEST_WHOLE_SCALE).any())
    codes, factors = _padded(data.view(torch.uint8)), _padded(scale)
    groups, steps = codes.shape[0] // GROUP_FEATURES, k // BLOCK_K
    broken = _padded(_nan_blocks(data.view(torch.uint8)))
    turned = (codes & 0x80) | ((codes & 0x0F) << 3) | ((codes >> 4) & 0x07)
    # feature = 32 w + 8 m + r; element of K = 16 s + 8 h + 2 q + e
    turned = turned.view(groups, 4, 4, 8, steps, 4, 2, 4, 2)
    turned = turned.permute(0, 4, 5, 1, 3, 7, 2, 6, 8).reshape(groups, steps, CODE_BYTES)
    exponent = factors.to(torch.int16) + (0 if split else 120)
    bits = torch.where(exponent == 0, 0x40, exponent << 7)
    bits = torch.where(broken | (factors == 255), _BF16_NAN, bits).to(torch.int16)
    bits = bits.view(groups, 4, 4, 8, steps, 2).permute(0, 4, 5, 1, 3, 2)
    tail = bits.reshape(groups, steps, FACTOR_BYTES // 2).view(torch.uint8)
    return PackedWeight(torch.cat([turned, tail], dim=2), n, k, split)


def unpack(packed: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """The E4M3 data [N, K] and E8M0 bytes [N, K/32]; a block with a NaN is all NaN, of scale byte 255."""
    n, k, blocks = packed.n, packed.k, packed.blocks
    groups, steps = blocks.shape[:2]
    turned = blocks[..., :CODE_BYTES].reshape(groups, steps, 4, 4, 8, 4, 4, 2, 2)
    turned = turned.permute(0, 3, 6, 4, 1, 2, 7, 5, 8).reshape(groups * GROUP_FEATURES, k)
    codes = (turned & 0x80) | ((turned >> 3) & 0x0F) | ((turned & 0x07) << 4)
    bits = blocks[..., CODE_BYTES:].contiguous().view(torch.int16)
    bits = bits.view(groups, steps, 2, 4, 8, 4).permute(0, 3, 5, 4, 1, 2).reshape(-1, k // 32)
    exponent = (bits >> 7) - (0 if packed.split else 120)
    scale = torch.where(bits == _BF16_NAN, 255, exponent).to(torch.uint8)
    broken = (scale == 255).repeat_interleave(32, dim=1)
    codes = torch.where(broken, _NAN, codes)
    return codes[:n].contiguous().view(torch.float8_e4m3fn), scale[:n].contiguous()


def _padded(rows: torch.Tensor) -> torch.Tensor:
    missing = -rows.shape[0] % GROUP_FEATURES
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _nan_blocks(codes: torch.Tensor) -> torch.Tensor:
    nan = (codes & 0x7F) == _NAN
    return nan.view(codes.shape[0], -1, 32).any(dim=2)
