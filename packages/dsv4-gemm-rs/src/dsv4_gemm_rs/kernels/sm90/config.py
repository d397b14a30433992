# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernel's tile configurations and what follows from them.

Contract: pure numbers, no CUDA. A configuration fixes everything that the compiled kernel depends on; M, N,
K, P and rank are launch arguments, so one compiled kernel per configuration serves every call.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.slots import BLOCK_COLUMNS, BOUNCES, STAGED_TILES

TILE_K = 64
"""Elements of K per pipeline stage: 128 bytes, one row of the 128-byte swizzle."""
WARPS_PER_GROUP = 4
THREADS_PER_GROUP = 128
SHARED_BYTES = 227 * 1024
"""Shared memory that one CTA can have on SM90."""
RESERVED_BYTES = 1024
"""Kept for barriers and alignment."""
MAX_CHUNK_COLUMNS = 128
"""Most columns that a chunk of a peer's tile spans: it bounds the registers of the rank-order sum."""
MAX_MMA_COLUMNS = 256
"""Widest N of a wgmma instruction."""


@dataclass(frozen=True)
class KernelConfig:
    """One member of the family.

    Attributes:
        tile_m: Rows of a tile; 64 for each math warpgroup.
        tile_n: Columns of a tile: a multiple of 32 up to 256, or 320.
        cluster: CTAs of a cluster; they take consecutive row tiles and share W by multicast.
        max_stages: Cap on pipeline stages.
    """

    tile_m: int
    tile_n: int
    cluster: int = 1
    max_stages: int = 8

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128):
            raise ArgumentError("tile_m", self.tile_m, "64 or 128")
        if self.tile_n % 32 or not (64 <= self.tile_n <= MAX_MMA_COLUMNS or self.tile_n == 320):
            raise ArgumentError("tile_n", self.tile_n, "a multiple of 32 from 64 to 256, or 320")
        # Each CTA of a cluster loads whole 32-row blocks of W's permutation.
        if self.cluster not in (1, 2) or self.tile_n % (32 * self.cluster):
            raise ArgumentError("cluster", self.cluster, "1, or 2 where tile_n is a multiple of 64")

    @property
    def math_groups(self) -> int:
        """Warpgroups that multiply."""
        return self.tile_m // 64

    @property
    def mma_columns(self) -> int:
        """N of one wgmma: a wider tile takes two of half its width side by side."""
        return self.tile_n if self.tile_n <= MAX_MMA_COLUMNS else self.tile_n // 2

    @property
    def threads(self) -> int:
        """Threads of a CTA: the math warpgroups, then one for loading and publishing."""
        return (self.math_groups + 1) * THREADS_PER_GROUP

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage of A and W."""
        return (self.tile_m + self.tile_n) * TILE_K * 2

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        free = SHARED_BYTES - RESERVED_BYTES - self.bounce_bytes
        return min(self.max_stages, free // self.stage_bytes)

    @property
    def bounce_bytes(self) -> int:
        """Shared memory through which staged tiles are sent."""
        return BOUNCES * self.tile_m * BLOCK_COLUMNS * 2

    @property
    def staging_bytes(self) -> int:
        """Device memory in which one CTA stages tiles."""
        return STAGED_TILES * self.tile_bytes

    @property
    def w_stage_bytes(self) -> int:
        """Bytes of one stage of W, which also takes a chunk."""
        return self.tile_n * TILE_K * 2

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in a slot."""
        return self.tile_m * self.tile_n * 2

    @property
    def chunk_columns(self) -> int:
        """Columns of a peer's tile that travel through one stage at a time, a multiple of 32."""
        fitting = self.w_stage_bytes // (2 * self.tile_m) // 32 * 32
        registers = MAX_CHUNK_COLUMNS if self.tile_n <= MAX_MMA_COLUMNS else MAX_CHUNK_COLUMNS // 2
        return min(fitting, self.tile_n, registers)

    @property
    def chunks(self) -> int:
        """Chunks of a tile."""
        return -(-self.tile_n // self.chunk_columns)

    def chunk_width(self, chunk: int) -> int:
        """Columns of chunk `chunk`; the last may be narrower."""
        return min(self.chunk_columns, self.tile_n - chunk * self.chunk_columns)

    def chunk_bytes(self, chunk: int) -> int:
        """Bytes of chunk `chunk`."""
        return self.tile_m * self.chunk_width(chunk) * 2

    @property
    def math_registers(self) -> int:
        """Registers of a math thread."""
        return 232 if self.math_groups == 2 else 0

    @property
    def service_registers(self) -> int:
        """Registers of a loading or publishing thread."""
        return 40 if self.math_groups == 2 else 0


# A cluster of two shares W by multicast. It compiles and is tested, and is not in the family: half of each
# cluster idles where an owner has an odd number of row tiles, and no gain has been measured that pays for it.
FAMILY = tuple(
    KernelConfig(tile_m, tile_n, cluster)
    for tile_m, tile_n, cluster in (
        (128, 320, 1),
        (128, 256, 1),
        (128, 192, 1),
        (128, 160, 1),
        (128, 128, 1),
        (64, 256, 1),
        (64, 192, 1),
        (64, 160, 1),
        (64, 128, 1),
    )
)
