# SPDX-License-Identifier: Apache-2.0
"""Where control words, flags and slots lie in one rank's symmetric block; equal on all ranks.

    control   epoch, ticket, abort, diagnosis: one 128-byte line each
    flags     [bank 2][source P][max_tiles + 1] int64; the last word of a row is the source's token
    slots     [bank 2][slot P-1] regions of `slot_bytes`
    more      [bank 2] one more region, where partials may stay with their source

A flag row and a slot have one writer each, their source. A rank never sends to itself, so a rank keeps
P-1 slots; source s lies in slot (s - rank - 1) mod P of its receiver. Inside a slot, tile t of the
receiver's shard occupies `tile_m * tile_n` BF16 elements from element `t * tile_m * tile_n` on, whole even
at the shard's edge, so every transfer is one dense burst and its address needs no division.

Where owners may read sums through multicast, a bank has P regions: region o < P-1 of bank b is slot o of that
bank, and region P-1 its region of `more`. In a multicast call, region o of a rank's own bank holds the rank's
whole partial of owner o's shard, so it lies at the same offset on every rank, as a multicast address needs.
A call makes of a bank what it likes: no rank begins it before all have ended the call that had the bank last
(`protocol.model`, `shared_banks`). The owner's sums of an all-reduce come back over the partials, unit by
unit (`slots.UNIT_BYTES`); their flags follow the token in the owner's row.

A rank's rows are cut into tiles from the first row of its own shard (see `shard_rows`), so no tile has two
owners.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.slots import UNIT_BYTES
from dsv4_symm_mem.protocol.words import MAX_WORLD_SIZE

LINE_BYTES = 128
WORD_BYTES = 8
BANKS = 2
BF16_BYTES = 2

EPOCH_OFFSET = 0
TICKET_OFFSET = LINE_BYTES
"""Counts the CTAs of a launch that have read the epoch; the last one bumps it and sets this back to 0."""
LEAVING_OFFSET = TICKET_OFFSET + WORD_BYTES
"""Counts the CTAs of a launch that have left, and above bit 32 those of them whose call was aborted."""
ABORT_OFFSET = 2 * LINE_BYTES
DIAGNOSIS_OFFSET = 3 * LINE_BYTES
DIAGNOSIS_WORDS = 6
"""Words of the diagnosis line: abort word, source rank, tile (or the token's index), seen, wanted, spins."""
DIAGNOSIS_LOCK_OFFSET = DIAGNOSIS_OFFSET + DIAGNOSIS_WORDS * WORD_BYTES
"""Held, as 1, by the worker that writes the line: several of a rank may give up at once."""
CONTROL_BYTES = 4 * LINE_BYTES


class Strategy(enum.StrEnum):
    """How partials reach their owner."""

    PUSH = "push"
    """They are stored into the owner's slots."""
    MULTICAST = "multicast"
    """They stay with their source; the owner reads their sum through NVLink multicast."""


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below a / b."""
    return -(-a // b)


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` not below `value`."""
    return ceil_div(value, alignment) * alignment


def shard_length(m: int, world_size: int) -> int:
    """Rows of every rank's output, L = ceil(m / world_size); trailing rows may lie past m."""
    return ceil_div(m, world_size)


def shard_rows(m: int, world_size: int, rank: int) -> range:
    """The rows of the partial that `rank` owns: [rank·L, min((rank+1)·L, m)), empty when past m."""
    length = shard_length(m, world_size)
    start = min(rank * length, m)
    return range(start, min(start + length, m))


@dataclass(frozen=True)
class ExchangeLayout:
    """Sizes and byte offsets of one rank's exchange block.

    Attributes:
        world_size: Number of ranks P, 1 to 128.
        max_tiles: Most tiles that one rank's shard is ever cut into.
        slot_bytes: Capacity of one slot in bytes, a multiple of 128.
        strategy: `MULTICAST` for a block in which partials may also stay with their source.
    """

    world_size: int
    max_tiles: int
    slot_bytes: int
    strategy: Strategy = Strategy.PUSH

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ArgumentError("world_size", self.world_size, f"1 to {MAX_WORLD_SIZE}")
        if self.max_tiles < 0:
            raise ArgumentError("max_tiles", self.max_tiles, "at least 0")
        if self.slot_bytes < 0 or self.slot_bytes % LINE_BYTES:
            raise ArgumentError("slot_bytes", self.slot_bytes, f"a multiple of {LINE_BYTES}")

    @property
    def flag_row_bytes(self) -> int:
        """Bytes of one source's flags in one bank, its token and the flags of its sums included."""
        return align_up((self.max_tiles + 1 + self.sum_flags) * WORD_BYTES, LINE_BYTES)

    @property
    def sum_flags(self) -> int:
        """Flags of an owner's sums: one for each unit that a slot holds, none where nothing comes back."""
        return ceil_div(self.slot_bytes, UNIT_BYTES) if self.strategy is Strategy.MULTICAST else 0

    @property
    def flags_offset(self) -> int:
        """First byte of the flags."""
        return CONTROL_BYTES

    @property
    def slots_offset(self) -> int:
        """First byte of the slots."""
        return self.flags_offset + BANKS * self.world_size * self.flag_row_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole block."""
        regions = self.world_size if self.strategy is Strategy.MULTICAST else self.world_size - 1
        return self.slots_offset + BANKS * regions * self.slot_bytes

    @property
    def token_index(self) -> int:
        """The index that `flag_offset` takes for a source's token."""
        return self.max_tiles

    def flag_offset(self, bank: int, source: int, tile: int) -> int:
        """First byte of the flag that `source` raises for the receiver's `tile`."""
        row = bank * self.world_size + source
        return self.flags_offset + row * self.flag_row_bytes + tile * WORD_BYTES

    def slot_index(self, owner: int, source: int) -> int:
        """Which of its P-1 slots `owner` keeps for `source`."""
        return (source - owner - 1) % self.world_size

    def slot_offset(self, bank: int, owner: int, source: int) -> int:
        """First byte, in `owner`'s block, of the slot for `source`."""
        index = bank * (self.world_size - 1) + self.slot_index(owner, source)
        return self.slots_offset + index * self.slot_bytes

    def partial_offset(self, bank: int, owner: int) -> int:
        """First byte, in every rank's block, of its partial of `owner`'s shard in a multicast call."""
        others = self.world_size - 1
        index = bank * others + owner if owner < others else BANKS * others + bank
        return self.slots_offset + index * self.slot_bytes

    def sum_flag_index(self, unit: int) -> int:
        """The index that `flag_offset` takes for the flag of an owner's sum number `unit`."""
        return self.token_index + 1 + unit
