# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernel's tile configurations and what follows from them.

Contract: pure numbers, no CUDA. A configuration fixes everything that the compiled kernel depends on; M, N,
K, P and rank are launch arguments, so one compiled kernel per configuration serves every call.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.slots import BLOCK_COLUMNS

TILE_K = 64
"""Elements of K per pipeline stage: 128 bytes, one row of the 128-byte swizzle."""
WARPS_PER_GROUP = 4
THREADS_PER_GROUP = 128
MATH_GROUPS = 2
"""Warpgroups that multiply, a tile each in turn."""
SHARED_BYTES = 227 * 1024
"""Shared memory that one CTA can have on SM90."""
RESERVED_BYTES = 1024
"""Kept for barriers and alignment."""
MAX_ACCUMULATORS = 160
"""Registers of a math thread that its tile may take; it has 232."""
MAX_MMA_COLUMNS = 256
"""Widest N of a wgmma instruction."""
LEAST_CHUNKS = 4
"""Chunks of peers' tiles for which shared memory is kept."""
MOST_CHUNKS = 8
"""Most of them, where pipeline stages leave more room."""
CHUNK_BYTES = 8192
"""Most bytes of a chunk: it bounds the registers of the rank-order sum."""


@dataclass(frozen=True)
class KernelConfig:
    """One member of the family.

    Attributes:
        tile_m: Rows of a tile, 64 or 128; one math warpgroup multiplies a whole tile.
        tile_n: Columns of a tile: a multiple of 32 from 64 to 256, to 160 where tile_m is 128.
        max_stages: Cap on pipeline stages.
    """

    tile_m: int
    tile_n: int
    max_stages: int = 8

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128):
            raise ArgumentError("tile_m", self.tile_m, "64 or 128")
        widest = min(MAX_MMA_COLUMNS, 2 * 64 * MAX_ACCUMULATORS // self.tile_m)
        if self.tile_n % BLOCK_COLUMNS or not 64 <= self.tile_n <= widest:
            raise ArgumentError("tile_n", self.tile_n, f"a multiple of {BLOCK_COLUMNS} from 64 to {widest}")

    @property
    def cluster(self) -> int:
        """CTAs of a cluster: none. Two that share A were hardly faster in long calls, slower in short."""
        return 1

    @property
    def row_atoms(self) -> int:
        """Instructions of 64 rows side by side that a tile takes."""
        return self.tile_m // 64

    @property
    def threads(self) -> int:
        """Threads of a CTA: the math warpgroups, then one for loading, sending and gathering."""
        return (MATH_GROUPS + 1) * THREADS_PER_GROUP

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage of A and W."""
        return (self.tile_m + self.tile_n) * TILE_K * 2

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        free = self._free_bytes - LEAST_CHUNKS * self.chunk_bytes(0)
        return min(self.max_stages, free // self.stage_bytes)

    @property
    def _free_bytes(self) -> int:
        """Shared memory for stages and chunks."""
        return SHARED_BYTES - RESERVED_BYTES - self.tile_bytes

    @property
    def staging_bytes(self) -> int:
        """Device memory in which one CTA stages tiles: none, they wait in its shared memory."""
        return 0

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in a slot."""
        return self.tile_m * self.tile_n * 2

    @property
    def ring_chunks(self) -> int:
        """Chunks of peers' tiles that may be on their way at a time.

        A chunk takes one to two microseconds to come, so they decide how fast own tiles are finished where
        there are many peers: seven take 280 KB for a tile of 128 x 160.
        """
        return min(MOST_CHUNKS, (self._free_bytes - self.stages * self.stage_bytes) // self.chunk_bytes(0))

    @property
    def gather_bytes(self) -> int:
        """Shared memory into which peers' chunks are gathered."""
        return self.ring_chunks * self.chunk_bytes(0)

    @property
    def chunk_columns(self) -> int:
        """Columns of a peer's tile that are gathered at a time, a multiple of 32."""
        return min(CHUNK_BYTES // (2 * self.tile_m), self.tile_n)

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
        return 232

    @property
    def service_registers(self) -> int:
        """Registers of a thread of the service warps."""
        return 40


FAMILY = tuple(
    KernelConfig(tile_m, tile_n)
    for tile_m, tile_n in ((128, 160), (128, 128), (64, 256), (64, 192), (64, 160), (64, 128))
)
