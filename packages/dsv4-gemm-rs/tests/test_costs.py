# SPDX-License-Identifier: Apache-2.0
"""The cost model against the calibration and the shapes whose best tile was measured."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from dsv4_gemm_rs.dispatch.costs import Grouping, choose, estimate_us, grouping, positions
from dsv4_gemm_rs.dispatch.rates import SM90, SM100_MXFP8, Rates, rates_of
from dsv4_gemm_rs.kernels.families import Family, Operand, TileConfig, family_of, members
from dsv4_gemm_rs.kernels.sm90.config import (
    CHUNK_BYTES,
    FAMILY,
    MAX_ACCUMULATORS,
    RESERVED_BYTES,
    SHARED_BYTES,
    KernelConfig,
)
from dsv4_gemm_rs.schedule import Schedule, TileShape
from dsv4_symm_mem.errors import ArgumentError

MEASURED = json.loads((Path(__file__).parent / "data" / "sm90_gemm_h200.json").read_text())
"""Microseconds of bare GEMMs by tile shape, and of cuBLAS: one H200, BF16, random operands, CUDA graphs,
medians."""

EXCHANGED = json.loads((Path(__file__).parent / "data" / "sm90_fused_tp2_h200.json").read_text())
"""The fused kernel on two H200s over NVLink, likewise."""

KERNELS = [
    pytest.param(rates_of(arch, operand), members(arch, operand), sms, id=f"sm_{arch}-{operand}")
    for arch, operand, sms in (
        (90, Operand.BF16, 132),
        (100, Operand.MXFP8, 148),
        (103, Operand.BF16, 148),
    )
]
every_kernel = pytest.mark.parametrize(("rates", "family", "sms"), KERNELS)


def test_estimates_are_near_what_was_measured() -> None:
    for row in MEASURED:
        for config in FAMILY:
            measured = row[f"{config.tile_m}x{config.tile_n}"]
            estimate = estimate_us(SM90, config, row["m"], row["n"], row["k"], 1, 132)
            assert 0.86 < estimate / measured < 1.1, (row, config, estimate)


def test_estimates_of_the_exchange_are_near_what_was_measured() -> None:
    for row in EXCHANGED:
        for config in (KernelConfig(128, 160), KernelConfig(128, 128)):
            measured = row[f"{config.tile_m}x{config.tile_n}"]
            estimate = estimate_us(SM90, config, row["m"], row["n"], row["k"], 2, 132)
            assert 0.89 < estimate / measured < 1.06, (row, config, estimate)


def test_choices_are_near_the_best_measured() -> None:
    for row in MEASURED:
        times: dict[TileConfig, float] = {
            config: row[f"{config.tile_m}x{config.tile_n}"] for config in FAMILY
        }
        chosen = choose(SM90, FAMILY, row["m"], row["n"], row["k"], 1, 132)
        assert times[chosen] <= 1.02 * min(times.values()), (row, chosen)


@every_kernel
def test_choices_are_the_least_estimates(rates: Rates, family: Family, sms: int) -> None:
    for m, k, world in itertools.product((0, 1, 130, 1024, 5000), (128, 2048), (1, 2, 8)):
        estimates = [estimate_us(rates, config, m, 5120, k, world, sms) for config in family]
        assert choose(rates, family, m, 5120, k, world, sms) == family[estimates.index(min(estimates))]


def test_sm100_products_are_near_what_was_published() -> None:
    """FlashInfer's MXFP8 product on a B200 (see `rates`): large ones are met, small ones too slow."""
    for m, published in ((2048, 19.3), (4096, 31.1), (8192, 60.8)):
        family = members(100, Operand.MXFP8)
        estimate = min(estimate_us(SM100_MXFP8, config, m, 6144, 1536, 1, 148) for config in family)
        assert 0.95 < estimate / published < 1.16


def test_both_sm100_architectures_are_one_to_the_model() -> None:
    assert family_of(100) == family_of(103)
    for operand in Operand:
        assert rates_of(100, operand) == rates_of(103, operand)
        assert set(members(100, operand)) < set(family_of(100))
    assert members(90, Operand.MXFP8) == ()
    assert family_of(None) == family_of(120) == ()


def test_two_accumulators_hide_epilogues() -> None:
    config = members(100, Operand.MXFP8)[0]
    serial = replace(SM100_MXFP8, overlapped=False)
    for m, waves in ((256, 1), (8192, 9)):
        both = [estimate_us(rates, config, m, 5120, 2048, 1, 148) for rates in (serial, SM100_MXFP8)]
        epilogue = SM100_MXFP8.epilogue_us + SM100_MXFP8.epilogue_us_per_element * 128 * 256
        assert both[0] - both[1] == pytest.approx((waves - 1) * epilogue)


def test_smaller_tiles_win_where_a_single_wave_would_have_to_travel() -> None:
    """A wave of the largest tiles sends nothing until all of the arithmetic is done."""
    large = KernelConfig(128, 160)
    assert choose(SM90, FAMILY, 1024, 5120, 2048, 1, 132) == large
    alone, exchanging = (estimate_us(SM90, large, 512, 5120, 2048, p, 132) for p in (1, 2))
    chosen = choose(SM90, FAMILY, 512, 5120, 2048, 2, 132)
    assert chosen.tile_m == 64
    assert alone < estimate_us(SM90, chosen, 512, 5120, 2048, 2, 132) < exchanging


@pytest.mark.parametrize(
    ("k", "world_size", "workers", "rows", "lag"),
    [
        (4096, 1, 132, 13, 1),
        (4096, 2, 132, 13, 1),
        (2048, 2, 132, 4, 2),
        (1024, 8, 132, 4, 2),
        (1024, 1, 16, 4, 1),
    ],
)
def test_groups_are_square_where_the_link_needs_little(
    k: int, world_size: int, workers: int, rows: int, lag: int
) -> None:
    assert grouping(SM90, KernelConfig(128, 160), 5120, k, world_size, workers) == Grouping(rows, lag)


def test_groups_by_row_are_a_wave() -> None:
    config = members(100, Operand.MXFP8)[0]
    columns = -(-5120 // config.tile_n)
    workers = 148 // config.cluster
    assert grouping(SM100_MXFP8, config, 5120, 2048, 1, workers) == Grouping(-(-workers // columns), 2)


@every_kernel
def test_the_link_bounds_what_the_tensor_cores_do_not(rates: Rates, family: Family, sms: int) -> None:
    (config,) = (each for each in family if (each.tile_m, each.tile_n, each.cluster) == (128, 128, 1))
    for m, world in itertools.product((4096, 8192), (4, 8)):
        wire = 2 * m * 5120 * (world - 1) / world / rates.link_bytes_per_us
        estimate = estimate_us(rates, config, m, 5120, 128, world, sms)
        assert wire < estimate < 1.2 * wire + 20


@pytest.mark.parametrize("arch", [90, 100])
def test_positions_are_the_schedules(arch: int) -> None:
    family = family_of(arch)
    for config, m, world in itertools.product(family, [0, 1, 127, 128, 129, 1000, 1025, 4097], [1, 2, 4, 8]):
        schedule = Schedule(m, 992, world, 0, TileShape(config.tile_m, config.tile_n), cluster=config.cluster)
        assert positions(config, m, 992, world) == schedule.positions


@every_kernel
def test_every_choice_is_of_the_family_and_does_not_depend_on_rank(
    rates: Rates, family: Family, sms: int
) -> None:
    for m, n, k, world in itertools.product(
        [0, 1, 128, 1024, 8192], [512, 5120, 7168], [128, 4096], [1, 2, 8]
    ):
        config = choose(rates, family, m, n, k, world, sms)
        assert config in family
        assert grouping(rates, config, n, k, world, sms // config.cluster).rows >= 1


@pytest.mark.parametrize("config", FAMILY, ids=str)
def test_configurations_fit(config: KernelConfig) -> None:
    assert config.stages >= 4
    used = config.stages * config.stage_bytes + config.tile_bytes + config.gather_bytes
    assert used + RESERVED_BYTES <= SHARED_BYTES
    widths = [config.chunk_width(chunk) for chunk in range(config.chunks)]
    assert sum(widths) == config.tile_n
    assert all(width % 32 == 0 and width > 0 for width in widths)
    assert max(config.chunk_bytes(chunk) for chunk in range(config.chunks)) <= CHUNK_BYTES
    assert config.row_atoms * config.tile_n // 2 <= MAX_ACCUMULATORS


@pytest.mark.parametrize("arguments", [(96, 128), (128, 192), (128, 48), (64, 320), (64, 48), (128, 100)])
def test_impossible_configurations_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError):
        KernelConfig(*arguments)
