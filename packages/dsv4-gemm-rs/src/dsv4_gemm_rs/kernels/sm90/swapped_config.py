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
from dsv4_symm_mem.protocol.slots import BLOCK_COLUMNS, BOUNCES, STAGED_TILES

from dsv4_gemm_rs.kernels.sm90.config import RESERVED_BYTES, SHARED_BYTES, THREADS_PER_GROUP, TILE_K
from dsv4_gemm_rs.packing import BLOCK_BYTES, GROUP_FEATURES

MATH_GROUPS = 2
"""Warpgroups that multiply."""
UNITS = MATH_GROUPS * 4
"""Math warps; each holds 32 features of its warpgroup's tokens."""
MAX_LEAVING_TOKENS = 160
"""Tokens of a warpgroup's own tile that leave for the output together; if there are more, in parts of 16."""
LEAVING_PARTS = 6
"""Such parts that shared memory holds."""
MAX_CHUNK_TOKENS = 32
"""Most tokens of a warpgroup in a chunk of a peer's tile: it bounds the registers of the rank-order sum."""


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
        """Threads of a CTA: the math warpgroups, then one for loading and publishing."""
        return (MATH_GROUPS + 1) * THREADS_PER_GROUP

    @property
    def x_stage_bytes(self) -> int:
        """Bytes of one stage of the tokens, which also takes a chunk."""
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
        free = SHARED_BYTES - RESERVED_BYTES - self.bounce_bytes - self.leaving_bytes
        return min(self.max_stages, free // self.stage_bytes)

    @property
    def bounce_bytes(self) -> int:
        """Shared memory through which staged tiles are sent."""
        return BOUNCES * self.tile_m * BLOCK_COLUMNS * 2

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in a slot."""
        return self.tile_m * self.tile_n * 2

    @property
    def staging_bytes(self) -> int:
        """Device memory in which one CTA stages tiles."""
        return STAGED_TILES * self.tile_bytes

    @property
    def parts(self) -> int:
        """Parts of an own tile's tokens that leave one after the other."""
        return 1 if self.group_tokens <= MAX_LEAVING_TOKENS else self.group_tokens // 16

    @property
    def leaving_tokens(self) -> int:
        """Tokens of a part."""
        return self.group_tokens // self.parts

    @property
    def leaving_parts(self) -> int:
        """Parts that a math warp's memory holds."""
        return min(self.parts, LEAVING_PARTS)

    @property
    def leaving_bytes(self) -> int:
        """Shared memory in which math warps transpose tiles, and from which own ones leave for the output."""
        return UNITS * self.leaving_parts * self.leaving_tokens * BLOCK_COLUMNS * 2

    @property
    def chunk_tokens(self) -> int:
        """Tokens of each warpgroup that travel through one stage at a time: a multiple of 8."""
        fitting = self.x_stage_bytes // (UNITS * BLOCK_COLUMNS * 2)
        most = min(fitting, MAX_CHUNK_TOKENS if self.group_tokens <= 160 else MAX_CHUNK_TOKENS // 2)
        return max(size for size in range(8, most + 1, 8) if self.group_tokens % size == 0)

    @property
    def chunks(self) -> int:
        """Chunks of a tile."""
        return self.group_tokens // self.chunk_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return UNITS * self.chunk_tokens * BLOCK_COLUMNS * 2

    @property
    def math_registers(self) -> int:
        """Registers of a math thread."""
        return 224

    @property
    def service_registers(self) -> int:
        """Registers of a loading or publishing thread."""
        return 56


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
