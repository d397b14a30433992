# SPDX-License-Identifier: Apache-2.0
"""The numbers of one launch, from facts equal on all ranks: tile configuration, order, grid and signature.

Fused kernel and stand-alone reduce-scatter take the same plan for the same call, so a rank that runs one
understands a rank that runs the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_symm_mem.protocol.tiles import TileShape
from dsv4_symm_mem.protocol.words import Operation, call_signature

from dsv4_gemm_rs.dispatch.costs import choose, group_rows
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig
from dsv4_gemm_rs.schedule import DEFAULT_LAG


@dataclass(frozen=True)
class LaunchPlan:
    """How one call is launched.

    Attributes:
        config: The kernel's tile configuration.
        grid: CTAs, all resident at once; a multiple of the configuration's cluster.
        group_rows: Position rows per owner in a group, see `Schedule`.
        lag: Groups by which own tiles trail.
        signature: What all ranks of the call must agree on, see `call_signature`.
    """

    config: KernelConfig
    grid: int
    group_rows: int
    lag: int
    signature: int

    @property
    def shape(self) -> TileShape:
        """Tile shape of the call."""
        return TileShape(self.config.tile_m, self.config.tile_n)


def plan_launch(m: int, n: int, k: int, world_size: int, multiprocessors: int) -> LaunchPlan:
    """The plan of a call [m, n] over k per rank, on `multiprocessors` SMs of each rank."""
    config = choose(m, n, k, world_size, multiprocessors)
    grid = multiprocessors // config.cluster * config.cluster
    return LaunchPlan(
        config=config,
        grid=grid,
        group_rows=group_rows(config, n, world_size, grid),
        lag=DEFAULT_LAG,
        signature=call_signature(Operation.REDUCE_SCATTER, m, n, config.tile_m, config.tile_n),
    )
