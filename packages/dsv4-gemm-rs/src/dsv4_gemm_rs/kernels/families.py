# SPDX-License-Identifier: Apache-2.0
"""Which tile configurations there are, by architecture and by what they multiply.

Contract: all that dispatch, workspace and cache know of a configuration is `TileConfig`; what else a
configuration has is its kernel's own. Architectures with one kernel share its family: a plan then depends on
the number of SMs alone, never on which of them a rank has. Each way to exchange has families of its own.
"""

from __future__ import annotations

from typing import Protocol

from dsv4_symm_mem.protocol.layout import Strategy

from dsv4_gemm_rs.kernels.sm90.config import FAMILY as SM90
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig as Sm90Config
from dsv4_gemm_rs.kernels.sm90.swapped_config import FAMILY as SM90_SWAPPED
from dsv4_gemm_rs.kernels.sm90.swapped_config import SwappedConfig
from dsv4_gemm_rs.kernels.sm100.config import FAMILY as SM100
from dsv4_gemm_rs.kernels.sm100.config import MULTICAST_FAMILY as SM100_MULTICAST
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig as Sm100Config
from dsv4_gemm_rs.kernels.sm100.config import Operand


class TileConfig(Protocol):
    """A member of a family, a hashable value."""

    @property
    def tile_m(self) -> int:
        """Rows of a CTA's tile."""
        ...

    @property
    def tile_n(self) -> int:
        """Its columns."""
        ...

    @property
    def cluster(self) -> int:
        """CTAs that take consecutive row tiles together and load W once for all of them."""
        ...

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in a slot."""
        ...

    @property
    def staging_bytes(self) -> int:
        """Device memory in which one CTA stages tiles for its peers."""
        ...


Family = tuple[TileConfig, ...]

FAMILIES: dict[int, Family] = {90: (*SM90, *SM90_SWAPPED), 100: SM100, 103: SM100}
"""All configurations with a fused kernel that pushes, by 10 * major + minor of the compute capability."""
MULTICAST_FAMILIES: dict[int, Family] = {100: SM100_MULTICAST, 103: SM100_MULTICAST}
"""Those whose owners read sums through multicast: the same tiles."""


def family_of(arch: int | None, strategy: Strategy = Strategy.PUSH) -> Family:
    """Every configuration for GPUs of `arch`; none where there is no fused kernel."""
    families = FAMILIES if strategy is Strategy.PUSH else MULTICAST_FAMILIES
    return () if arch is None else families.get(arch, ())


def members(arch: int | None, operand: Operand, strategy: Strategy = Strategy.PUSH) -> Family:
    """Those of them that multiply `operand`, preferred first."""
    return tuple(config for config in family_of(arch, strategy) if operand_of(config) is operand)


def strategy_of(config: TileConfig) -> Strategy:
    """How a configuration's kernel exchanges."""
    return config.strategy if isinstance(config, Sm100Config) else Strategy.PUSH


def by_column(config: TileConfig) -> bool:
    """Whether a configuration's kernel takes the tiles of a group column by column."""
    return isinstance(config, Sm90Config)


def operand_of(config: TileConfig) -> Operand:
    """What a configuration multiplies."""
    if isinstance(config, SwappedConfig):
        return Operand.FP8_WEIGHT
    return config.operand if isinstance(config, Sm100Config) else Operand.BF16


__all__ = [
    "FAMILIES",
    "MULTICAST_FAMILIES",
    "Family",
    "Operand",
    "Strategy",
    "TileConfig",
    "by_column",
    "family_of",
    "members",
    "operand_of",
    "strategy_of",
]
