# SPDX-License-Identifier: Apache-2.0
"""Which tile shape a call takes: the time of a fused kernel by waves, bytes and the link.

Contract: pure arithmetic on (M, N, K, P, SMs), so every rank that passes the same numbers chooses the same
configuration; ties go to the earlier one of the family. One model serves every architecture; what differs
between them is a family of tiles and its `Rates`.

Model. A CTA's k step of 128 bytes costs the slower of two things:
  * multiplying, by elements of the tile on top of a constant,
  * filling shared memory from L2: A's and W's rows of 128 bytes, W's divided by the cluster, which shares
    them. Where few SMs are busy, each of them reaches more.

A tile adds its epilogue, an own tile also the peers' partials; a launch costs something whatever it does.
Where the kernel has two accumulators, or warpgroups that take turns, a tile's epilogue runs beside the next
tile's k steps, which wait for the epilogue of the one before; a lone tile has nothing beside it. Workers
take the positions of rank 0's schedule in turn: a wave's remote tiles join the link's queue when they are
finished, and an own tile ends no earlier than its group's tiles are through the link, from peers that run
level. Where sums are read through multicast, every tile crosses the link, own ones too, and the call ends
when the last is read. This is why small tiles win where large ones would make a single wave: its tiles could
only travel after all of the arithmetic.

Known miss on SM90: every shape comes out slower than modelled, by up to 13 %, at M = 8192 and K = 4096, where
the clock falls under the power limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from dsv4_symm_mem.protocol.layout import ceil_div, shard_rows
from dsv4_symm_mem.protocol.tiles import TileShape

from dsv4_gemm_rs.dispatch.rates import Rates
from dsv4_gemm_rs.kernels.families import Strategy, TileConfig, by_column, strategy_of
from dsv4_gemm_rs.schedule import DEFAULT_LAG, Schedule

STAGE_BYTES = 128
"""Bytes of K in a k step: one row of the 128-byte swizzle, on every architecture."""
LINK_SHARE = 1 / 3
"""Share of a wave's time up to which its tiles may need the link for waves to be square.

On two H200s with N = 5120 square waves lost to groups of four rows where K is 2048 (a share of 0.5), and won
where it is 4096 (0.25).
"""
LEAST_ROWS = 4
"""Position rows of a group by columns: three were slower there, and one much slower where a rank has few
multiprocessors."""


@dataclass(frozen=True)
class Grouping:
    """Position rows per owner in a group, and the groups by which own tiles trail, see `Schedule`."""

    rows: int
    lag: int


def positions(config: TileConfig, m: int, n: int, world_size: int) -> int:
    """Positions (see `Schedule`) of a call, with the row tiles that no one needs: they cost time."""
    rows = sum(
        ceil_div(len(shard_rows(m, world_size, owner)), config.tile_m * config.cluster)
        for owner in range(world_size)
    )
    return rows * ceil_div(n, config.tile_n)


def k_step_us(rates: Rates, config: TileConfig, busy: float = 1.0) -> float:
    """Microseconds of one k step of a tile where the fraction `busy` of the SMs is at work."""
    elements = config.tile_m * config.tile_n
    filled = (config.tile_m + config.tile_n / config.cluster) * STAGE_BYTES
    fill = filled * max(busy / rates.fill_bytes_per_us, 1 / rates.fill_bytes_per_us_alone)
    return max(rates.step_us + elements * rates.multiply_us, fill)


def estimate_us(rates: Rates, config: TileConfig, m: int, n: int, k: int, world_size: int, sms: int) -> float:
    """Microseconds of a call on `sms` SMs whose peers run level with it."""
    elements = config.tile_m * config.tile_n
    epilogue = rates.epilogue_us + rates.epilogue_us_per_element * elements
    addition = rates.peer_us_per_element * elements * (world_size - 1)
    pulled = strategy_of(config) is Strategy.MULTICAST and world_size > 1
    rate = rates.multicast_bytes_per_us if pulled else rates.link_bytes_per_us
    sent_us = config.cluster * config.tile_bytes / rate
    k_steps = ceil_div(k, rates.stage_k)
    workers = max(sms // config.cluster, 1)
    step_factor = rates.lone if positions(config, m, n, world_size) <= workers else 1.0
    launched = rates.launch_us + (rates.cluster_launch_us if config.cluster > 1 else 0.0)
    # Ends, by worker: of the last tile's k steps, of its epilogue, and of the epilogue before that one.
    multiplied, ready, earlier = (np.full(workers, launched) for _ in range(3))
    link = 0.0
    arrived: dict[int, float] = {}
    groups = grouping(rates, config, n, k, world_size, workers)
    for wave in _waves(config, m, n, world_size, groups, workers):
        busy = sum(count for _, _, count in wave)
        start = np.maximum(multiplied[:busy], (earlier if rates.overlapped else ready)[:busy])
        multiplied[:busy] = start + k_steps * step_factor * k_step_us(rates, config, busy / workers)
        earlier[:busy] = ready[:busy]
        ready[:busy] = np.maximum(multiplied[:busy], ready[:busy]) + epilogue
        first = 0
        for step, own, count in wave:
            run = ready[first : first + count]
            first += count
            if own and not pulled:
                np.maximum(run, arrived.get(step - groups.lag, 0.0), out=run)
                run += addition
            else:
                # The link is idle until the first of them is finished and serves them in turn; CTAs that
                # are level with each other then publish together.
                through = max(max(link, float(run.min())) + count * sent_us, float(run.max()) + sent_us)
                link = through + rates.publish_us * count / workers
                arrived[step] = link + rates.link_latency_us
    return max(float(ready.max()), link + rates.link_latency_us) if pulled else float(ready.max())


def _arithmetic_us(
    rates: Rates, config: TileConfig, m: int, n: int, k: int, world_size: int, sms: int
) -> float:
    """Microseconds of a call's products and epilogues alone, at most what `estimate_us` is."""
    elements = config.tile_m * config.tile_n
    workers = max(sms // config.cluster, 1)
    waves, last = divmod(positions(config, m, n, world_size), workers)
    steps = waves * k_step_us(rates, config) + (k_step_us(rates, config, last / workers) if last else 0.0)
    epilogues = min(waves + bool(last), 1 if rates.overlapped else waves + 1)
    epilogue = rates.epilogue_us + rates.epilogue_us_per_element * elements
    return rates.launch_us + ceil_div(k, rates.stage_k) * steps + epilogues * epilogue


def _waves(
    config: TileConfig, m: int, n: int, world_size: int, groups: Grouping, workers: int
) -> Iterator[list[tuple[int, bool, int]]]:
    """Rank 0's positions in waves of `workers`: runs of (step, whether own, how many)."""
    rows, lag = groups.rows, groups.lag
    shape = TileShape(config.tile_m, config.tile_n)
    schedule = Schedule(m, n, world_size, 0, shape, rows, lag, config.cluster)
    columns, own_rows = schedule.grid.column_tiles, schedule.position_rows(0)
    wave: list[tuple[int, bool, int]] = []
    room = workers
    for step in range(schedule.groups + lag):
        first = max(step - lag, 0) * rows
        last = max(step + 1 - lag, 0) * rows
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
    rates: Rates, family: Sequence[TileConfig], m: int, n: int, k: int, world_size: int, sms: int
) -> TileConfig:
    """The configuration of `family` with the least estimate.

    Args:
        rates: What the family's kernel takes.
        family: Configurations to choose from, preferred first.
        m: Rows of one rank's product.
        n: Its columns.
        k: Its summed length.
        world_size: Ranks P.
        sms: SMs that one rank's kernel may use, the least over the ranks.
    """
    usable = [config for config in family if config.cluster <= sms]
    bounds = [_arithmetic_us(rates, config, m, n, k, world_size, sms) for config in usable]
    best, least = usable[0], float("inf")
    # Most promising first, so that most need no simulation: an estimate is never below its bound.
    for index in sorted(range(len(usable)), key=bounds.__getitem__):
        if bounds[index] > least:
            break
        estimate = estimate_us(rates, usable[index], m, n, k, world_size, sms)
        if (estimate, index) < (least, usable.index(best)):
            best, least = usable[index], estimate
    return best


def wave_rows(config: TileConfig, n: int, world_size: int, workers: int) -> int:
    """Position rows per owner that make about one wave of `workers` over all owners."""
    return max(1, ceil_div(workers, ceil_div(n, config.tile_n) * world_size))


def grouping(rates: Rates, config: TileConfig, n: int, k: int, world_size: int, workers: int) -> Grouping:
    """How `workers` CTAs or clusters of the kernel group a call's position rows.

    About one wave over all owners, so that own tiles, two groups later, meet tiles that peers have finished.
    Kernels that go by columns take a few rows more, or their operands would fill L2 in a single wave. Where
    the link needs little of the time, a wave is as many rows as columns: fewest operands, but the link then
    gets its tiles in long runs.
    """
    wave = wave_rows(config, n, world_size, workers)
    if not by_column(config):
        return Grouping(wave, DEFAULT_LAG)
    sent_us = workers * config.tile_bytes / rates.link_bytes_per_us * (world_size - 1) / world_size
    if sent_us < LINK_SHARE * ceil_div(k, rates.stage_k) * k_step_us(rates, config):
        return Grouping(max(1, round((workers * config.tile_n / config.tile_m) ** 0.5)), 1)
    return Grouping(max(wave, LEAST_ROWS), DEFAULT_LAG)
