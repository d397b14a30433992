# SPDX-License-Identifier: Apache-2.0
"""What memory alone bounds: the quantiser, beside copies that read and write as many bytes.

`quantise` writes MXFP8, `round-trip` the same values in BF16, which is what the paths of a GPU without block
scales take. Both write into outputs that rotate like their inputs, and so do their copies, which stand for
the bandwidth that this machine has for that many bytes, a launch included. `copy` moves `COPY_BYTES` and
gives the bandwidth by itself; the stand-alone reduce-scatter of ranks that share one memory is held against
that (`moved_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from dsv4_symm_mem.communicator import Communicator
from dsv4_symm_mem.protocol.layout import BF16_BYTES

from dsv4_gemm_rs.bench.timing import Step
from dsv4_gemm_rs.quantize import quantize_mxfp8, round_trip_mxfp8

COPY_BYTES = 256 << 20
"""Bytes that `copy` reads, and that it writes: several times any GPU's L2."""
MX_BYTES = 1 + 1 / 32
"""Bytes of an element in MXFP8, with its share of the scale."""


def moved_bytes(m: int, n: int, world_size: int) -> int:
    """Bytes that `world_size` reduce-scatters of [m, n] read and write where all ranks share one memory.

    A rank reads its partial, S = 2·m·n bytes, writes and later reads S·(P-1)/P of slots, and writes S/P.
    """
    return BF16_BYTES * m * n * (3 * world_size - 1)


class Memory:
    """One rank's outputs of quantisers and copies.

    Args:
        xs: Rotating BF16 activations [M, K], contiguous.
    """

    def __init__(self, xs: Sequence[torch.Tensor]) -> None:
        self._xs = xs
        self._quantised = [quantize_mxfp8(x) for x in xs]
        self._values = [torch.empty_like(x) for x in xs]

    def cases(self) -> Iterator[tuple[str, Step]]:
        """A name and the step that performs one call of it."""
        yield "quantise", self.quantise
        if self._xs[0].device.type == "cuda":
            yield "quantise-copy", self.quantise_copy
            yield "round-trip", self.round_trip
            yield "round-trip-copy", self.round_trip_copy

    def quantise(self, rank: Communicator, which: int) -> None:
        """BF16 to MXFP8."""
        quantize_mxfp8(self._xs[which], out=self._quantised[which])

    def quantise_copy(self, rank: Communicator, which: int) -> None:
        """A copy that reads and writes, together, as many bytes."""
        x, values = self._xs[which].flatten(), self._values[which].flatten()
        count = int(x.numel() * (BF16_BYTES + MX_BYTES)) // 2 // BF16_BYTES
        values[:count].copy_(x[:count])

    def round_trip(self, rank: Communicator, which: int) -> None:
        """BF16 to MXFP8 and back."""
        round_trip_mxfp8(self._xs[which], out=self._values[which])

    def round_trip_copy(self, rank: Communicator, which: int) -> None:
        """A copy of the activations."""
        self._values[which].copy_(self._xs[which])


def bandwidth_copy(device: torch.device, first: int) -> Step:
    """The step of `copy`, which rank `first` performs for all that share its device."""
    source, target = torch.zeros(2, COPY_BYTES, dtype=torch.uint8, device=device)

    def copy(rank: Communicator, which: int) -> None:
        if rank.rank == first:
            target.copy_(source)

    return copy
