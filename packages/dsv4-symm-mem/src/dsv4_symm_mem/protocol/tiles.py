# SPDX-License-Identifier: Apache-2.0
"""How a partial [M, N] is cut into tiles, and how a tile is numbered and stored.

Row tiles are cut per owner, from the first row of the owner's shard, so no tile has two owners and any M
works, also M < P. Tile `index` counts row tile major within its owner's shard; it names the tile's flag and
its place in a slot. Fused kernels, the stand-alone reduce-scatter and the host share this numbering, so
ranks that take different paths still understand each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.layout import (
    BF16_BYTES,
    ExchangeLayout,
    ceil_div,
    shard_length,
    shard_rows,
)


@dataclass(frozen=True)
class TileShape:
    """Rows and columns of one output tile."""

    m: int
    n: int


@dataclass(frozen=True)
class Tile:
    """One tile of the partial.

    Attributes:
        owner: Rank that owns the rows.
        index: Position among the owner's tiles, row tile major.
        rows: Rows of the partial [M, N] that the tile covers, cut at the shard's end.
        columns: Columns that the tile covers, cut at N.
    """

    owner: int
    index: int
    rows: range
    columns: range


@dataclass(frozen=True)
class TileGrid:
    """The tiles of one call.

    Attributes:
        m, n: Shape of the partial.
        world_size: Number of ranks P.
        shape: Tile shape, equal on all ranks.
    """

    m: int
    n: int
    world_size: int
    shape: TileShape

    @property
    def shard_length(self) -> int:
        """Rows of every rank's output, L = ceil(m / P)."""
        return shard_length(self.m, self.world_size)

    @property
    def column_tiles(self) -> int:
        """Tiles across N."""
        return ceil_div(self.n, self.shape.n)

    @property
    def tile_elements(self) -> int:
        """Elements that a tile occupies in a slot, also where it is cut."""
        return self.shape.m * self.shape.n

    def row_tiles(self, owner: int) -> int:
        """Row tiles of `owner`'s shard; 0 when it owns no rows."""
        return ceil_div(len(shard_rows(self.m, self.world_size, owner)), self.shape.m)

    def owned_tiles(self, owner: int) -> int:
        """Tiles of `owner`'s shard, which is also how many flags each peer raises for it."""
        return self.row_tiles(owner) * self.column_tiles

    def require_fits(self, layout: ExchangeLayout) -> None:
        """Check that the largest shard, in whole tiles, fits into `layout`'s slots and flags.

        Raises:
            ArgumentError: It does not; sending it would write past the slot.
        """
        tiles = self.owned_tiles(0)
        held = min(layout.max_tiles, layout.slot_bytes // (self.tile_elements * BF16_BYTES))
        if layout.world_size > 1 and tiles > held:
            shape = (self.m, self.n, self.shape.m, self.shape.n)
            raise ArgumentError("partial", shape, f"a shard of at most {held} tiles of this shape")

    def tile(self, owner: int, index: int) -> Tile:
        """Tile `index` of `owner`'s shard."""
        row_tile, column_tile = divmod(index, self.column_tiles)
        shard = shard_rows(self.m, self.world_size, owner)
        top = shard.start + row_tile * self.shape.m
        left = column_tile * self.shape.n
        return Tile(
            owner=owner,
            index=index,
            rows=range(top, min(top + self.shape.m, shard.stop)),
            columns=range(left, min(left + self.shape.n, self.n)),
        )

    def tiles(self, owner: int) -> Iterator[Tile]:
        """All tiles of `owner`'s shard, by index."""
        return (self.tile(owner, index) for index in range(self.owned_tiles(owner)))
