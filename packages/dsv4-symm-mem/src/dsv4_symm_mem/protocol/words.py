# SPDX-License-Identifier: Apache-2.0
"""The 64-bit words that ranks exchange: signals (flags and tokens) and abort words.

A signal is `epoch << 16 | signature`. The epoch counts the calls on a workspace from 1, so a flag never
has to be reset: it is raised when it equals the current call's signal. 48 bits of epoch last 89 years at
one call every 10 microseconds; a 32-bit epoch was rejected because a flag that idles for 2**31 calls would
read as raised. The signature is a digest of what the ranks must agree on (operation, M, N, tile), so a
peer that runs the same epoch with another shape is told from a peer that is late, at the cost of no
message. A digest of 16 bits lets one mismatch in 65,536 through to the deadline, never to a wrong result:
a rank waits for the tiles of its own schedule only.

An abort word is `epoch << 16 | blamed << 8 | kind`, zero while nothing is wrong. The first writer wins.
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


class Operation(enum.IntEnum):
    """Collective operations that share flags, slots and epochs."""

    REDUCE_SCATTER = 1
    ALL_REDUCE = 2


class AbortKind(enum.IntEnum):
    """Why a call was ended."""

    TIMEOUT = 1
    MISMATCH = 2
    FAILED = 3


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


@dataclass(frozen=True)
class Abort:
    """A decoded abort word: call `epoch` was ended for `kind`, held against rank `blamed`."""

    epoch: int
    blamed: int
    kind: AbortKind

    def encode(self) -> int:
        """The 64-bit abort word."""
        return self.epoch << SIGNATURE_BITS | self.blamed << 8 | int(self.kind)

    @classmethod
    def decode(cls, word: int) -> Abort | None:
        """The abort that `word` stands for, or None for `NO_ABORT`."""
        if word == NO_ABORT:
            return None
        return cls(epoch_of(word), (word >> 8) & 0xFF, AbortKind(word & 0xFF))
