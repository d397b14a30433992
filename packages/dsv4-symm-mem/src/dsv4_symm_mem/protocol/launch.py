# SPDX-License-Identifier: Apache-2.0
"""What a kernel launch needs of the exchange, and how the host hears of failures without waiting for the GPU.

A kernel that ends a call, on its own or following a peer, also writes one word of pinned host memory,
`report`. `check` reads only that word while all is well: no launch, no copy, no synchronisation, so it runs
before every call. Once it is set, `check` fetches the abort word and the diagnosis from the device over a
stream of its own. It tells what has happened so far; after a `torch.cuda.synchronize()` that is everything.
"""

from __future__ import annotations

import math

import torch

from dsv4_symm_mem.accelerator import Accelerator, CudaAccelerator, Stream
from dsv4_symm_mem.arena import SymmetricTensor
from dsv4_symm_mem.protocol.failure import describe, own_diagnosis
from dsv4_symm_mem.protocol.layout import (
    ABORT_OFFSET,
    CONTROL_BYTES,
    DIAGNOSIS_OFFSET,
    DIAGNOSIS_WORDS,
    WORD_BYTES,
    ExchangeLayout,
)
from dsv4_symm_mem.protocol.pacing import DURATION_OFFSET, PACING_BYTES, block_duration
from dsv4_symm_mem.protocol.words import Abort

NANOSECONDS = 1_000_000_000


class LaunchExchange:
    """One rank's end of the exchange as kernels take it.

    Args:
        layout: Placement of words and slots, equal on all ranks.
        block: The symmetric block, `layout.total_bytes` of uint8.
        rank: This rank.
        deadline: Seconds that a wait may last; 0 waits for ever.
        accelerator: Where the kernels run; default the CUDA device of `block`.
        staging_bytes: Memory of this rank's own for tiles that wait to be sent, see `device.forward`; 0 where
            no kernel of this exchange stages any.
        link_bytes_per_us: What this rank's link takes, see `protocol.pacing`; 0 to send without taking turns,
            right where ranks share a device.

    Attributes:
        staging: Address of the words of `protocol.pacing`, behind which the staging memory begins.
        pacing: Those words.
        multicast: Multicast address of the block, or 0.
        memory: What kernels touch of the exchange beside the block, for `Kernel`.
    """

    def __init__(
        self,
        layout: ExchangeLayout,
        block: SymmetricTensor,
        rank: int,
        deadline: float,
        accelerator: Accelerator | None = None,
        staging_bytes: int = 0,
        link_bytes_per_us: float = 0.0,
    ) -> None:
        self.accelerator = accelerator or CudaAccelerator(block.local.device)
        self.layout = layout
        self.rank = rank
        self.deadline = deadline
        self._bases = torch.tensor(block.pointers, dtype=torch.int64, device=block.local.device)
        self._report = torch.zeros(1, dtype=torch.int64, pin_memory=block.local.device.type == "cuda")
        self._reported = self._report.numpy()
        self._staging = torch.zeros(
            PACING_BYTES + staging_bytes, dtype=torch.uint8, device=block.local.device
        )
        self.pacing = self._staging[:PACING_BYTES].view(torch.int64)
        self.pacing[DURATION_OFFSET // WORD_BYTES] = block_duration(link_bytes_per_us)
        self.staging = self._staging.data_ptr()
        self.multicast = block.multicast_pointer
        self.memory: tuple[torch.Tensor, ...] = (self._bases, self._report, self._staging)
        self._control = block.local[:CONTROL_BYTES].view(torch.int64)
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

    @classmethod
    def scratch(cls, device: torch.device, accelerator: Accelerator | None = None) -> LaunchExchange:
        """An exchange of one rank with itself, for launches that load a kernel, or that exchange nothing."""
        layout = ExchangeLayout(1, 0, 0)
        memory = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
        block = SymmetricTensor("scratch", 0, memory, (memory,), (memory.data_ptr(),), 0)
        made = cls(layout, block, 0, 0.0, accelerator)
        # No arena has told anybody of it.
        made.memory = (*made.memory, memory)
        return made

    def stream(self) -> Stream:
        """Where a launch goes now."""
        return self.accelerator.current_stream()

    def arguments(self, signature: int) -> tuple[int, ...]:
        """The exchange's part of a kernel's arguments, in the order that `device.exchange.Exchange` has."""
        # Rounded up: 0 would mean no deadline.
        return (*self._fixed, signature, math.ceil(self.deadline * NANOSECONDS))

    def check(self) -> None:
        """Raise what ended an earlier call, as far as it has been reported.

        Raises:
            ExchangeError: `PeerTimeoutError`, `CallMismatchError` or `PeerAbortError`.
        """
        if self._reported[0] == 0:
            return
        if self._control.device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream(self._control.device)):
                control = self._control.cpu()
        else:
            control = self._control
        first = DIAGNOSIS_OFFSET // WORD_BYTES
        words = control[first : first + DIAGNOSIS_WORDS].tolist()
        abort = Abort.decode(int(control[ABORT_OFFSET // WORD_BYTES]))
        if abort is not None:
            diagnosis = own_diagnosis(words, abort, self.layout.token_index)
            raise describe(self.rank, abort, diagnosis, self.layout.token_index, self.deadline)
