# SPDX-License-Identifier: Apache-2.0
"""What a benchmark's medians should show, as checks of one case's time over another's.

Every check that applies is reported, whether it holds or not. Where several cases could stand for the same
thing (a bare GEMM, an alternative) the fastest of them is the one to beat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsv4_symm_mem.protocol.layout import Strategy

from dsv4_gemm_rs.bench.memory import COPY_BYTES, moved_bytes
from dsv4_gemm_rs.bench.report import Check

NEVER_SLOWER = 1.02
"""Largest ratio of the dispatched call to another that counts as not slower, for noise."""
EXCHANGE_COST = 1.12
"""Largest ratio of the fused kernel to itself without the exchange that virtual ranks should show."""
LIMIT = 1.08
"""Largest ratio of the fused kernel to the larger of bare GEMM and bare link, for M from `LARGE` on."""
COLLECTIVE = 0.7
"""Largest ratio of the stand-alone reduce-scatter to NCCL's, for M from `LARGE` on."""
KEPT = 1 / 0.92
"""Largest ratio of the kernel for FP8 weights to cuBLAS on their BF16 copies, for M from `LARGE` on."""
QUANTISER = 1 / 0.85
"""Largest ratio of a quantiser to a copy of as many bytes, for M from `MANY` on."""
QUANTISER_US = 4.0
"""Longest that a rank's quantiser should take, for M up to `FEW`."""
FEW, MANY = 128, 2048
REDUCE_SCATTER, REDUCE_SCATTER_US = 1.25, 6.0
"""What the stand-alone reduce-scatter should take where ranks share one memory: times the bytes that they
move at the copy's bandwidth, and on top of it."""
LARGE = 1024
OVER_NCCL = {2048: 0.55, 4096: 0.68}
"""Largest ratio of the fused kernel to cuBLAS then NCCL by K per rank, for M = 2048 and 4096."""

GEMMS = ("gemm-cublas", "gemm-mxfp8", "gemm-ours")
CALLS = ("unfused-call", "unfused-call-nccl")


def targets(
    m: int,
    k: int,
    medians: Mapping[str, float],
    *,
    on_gpu: bool,
    virtual: bool,
    exchange: Strategy = Strategy.PUSH,
    n: int = 0,
    world_size: int = 1,
) -> list[Check]:
    """The checks of one M.

    Args:
        m: Rows.
        k: Input features of a rank.
        medians: Microseconds by case.
        on_gpu: Whether the cases ran on a GPU; a CPU shows only that the dispatcher does no harm.
        virtual: Whether ranks shared one device.
        exchange: How fused kernels exchanged; a check's name says so where they did not push.
        n: Output features.
        world_size: Ranks.
    """
    which = f"M={m}" if exchange is Strategy.PUSH else f"M={m}, {exchange.value}"
    return [
        Check(f"{which}: {case} / {others}", medians[case] / base, target, medians[case] <= target * base)
        for case, others, base, target in (
            *_claims(m, k, medians, on_gpu, virtual),
            *_memory_claims(m, n, world_size, medians, virtual),
        )
    ]


def _claims(
    m: int, k: int, medians: Mapping[str, float], on_gpu: bool, virtual: bool
) -> Iterator[tuple[str, str, float, float]]:
    name, base = _fastest(medians, CALLS)
    yield "dispatched", name, base, NEVER_SLOWER
    if not on_gpu or "fused" not in medians:
        return
    yield "fused", "gemm-then-reduce-scatter", medians["gemm-then-reduce-scatter"], 1.0
    if virtual:
        yield "fused", "gemm-ours", medians["gemm-ours"], EXCHANGE_COST
    if "gemm-ours-fp8-weights" in medians:
        if m >= LARGE:
            yield "gemm-ours-fp8-weights", "gemm-cublas", medians["gemm-cublas"], KEPT
        if virtual:
            name = "gemm-ours-fp8-weights"
            yield "fused-fp8-weights", name, medians[name], EXCHANGE_COST
    if "link-copy" not in medians:
        return
    for other in ("gemm-then-nccl", "torch-fused"):
        if other in medians:
            target = OVER_NCCL.get(k, 1.0) if other == "gemm-then-nccl" and m in (2048, 4096) else 1.0
            yield "fused", other, medians[other], target
    if "gemm-then-nccl-all-reduce" in medians and "fused-all-reduce" in medians:
        other = "gemm-then-nccl-all-reduce"
        yield "fused-all-reduce", other, medians[other], 1.0
    if m >= LARGE:
        name, base = _fastest(medians, GEMMS)
        if medians["link-copy"] > base:
            name, base = "link-copy", medians["link-copy"]
        yield "fused", f"max(bare GEMM, link) = {name}", base, LIMIT
        yield "reduce-scatter", "nccl-reduce-scatter", medians["nccl-reduce-scatter"], COLLECTIVE


def _memory_claims(
    m: int, n: int, world_size: int, medians: Mapping[str, float], virtual: bool
) -> Iterator[tuple[str, str, float, float]]:
    """Claims on what memory bounds; ranks that share a device quantise one after the other."""
    for name in ("quantise", "round-trip"):
        copy = f"{name}-copy"
        if copy in medians and m >= MANY:
            yield name, copy, medians[copy], QUANTISER
        if copy in medians and m <= FEW:
            ranks = world_size if virtual else 1
            yield name, f"{QUANTISER_US:g} us a rank", ranks * QUANTISER_US, 1.0
    if virtual and "copy" in medians and "reduce-scatter" in medians:
        floor = moved_bytes(m, n, world_size) / (2 * COPY_BYTES) * medians["copy"]
        said = f"({REDUCE_SCATTER:g} copy floor + {REDUCE_SCATTER_US:g} us)"
        yield "reduce-scatter", said, REDUCE_SCATTER * floor + REDUCE_SCATTER_US, 1.0


def _fastest(medians: Mapping[str, float], names: tuple[str, ...]) -> tuple[str, float]:
    return min(((name, medians[name]) for name in names if name in medians), key=lambda item: item[1])
