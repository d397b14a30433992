# SPDX-License-Identifier: Apache-2.0
"""Which tile shape a call takes: the time of the SM90 kernel by waves and bytes.

Contract: pure arithmetic on (M, N, K, P, SMs), so every rank that passes the same numbers chooses the same
configuration; ties go to the earlier one of the family.

Model. A CTA's k step of 64 costs the slower of two things:
  * multiplying: `MULTIPLY_US` per element of the tile,
  * filling shared memory from L2: A's and W's rows of 128 bytes, W's divided by the cluster, which shares
    them. All SMs together reach `FILL_BYTES_PER_US` each; where fewer are busy, one reaches
    `FILL_BYTES_PER_US_ALONE`.

A tile adds its epilogue, an own tile also the peers' partials; waves of positions multiply that, and a launch
costs `LAUNCH_US` whatever it does. Long calls run slower than this by up to a fifth, as the clock falls under
the power limit; that scales all shapes alike.

Calibration: one H200, 132 SMs, BF16, random operands, single and triple waves at K = 1024 and 4096, CUDA
graphs, medians. Microseconds per k step, measured and modelled: 128x320 0.79-0.83/0.81, 128x256
0.64-0.67/0.67, two CTAs sharing W 0.63-0.65/0.65, 128x192 0.56/0.56, 128x160 0.51-0.54/0.51, 128x128
0.46-0.47/0.45, 64x256 0.52-0.56/0.56, 64x192 0.44-0.48/0.45, 64x160 0.39-0.41/0.39, 64x128 0.33-0.35/0.34.
The fill rate, 73 bytes per nanosecond and SM or 9.6 TB/s in all, is the same for every shape that
multiplying does not bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv4_symm_mem.protocol.layout import ceil_div, shard_rows

from dsv4_gemm_rs.kernels.sm90.config import FAMILY, TILE_K, KernelConfig

MULTIPLY_US = 1.98e-5
FILL_BYTES_PER_US = 73_000.0
FILL_BYTES_PER_US_ALONE = 110_000.0
EPILOGUE_US = 0.3
EPILOGUE_US_PER_ELEMENT = 0.95 / (128 * 256)
PEER_US_PER_ELEMENT = 0.6 / (128 * 256)
LAUNCH_US = 4.5
CLUSTER_LAUNCH_US = 1.6


def positions(config: KernelConfig, m: int, n: int, world_size: int) -> int:
    """Positions (see `Schedule`) of a call, with the row tiles that no one needs: they cost time."""
    rows = sum(
        ceil_div(len(shard_rows(m, world_size, owner)), config.tile_m * config.cluster)
        for owner in range(world_size)
    )
    return rows * ceil_div(n, config.tile_n)


def k_step_us(config: KernelConfig, busy: float = 1.0) -> float:
    """Microseconds of one k step of a tile where the fraction `busy` of the SMs is at work."""
    elements = config.tile_m * config.tile_n
    filled = (config.tile_m + config.tile_n / config.cluster) * TILE_K * 2
    fill = filled * max(busy / FILL_BYTES_PER_US, 1 / FILL_BYTES_PER_US_ALONE)
    return max(elements * MULTIPLY_US, fill)


def estimate_us(config: KernelConfig, m: int, n: int, k: int, world_size: int, sms: int) -> float:
    """Microseconds of a call on `sms` SMs, its peers' data always in time."""
    elements = config.tile_m * config.tile_n
    own = PEER_US_PER_ELEMENT * elements * (world_size - 1) / world_size
    rest = EPILOGUE_US + EPILOGUE_US_PER_ELEMENT * elements + own
    k_steps = ceil_div(k, TILE_K)
    workers = max(sms // config.cluster, 1)
    waves, last = divmod(positions(config, m, n, world_size), workers)
    total = LAUNCH_US + (CLUSTER_LAUNCH_US if config.cluster > 1 else 0.0)
    total += waves * (k_steps * k_step_us(config) + rest)
    if last:
        total += k_steps * k_step_us(config, last / workers) + rest
    return total


def choose(
    m: int, n: int, k: int, world_size: int, sms: int, family: Sequence[KernelConfig] = FAMILY
) -> KernelConfig:
    """The configuration of `family` with the least estimate.

    Args:
        m: Rows of one rank's product.
        n: Its columns.
        k: Its summed length.
        world_size: Ranks P.
        sms: SMs that one rank's kernel may use, the least over the ranks.
        family: Configurations to choose from, preferred first.
    """
    usable = [config for config in family if config.cluster <= sms]
    return min(usable, key=lambda config: estimate_us(config, m, n, k, world_size, sms))


def group_rows(config: KernelConfig, n: int, world_size: int, grid: int) -> int:
    """Position rows per owner that make about one wave of `grid` CTAs over all owners.

    A wave is what it takes for own tiles, one group later, to meet tiles that peers have finished.
    """
    return max(1, ceil_div(grid // config.cluster, ceil_div(n, config.tile_n) * world_size))
