# SPDX-License-Identifier: Apache-2.0
"""The numbers of one launch, from facts equal on all ranks: tile configuration, order, grid and signature.

Fused kernel and stand-alone reduce-scatter take the same plan for the same call, so a rank that runs one
understands a rank that runs the other.

A grid of pairs takes every SM of an even number: SMs come in pairs (TPCs) on every architecture so far, and a
cluster of two fits each.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_symm_mem.protocol.layout import Strategy
from dsv4_symm_mem.protocol.tiles import TileShape
from dsv4_symm_mem.protocol.words import Operation, call_signature

from dsv4_gemm_rs.dispatch.costs import choose, grouping, wave_rows
from dsv4_gemm_rs.dispatch.decide import Machine, Problem, operand_for
from dsv4_gemm_rs.dispatch.rates import rates_of
from dsv4_gemm_rs.kernels.families import TileConfig, members, operand_of


@dataclass(frozen=True)
class LaunchPlan:
    """How one call is launched.

    Attributes:
        config: The kernel's tile configuration.
        grid: CTAs, all resident at once; a multiple of the configuration's cluster.
        group_rows: Position rows per owner in a group, see `Schedule`.
        lag: Groups by which own tiles trail.
        wave_rows: Rows of a group for the stand-alone reduce-scatter, whose waves need no operands.
        signature: What all ranks of the call must agree on, see `call_signature`.
        gathered: Whether the kernel performs a whole all-reduce.
    """

    config: TileConfig
    grid: int
    group_rows: int
    lag: int
    wave_rows: int
    signature: int
    gathered: bool = False

    @property
    def shape(self) -> TileShape:
        """Tile shape of the call."""
        return TileShape(self.config.tile_m, self.config.tile_n)


def operation_of(strategy: Strategy, *, gathered: bool) -> Operation:
    """What a fused kernel performs, for its flags; `gathered` for a whole all-reduce in one launch."""
    if strategy is Strategy.PUSH:
        return Operation.REDUCE_SCATTER
    return Operation.MULTICAST_ALL_REDUCE if gathered else Operation.MULTICAST_REDUCE_SCATTER


def plan_launch(machine: Machine, problem: Problem, *, gathered: bool = False) -> LaunchPlan:
    """The plan of a call on a machine with a fused kernel; `gathered` for an all-reduce by that kernel."""
    operand = operand_for(machine.arch, problem.kind, packed=problem.packed)
    config = choose(
        rates_of(machine.arch, operand),
        members(machine.arch, operand, machine.strategy),
        problem.m,
        problem.n,
        problem.k,
        machine.world_size,
        machine.multiprocessors,
    )
    return plan_with(config, machine, problem, gathered=gathered)


def plan_with(
    config: TileConfig, machine: Machine, problem: Problem, *, gathered: bool = False
) -> LaunchPlan:
    """The plan of a call in tiles of `config`, whichever the best are."""
    m, n = problem.m, problem.n
    operation = operation_of(machine.strategy, gathered=gathered)
    workers = machine.multiprocessors // config.cluster
    rates = rates_of(machine.arch, operand_of(config))
    groups = grouping(rates, config, n, problem.k, machine.world_size, workers)
    return LaunchPlan(
        config=config,
        grid=workers * config.cluster,
        group_rows=groups.rows,
        lag=groups.lag,
        wave_rows=wave_rows(config, n, machine.world_size, workers),
        signature=call_signature(operation, m, n, config.tile_m, config.tile_n),
        gathered=gathered,
    )
