# SPDX-License-Identifier: Apache-2.0
"""Tile configurations of the SM90 kernel that keeps weights in FP8, and what follows from them.

Contract: pure numbers, no CUDA, as `sm90.config`. Operands are swapped: features (rows of W) are the MMA's M,
tokens its N. A math warpgroup always multiplies 128 features, two MMAs of 64, so that each of its warps
holds all of a slot's 32 columns; its tokens are what varies. The two warpgroups of a CTA stand side by side
along the features (a tile of 256) or along the tokens (128; both convert the same weights then).

Rejected: 64 features to a warpgroup, which would allow 256 tokens, but leaves a lane with 8 bytes of a
token's neighbouring features instead of 16; tiles of 320 features, five MMAs for two warpgroups, for the same
reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.slots import BLOCK_COLUMNS

from dsv4_gemm_rs.kernels.sm90.config import RESERVED_BYTES, SHARED_BYTES, THREADS_PER_GROUP, TILE_K
from dsv4_gemm_rs.packing import BLOCK_BYTES, GROUP_FEATURES

MATH_GROUPS = 2
"""Warpgroups that multiply."""
UNITS = MATH_GROUPS * 4
"""Math warps; each holds 32 features of its warpgroup's tokens."""
CHUNK_ACCUMULATORS = 160
"""Most tokens of a warpgroup that leave registers for a rank-order sum of 16 tokens at a time; 8 if more."""
LEAST_BYTES = 16384
"""Shared memory that is kept for chunks of peers' tiles."""
MOST_CHUNKS = 8
"""Most chunks that it holds, where pipeline stages leave more."""


@dataclass(frozen=True)
class SwappedConfig:
    """One member of the family.

    Attributes:
        tile_m: Tokens of a tile, rows of the output.
        tile_n: Features of a tile, columns of the output: 128 or 256.
        max_stages: Cap on pipeline stages.
    """

    tile_m: int
    tile_n: int
    max_stages: int = 8

    def __post_init__(self) -> None:
        if self.tile_n not in (GROUP_FEATURES, MATH_GROUPS * GROUP_FEATURES):
            raise ArgumentError("tile_n", self.tile_n, "128 or 256")
        if self.group_tokens % 16 or not 32 <= self.group_tokens <= 192 or self.tile_m > 256:
            raise ArgumentError(
                "tile_m", self.tile_m, "up to 256; for each math warpgroup a multiple of 16 from 32 to 192"
            )

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return 1

    @property
    def feature_groups(self) -> int:
        """Groups of 128 features in a tile, a math warpgroup or both to each."""
        return self.tile_n // GROUP_FEATURES

    @property
    def token_groups(self) -> int:
        """Warpgroups that share a group of features, each with its own tokens."""
        return MATH_GROUPS // self.feature_groups

    @property
    def group_tokens(self) -> int:
        """Tokens of a math warpgroup, N of its MMAs."""
        return self.tile_m * (self.tile_n // GROUP_FEATURES) // MATH_GROUPS

    @property
    def threads(self) -> int:
        """Threads of a CTA: the math warpgroups, then one for loading, sending and gathering."""
        return (MATH_GROUPS + 1) * THREADS_PER_GROUP

    @property
    def x_stage_bytes(self) -> int:
        """Bytes of one stage of the tokens."""
        return self.tile_m * TILE_K * 2

    @property
    def w_stage_bytes(self) -> int:
        """Bytes of one stage of packed W."""
        return self.feature_groups * BLOCK_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage."""
        return self.x_stage_bytes + self.w_stage_bytes

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return min(self.max_stages, (self._free_bytes - LEAST_BYTES) // self.stage_bytes)

    @property
    def _free_bytes(self) -> int:
        """Shared memory for stages and chunks."""
        return SHARED_BYTES - RESERVED_BYTES - self.tile_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in a slot, and of the shared memory from which finished tiles leave."""
        return self.tile_m * self.tile_n * 2

    @property
    def part_bytes(self) -> int:
        """Bytes of a math warp's part of a tile."""
        return self.tile_bytes // UNITS

    @property
    def staging_bytes(self) -> int:
        """Device memory in which one CTA stages tiles: none, they wait in its shared memory."""
        return 0

    @property
    def chunk_tokens(self) -> int:
        """Tokens of each math warp in a chunk of a peer's tile."""
        return 16 if self.group_tokens <= CHUNK_ACCUMULATORS else 8

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return UNITS * self.chunk_tokens * BLOCK_COLUMNS * 2

    @property
    def chunks(self) -> int:
        """Chunks of a tile."""
        return self.group_tokens // self.chunk_tokens

    @property
    def ring_chunks(self) -> int:
        """Chunks of peers' tiles that may be on their way at a time."""
        return min(MOST_CHUNKS, (self._free_bytes - self.stages * self.stage_bytes) // self.chunk_bytes)

    @property
    def gather_bytes(self) -> int:
        """Shared memory into which peers' chunks are gathered."""
        return self.ring_chunks * self.chunk_bytes

    @property
    def math_registers(self) -> int:
        """Registers of a math thread."""
        return 232

    @property
    def service_registers(self) -> int:
        """Registers of a thread of the service warps."""
        return 40


FAMILY = tuple(
    SwappedConfig(tile_m, tile_n)
    for tile_m, tile_n in (
        (176, 256),
        (160, 256),
        (128, 256),
        (96, 256),
        (64, 256),
        (64, 128),
    )
)
