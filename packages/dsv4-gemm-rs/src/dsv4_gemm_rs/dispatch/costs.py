# SPDX-License-Identifier: Apache-2.0
"""Which tile shape a call takes: the time of the SM90 kernel by waves, bytes and the link.

Contract: pure arithmetic on (M, N, K, P, SMs), so every rank that passes the same numbers chooses the same
configuration; ties go to the earlier one of the family.

Model. A CTA's k step of 64 costs the slower of two things:
  * multiplying: `MULTIPLY_US` per element of the tile,
  * filling shared memory from L2: A's and W's rows of 128 bytes, W's divided by the cluster, which shares
    them. All SMs together reach `FILL_BYTES_PER_US` each; where fewer are busy, one reaches
    `FILL_BYTES_PER_US_ALONE`.

A tile adds its epilogue, an own tile also the peers' partials; a launch costs `LAUNCH_US` whatever it does.
Workers take the positions of rank 0's schedule in turn: a wave's remote tiles join the link's queue when they
are finished, and an own tile ends no earlier than its group's tiles are through the link, from peers that run
level. This is why small tiles win where large ones would make a single wave: its tiles could only travel
after all of the arithmetic.

Calibration: one H200, 132 SMs, BF16, random operands, every configuration in turn at M = 512 to 8192 and
K = 1024 to 4096, CUDA graphs, medians; the tests hold the model against them. Clusters and tiles of 64 rows
come out slower than modelled where many waves run, and every shape does by up to a fifth at large M and K, as
the clock falls under the power limit. The link's rate is what copies between two H200s reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from dsv4_symm_mem.protocol.layout import ceil_div, shard_rows
from dsv4_symm_mem.protocol.tiles import TileShape

from dsv4_gemm_rs.kernels.sm90.config import FAMILY, TILE_K, KernelConfig
from dsv4_gemm_rs.schedule import DEFAULT_LAG, Schedule

MULTIPLY_US = 1.98e-5
FILL_BYTES_PER_US = 88_000.0
FILL_BYTES_PER_US_ALONE = 110_000.0
EPILOGUE_US = 0.1
EPILOGUE_US_PER_ELEMENT = 1.2 / (128 * 256)
PEER_US_PER_ELEMENT = 0.6 / (128 * 256)
LAUNCH_US = 4.5
CLUSTER_LAUNCH_US = 1.6
LINK_BYTES_PER_US = 365_000.0
LINK_LATENCY_US = 3.0


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
    """Microseconds of a call on `sms` SMs whose peers run level with it."""
    elements = config.tile_m * config.tile_n
    epilogue = EPILOGUE_US + EPILOGUE_US_PER_ELEMENT * elements
    addition = PEER_US_PER_ELEMENT * elements * (world_size - 1)
    sent_us = config.cluster * config.tile_bytes / LINK_BYTES_PER_US
    k_steps = ceil_div(k, TILE_K)
    workers = max(sms // config.cluster, 1)
    ready = np.full(workers, LAUNCH_US + (CLUSTER_LAUNCH_US if config.cluster > 1 else 0.0))
    link = 0.0
    arrived: dict[int, float] = {}
    for wave in _waves(config, m, n, world_size, sms, workers):
        busy = sum(count for _, _, count in wave)
        ready[:busy] += k_steps * k_step_us(config, busy / workers) + epilogue
        first = 0
        for step, own, count in wave:
            run = ready[first : first + count]
            first += count
            if own:
                np.maximum(run, arrived.get(step - DEFAULT_LAG, 0.0), out=run)
                run += addition
            else:
                # The link is idle until the first of them is finished and serves them in turn.
                link = max(max(link, float(run.min())) + count * sent_us, float(run.max()) + sent_us)
                arrived[step] = link + LINK_LATENCY_US
    return float(ready.max())


def _arithmetic_us(config: KernelConfig, m: int, n: int, k: int, world_size: int, sms: int) -> float:
    """Microseconds of a call's products and epilogues alone: what `estimate_us` is with an infinite link."""
    elements = config.tile_m * config.tile_n
    workers = max(sms // config.cluster, 1)
    waves, last = divmod(positions(config, m, n, world_size), workers)
    steps = waves * k_step_us(config) + (k_step_us(config, last / workers) if last else 0.0)
    epilogue = EPILOGUE_US + EPILOGUE_US_PER_ELEMENT * elements
    return LAUNCH_US + ceil_div(k, TILE_K) * steps + (waves + bool(last)) * epilogue


def _waves(
    config: KernelConfig, m: int, n: int, world_size: int, sms: int, workers: int
) -> Iterator[list[tuple[int, bool, int]]]:
    """Rank 0's positions in waves of `workers`: runs of (step, whether own, how many)."""
    rows = group_rows(config, n, world_size, sms // config.cluster * config.cluster)
    shape = TileShape(config.tile_m, config.tile_n)
    schedule = Schedule(m, n, world_size, 0, shape, rows, cluster=config.cluster)
    columns, own_rows = schedule.grid.column_tiles, schedule.position_rows(0)
    wave: list[tuple[int, bool, int]] = []
    room = workers
    for step in range(schedule.groups + DEFAULT_LAG):
        first = max(step - DEFAULT_LAG, 0) * rows
        last = max(step + 1 - DEFAULT_LAG, 0) * rows
        own = columns * (min(last, own_rows) - min(first, own_rows))
        remote = schedule.before(step + 1) - schedule.before(step) - own
        for is_own, count in ((False, remote), (True, own)):
            while count > 0:
                taken = min(count, room)
                wave.append((step, is_own, taken))
                count, room = count - taken, room - taken
                if not room:
                    yield wave
                    wave, room = [], workers
    if wave:
        yield wave


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
    bounds = [_arithmetic_us(config, m, n, k, world_size, sms) for config in usable]
    best, least = usable[0], float("inf")
    # Most promising first, so that most need no simulation: an estimate is never below its bound.
    for index in sorted(range(len(usable)), key=bounds.__getitem__):
        if bounds[index] > least:
            break
        estimate = estimate_us(usable[index], m, n, k, world_size, sms)
        if (estimate, index) < (least, usable.index(best)):
            best, least = usable[index], estimate
    return best


def group_rows(config: KernelConfig, n: int, world_size: int, grid: int) -> int:
    """Position rows per owner that make about one wave of `grid` CTAs over all owners.

    A wave is what it takes for own tiles, one group later, to meet tiles that peers have finished.
    """
    return max(1, ceil_div(grid // config.cluster, ceil_div(n, config.tile_n) * world_size))
