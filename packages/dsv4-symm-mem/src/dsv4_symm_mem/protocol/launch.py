# SPDX-License-Identifier: Apache-2.0
"""What a kernel launch needs of the exchange, and how the host hears of failures without waiting for the GPU.

A kernel that gives up, or finds that a peer did, writes the abort word and its diagnosis into `report`,
pinned host memory, besides the words in device memory. `check` reads that memory: it costs no launch, no copy
and no synchronisation, so it runs before every call. It tells what has been reported so far; after a
`torch.cuda.synchronize()` that is everything.
"""

from __future__ import annotations

import torch

from dsv4_symm_mem.arena import SymmetricTensor
from dsv4_symm_mem.protocol.failure import Diagnosis, describe
from dsv4_symm_mem.protocol.layout import DIAGNOSIS_WORDS, ExchangeLayout
from dsv4_symm_mem.protocol.words import Abort

NANOSECONDS = 1_000_000_000


class LaunchExchange:
    """One rank's end of the exchange as kernels take it.

    Args:
        layout: Placement of words and slots, equal on all ranks.
        block: The symmetric block on CUDA, `layout.total_bytes` of uint8.
        rank: This rank.
        deadline: Seconds that a wait may last; 0 waits for ever.
    """

    def __init__(self, layout: ExchangeLayout, block: SymmetricTensor, rank: int, deadline: float) -> None:
        self.layout = layout
        self.rank = rank
        self.deadline = deadline
        self._bases = torch.tensor(block.pointers, dtype=torch.int64, device=block.local.device)
        self._report = torch.zeros(DIAGNOSIS_WORDS, dtype=torch.int64, pin_memory=True)
        self._words = self._report.numpy()
        self._fixed = (
            block.pointers[rank],
            self._bases.data_ptr(),
            self._report.data_ptr(),
            rank,
            layout.world_size,
            layout.max_tiles,
            layout.flag_row_bytes,
            layout.slots_offset,
            layout.slot_bytes,
        )

    def arguments(self, signature: int) -> tuple[int, ...]:
        """The exchange's part of a kernel's arguments, in the order that `device.exchange.Exchange` has."""
        return (*self._fixed, signature, int(self.deadline * NANOSECONDS))

    def check(self) -> None:
        """Raise what ended an earlier call, as far as it has been reported.

        Raises:
            ExchangeError: `PeerTimeoutError`, `CallMismatchError` or `PeerAbortError`.
        """
        abort = Abort.decode(int(self._words[0]))
        if abort is None:
            return
        _, source, tile, seen, wanted, polls = (int(word) for word in self._words)
        # A wanted signal is never 0; it is 0 where a peer gave up first and this rank only follows.
        diagnosis = Diagnosis(source, tile, seen, wanted, polls) if wanted else None
        raise describe(self.rank, abort, diagnosis, self.layout.token_index, self.deadline)
