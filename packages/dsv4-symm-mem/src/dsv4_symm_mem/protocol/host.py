# SPDX-License-Identifier: Apache-2.0
"""The exchange protocol performed from the host, over any arena: the reference for what kernels do.

Contract: the same words, banks, slots, tokens, deadlines and abort as in a kernel, so host and kernels can
meet in one call. A call that cannot get its peers' data ends: the abort word reaches every rank, the
diagnosis says what was awaited, and the error names the rank that is blamed.

Memory order. On a CPU arena words are read and written by this interpreter's thread with plain 8-byte
accesses: between virtual ranks the interpreter lock orders them after the data, between processes
x86-64's store order does (the `shared` back end refuses other processors). On a CUDA arena a flag is stored
after the stream that wrote the data has been synchronised.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import torch

from dsv4_symm_mem.arena import SymmetricTensor
from dsv4_symm_mem.protocol.failure import describe, own_diagnosis
from dsv4_symm_mem.protocol.layout import (
    ABORT_OFFSET,
    BF16_BYTES,
    DIAGNOSIS_OFFSET,
    DIAGNOSIS_WORDS,
    EPOCH_OFFSET,
    WORD_BYTES,
    ExchangeLayout,
)
from dsv4_symm_mem.protocol.words import NO_ABORT, Abort, AbortKind, bank_of, epoch_of, signal, wait_level

_SPINS_BEFORE_SLEEP = 200
_SLEEP_SECONDS = 50e-6


class _Words(Protocol):
    """64-bit words of one rank's block."""

    def load(self, offset: int) -> int: ...

    def store(self, offset: int, value: int) -> None: ...


class _CpuWords:
    def __init__(self, block: torch.Tensor) -> None:
        self._words = block.numpy().view(np.int64)

    def load(self, offset: int) -> int:
        return int(self._words[offset // WORD_BYTES])

    def store(self, offset: int, value: int) -> None:
        self._words[offset // WORD_BYTES] = value


class _CudaWords:
    def __init__(self, block: torch.Tensor) -> None:
        self._words = block.view(torch.int64)

    def load(self, offset: int) -> int:
        return int(self._words[offset // WORD_BYTES].item())

    def store(self, offset: int, value: int) -> None:
        self._words[offset // WORD_BYTES].fill_(value)


def _words_of(block: torch.Tensor) -> _Words:
    return _CpuWords(block) if block.device.type == "cpu" else _CudaWords(block)


class HostExchange:
    """One rank's end of the exchange, driven by the host.

    Args:
        layout: Placement of words and slots, equal on all ranks.
        block: The symmetric block, `layout.total_bytes` of uint8.
        rank: This rank.
        deadline: Seconds that a call waits for one message before it gives up; 0 waits for ever.

    Attributes:
        blocks: Every rank's block, as this process has it mapped.
        words: The 64-bit words of `blocks`.
        ended: Whether a call that this object drove was ended.
    """

    def __init__(self, layout: ExchangeLayout, block: SymmetricTensor, rank: int, deadline: float) -> None:
        self.layout = layout
        self.rank = rank
        self.deadline = deadline
        self.device = block.local.device
        self.ended = False
        self.blocks = block.peers
        self.words = tuple(_words_of(peer) for peer in block.peers)

    @property
    def epoch(self) -> int:
        """Calls completed on this rank."""
        return self.words[self.rank].load(EPOCH_OFFSET)

    @property
    def abort(self) -> Abort | None:
        """The abort that this rank knows of."""
        return Abort.decode(self.words[self.rank].load(ABORT_OFFSET))

    def check(self) -> None:
        """Raise what ended an earlier call, if anything did.

        Raises:
            ExchangeError: `PeerTimeoutError`, `CallMismatchError` or `PeerAbortError`, as the abort word and
                the diagnosis say.
        """
        abort = self.abort
        if abort is not None:
            offsets = (DIAGNOSIS_OFFSET + i * WORD_BYTES for i in range(DIAGNOSIS_WORDS))
            words = [self.words[self.rank].load(offset) for offset in offsets]
            diagnosis = own_diagnosis(words, abort, self.layout.token_index)
            raise describe(self.rank, abort, diagnosis, self.layout.token_index, self.deadline)

    def begin(self, signature: int) -> HostCall:
        """Start the next call, whose flags carry `signature`; raises like `check`."""
        self.check()
        return HostCall(self, self.epoch + 1, signature)

    def broadcast_abort(self, abort: Abort) -> None:
        """Combine `abort` into every rank's abort word: the greater word stays.

        Between processes, reading and storing are two steps, so of two words raised at the same moment the
        smaller may stay on some rank; the call ends on all ranks either way. Kernels use an atomic.
        """
        self.ended = True
        for words in self.words:
            words.store(ABORT_OFFSET, max(words.load(ABORT_OFFSET), abort.encode()))


class HostCall:
    """One call of the exchange on one rank, numbered `epoch`; made by `HostExchange.begin`."""

    def __init__(self, exchange: HostExchange, epoch: int, signature: int) -> None:
        self.epoch = epoch
        self.bank = bank_of(epoch)
        self._exchange = exchange
        self._layout = exchange.layout
        self._wanted = signal(epoch, signature)

    def slot(self, owner: int, source: int) -> torch.Tensor:
        """The slot of this call in which `owner` receives from `source`: BF16, flat, `slot_bytes` long."""
        start = self._layout.slot_offset(self.bank, owner, source)
        block = self._exchange.blocks[owner]
        return block[start : start + self._layout.slot_bytes // BF16_BYTES * BF16_BYTES].view(torch.bfloat16)

    def publish(self, owner: int, tile: int) -> None:
        """Raise this rank's flag for `owner`'s `tile`; what was stored into the slot is visible first."""
        if self._exchange.device.type == "cuda":
            torch.cuda.current_stream(self._exchange.device).synchronize()
        offset = self._layout.flag_offset(self.bank, self._exchange.rank, tile)
        self._exchange.words[owner].store(offset, self._wanted)

    def publish_token(self, owner: int) -> None:
        """Tell `owner` that this rank takes part in the call, where it has no tile for it."""
        self.publish(owner, self._layout.token_index)

    def wait(self, source: int, tile: int) -> None:
        """Wait until `source` has raised its flag for this rank's `tile`.

        Raises:
            PeerTimeoutError: The deadline passed.
            CallMismatchError: `source` is in the same call with another signature.
            PeerAbortError: Another rank ended the call.
        """
        words = self._exchange.words[self._exchange.rank]
        offset = self._layout.flag_offset(self.bank, source, tile)
        started = time.monotonic()
        spins = 0
        while (seen := words.load(offset)) != self._wanted:
            if epoch_of(seen) == self.epoch:
                self._end(AbortKind.MISMATCH, source, tile, seen, spins)
            aborted = words.load(ABORT_OFFSET) != NO_ABORT
            expired = self._exchange.deadline and time.monotonic() - started > self._exchange.deadline
            if aborted or expired:
                self._end(self._kind_of_silence(source), source, tile, seen, spins)
            spins += 1
            time.sleep(0 if spins < _SPINS_BEFORE_SLEEP else _SLEEP_SECONDS)

    def wait_token(self, source: int) -> None:
        """Wait for `source`'s token; raises like `wait`."""
        self.wait(source, self._layout.token_index)

    def _kind_of_silence(self, source: int) -> AbortKind:
        """Whether `source` is late, or in this call with another shape and so raising other flags."""
        words = self._exchange.words[self._exchange.rank]
        for tile in range(self._layout.max_tiles + 1):
            seen = words.load(self._layout.flag_offset(self.bank, source, tile))
            if epoch_of(seen) == self.epoch and seen != self._wanted:
                return AbortKind.MISMATCH
        return AbortKind.TIMEOUT

    def _end(self, kind: AbortKind, source: int, tile: int, seen: int, spins: int) -> None:
        """Record what was awaited, end the call on every rank and raise what the abort word then says.

        A rank that ends because a peer did adds its own wait all the same: only the earliest of all waits
        tells whose fault it is.
        """
        abort = Abort(self.epoch, source, kind, wait_level(tile, self._layout.token_index))
        words = self._exchange.words[self._exchange.rank]
        diagnosis = (abort.encode(), source, tile, seen, self._wanted, spins)
        for i, value in enumerate(diagnosis):
            words.store(DIAGNOSIS_OFFSET + i * WORD_BYTES, value)
        self._exchange.broadcast_abort(abort)
        self._exchange.check()

    def fail(self) -> None:
        """End the call on every rank because this rank cannot go on; it blames itself."""
        self._exchange.broadcast_abort(Abort(self.epoch, self._exchange.rank, AbortKind.FAILED))

    def finish(self) -> None:
        """Complete the call: the next one on this rank has the next epoch and the other bank."""
        self._exchange.words[self._exchange.rank].store(EPOCH_OFFSET, self.epoch)
