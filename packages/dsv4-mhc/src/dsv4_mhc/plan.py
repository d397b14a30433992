# SPDX-License-Identifier: Apache-2.0
"""Which kernel variant serves a call, and how it divides the work. Pure: no tensor, no device.

The hidden dimension is cut into slices, their number from H alone, and a slice into steps of 64 elements,
which are two chunks of 32. A warp takes eight tokens through the steps of a slice; where few tokens leave the
device empty, several warps share a slice's steps. A CTA has some slices of a tile of tokens, and a cluster of
CTAs all of them.

Results depend on none of this but H: the matrix instructions add up a step, its sums are added to those of
the steps before it, whichever warps had them, and slices are added up in their order. So a tile may follow
T.

Rejected: a persistent grid whose CTAs keep their weights on chip (measured: slower but at 128 and 256 tokens,
for ten warps of an SM do not hide latencies); clusters of 16 (not portable, and they leave SMs idle where a
GPC has 18).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from dsv4_mhc.errors import ArgumentError, UnsupportedError

STREAMS = 4
CHUNK = 32
"""Hidden elements of a chunk: four lanes of eight BF16. Also a block of MXFP8."""
STEP = 64
"""Hidden elements of a step: two chunks, whose products are added up in the tensor cores."""
WARP_TOKENS = 8
"""Tokens of a warp, which is N of the matrix instruction."""
LANES = 4
"""Threads that share a token's chunk."""
FP8_GROUP = 128
"""Elements that share an FP32 scale."""
RESIDENT_THREADS = 512
"""Threads of an SM that have 128 registers each."""
WEIGHT_BYTES = STREAMS * 24 * 2 * CHUNK * 2
"""Of a chunk's weights, high and low parts."""
SHARED_SLACK = 512
"""For what is allocated where a variant lacks a buffer, and alignment."""
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
    PROJECT = "project"
    """V4's seam up to its coefficients; a collapse follows in a launch of its own."""
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
        collapse: Find the sublayer's input.
        norm: RMSNorm of the sublayer's input.
        exact_statistic: The norm's mean of squares is that of the unrounded input (V4's order).
        mean: Also write the mean of the streams.
        y: Write the sublayer's input in BF16.
        quant: Also, or only, write it quantised.
    """

    post: bool = True
    store_residual: bool = True
    collapse: bool = True
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
        cluster: CTAs that share a tile of tokens.
        tokens: Tokens of a tile, a multiple of 8.
        parallel: Warps that share the steps of a slice, for each 8 tokens.
        stages: Buffers in shared memory for a chunk's weights, for each slice; 0 to load to registers.
        depth: Buffers in shared memory for a warp's chunk of the streams and F; 0 to load to registers.
    """

    hidden: int
    cluster: int
    tokens: int
    parallel: int
    stages: int = 0
    depth: int = 0

    @property
    def slices(self) -> int:
        """Slices of the hidden dimension."""
        return slice_count(self.hidden)

    @property
    def per_cta(self) -> int:
        """Slices of a CTA."""
        return self.slices // self.cluster

    @property
    def steps(self) -> int:
        """Steps of a slice."""
        return self.hidden // self.slices // STEP

    @property
    def span(self) -> int:
        """Hidden elements of a CTA."""
        return self.hidden // self.cluster

    @property
    def chunks(self) -> int:
        """Chunks of a CTA."""
        return self.span // CHUNK

    @property
    def groups(self) -> int:
        """Warps side by side for the tokens of a tile."""
        return self.tokens // WARP_TOKENS

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.groups * self.per_cta * self.parallel

    @property
    def owned(self) -> int:
        """Tokens whose coefficients a CTA finishes."""
        return self.tokens // self.cluster

    @property
    def parts(self) -> int:
        """Partial sums that wait in shared memory for each token of a slice, in rows of 32."""
        return self.steps if self.parallel > 1 else 0

    def shared_bytes(self, kernel: Kernel) -> int:
        """Dynamic shared memory, which no two buffers share: most are in use until the end."""
        kept = {Kernel.SHIFTED: 1, Kernel.PROJECT: 0}.get(kernel, STREAMS)
        rows = self.slices * self.tokens
        sums = 32 * self.parts * self.per_cta * self.tokens + 25 * self.slices * self.owned + rows
        if kernel in (Kernel.COUPLED, Kernel.HEAD):
            sums += 5 * rows
        if kernel is Kernel.ENGRAM:
            sums += 3 * STREAMS * (rows + self.per_cta * self.parallel * self.tokens)
        ring = self.per_cta * self.stages * (WEIGHT_BYTES + 16)
        ring += self.depth * self.threads * (STREAMS + 1) * 16
        return 2 * kept * self.span * self.tokens + 4 * sums + ring + SHARED_SLACK


def resident_ctas(kernel: Kernel, tile: Tile) -> int:
    """CTAs that should share an SM, which limits the registers of a thread: at least 128 are left to each.

    Where weights go to registers these are the limit: with 128, a warp waits for a few rows at a time.
    """
    if not tile.stages:
        return 1
    shared = SHARED_OF_AN_SM // (tile.shared_bytes(kernel) + SHARED_RESERVED)
    return max(1, min(RESIDENT_THREADS // tile.threads, shared))


def slice_count(hidden: int) -> int:
    """Slices of the hidden dimension: the most of 8, 4, 2 and 1 that divide H into whole steps."""
    return next(count for count in (8, 4, 2, 1) if hidden % (count * STEP) == 0)


Division = tuple[int, int, int, int, int]
"""Cluster, tokens, parallel, stages and depth of a tile."""

FEW: tuple[tuple[Division, ...], ...] = (((8, 8, 10, 0, 0),), ((8, 16, 5, 0, 0),))
PREFERRED: dict[Kernel, tuple[tuple[Division, ...], ...]] = {
    Kernel.SHIFTED: (*FEW, ((8, 32, 1, 2, 3),), ((2, 8, 1, 2, 3),), ((2, 16, 1, 2, 2), (8, 80, 1, 2, 2))),
    Kernel.COUPLED: FEW,
    Kernel.PROJECT: (((4, 16, 1, 2, 3),), ((2, 16, 1, 2, 3),)),
    Kernel.HEAD: FEW,
    Kernel.ENGRAM: (((8, 8, 5, 0, 0),), ((8, 16, 5, 0, 0),)),
}
"""For few tokens first; of each place the first that fits into shared memory. Measured on an H200."""

FALLBACK: tuple[Division, ...] = ((8, 8, 5, 0, 0), (8, 8, 2, 0, 0), (8, 8, 1, 0, 0))
"""For hidden sizes with which no preferred tile fits."""

CLUSTERS = {1: 132, 2: 66, 4: 32, 8: 15}
"""Clusters of each size that an H200 holds at once with a CTA on each SM. A cluster lies within a GPC, and
not every GPC has room for two of eight."""


def check_hidden(hidden: int) -> None:
    """Refuse a hidden size that no kernel serves.

    Raises:
        ArgumentError: Not a positive multiple of 64.
    """
    if hidden <= 0 or hidden % 64:
        raise ArgumentError("hidden", hidden, "a positive multiple of 64")


@cache
def _usable(kernel: Kernel, hidden: int) -> tuple[Tile, ...]:
    slices = slice_count(hidden)

    def first(place: tuple[Division, ...]) -> Iterator[Tile]:
        for cluster, tokens, parallel, stages, depth in place:
            steps = hidden // slices // STEP
            tile = Tile(hidden, min(cluster, slices), tokens, min(parallel, steps), stages, depth)
            if tile.threads <= RESIDENT_THREADS and tile.shared_bytes(kernel) <= SHARED_LIMIT:
                yield tile
                return

    preferred = dict.fromkeys(tile for place in PREFERRED[kernel] for tile in first(place))
    return tuple(preferred) or tuple(first(FALLBACK))


def tiles(kernel: Kernel, hidden: int) -> tuple[Tile, ...]:
    """The tiles compiled for a hidden size, smallest first; at least one.

    Raises:
        ArgumentError: `hidden` is not a positive multiple of 64.
        UnsupportedError: No tile fits into shared memory.
    """
    check_hidden(hidden)
    found = _usable(kernel, hidden)
    if not found:
        slices = slice_count(hidden)
        raise UnsupportedError(
            f"the {kernel} kernel has no tile for hidden size {hidden}: a cluster of {slices} gives a CTA "
            f"{hidden // slices} elements, too many for {SHARED_LIMIT} bytes of shared memory; sizes that "
            f"512 divides have clusters of 8"
        )
    return found


_forced: ContextVar[tuple[Kernel, Tile] | None] = ContextVar("forced", default=None)


@contextmanager
def forced_tile(kernel: Kernel, tile: Tile) -> Iterator[None]:
    """Have this context's calls of `kernel` take this tile, to measure or test it."""
    before = _forced.set((kernel, tile))
    try:
        yield
    finally:
        _forced.reset(before)


def choose_tile(kernel: Kernel, hidden: int, tokens: int) -> Tile:
    """The first tile whose launch fits on the device at once, else the last.

    Raises:
        ArgumentError: As for `tiles`.
        UnsupportedError: As for `tiles`.
    """
    forced = _forced.get()
    if forced is not None and forced[0] is kernel:
        return forced[1]
    candidates = tiles(kernel, hidden)
    for tile in candidates:
        if -(-tokens // tile.tokens) <= CLUSTERS[tile.cluster]:
            return tile
    return candidates[-1]


FUSED_TOKENS = 240
"""Tokens up to which V4's seam is one launch: what an H200 holds at once. 512 took 54 us in one launch and 40
in two."""


def coupled_form(hidden: int, tokens: int) -> Kernel:
    """COUPLED, which keeps the streams on chip, or PROJECT and a collapse: bit for bit the same results."""
    fused = tokens <= FUSED_TOKENS and _usable(Kernel.COUPLED, hidden)
    return Kernel.COUPLED if fused else Kernel.PROJECT


def row_threads(hidden: int) -> int:
    """Threads of a collapse's CTA: whole warps, the most up to 512 that share a row evenly, if any do."""
    vectors = hidden // 8
    even = [count for count in range(32, 513, 32) if vectors % count == 0]
    return max(even, default=min(512, -(-vectors // 32) * 32))


SPREAD_TOKENS = 64
"""Tokens up to which a collapse without norm takes several CTAs for each."""


def finishing(options: SeamOptions) -> SeamOptions:
    """Options of the collapse that follows PROJECT."""
    return replace(options, post=False, store_residual=False, mean=False)
