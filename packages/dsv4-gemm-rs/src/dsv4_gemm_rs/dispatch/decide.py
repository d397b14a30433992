# SPDX-License-Identifier: Apache-2.0
"""The decision: (machine, problem, what was asked for) -> path, with the reasons for every path not taken.

Contract: a pure function of values that are equal on all ranks, so all ranks take the same path without
talking. Everything that could differ (what is installed, what could be mapped, environment switches) is
settled when the workspace is created. A path that was asked for and cannot be had is an error, never a
silent substitute; a fused path that merely is not there is a fallback with its reason.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dsv4_symm_mem.errors import UnsupportedError
from dsv4_symm_mem.protocol.layout import Strategy

from dsv4_gemm_rs.dispatch.thresholds import Shape, Table, merged, nearest, packaged
from dsv4_gemm_rs.kernels.families import Operand
from dsv4_gemm_rs.weights import WeightKind

BLOCK_SCALED_ARCHS = frozenset({100, 103})
"""Architectures whose tensor cores take E8M0 block scales in the library GEMMs used here."""
FUSED_MIN_TOKENS = 128
"""Rows from which a call is taken to be faster fused where nothing like it was measured (`thresholds`)."""
FLASHINFER_LEAST_N = 128
"""Least N that `flashinfer.mm_mxfp8` takes (0.6.18); it raises below."""


class Path(enum.StrEnum):
    """The ways to perform the operation."""

    FUSED = "fused"
    """One kernel: GEMM tiles are pushed to their owner as they are finished."""
    UNFUSED = "unfused"
    """The best library GEMM, then a reduce-scatter."""
    HOST = "host"
    """The reference back end: the fused schedule and protocol, tile by tile, driven by the host."""


class Gemm(enum.StrEnum):
    """Who multiplies."""

    FUSED_SM90 = "dsv4 SM90 kernel"
    SM90_FP8 = "dsv4 SM90 kernel, FP8 weights"
    FUSED_SM100 = "dsv4 SM100 kernel"
    FLASHINFER = "flashinfer.mm_mxfp8"
    SCALED_MM = "torch._scaled_mm, block-scaled"
    BF16 = "torch.matmul, BF16 operands"
    HOST = "torch.matmul, FP32 tiles"


class Exchange(enum.StrEnum):
    """How partials reach their owner."""

    NONE = "none, one rank"
    PUSH = "push to the owner's slots, by the GEMM kernel"
    MULTICAST = "sums that the owner reads through multicast, by the GEMM kernel"
    PUSH_AFTER = "push to the owner's slots, by the reduce-scatter kernel"
    HOST_PUSH = "push to the owner's slots, by the host"
    ALL_TO_ALL = "all-to-all of the process group, then FP32 addition"


@dataclass(frozen=True)
class Machine:
    """What a group has, equal on all its ranks.

    Attributes:
        arch: Compute capability as 10 * major + minor, or None on a CPU.
        world_size: Number of ranks P.
        multicast: Whether symmetric memory has multicast addresses.
        symmetric: Whether symmetric memory could be mapped.
        process_group: Whether there is a process group for library collectives.
        flashinfer: Whether FlashInfer is installed with its block-scaled product.
        multiprocessors: SMs that a rank's kernels may fill, the least over ranks; 0 on a CPU.
        fused_archs: Architectures that this version has kernels for, fused and stand-alone.
        emulated: Whether kernels are emulated on host memory, where no library multiplies with block scales.
        strategy: How fused kernels are to exchange; never chosen, only asked for.
        multicast_archs: Architectures whose fused kernels can read sums through multicast.
        shared: Whether the ranks share one GPU, each with its part of the SMs.
        table: A user's own thresholds, see `thresholds`.
        batch_invariant: Whether a row's bits may depend on nothing but the row, see `batch_obstacle`.
    """

    arch: int | None
    world_size: int
    multicast: bool
    symmetric: bool
    process_group: bool
    flashinfer: bool
    multiprocessors: int
    fused_archs: frozenset[int]
    emulated: bool = False
    strategy: Strategy = Strategy.PUSH
    multicast_archs: frozenset[int] = frozenset()
    shared: bool = False
    table: Table = ()
    batch_invariant: bool = False


@dataclass(frozen=True)
class Problem:
    """One call: partial [m, n] over k per rank, and what is multiplied, see `Operands.kind`.

    `packed` tells whether the weight is kept packed, see `weights.Keep`.
    """

    m: int
    n: int
    k: int
    kind: WeightKind
    packed: bool = False


@dataclass(frozen=True)
class Rejection:
    """A path that was preferred to the chosen one, and why it was not taken."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Decision:
    """A path with its parts, why it was taken, and what was passed over."""

    path: Path
    gemm: Gemm
    exchange: Exchange
    reason: str
    rejected: tuple[Rejection, ...] = ()

    @property
    def capturable(self) -> bool:
        """Whether a call only enqueues work, so that CUDA graphs can hold it."""
        return self.gemm is not Gemm.HOST and self.exchange is not Exchange.HOST_PUSH

    def __str__(self) -> str:
        passed_over = "".join(f"; not {r.path.value}: {r.reason}" for r in self.rejected)
        return f"{self.path.value} ({self.gemm.value}; {self.exchange.value}): {self.reason}{passed_over}"


def decide(machine: Machine, problem: Problem, requested: Path | None = None) -> Decision:
    """Choose a path.

    Args:
        machine: What the group has.
        problem: The call.
        requested: The only acceptable path, or None for the best one.

    Raises:
        UnsupportedError: The requested path cannot be had here; says why.
    """
    obstacles = {
        Path.FUSED: _fused_obstacle(machine, problem),
        Path.UNFUSED: _unfused_obstacle(machine),
        Path.HOST: _host_obstacle(machine),
    }
    if machine.batch_invariant:
        obstacles = {path: obstacles[path] or batch_obstacle(machine, path) for path in Path}
    if requested is not None:
        if obstacles[requested]:
            raise UnsupportedError(f"path {requested.value!r} was requested, but {obstacles[requested]}")
        return _decision(requested, machine, problem, "requested", ())
    if machine.batch_invariant:
        if obstacles[Path.UNFUSED]:
            raise UnsupportedError(f"batch invariance was requested, but {obstacles[Path.UNFUSED]}")
        reason = "batch invariance was requested: one order of K, every partial rounded"
        return _decision(Path.UNFUSED, machine, problem, reason, ())
    if machine.world_size == 1 and not obstacles[Path.FUSED]:
        obstacles[Path.FUSED] = "one rank has nothing to exchange, and the library's GEMM alone is faster"
    preferred = [Path.FUSED, Path.UNFUSED, Path.HOST]
    if machine.arch is None:
        preferred = [Path.FUSED, Path.HOST, Path.UNFUSED]
    elif not (obstacles[Path.FUSED] or obstacles[Path.UNFUSED]):
        least = least_tokens(machine, problem)
        if least is None or problem.m < least:
            # A choice, not a fallback: the fused path is there, and nothing is to be logged.
            where = "for any number of tokens" if least is None else f"below {least} tokens"
            reason = f"library GEMM and exchange, the faster way {where}"
            return _decision(Path.UNFUSED, machine, problem, reason, ())
    rejected: list[Rejection] = []
    for path in preferred:
        if not obstacles[path]:
            return _decision(path, machine, problem, _merit(path, machine), tuple(rejected))
        rejected.append(Rejection(path, obstacles[path]))
    raise UnsupportedError("no path: " + "; ".join(f"{r.path.value}: {r.reason}" for r in rejected))


def least_tokens(machine: Machine, problem: Problem) -> int | None:
    """Rows from which a call is faster fused, of the nearest shape measured; None if it never is."""
    if machine.arch is None or machine.strategy is not Strategy.PUSH:
        return FUSED_MIN_TOKENS
    operand = operand_for(machine.arch, problem.kind, packed=problem.packed)
    extents = (max(problem.n, 1), max(problem.k, 1))
    shape = Shape(machine.arch, machine.world_size, machine.shared, operand.value, *extents)
    entry = nearest(merged(packaged(), machine.table), shape)
    return FUSED_MIN_TOKENS if entry is None else entry.least_tokens


def operand_for(arch: int | None, kind: WeightKind, *, packed: bool = False) -> Operand:
    """What the fused kernel of `arch` multiplies for operands of `kind`: BF16 where it knows no scales.

    `packed` tells that the weight is kept packed, which counts there alone.
    """
    if arch in BLOCK_SCALED_ARCHS:
        return Operand.MXFP8 if kind is WeightKind.MXFP8 else Operand.BF16
    return Operand.FP8_WEIGHT if packed else Operand.BF16


def _fused_obstacle(machine: Machine, problem: Problem) -> str:
    if machine.arch is None:
        return "fused kernels need a GPU"
    if machine.arch not in machine.fused_archs:
        return f"this version has no fused kernel for sm_{machine.arch}"
    if not machine.symmetric:
        return "symmetric memory could not be mapped"
    return strategy_obstacle(machine)


def strategy_obstacle(machine: Machine) -> str:
    """Why fused kernels cannot exchange as they are to; empty if they can."""
    if machine.strategy is Strategy.PUSH:
        return ""
    if machine.arch not in machine.multicast_archs:
        arch = "a CPU" if machine.arch is None else f"sm_{machine.arch}"
        return f"this version has no kernel for {arch} that reads through multicast"
    if machine.world_size > 1 and not machine.multicast:
        return "symmetric memory has no multicast address on some rank"
    return ""


def batch_obstacle(machine: Machine, path: Path) -> str:
    """Why a row's bits would depend on the other rows of a call; empty if they do not.

    Our kernels add products along K in one order whatever M and the tile shape, which libraries do not. What
    is left is the exchange: a fused kernel adds the owner's partial unrounded, and which rank owns a row
    depends on M. The stand-alone reduce-scatter adds partials that are all rounded to BF16.
    """
    if path is Path.FUSED:
        return "a fused call rounds all partials but the owner's, and which rank owns a row depends on M"
    if path is Path.HOST:
        return "PyTorch's products may depend on M"
    if machine.arch not in machine.fused_archs:
        where = "a CPU" if machine.arch is None else f"sm_{machine.arch}"
        return f"this version has no kernel for {where}, and a library's product may depend on M"
    if machine.strategy is not Strategy.PUSH:
        return "sums are to be read through multicast, in an order that the switch chooses"
    return ""


def _unfused_obstacle(machine: Machine) -> str:
    if machine.world_size > 1 and not (machine.process_group or machine.symmetric):
        return "there is neither a process group nor symmetric memory to exchange over"
    return ""


def _host_obstacle(machine: Machine) -> str:
    if machine.world_size > 1 and not machine.symmetric:
        return "symmetric memory could not be mapped"
    return ""


def _merit(path: Path, machine: Machine) -> str:
    if path is Path.FUSED:
        return f"a fused kernel exists for sm_{machine.arch}"
    if path is Path.HOST:
        return "reference back end"
    return "library GEMM and exchange"


def _decision(
    path: Path, machine: Machine, problem: Problem, reason: str, rejected: tuple[Rejection, ...]
) -> Decision:
    return Decision(path, _gemm(path, machine, problem), _exchange(path, machine), reason, rejected)


def _gemm(path: Path, machine: Machine, problem: Problem) -> Gemm:
    if path is Path.HOST:
        return Gemm.HOST
    if problem.packed and machine.arch == 90 and machine.arch in machine.fused_archs:
        # The library would have to be given a BF16 copy, made anew for each call.
        return Gemm.SM90_FP8
    if path is Path.FUSED or machine.batch_invariant:
        return Gemm.FUSED_SM90 if machine.arch == 90 else Gemm.FUSED_SM100
    if problem.kind is WeightKind.MXFP8 and machine.arch in BLOCK_SCALED_ARCHS and not machine.emulated:
        taken = machine.flashinfer and problem.n >= FLASHINFER_LEAST_N
        return Gemm.FLASHINFER if taken else Gemm.SCALED_MM
    return Gemm.BF16


def _exchange(path: Path, machine: Machine) -> Exchange:
    if machine.world_size == 1:
        return Exchange.NONE
    if path is Path.FUSED:
        return Exchange.PUSH if machine.strategy is Strategy.PUSH else Exchange.MULTICAST
    if path is Path.UNFUSED and machine.symmetric and machine.arch in machine.fused_archs:
        return Exchange.PUSH_AFTER
    if path is Path.UNFUSED and machine.process_group:
        return Exchange.ALL_TO_ALL
    return Exchange.HOST_PUSH
