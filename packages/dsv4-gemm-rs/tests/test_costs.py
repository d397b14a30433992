# SPDX-License-Identifier: Apache-2.0
"""The cost model against the calibration and the shapes whose best tile was measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from dsv4_gemm_rs.dispatch.costs import choose, estimate_us, group_rows, positions
from dsv4_gemm_rs.kernels.sm90.config import FAMILY, SHARED_BYTES, KernelConfig
from dsv4_gemm_rs.schedule import Schedule, TileShape
from dsv4_symm_mem.errors import ArgumentError

MEASURED = Path(__file__).parent / "data" / "sm90_gemm_h200.json"
"""Microseconds of bare GEMMs by tile shape: one H200, BF16, random operands, CUDA graphs, medians."""


def _config(name: str) -> KernelConfig:
    shape, _, cluster = name.partition("c")
    m, n = map(int, shape.split("x"))
    return KernelConfig(m, n, int(cluster or 1))


def test_estimates_are_near_what_was_measured() -> None:
    for row in json.loads(MEASURED.read_text()):
        for key, measured in row.items():
            if "x" in key:
                estimate = estimate_us(_config(key), row["m"], row["n"], row["k"], 1, 132)
                assert 0.75 < estimate / measured < 1.2, (row, key, estimate)


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
    assert config.stages * config.stage_bytes + 1024 <= SHARED_BYTES
    widths = [config.chunk_width(chunk) for chunk in range(config.chunks)]
    assert sum(widths) == config.tile_n
    assert all(width % 32 == 0 and width > 0 for width in widths)
    assert max(config.chunk_bytes(chunk) for chunk in range(config.chunks)) <= config.w_stage_bytes


@pytest.mark.parametrize("arguments", [(96, 128), (128, 96, 3), (128, 160, 2), (128, 512), (64, 48)])
def test_impossible_configurations_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError):
        KernelConfig(*arguments)
