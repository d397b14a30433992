# SPDX-License-Identifier: Apache-2.0
"""Which kernel variant serves a call, and how it divides the work. Pure: no tensor, no device.

A seam kernel gives a tile of `tokens` tokens to a cluster of `cluster` CTAs; each CTA takes a slice of the
hidden dimension and goes through it in chunks of 32, `groups` chunks at a time. Results do not depend on
`tokens` and `groups`: the number of CTAs of a cluster follows from H alone, sums over a slice are kept in
four parts by chunk number modulo 4, and the tensor cores go through the chunks in order. So the tile may
follow T and no result does.

Rejected: a persistent grid (the tail of a wave costs less than the bookkeeping at these sizes is worth, and
it would serialise a tile's epilogue with the next tile's loads, which two CTAs on an SM overlap);
clusters of 16 (not portable, and they leave SMs idle where a GPC has 18).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from dsv4_mhc.errors import ArgumentError, UnsupportedError

STREAMS = 4
CHUNK = 32
"""Hidden elements of a chunk: four lanes of eight BF16. Also a block of MXFP8."""
LANES = 4
"""Threads that share a token's chunk."""
DEPTH = STREAMS * CHUNK
"""Extent of a chunk along the projection's K."""
CLASSES = 4
"""Partial sums kept apart within a slice, by chunk number modulo this."""
FP8_GROUP = 128
"""Elements that share an FP32 scale."""
WGMMA_ROWS = 64
WARPGROUP = 128
SHARED_LIMIT = 227 * 1024
"""Dynamic shared memory of a CTA on SM90 and SM100 (CUDA programming guide, compute capabilities)."""
SHARED_OF_AN_SM = 228 * 1024
SHARED_RESERVED = 1024
"""What the driver takes of each CTA's shared memory."""
MAX_ELEMENTS = 2**31 - 1
"""Elements of a residual: some addresses inside a kernel are 32-bit element offsets."""


class Kernel(StrEnum):
    """The seam kernels."""

    SHIFTED = "shifted"
    COUPLED = "coupled"
    HEAD = "head"
    ENGRAM = "engram"


class Quant(StrEnum):
    """A quantised form of a sublayer's input."""

    NONE = "none"
    MXFP8 = "mxfp8"
    """E4M3 with an E8M0 scale for 32 elements, scales swizzled 128 x 4."""
    FP8 = "fp8"
    """E4M3 with an FP32 scale for 128 elements, scales row-major."""


@dataclass(frozen=True)
class SeamOptions:
    """What a seam kernel does beside projection and collapse.

    Attributes:
        post: Begin with the post map of the finished sublayer; otherwise the residual is read as it is.
        store_residual: Write the streams after the post map. Only with `post`.
        norm: RMSNorm of the sublayer's input.
        exact_statistic: The norm's mean of squares is that of the unrounded input (V4's order).
        mean: Also write the mean of the streams.
        y: Write the sublayer's input in BF16.
        quant: Also, or only, write it quantised.
    """

    post: bool = True
    store_residual: bool = True
    norm: bool = True
    exact_statistic: bool = False
    mean: bool = False
    y: bool = True
    quant: Quant = Quant.NONE


@dataclass(frozen=True)
class Tile:
    """How a seam kernel divides its work.

    Attributes:
        hidden: H.
        cluster: CTAs that share a tile of tokens; each has H / cluster hidden elements.
        tokens: Tokens of a tile, which is N of the matrix instruction.
        groups: Chunks handled at a time.
        stages: Buffers for the projection's weights.
    """

    hidden: int
    cluster: int
    tokens: int
    groups: int
    stages: int

    @property
    def span(self) -> int:
        """Hidden elements of a CTA."""
        return self.hidden // self.cluster

    @property
    def chunks(self) -> int:
        """Chunks of a CTA."""
        return self.span // CHUNK

    @property
    def batches(self) -> int:
        """Steps of a CTA's main loop."""
        return self.chunks // self.groups

    @property
    def threads(self) -> int:
        """Threads of a CTA; at least a warpgroup, so with few tokens some repeat the last token's work."""
        return max(WARPGROUP, LANES * self.groups * self.tokens)

    @property
    def slots(self) -> int:
        """Partial sums that one thread keeps."""
        return CLASSES // self.groups

    @property
    def owned(self) -> int:
        """Tokens whose coefficients a CTA finishes."""
        return max(1, self.tokens // self.cluster)

    @property
    def operand_bytes(self) -> int:
        """Shared memory for one batch of streams."""
        return self.tokens * self.groups * DEPTH * 2

    @property
    def weight_bytes(self) -> int:
        """Shared memory for the weights' stages."""
        return self.stages * WGMMA_ROWS * self.groups * DEPTH * 2

    def shared_bytes(self, kernel: Kernel) -> int:
        """Dynamic shared memory of the main loop, which the epilogue's buffers reuse."""
        if kernel is Kernel.SHIFTED:
            return self.weight_bytes + self.operand_bytes + self.tokens * self.span * 2
        # What else they need is live beside the streams: partial sums of the cluster, and gates.
        beside = 4 * (WGMMA_ROWS * self.tokens + 2 * self.cluster * self.owned * 26 + 32 * self.tokens)
        if kernel is Kernel.ENGRAM:
            gates = 4 * 3 * STREAMS * self.cluster * self.tokens
            return max(self.weight_bytes + gates, beside) + self.batches * self.operand_bytes
        return max(self.weight_bytes, beside) + self.batches * self.operand_bytes


def resident_ctas(kernel: Kernel, tile: Tile) -> int:
    """CTAs that should share an SM.

    Two where shared memory allows it, so that one's epilogue hides behind the other's loads; registers are
    limited accordingly.
    """
    fits = 2 * (tile.shared_bytes(kernel) + SHARED_RESERVED) <= SHARED_OF_AN_SM
    return 2 if fits and tile.threads <= 256 else 1


def cluster_size(hidden: int) -> int:
    """CTAs of a cluster, from H alone: the most of 8, 4, 2 and 1 that divide H into whole chunks."""
    return next(size for size in (8, 4, 2, 1) if hidden % (size * CHUNK) == 0)


PREFERRED: dict[Kernel, tuple[tuple[int, int, int], ...]] = {
    Kernel.SHIFTED: ((8, 4, 3), (16, 4, 2), (32, 2, 2), (64, 1, 1)),
    Kernel.COUPLED: ((8, 4, 2), (16, 4, 1), (32, 2, 1), (32, 1, 1)),
    Kernel.HEAD: ((8, 4, 2), (16, 4, 1), (32, 2, 1), (32, 1, 1)),
    Kernel.ENGRAM: ((8, 4, 2), (16, 4, 1), (32, 2, 1), (32, 1, 1)),
}
"""(tokens, groups, stages), smallest tile first."""

FALLBACK = ((32, 1, 1), (16, 2, 1), (16, 1, 1), (8, 2, 1), (8, 1, 1))
"""For hidden sizes that the preferred tiles do not divide, or with which they do not fit."""

WAVE = 132
"""CTAs of a launch up to which a smaller tile is worth its extra reads of the weights: the SMs of an H200."""


def check_hidden(hidden: int) -> None:
    """Refuse a hidden size that no kernel serves.

    Raises:
        ArgumentError: Not a positive multiple of 64.
    """
    if hidden <= 0 or hidden % 64:
        raise ArgumentError("hidden", hidden, "a positive multiple of 64")


def tiles(kernel: Kernel, hidden: int) -> tuple[Tile, ...]:
    """The tiles compiled for a hidden size, smallest first; at least one.

    Raises:
        ArgumentError: `hidden` is not a positive multiple of 64.
        UnsupportedError: No tile fits into shared memory.
    """
    check_hidden(hidden)
    cluster = cluster_size(hidden)

    def usable(candidates: tuple[tuple[int, int, int], ...]) -> Iterator[Tile]:
        for tokens, groups, stages in candidates:
            tile = Tile(hidden, cluster, tokens, groups, stages)
            whole = tile.chunks % groups == 0 and stages <= tile.batches
            if whole and tile.shared_bytes(kernel) <= SHARED_LIMIT:
                yield tile

    found = tuple(usable(PREFERRED[kernel])) or tuple(usable(FALLBACK))[:1]
    if not found:
        raise UnsupportedError(
            f"the {kernel} kernel has no tile for hidden size {hidden}: a cluster of {cluster} gives a CTA "
            f"{hidden // cluster} elements, too many for {SHARED_LIMIT} bytes of shared memory; sizes that "
            f"256 divides have clusters of 8"
        )
    return found


def choose_tile(kernel: Kernel, hidden: int, tokens: int) -> Tile:
    """The smallest tile whose launch fits on the device at once, else the largest.

    Raises:
        ArgumentError: As for `tiles`.
        UnsupportedError: As for `tiles`.
    """
    candidates = tiles(kernel, hidden)
    for tile in candidates:
        if -(-tokens // tile.tokens) * tile.cluster <= WAVE:
            return tile
    return candidates[-1]
