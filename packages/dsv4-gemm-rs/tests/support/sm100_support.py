# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernel on emulated ranks, launched by itself: operands, exchange and outputs of a whole group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dsv4_gemm_rs import WeightKind
from dsv4_gemm_rs.dispatch.costs import grouping
from dsv4_gemm_rs.dispatch.plan import operation_of
from dsv4_gemm_rs.dispatch.rates import rates_of
from dsv4_gemm_rs.kernels.cache import gemm_reduce_scatter_kernel
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig, Operand
from dsv4_gemm_rs.problems import RankProblem
from dsv4_gemm_rs.quantize import quantize_mxfp8
from dsv4_symm_mem import SymmetricArena, VirtualGroup
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.layout import BF16_BYTES, ExchangeLayout, shard_length
from dsv4_symm_mem.protocol.tiles import TileGrid, TileShape
from dsv4_symm_mem.protocol.words import call_signature
from gemm_rs_support import problems_for


@dataclass(frozen=True)
class Operands:
    """One rank's A [M, K] and W [N, K] as the kernel takes them; scales are empty for BF16."""

    a: torch.Tensor
    a_scale: torch.Tensor
    w: torch.Tensor
    w_scale: torch.Tensor


def operands_of(problem: RankProblem, operand: Operand) -> Operands:
    """The operands of a problem, of MXFP8 quantised as the problem's exact values are."""
    none = torch.empty(0, dtype=torch.uint8)
    if operand is Operand.BF16:
        return Operands(problem.x, none, problem.weight.data, none)
    quantised = quantize_mxfp8(problem.x)
    scale = problem.weight.scale
    assert scale is not None
    return Operands(quantised.data, quantised.scale, problem.weight.data, scale)


def case(
    config: KernelConfig, size: int, m: int, n: int, k: int, seed: int = 0
) -> tuple[list[RankProblem], list[Operands]]:
    """Every rank's part of a problem, and the kernel's operands for it."""
    kind = WeightKind.MXFP8 if config.scaled else WeightKind.BF16
    problems = problems_for(size, m, n, k, kind, seed=seed)
    return problems, [operands_of(problem, config.operand) for problem in problems]


class Group:
    """P emulated ranks with an exchange each.

    Args:
        emulation: Their devices.
        config: The kernel.
        max_tokens: Largest M of a call.
        n: Largest N of a call.
        deadline: Seconds that a wait may last.
    """

    def __init__(
        self, emulation: Any, config: KernelConfig, max_tokens: int, n: int, deadline: float = 0.0
    ) -> None:
        self.emulation, self.config = emulation, config
        self.size = len(emulation.accelerators)
        self.processors = emulation.accelerators[0].multiprocessors
        self.shape = TileShape(config.tile_m, config.tile_n)
        grid = TileGrid(max_tokens, n, self.size, self.shape)
        tiles = grid.owned_tiles(0)
        slot_bytes = tiles * grid.tile_elements * BF16_BYTES
        layout = ExchangeLayout(self.size, tiles, slot_bytes, config.strategy)
        self.group = VirtualGroup(self.size, emulation=emulation)
        self.arenas = self.group.run(lambda rank: SymmetricArena.create(rank, layout.total_bytes))
        self.blocks = [arena.allocate((layout.total_bytes,), torch.uint8, "block") for arena in self.arenas]
        staging = self.processors * config.staging_bytes if self.size > 1 else 0
        self.exchanges = [
            LaunchExchange(layout, block, rank, deadline, device, staging)
            for rank, (block, device) in enumerate(zip(self.blocks, emulation.accelerators, strict=True))
        ]

    def launch(
        self,
        rank: int,
        operands: Operands,
        *,
        m: int | None = None,
        gathered: bool = False,
        early: bool = False,
    ) -> torch.Tensor:
        """Queue one rank's part of a call.

        `gathered` makes an all-reduce of it, `early` lets it begin while the launch before runs.
        """
        config, exchange = self.config, self.exchanges[rank]
        m, n, k = operands.a.shape[0] if m is None else m, operands.w.shape[0], operands.a.shape[1]
        rows = m if gathered else shard_length(m, self.size)
        out = torch.full((rows, n), float("nan"), dtype=torch.bfloat16)
        workers = self.processors // config.cluster
        groups = grouping(rates_of(100, config.operand), config, n, k, self.size, workers)
        operation = operation_of(config.strategy, gathered=gathered)
        gemm_reduce_scatter_kernel(config)(
            operands.a.data_ptr(),
            operands.a.stride(0) if m > 1 else k,
            operands.w.data_ptr(),
            operands.w.stride(0),
            operands.a_scale.data_ptr(),
            operands.w_scale.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            m,
            n,
            k,
            *exchange.arguments(call_signature(operation, m, n, config.tile_m, config.tile_n)),
            exchange.staging,
            exchange.multicast,
            int(gathered),
            int(early),
            groups.rows,
            groups.lag,
            workers * config.cluster,
            stream=exchange.stream(),
            memory=(
                *(part for part in vars(operands).values() if part.numel()),
                *([out] if out.numel() else []),
                *(part for part in exchange.memory if part.numel()),
            ),
        )
        return out

    def call(self, operands: Sequence[Operands], *, gathered: bool = False) -> list[torch.Tensor]:
        """Queue one call on every rank; results are there after `finish`."""
        return [self.launch(rank, mine, gathered=gathered) for rank, mine in enumerate(operands)]

    def finish(self) -> None:
        """Execute what is queued, and raise what ended a call."""
        self.emulation.run()
        for exchange in self.exchanges:
            exchange.check()

    def poison(self) -> None:
        """Fill all slots with BF16 NaN bits."""
        for exchange, block in zip(self.exchanges, self.blocks, strict=True):
            block.local[exchange.layout.slots_offset :].fill_(0xFF)

    def close(self) -> None:
        """Free the ranks' memory; collective."""
        self.group.run(lambda rank: self.arenas[rank.rank].close())
