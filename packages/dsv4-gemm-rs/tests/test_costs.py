# SPDX-License-Identifier: Apache-2.0
"""The cost model against the calibration and the shapes whose best tile was measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from dsv4_gemm_rs.dispatch.costs import LINK_BYTES_PER_US, choose, estimate_us, group_rows, positions
from dsv4_gemm_rs.kernels.sm90.config import FAMILY, SHARED_BYTES, KernelConfig
from dsv4_gemm_rs.schedule import Schedule, TileShape
from dsv4_symm_mem.errors import ArgumentError

MEASURED = json.loads((Path(__file__).parent / "data" / "sm90_gemm_h200.json").read_text())
"""Microseconds of bare GEMMs by tile shape (c2: clusters of two that share W), and of cuBLAS: one H200, BF16,
random operands, CUDA graphs, medians."""


def test_estimates_are_near_what_was_measured() -> None:
    for row in MEASURED:
        for config in FAMILY:
            measured = row[f"{config.tile_m}x{config.tile_n}"]
            estimate = estimate_us(config, row["m"], row["n"], row["k"], 1, 132)
            assert 0.78 < estimate / measured < 1.12, (row, config, estimate)


def test_choices_are_near_the_best_measured() -> None:
    for row in MEASURED:
        times = {config: row[f"{config.tile_m}x{config.tile_n}"] for config in FAMILY}
        chosen = choose(row["m"], row["n"], row["k"], 1, 132)
        assert times[chosen] <= 1.06 * min(times.values()), (row, chosen)


def test_choices_are_the_least_estimates() -> None:
    for m, k, world in itertools.product((0, 1, 130, 1024, 5000), (128, 2048), (1, 2, 8)):
        estimates = [estimate_us(config, m, 5120, k, world, 132) for config in FAMILY]
        assert choose(m, 5120, k, world, 132) == FAMILY[estimates.index(min(estimates))]


def test_one_wave_of_large_tiles_loses_where_its_tiles_must_travel() -> None:
    """At M = 1024 a single wave of 128x320 is the best product, and the worst exchange."""
    assert choose(1024, 5120, 2048, 1, 132) == KernelConfig(128, 320)
    alone, exchanging = (estimate_us(KernelConfig(128, 320), 1024, 5120, 2048, p, 132) for p in (1, 2))
    chosen = choose(1024, 5120, 2048, 2, 132)
    assert chosen.tile_n < 320
    assert alone < estimate_us(chosen, 1024, 5120, 2048, 2, 132) < exchanging


def test_the_link_bounds_what_the_tensor_cores_do_not() -> None:
    for m, world in itertools.product((4096, 8192), (4, 8)):
        wire = 2 * m * 5120 * (world - 1) / world / LINK_BYTES_PER_US
        estimate = estimate_us(KernelConfig(128, 128), m, 5120, 128, world, 132)
        assert wire < estimate < 1.2 * wire + 20


def test_positions_are_the_schedules() -> None:
    for config, m, world in itertools.product(FAMILY, [0, 1, 127, 128, 129, 1000, 1025, 4097], [1, 2, 4, 8]):
        schedule = Schedule(m, 992, world, 0, TileShape(config.tile_m, config.tile_n), cluster=config.cluster)
        assert positions(config, m, 992, world) == schedule.positions


def test_every_choice_is_of_the_family_and_does_not_depend_on_rank() -> None:
    for m, n, k, world in itertools.product(
        [0, 1, 128, 1024, 8192], [512, 5120, 7168], [128, 4096], [1, 2, 8]
    ):
        config = choose(m, n, k, world, 132)
        assert config in FAMILY
        assert group_rows(config, n, world, 132) >= 1


@pytest.mark.parametrize(
    ("m", "n", "k", "width"), [(1024, 5120, 4096, 320), (2048, 5120, 4096, 320), (8192, 5120, 2048, 256)]
)
def test_whole_waves_and_large_tiles_win(m: int, n: int, k: int, width: int) -> None:
    assert choose(m, n, k, 1, 132).tile_n in (width, 320)


@pytest.mark.parametrize("config", FAMILY, ids=str)
def test_configurations_fit(config: KernelConfig) -> None:
    assert config.stages >= 3
    assert config.stages * config.stage_bytes + config.bounce_bytes + 1024 <= SHARED_BYTES
    widths = [config.chunk_width(chunk) for chunk in range(config.chunks)]
    assert sum(widths) == config.tile_n
    assert all(width % 32 == 0 and width > 0 for width in widths)
    assert max(config.chunk_bytes(chunk) for chunk in range(config.chunks)) <= config.w_stage_bytes


@pytest.mark.parametrize("arguments", [(96, 128), (128, 96, 3), (128, 160, 2), (128, 512), (64, 48)])
def test_impossible_configurations_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError):
        KernelConfig(*arguments)
