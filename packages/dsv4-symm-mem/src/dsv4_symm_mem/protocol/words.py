# SPDX-License-Identifier: Apache-2.0
"""The 64-bit words that ranks exchange: signals (flags and tokens) and abort words.

A signal is `epoch << 16 | signature`. The epoch counts the calls on a workspace from 1, so a flag never
has to be reset: it is raised when it equals the current call's signal. 48 bits of epoch last 89 years at
one call every 10 microseconds; a 32-bit epoch was rejected because a flag that idles for 2**31 calls would
read as raised. The signature is a digest of what the ranks must agree on (operation, M, N, tile), so a
peer that runs the same epoch with another shape is told from a peer that is late, at the cost of no
message. It is a digest of 16 bits, a guard against mistakes and not a proof: of two different shapes that
also have the same tiles to exchange, one pair in 65,536 passes unnoticed, and its sums are wrong.

An abort word says why a call was ended and whose fault it is; zero while nothing is wrong. Abort words are
ordered, and each rank keeps the greatest: certain causes above silence, then the earlier call, then the
earlier wait. Keeping the first was rejected: with three ranks or more, a rank that waits for a healthy peer,
which itself waits for the dead one, may be first, and blame the peer (`protocol.model` shows it). With the
order, and each worker that ends adding its own wait, all survivors blame the dead rank once all have ended.
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass

SIGNATURE_BITS = 16
SIGNATURE_MASK = (1 << SIGNATURE_BITS) - 1
MAX_EPOCH = (1 << 47) - 1
MAX_WORLD_SIZE = 128
NO_ABORT = 0

BLAMED_BITS = 7
LEVEL_BITS = 12
ABORT_EPOCH_BITS = 42
LEVEL_SHIFT = BLAMED_BITS
ABORT_EPOCH_SHIFT = LEVEL_SHIFT + LEVEL_BITS
KIND_SHIFT = ABORT_EPOCH_SHIFT + ABORT_EPOCH_BITS
MAX_LEVEL = (1 << LEVEL_BITS) - 1
ABORT_EPOCH_MASK = (1 << ABORT_EPOCH_BITS) - 1


class Operation(enum.IntEnum):
    """Collective operations that share flags, slots and epochs."""

    REDUCE_SCATTER = 1
    ALL_REDUCE = 2
    ALL_GATHER = 3
    MULTICAST_REDUCE_SCATTER = 4
    """Partials stay with their source; owners read sums through multicast."""
    MULTICAST_ALL_REDUCE = 5
    """The same, and owners write the sums back through multicast."""


class AbortKind(enum.IntEnum):
    """Why a call was ended; a greater kind is the surer cause and outweighs the others."""

    TIMEOUT = 1
    MISMATCH = 2
    FAILED = 3


MULTICAST = frozenset({Operation.MULTICAST_REDUCE_SCATTER, Operation.MULTICAST_ALL_REDUCE})
"""Operations of which owners read sums through multicast."""


def call_signature(operation: Operation, m: int, n: int, tile_m: int, tile_n: int) -> int:
    """Digest of what all ranks of one call must agree on, in [0, 65535].

    CRC-32 (ISO-HDLC, as `zlib.crc32`) of the five values as little-endian 64-bit integers, its two halves
    combined by exclusive or.
    """
    digest = zlib.crc32(struct.pack("<5q", int(operation), m, n, tile_m, tile_n))
    return (digest ^ (digest >> SIGNATURE_BITS)) & SIGNATURE_MASK


def signal(epoch: int, signature: int) -> int:
    """The value that raises a flag in call `epoch`."""
    return epoch << SIGNATURE_BITS | signature


def epoch_of(word: int) -> int:
    """The call that a signal or an abort word belongs to; 0 for a word never written."""
    return word >> SIGNATURE_BITS


def bank_of(epoch: int) -> int:
    """Which of the two banks of slots and flags call `epoch` uses."""
    return epoch & 1


def wait_level(tile: int, token_index: int) -> int:
    """How early in a call a wait comes: 0 for the token, then the own tiles by index, saturating."""
    return 0 if tile == token_index else min(tile + 1, MAX_LEVEL)


@dataclass(frozen=True)
class Abort:
    """A decoded abort word: call `epoch` was ended for `kind`, held against rank `blamed`.

    Attributes:
        epoch: The call, modulo 2**42: more than a year of calls at ten microseconds each, so the order of
            two words, which are never far apart, is right but at the wrap.
        blamed: The rank held responsible.
        kind: Why.
        level: `wait_level` of the wait that failed; 0 for `AbortKind.FAILED`.
    """

    epoch: int
    blamed: int
    kind: AbortKind
    level: int = 0

    def encode(self) -> int:
        """The 64-bit abort word; the greater of two is the one to keep."""
        return (
            int(self.kind) << KIND_SHIFT
            | (ABORT_EPOCH_MASK - (self.epoch & ABORT_EPOCH_MASK)) << ABORT_EPOCH_SHIFT
            | (MAX_LEVEL - self.level) << LEVEL_SHIFT
            | self.blamed
        )

    @classmethod
    def decode(cls, word: int) -> Abort | None:
        """The abort that `word` stands for, or None for `NO_ABORT`."""
        if word == NO_ABORT:
            return None
        return cls(
            epoch=ABORT_EPOCH_MASK - (word >> ABORT_EPOCH_SHIFT & ABORT_EPOCH_MASK),
            blamed=word & ((1 << BLAMED_BITS) - 1),
            kind=AbortKind(word >> KIND_SHIFT),
            level=MAX_LEVEL - (word >> LEVEL_SHIFT & MAX_LEVEL),
        )
