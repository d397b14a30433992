# SPDX-License-Identifier: Apache-2.0
"""The product's tiles, and what follows from them. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs.kernels.sm90.config import RESERVED_BYTES, SHARED_BYTES, KernelConfig
from dsv4_gemm_rs.quantize.layout import ATOM_BYTES
from dsv4_gemm_rs.quantize.rule import BLOCK

TILE_M = 128
GROUP_ROWS = 64
"""Rows of a math warpgroup."""
TILE_K = 128
"""Elements of K per stage: a row of the 128-byte swizzle, an atom of scales."""
STEPS = TILE_K // BLOCK
"""Instructions' K of a stage: a block of elements that share a scale."""
MAX_REGISTERS = 192
"""Of a math thread, for accumulators and products; it has 232."""


@dataclass(frozen=True)
class ScaledConfig:
    """One way to divide the work.

    Attributes:
        tile_n: Columns of a tile: 128, 192 or 256.
        piece_n: Columns multiplied at a time, a divisor of it and a multiple of 32.
        temps: Products of a warpgroup under way or being promoted, 1 or 2.
    """

    tile_n: int
    piece_n: int
    temps: int

    def __post_init__(self) -> None:
        if self.tile_n not in (128, 192, 256):
            raise ArgumentError("tile_n", self.tile_n, "128, 192 or 256")
        if self.piece_n % BLOCK or self.tile_n % self.piece_n:
            raise ArgumentError("piece_n", self.piece_n, f"a multiple of {BLOCK} that divides tile_n")
        if self.temps not in (1, 2):
            raise ArgumentError("temps", self.temps, "1 or 2")
        registers = (self.tile_n + self.temps * self.piece_n) // 2
        if registers > MAX_REGISTERS:
            raise ArgumentError("temps", self.temps, f"at most {MAX_REGISTERS} registers, not {registers}")

    @property
    def pieces(self) -> int:
        """Pieces of a tile's width."""
        return self.tile_n // self.piece_n

    @property
    def column_blocks(self) -> int:
        """Scales across a tile."""
        return self.tile_n // BLOCK

    @property
    def w_scale_bytes(self) -> int:
        """W's scales of a stage."""
        return STEPS * self.column_blocks * 4

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return (TILE_M + self.tile_n) * TILE_K + ATOM_BYTES + self.w_scale_bytes

    @property
    def stages(self) -> int:
        """Stages that fit."""
        return min(8, (SHARED_BYTES - 2 * RESERVED_BYTES) // self.stage_bytes)

    @property
    def rows(self) -> KernelConfig:
        """A math warpgroup's rows of a tile as the BF16 kernel's tile: accumulators, threads, registers."""
        return KernelConfig(GROUP_ROWS, self.tile_n)


CONFIGS = (
    ScaledConfig(256, 128, 1),
    ScaledConfig(256, 64, 2),
    ScaledConfig(192, 192, 1),
    ScaledConfig(192, 96, 2),
    ScaledConfig(128, 128, 2),
    ScaledConfig(128, 128, 1),
)
