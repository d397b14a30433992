# SPDX-License-Identifier: Apache-2.0
"""One rank's end of the link: its symmetric memory, its neighbours, and the launches that use them.

Contract: rank r works on rank r + 1, modulo P; `move` and the stop-watches only enqueue. Everything that a
measurement enqueues has run before, with sizes of zero, since the first launch of a kernel may wait for the
device, and a rank that spins in a meeting would then be waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from dsv4_symm_mem.arena import SymmetricArena
from dsv4_symm_mem.communicator import Communicator
from dsv4_symm_mem.compiled import Kernel, compiled
from dsv4_symm_mem.protocol.layout import LINE_BYTES

from dsv4_gemm_rs.bench.link.cases import (
    SUMS,
    UNIT_BYTES,
    Case,
    Way,
    count_wrong,
    count_wrong_sums,
    fill,
    fill_addend,
)

MEET_SECONDS = 10.0
"""How long a rank waits for the others on the device; they have just met on the host."""
PING_PONG_CYCLES = 10_000_000_000
"""About five seconds, for all round trips together."""
TIME_WORDS = 8192
KERNELS = (
    "meet",
    Way.PUSH_BULK,
    Way.PUSH_STORES,
    Way.PUSH_BLOCKS,
    Way.PULL_LOADS,
    Way.PULL_BULK,
    Way.READ_SUMS,
    "ping-pong",
    "publication",
)


def link_kernel(name: str) -> Kernel:
    """The compiled kernel `name`; its arguments are those of its host function."""

    def build(options: str) -> Any:
        import cutlass.cute as cute

        from dsv4_gemm_rs.bench.link.kernels import example_arguments

        function, arguments = example_arguments(name)
        return cute.compile(function, *arguments, options=options)

    return compiled(("link", str(name)), build, "dsv4_gemm_rs")


class Endpoint:
    """A rank's memory and launches; made and closed collectively.

    Args:
        communicator: The rank, on a CUDA device.
        message_bytes: Size of the largest message.

    Attributes:
        no_multicast: Why sums cannot be read through multicast, by rank; empty if they can.
    """

    def __init__(self, communicator: Communicator, message_bytes: int) -> None:
        self.communicator = communicator
        self.rank, self.size, self.device = communicator.rank, communicator.size, communicator.device
        self.next, self.previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        # A line for each rank's arrivals, one for the ping-pong, one for what is published.
        lines = self.size + 2
        self._arena = SymmetricArena.create(communicator, 2 * message_bytes + lines * LINE_BYTES)
        self.landing = self._arena.allocate((message_bytes,), torch.uint8, "landing")
        self.source = self._arena.allocate((message_bytes,), torch.uint8, "source")
        self._flags = self._arena.allocate((lines, LINE_BYTES // 8), torch.int64, "flags")
        self._bases = torch.tensor(self._flags.pointers, dtype=torch.int64, device=self.device)
        self._failed = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._times = torch.zeros(TIME_WORDS, dtype=torch.int64, device=self.device)
        reasons = communicator.all_gather(self._arena.multicast_reason)
        self.no_multicast = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why)
        self._epoch = 0
        self._passed = 0

    def close(self, *, wait: bool = True) -> None:
        """Free the memory; collective if `wait`."""
        self._arena.close(wait=wait)

    def prepare(self) -> None:
        """Compile and load everything that is going to be enqueued, and let it do nothing once."""
        self._launch("meet", *[0] * 8)
        for way in (Way.PUSH_BULK, Way.PUSH_STORES, Way.PUSH_BLOCKS, Way.PULL_LOADS, Way.PULL_BULK):
            self.move(Case(way, UNIT_BYTES), 0, 1, 0)
        self._launch("ping-pong", 0, 0, 0, self._times.data_ptr(), 0, 0, 0, 0)
        self.time_publication(0, 0, 0)
        fill(self.source.local, 0)
        if not self.no_multicast:
            self.move(SUMS, 0, 1, 0)
            fill_addend(self.source.local, 0, self.size)
            count_wrong_sums(self.landing.local, 0, self.size)
        for way in (Way.COPY_PUSH, Way.COPY_PULL):
            self.move(Case(way), UNIT_BYTES, 0, 0)
        count_wrong(self.landing.local, 0)
        self.read_times(1)
        self.failed()
        self.synchronize()

    def meet(self, *, hold_seconds: float = 0.0) -> None:
        """Let the stream go on when all ranks' streams have come to the same meeting.

        The stream stays `hold_seconds` before it. What the host enqueues meanwhile then runs without gaps.
        """
        self._epoch += 1
        self._launch(
            "meet",
            self._flags.pointers[self.rank],
            self._bases.data_ptr(),
            self._failed.data_ptr(),
            self.rank,
            self.size,
            self._epoch,
            round(MEET_SECONDS * 1e9),
            round(hold_seconds * 1e9),
        )

    def move(self, case: Case, size: int, grid: int, seed: int) -> None:
        """Move `size` bytes between this rank and the next.

        Pushes by our kernels carry the data of `seed`; all else takes what the sender's `source` holds.
        """
        units = size // UNIT_BYTES
        landing, source = self.landing.pointers, self.source.pointers
        match case.way:
            case Way.PUSH_BULK:
                self._launch(case.way, landing[self.next], units, case.piece, seed, grid)
            case Way.PUSH_STORES | Way.PUSH_BLOCKS:
                self._launch(case.way, landing[self.next], units, seed, grid)
            case Way.PULL_LOADS:
                self._launch(case.way, source[self.next], landing[self.rank], units, grid)
            case Way.PULL_BULK:
                self._launch(case.way, source[self.next], landing[self.rank], units, case.piece, grid)
            case Way.READ_SUMS:
                self._launch(case.way, self.source.multicast_pointer, landing[self.rank], units, grid)
            case Way.COPY_PUSH:
                self.landing.peers[self.next][:size].copy_(self.source.local[:size])
            case Way.COPY_PULL:
                self.landing.local[:size].copy_(self.source.peers[self.next][:size])

    def fill(self, case: Case, size: int, seed: int) -> None:
        """Write the data of `seed` into this rank's `source`, as `case` is going to read it."""
        if case.way is Way.READ_SUMS:
            fill_addend(self.source.local[:size], seed, self.size)
            # An alias fence, behind the writing.
            self.move(case, 0, 1, seed)
        else:
            fill(self.source.local[:size], seed)

    def count_wrong(self, case: Case, size: int, seed: int) -> int:
        """How many 32-bit words of what has landed are not those of `seed`; waits for them."""
        landed = self.landing.local[:size]
        if case.way is Way.READ_SUMS:
            return count_wrong_sums(landed, seed, self.size)
        return count_wrong(landed, seed)

    def play_ping_pong(self, rounds: int) -> None:
        """Rank 0 serves to rank 1; the others do nothing. To be called on all ranks."""
        if self.rank < 2:
            line = self.size * LINE_BYTES
            self._launch(
                "ping-pong",
                self._flags.pointers[self.rank] + line,
                self._flags.pointers[1 - self.rank] + line,
                self._failed.data_ptr(),
                self._times.data_ptr(),
                int(self.rank == 0),
                rounds,
                self._passed,
                PING_PONG_CYCLES,
            )
        self._passed += rounds

    def time_publication(self, stores: int, repetitions: int, seed: int) -> None:
        """Time publications of `stores` 16-byte stores to the next rank."""
        flag = self._flags.pointers[self.next] + (self.size + 1) * LINE_BYTES
        self._launch(
            "publication",
            self.landing.pointers[self.next],
            flag,
            self._times.data_ptr(),
            stores,
            repetitions,
            seed,
        )

    def read_times(self, words: int) -> list[int]:
        """The first `words` words of the last stop-watch; waits for it."""
        return [int(word) for word in self._times[:words].tolist()]

    def failed(self) -> bool:
        """Whether a peer did not come to a meeting or did not return the ball, ever."""
        return bool(self._failed.item())

    def synchronize(self) -> None:
        """Wait for this rank's stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def _launch(self, kernel: str, *arguments: int) -> None:
        link_kernel(kernel)(*arguments, stream=torch.cuda.current_stream(self.device))
