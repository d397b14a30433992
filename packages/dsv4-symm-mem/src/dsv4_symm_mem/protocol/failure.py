# SPDX-License-Identifier: Apache-2.0
"""How a call's end is told: an abort word, and the diagnosis of the rank that gave up, as a typed error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4_symm_mem.errors import CallMismatchError, ExchangeError, PeerAbortError, PeerTimeoutError
from dsv4_symm_mem.protocol.words import Abort, AbortKind, wait_level


@dataclass(frozen=True)
class Diagnosis:
    """What a rank was waiting for when it gave up.

    Attributes:
        source: Rank whose flag was awaited.
        tile: Index of the awaited tile, or the token's index.
        seen: The flag's value.
        wanted: The signal that would have raised it.
        polls: How often it was read.
    """

    source: int
    tile: int
    seen: int
    wanted: int
    polls: int


def own_diagnosis(words: Sequence[int], abort: Abort, token_index: int) -> Diagnosis | None:
    """The diagnosis line's `words` (see `layout.DIAGNOSIS_WORDS`) if they belong to `abort`, else None."""
    word, *values = words
    diagnosis = Diagnosis(*values)
    level = wait_level(diagnosis.tile, token_index)
    fits = (word, diagnosis.source, level) == (abort.encode(), abort.blamed, abort.level)
    return diagnosis if fits else None


def describe(
    rank: int, abort: Abort, diagnosis: Diagnosis | None, token_index: int, deadline: float
) -> ExchangeError:
    """The error that `rank` raises for `abort`.

    Args:
        rank: The reporting rank.
        abort: Its decoded abort word.
        diagnosis: What it was waiting for itself, or None when a peer ended the call.
        token_index: Tile index that stands for the token.
        deadline: Seconds that waits last.
    """
    where = f"rank {rank}, call {abort.epoch}"
    if diagnosis is None:
        text = f"{where}: ended by a peer ({abort.kind.name.lower()}), which blames rank {abort.blamed}"
        return PeerAbortError(text, rank=rank, blamed=abort.blamed, epoch=abort.epoch)
    what = "the token" if diagnosis.tile == token_index else f"tile {diagnosis.tile}"
    where += f": waited for {what} of rank {diagnosis.source}"
    where += f", saw {diagnosis.seen:#x}, wanted {diagnosis.wanted:#x} ({diagnosis.polls} polls)"
    if abort.kind is AbortKind.MISMATCH:
        text = f"{where}; rank {abort.blamed} takes part with another shape, tile or operation"
        return CallMismatchError(text, rank=rank, blamed=abort.blamed, epoch=abort.epoch)
    text = f"{where}; rank {abort.blamed} sent nothing within {deadline:g} s"
    return PeerTimeoutError(text, rank=rank, blamed=abort.blamed, epoch=abort.epoch)
