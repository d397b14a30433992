# SPDX-License-Identifier: Apache-2.0
"""What is measured: ways to move a message, message sizes, numbers of multiprocessors, and the data moved.

Every message consists of units of 32 KiB with equal content, 32-bit words

    word(i) = (i * STEP + seed) mod 2^32        i = 0 .. 8191 within the unit

so that a sender needs no source in memory, the largest bulk copy is one unit, and a receiver checks every
byte against one row. The seed differs between measurements: a byte that did not arrive is one of an earlier
measurement, hence wrong. What such data cannot show is a unit that landed in another unit's place, and since
each place is checked, another would then be found unwritten.

Where the sum over ranks is read through multicast, messages are small integers in BF16 instead, equal on all
ranks and so few that their sum is exact, `addend`.

Rejected: data that differ in every unit. A bulk copy would need its source rewritten before each piece, and
the writing would be measured instead of the link.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.slots import BLOCK_BYTES, BLOCK_ROWS

UNIT_BYTES = 32768
"""What a CTA moves at a time; the two orders of 16-byte stores are orders within a unit."""
UNIT_WORDS = UNIT_BYTES // 4
STEP = 0x9E3779B1
"""Odd, so all words of a unit differ; 2^32 divided by the golden ratio, so that all their bytes do vary."""
MESSAGE_MULTIPLE = 2 * UNIT_BYTES
"""Messages are multiples of this: the loads of a CTA cover two units at a time."""
TILE_M = 128
"""Rows of the tile whose blocks `push-blocks` writes, [128, 128] BF16, which is one unit."""


class Way(enum.StrEnum):
    """How a message is moved; each value is a kernel, except for `COPY_*`, which are torch's `copy_`.

    Torch hands the copy of a peer's memory to the driver, which has copy engines and may use them.
    """

    PUSH_BULK = "push-bulk"
    PUSH_STORES = "push-stores"
    PUSH_BLOCKS = "push-blocks"
    PULL_LOADS = "pull-loads"
    PULL_BULK = "pull-bulk"
    READ_SUMS = "read-sums"
    """Every rank's link carries what any rank reads; the receiver gets a sum over ranks of it."""
    COPY_PUSH = "copy-push"
    COPY_PULL = "copy-pull"

    @property
    def pulls(self) -> bool:
        """Whether the receiver does the work."""
        return self in (Way.PULL_LOADS, Way.PULL_BULK, Way.READ_SUMS, Way.COPY_PULL)

    @property
    def by_torch(self) -> bool:
        """Whether torch moves the data and no number of multiprocessors can be set."""
        return self in (Way.COPY_PUSH, Way.COPY_PULL)


@dataclass(frozen=True)
class Case:
    """A way to move a message; `piece` is the size of a bulk copy in bytes, 0 for the other ways."""

    way: Way
    piece: int = 0

    @property
    def name(self) -> str:
        """The case as rows and plots call it, such as "push-bulk-16k"."""
        return f"{self.way}-{self.piece // 1024}k" if self.piece else str(self.way)


PIECES = (4096, 16384, 32768)
CASES = (
    *(Case(Way.PUSH_BULK, piece) for piece in PIECES),
    Case(Way.PUSH_STORES),
    Case(Way.PUSH_BLOCKS),
    Case(Way.PULL_LOADS),
    *(Case(Way.PULL_BULK, piece) for piece in PIECES),
    Case(Way.COPY_PUSH),
    Case(Way.COPY_PULL),
)

SUMS = Case(Way.READ_SUMS)
"""Measured beside the others where all ranks have multicast addresses."""

STORES = (0, 1, 32, 256, 1024, 2048)
"""Remote 16-byte stores in flight when a publication is timed; 2048 are a unit."""


class Direction(enum.StrEnum):
    """Who moves data: rank 0 alone, or every rank, so that each also is at the other end of a transfer."""

    ONE_WAY = "one-way"
    BOTH_WAYS = "both-ways"

    def active(self, rank: int) -> bool:
        """Whether `rank` moves data."""
        return self is Direction.BOTH_WAYS or rank == 0


def multiprocessor_counts(available: int) -> tuple[int, ...]:
    """1, 2, 4, ... 64 as far as the device has them, then all of them."""
    return (*(count for count in (1, 2, 4, 8, 16, 32, 64) if count < available), available)


def require_messages(sizes: Sequence[int]) -> None:
    """Check message sizes in bytes.

    Raises:
        ArgumentError: There is none, or one is no positive multiple of 64 KiB.
    """
    if not sizes or any(size < 1 or size % MESSAGE_MULTIPLE for size in sizes):
        raise ArgumentError("sizes", tuple(sizes), f"positive multiples of {MESSAGE_MULTIPLE} bytes")


def block_offset(warp: int, half: int, column: int, lane: int) -> int:
    """Byte within a unit at which a lane of `push-blocks` stores: its place in the epilogue's order.

    The unit is a tile [128, 128] in the slot layout. Warp w of 8 has rows 16w to 16w + 15; `half` of 2 and
    `column` of 4 choose one of its blocks of 8 rows and 32 columns, of which a lane has 8 columns of a row.
    """
    return (column * (TILE_M // BLOCK_ROWS) + 2 * warp + half) * BLOCK_BYTES + lane * 16


def unit_words(seed: int, device: torch.device) -> torch.Tensor:
    """The words of one unit, int32 [8192]."""
    words = torch.arange(UNIT_WORDS, dtype=torch.int64, device=device) * STEP + seed
    # The conversion keeps the low 32 bits only where the value fits, so they are brought into range first.
    return ((words + 2**31) % 2**32 - 2**31).to(torch.int32)


def fill(message: torch.Tensor, seed: int) -> None:
    """Write the data of `seed` into `message`, uint8 [a multiple of 32 KiB]."""
    message.view(torch.int32).view(-1, UNIT_WORDS).copy_(unit_words(seed, message.device))


def sent_bytes(case: Case, size: int, direction: Direction, world_size: int) -> int:
    """Bytes that a sending rank's link carries while every active rank moves a message of `size` bytes."""
    readers = world_size if direction is Direction.BOTH_WAYS else 1
    return size * readers if case.way is Way.READ_SUMS else size


def addend(nbytes: int, seed: int, world_size: int, device: torch.device) -> torch.Tensor:
    """What each of `world_size` ranks adds to a message of sums, BF16 [nbytes / 2].

    Integers whose sum over ranks is at most 256, so it is exact in BF16, and which differ everywhere from
    those of the next seed.
    """
    values = (torch.arange(nbytes // 2, device=device) * 5 + seed) % max(256 // world_size, 2)
    return values.to(torch.bfloat16)


def fill_addend(message: torch.Tensor, seed: int, world_size: int) -> None:
    """Write one rank's addend into `message`, uint8."""
    message.view(torch.bfloat16).copy_(addend(message.numel(), seed, world_size, message.device))


def count_wrong_sums(message: torch.Tensor, seed: int, world_size: int) -> int:
    """How many 32-bit words of `message`, uint8, are not the sum of all ranks' addends."""
    expected = world_size * addend(message.numel(), seed, world_size, message.device)
    return int((message.view(torch.int32) != expected.view(torch.int32)).sum().item())


def count_wrong(message: torch.Tensor, seed: int) -> int:
    """How many 32-bit words of `message`, uint8, differ from the data of `seed`.

    A message shorter than a unit, a multiple of 16 bytes, is compared with the unit's beginning.
    """
    words, expected = message.view(torch.int32), unit_words(seed, message.device)
    if words.numel() < UNIT_WORDS:
        return int((words != expected[: words.numel()]).sum().item())
    return int((words.view(-1, UNIT_WORDS) != expected).sum().item())
