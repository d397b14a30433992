# SPDX-License-Identifier: Apache-2.0
"""Weights kept in FP8: what is made, what memory it takes, staleness, and what dispatch makes of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dsv4_gemm_rs import Keep, WeightKind, prepare_weight
from dsv4_gemm_rs import Path as Way
from dsv4_gemm_rs.dispatch import Exchange, Gemm, Machine, Problem, decide
from dsv4_gemm_rs.dispatch.costs import choose, estimate_us
from dsv4_gemm_rs.dispatch.decide import operand_for
from dsv4_gemm_rs.dispatch.plan import plan_launch
from dsv4_gemm_rs.dispatch.rates import SM90_FP8
from dsv4_gemm_rs.kernels.families import Operand, TileConfig, members, operand_of
from dsv4_gemm_rs.kernels.sm90.config import RESERVED_BYTES, SHARED_BYTES
from dsv4_gemm_rs.kernels.sm90.swapped_config import FAMILY, SwappedConfig
from dsv4_gemm_rs.quantize import dequantize_mxfp8
from dsv4_gemm_rs.weights import PreparedWeight
from dsv4_gemm_rs.workspace import exchange_layout
from dsv4_symm_mem.errors import ArgumentError, StaleWeightError
from dsv4_symm_mem.protocol.tiles import TileGrid
from gemm_rs_support import assert_right, problems_for, ranks

MEASURED = json.loads((Path(__file__).parent / "data" / "sm90_fp8_gemm_h200.json").read_text())
"""Microseconds of bare GEMMs with FP8 weights by tile shape, and of cuBLAS with BF16 ones: one H200, random
operands, CUDA graphs, medians; math warps of the 160x256 tile with 232 registers, of the others with 224."""
HOPPER = Machine(
    arch=90,
    world_size=4,
    multicast=False,
    symmetric=True,
    process_group=True,
    flashinfer=False,
    multiprocessors=132,
    fused_archs=frozenset({90, 100}),
)
PACKED = Problem(1024, 5120, 2048, WeightKind.MXFP8, packed=True)
N, K = 192, 256


def mxfp8(low: int = 110, high: int = 134) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 255, (N, K), dtype=torch.uint8, generator=generator)
    data[(data & 0x7F) == 0x7F] = 0
    scale = torch.randint(low, high, (N, K // 32), dtype=torch.uint8, generator=generator)
    return data.view(torch.float8_e4m3fn), scale


def held(weight: PreparedWeight) -> torch.Tensor:
    assert weight.packed is not None
    return weight.packed.blocks


def test_the_default_keeps_bf16() -> None:
    weight = prepare_weight(*mxfp8())
    assert weight.packed is None
    assert weight.memory == (weight.data, weight.scale)


def test_a_packed_weight_means_the_same() -> None:
    data, scale = mxfp8(3, 247)
    weight = prepare_weight(data, scale, keep="fp8")
    assert (weight.n, weight.k, weight.kind) == (N, K, WeightKind.MXFP8)
    assert held(weight).nbytes == 256 * K * 17 // 16
    assert torch.equal(weight.bf16().float(), dequantize_mxfp8(data, scale))
    assert weight.bf16() is not weight.bf16(), "a BF16 copy is what was to be saved"
    weight.release_source()
    assert torch.equal(weight.data.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(weight.bf16().float(), dequantize_mxfp8(data, scale))
    assert weight.memory == (held(weight), None)


def test_what_cannot_be_kept_so_is_refused() -> None:
    data, scale = mxfp8()
    with pytest.raises(ArgumentError, match="keep: got 'int4'"):
        prepare_weight(data, scale, keep="int4")
    with pytest.raises(ArgumentError, match="keep: got 'fp8', expected an MXFP8 weight"):
        prepare_weight(torch.zeros(64, 64, dtype=torch.bfloat16), keep=Keep.FP8)
    scale[9, 4] = 250
    with pytest.raises(ArgumentError, match=r"scale: got 250, .*row 9, block 4"):
        prepare_weight(data, scale, keep="fp8")
    with pytest.raises(ArgumentError, match="keep: got 'bf16'"):
        prepare_weight(*mxfp8()).release_source()


def test_a_write_into_a_source_is_noticed_until_refresh() -> None:
    data, scale = mxfp8()
    weight = prepare_weight(data, scale, keep="fp8")
    address = held(weight).data_ptr()
    data.view(torch.uint8)[3, 5] ^= 0x80
    with pytest.raises(StaleWeightError, match="weight: it was written in place"):
        weight.check()
    weight.refresh()
    assert held(weight).data_ptr() == address
    assert torch.equal(weight.bf16().float(), dequantize_mxfp8(data, scale))
    scale[0, 0] = 140
    with pytest.raises(ArgumentError, match="beyond 134"):
        weight.refresh()
    with pytest.raises(StaleWeightError):
        weight.check()


def test_a_split_weight_stays_split() -> None:
    data, scale = mxfp8(130, 140)
    weight = prepare_weight(data, scale, keep="fp8")
    scale.fill_(120)
    weight.refresh()
    assert weight.packed is not None
    assert weight.packed.split
    assert torch.equal(weight.bf16().float(), dequantize_mxfp8(data, scale))


def test_a_released_source_is_watched_no_more() -> None:
    data, scale = mxfp8()
    weight = prepare_weight(data, scale, keep="fp8")
    weight.release_source()
    data.view(torch.uint8).zero_()
    weight.check()
    assert weight.bf16().any()
    with pytest.raises(ArgumentError, match="released"):
        weight.refresh()


def test_the_host_path_takes_a_packed_weight() -> None:
    with ranks(2, max_tokens=40, n=128) as group:
        problems = problems_for(2, 40, 128, 128, WeightKind.MXFP8, keep=Keep.FP8)
        assert_right(group.call(problems), problems)
        for problem in problems:
            problem.weight.release_source()
        assert_right(group.call(problems), problems)


def test_it_counts_only_where_scales_are_not_taken() -> None:
    for kind in WeightKind:
        assert operand_for(90, kind, packed=True) is Operand.FP8_WEIGHT
        assert operand_for(100, kind, packed=True) is operand_for(100, kind)
    plan = plan_launch(HOPPER, PACKED)
    assert operand_of(plan.config) is Operand.FP8_WEIGHT
    assert plan.config in members(90, Operand.FP8_WEIGHT)
    assert plan_launch(replace(HOPPER, arch=100), PACKED) == plan_launch(
        replace(HOPPER, arch=100), replace(PACKED, packed=False)
    )


def test_the_same_kernel_multiplies_for_the_unfused_path() -> None:
    assert decide(HOPPER, PACKED).path is Way.FUSED
    for machine, m in itertools.product((HOPPER, replace(HOPPER, symmetric=False)), (1, 5000)):
        decision = decide(machine, replace(PACKED, m=m), Way.UNFUSED)
        assert decision.gemm is Gemm.SM90_FP8
        assert decision.capturable
    alone = decide(replace(HOPPER, world_size=1), PACKED)
    assert (alone.gemm, alone.exchange) == (Gemm.SM90_FP8, Exchange.NONE)
    # Without that kernel a library multiplies a BF16 copy, made for each call.
    assert decide(replace(HOPPER, arch=80), PACKED).gemm is Gemm.BF16


def test_estimates_are_near_what_was_measured_and_choices_the_best_of_it() -> None:
    for row in MEASURED:
        m, n, k = row["m"], row["n"], row["k"]
        times: dict[TileConfig, float] = {
            config: row[f"{config.tile_m}x{config.tile_n}"] for config in FAMILY
        }
        for config, measured in times.items():
            estimate = estimate_us(SM90_FP8, config, m, n, k, 1, 132)
            assert 0.9 < estimate / measured < 1.1, (row, config, estimate)
        chosen = choose(SM90_FP8, FAMILY, m, n, k, 1, 132)
        assert times[chosen] == min(times.values()), (row, chosen)


def test_every_plan_of_every_admitted_call_fits() -> None:
    for size, max_tokens, n in ((2, 512, 5120), (8, 64, 7168), (4, 8192, 576)):
        layout = exchange_layout(size, max_tokens, n)
        for m, sms in itertools.product((0, 1, max_tokens // 2 + 1, max_tokens), (16, 132)):
            machine = replace(HOPPER, world_size=size, multiprocessors=sms)
            plan = plan_launch(machine, replace(PACKED, m=m, n=n))
            TileGrid(m, n, size, plan.shape).require_fits(layout)


@pytest.mark.parametrize("config", FAMILY, ids=lambda c: f"{c.tile_m}x{c.tile_n}")
def test_configurations_fit(config: SwappedConfig) -> None:
    assert config.stages >= 3
    assert config.ring_chunks >= 2
    kept = config.tile_bytes + config.gather_bytes + RESERVED_BYTES
    assert config.stages * config.stage_bytes + kept <= SHARED_BYTES
    assert 2 * config.math_registers + config.service_registers == 3 * 168
    assert config.chunks * config.chunk_tokens == config.group_tokens
    assert config.chunk_bytes <= config.x_stage_bytes


@pytest.mark.parametrize(("tile_m", "tile_n"), [(128, 192), (40, 256), (208, 256), (32, 128), (512, 128)])
def test_other_tiles_are_refused(tile_m: int, tile_n: int) -> None:
    with pytest.raises(ArgumentError):
        SwappedConfig(tile_m, tile_n)
