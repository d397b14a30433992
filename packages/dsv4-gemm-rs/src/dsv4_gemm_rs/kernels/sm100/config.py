# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernel's tile configurations, and what each makes of shared and tensor memory.

Contract: pure numbers, no CUDA. A configuration fixes everything that the compiled kernel depends on; M, N,
K, P and rank are launch arguments, so one compiled kernel per configuration serves every call.

A tile is what one CTA finishes: 128 rows, since tensor memory has 128 lanes. A pair of CTAs multiplies the
tiles of two consecutive row tiles with one MMA (2-SM: M = 256), so the exchange, the schedule and the slots
know a pair as a cluster of two that takes consecutive row tiles, exactly as on SM90.

Tensor memory (512 columns) holds two accumulators, so that a tile is multiplied while the one before it is
drained, and **the scales of every pipeline stage**. Rejected: one set of scale columns, written anew for
every stage, as others do. It saves up to 48 columns, but rests on a copy into the columns staying behind the
MMA that was issued before it and still reads them. PTX orders `tcgen05.cp` before a later `tcgen05.mma`, and
MMAs of one shape into one accumulator among themselves, but no MMA before a later copy (ISA 9.4, section
9.7.18.6.2). With columns for each stage the stage's own barriers give the order: its MMAs are
committed to `empty`, the producers wait for that before they complete `full`, and the copy waits for `full`.

The exchange is a constant of the kernel, too (`protocol.layout.Strategy`). Where sums are read through
multicast there are no pieces of peers' tiles and nothing is staged, so shared memory holds more stages, and
`READERS` warps take the place of the one that loads peers' pieces.

Two accumulators of 256 columns leave no room for scales, so they share `OVERLAP` columns: the epilogue drains
these first, in both, and hands them back at once; the next tile's MMA then starts while the rest is drained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.layout import Strategy
from dsv4_symm_mem.protocol.slots import BLOCK_COLUMNS, BOUNCES, STAGED_TILES

TILE_M = 128
"""Rows of a tile: the lanes of tensor memory."""
STAGE_K_BYTES = 128
"""Bytes of K per pipeline stage: one row of the 128-byte swizzle."""
MMA_K_BYTES = 32
"""Bytes of K per MMA instruction, for both kinds of operands."""
ATOM_BYTES = 512
"""A scale atom: 128 rows by 128 elements of K, see `quantize.layout`."""
ATOM_COLUMNS = 4
"""Columns of tensor memory that a scale atom takes."""
CHUNK_COLUMNS = 64
"""Columns that the epilogue takes out of tensor memory at a time."""
OVERLAP = CHUNK_COLUMNS
"""Columns that two accumulators share where both do not fit beside the scales."""
TENSOR_COLUMNS = 512
"""Columns of an SM's tensor memory."""
SHARED_BYTES = 227 * 1024
"""Shared memory that one CTA can have on SM100."""
RESERVED_BYTES = 2048
"""Kept for barriers and alignment."""
PIECES = 4
"""Pieces of peers' tiles, 128 rows by 32 columns, that may be under way to the epilogue."""
PIECE_BYTES = TILE_M * BLOCK_COLUMNS * 2
EPILOGUE_WARPS = 4
WARPS = EPILOGUE_WARPS + 6
"""The epilogue's, and one each for operands, scales, multiplying, peers' pieces, forwarding and tidying."""
READERS = 4
"""Warps that read sums through multicast: enough for the loads in flight that a link's latency wants."""
GATHERERS = 2
"""Those of them that copy the peers' sums, in an all-reduce."""


class Operand(StrEnum):
    """What A and W are made of."""

    MXFP8 = "mxfp8"
    BF16 = "bf16"
    FP8_WEIGHT = "fp8-weight"
    """BF16 A and packed W (`dsv4_gemm_rs.packing`), where tensor cores take no block scales."""


@dataclass(frozen=True)
class KernelConfig:
    """One member of the family.

    Attributes:
        operand: MXFP8 (E4M3, E8M0 scales of 32) or BF16.
        tile_n: Columns of a tile: 64, 128 or 256.
        cluster: CTAs that multiply together, 1 or 2; they take consecutive row tiles.
        max_stages: Cap on pipeline stages.
        strategy: How partials reach their owner.
    """

    operand: Operand
    tile_n: int
    cluster: int = 1
    max_stages: int = 8
    strategy: Strategy = Strategy.PUSH

    def __post_init__(self) -> None:
        if self.tile_n not in (64, 128, 256):
            raise ArgumentError("tile_n", self.tile_n, "64, 128 or 256")
        # Each CTA of a pair holds half of W's rows, whole atoms of 8 rows of the swizzle in any case.
        if self.cluster not in (1, 2):
            raise ArgumentError("cluster", self.cluster, "1 or 2")

    @property
    def scaled(self) -> bool:
        """Whether operands have scales."""
        return self.operand is Operand.MXFP8

    @property
    def pushes(self) -> bool:
        """Whether tiles are sent to their owner; else they stay, and owners read sums."""
        return self.strategy is Strategy.PUSH

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return TILE_M

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * (WARPS if self.pushes else WARPS - 1 + READERS)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of A and W."""
        return 1 if self.scaled else 2

    @property
    def stage_k(self) -> int:
        """Elements of K per pipeline stage."""
        return STAGE_K_BYTES // self.element_bytes

    @property
    def w_rows(self) -> int:
        """Rows of W that one CTA holds: all of the tile's, or half where two multiply together."""
        return self.tile_n // self.cluster

    @property
    def w_atoms(self) -> int:
        """Scale atoms of W in a stage; each CTA of a pair has those of all the tile's columns."""
        return max(self.tile_n // 128, 1) if self.scaled else 0

    @property
    def a_stage_bytes(self) -> int:
        """Bytes of A in one stage."""
        return TILE_M * STAGE_K_BYTES

    @property
    def w_stage_bytes(self) -> int:
        """Bytes of W in one stage."""
        return self.w_rows * STAGE_K_BYTES

    @property
    def scale_stage_bytes(self) -> int:
        """Bytes of scales in one stage: A's atom, then W's."""
        return (1 + self.w_atoms) * ATOM_BYTES if self.scaled else 0

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage."""
        return self.a_stage_bytes + self.w_stage_bytes + self.scale_stage_bytes

    @property
    def bounce_bytes(self) -> int:
        """Shared memory through which staged tiles are sent."""
        return BOUNCES * PIECE_BYTES if self.pushes else 0

    @property
    def piece_bytes(self) -> int:
        """Shared memory through which peers' tiles come."""
        return PIECES * PIECE_BYTES if self.pushes else 0

    @property
    def stages(self) -> int:
        """Pipeline stages: what shared memory holds, and tensor memory has scale columns for."""
        free = SHARED_BYTES - RESERVED_BYTES - self.bounce_bytes - self.piece_bytes
        stages = min(self.max_stages, free // self.stage_bytes)
        if self.scaled:
            accumulators = min(2 * self.tile_n, TENSOR_COLUMNS - OVERLAP)
            stages = min(stages, (TENSOR_COLUMNS - accumulators) // self.scale_stage_columns)
        return stages

    @property
    def scales_ahead(self) -> int:
        """Stages whose scales are under way and not yet announced, see `scales`."""
        return self.stages - 2

    @property
    def scale_stage_columns(self) -> int:
        """Columns of tensor memory for one stage's scales."""
        return (1 + self.w_atoms) * ATOM_COLUMNS if self.scaled else 0

    @property
    def overlapped(self) -> bool:
        """Whether the two accumulators share columns."""
        return 2 * self.tile_n + self.stages * self.scale_stage_columns > TENSOR_COLUMNS

    @property
    def accumulator_stride(self) -> int:
        """Columns from the first accumulator to the second."""
        return self.tile_n - OVERLAP if self.overlapped else self.tile_n

    @property
    def accumulator_barriers(self) -> int:
        """Barriers of a kind that accumulators need: overlapped ones take turns on a single one."""
        return 1 if self.overlapped else 2

    @property
    def scale_column(self) -> int:
        """First column of the scales."""
        return self.accumulator_stride + self.tile_n

    @property
    def tensor_columns(self) -> int:
        """Columns to allocate: a power of two, at least 32."""
        used = self.scale_column + self.stages * self.scale_stage_columns
        return max(32, 1 << (used - 1).bit_length())

    @property
    def chunks(self) -> int:
        """Chunks of a tile in the epilogue."""
        return self.tile_n // CHUNK_COLUMNS

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in a slot."""
        return TILE_M * self.tile_n * 2

    @property
    def staging_bytes(self) -> int:
        """Device memory in which one CTA stages tiles."""
        return STAGED_TILES * self.tile_bytes if self.pushes else 0


FAMILY = tuple(
    KernelConfig(operand, tile_n, cluster)
    for operand in (Operand.MXFP8, Operand.BF16)
    for tile_n, cluster in ((256, 2), (128, 2), (128, 1), (64, 1))
)
MULTICAST_FAMILY = tuple(replace(config, strategy=Strategy.MULTICAST) for config in FAMILY)
