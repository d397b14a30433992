# SPDX-License-Identifier: Apache-2.0
"""The parts of `bench-scaled` that need no GPU: divisions, packed scales, checks, the refusal elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dsv4_gemm_rs.bench.scaled.config import CONFIGS, ScaledConfig
from dsv4_gemm_rs.bench.scaled.packing import packed_scales
from dsv4_gemm_rs.bench.scaled.run import Operands, case_name, checks, error_of
from dsv4_gemm_rs.cli.main import main
from dsv4_symm_mem.errors import ArgumentError


@pytest.mark.parametrize("numbers", [(160, 32, 1), (256, 96, 1), (256, 128, 2), (128, 128, 3)])
def test_divisions_that_cannot_be_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ArgumentError):
        ScaledConfig(*numbers)


@pytest.mark.parametrize("config", CONFIGS, ids=case_name)
def test_a_stage_of_a_tile_has_its_scales_side_by_side(config: ScaledConfig) -> None:
    scale = torch.randint(1, 255, (10, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = packed_scales(scale, config)
    tiles = -(-320 // config.tile_n)
    assert packed.shape == (3, tiles, 4, config.column_blocks)
    assert packed[0, 0].numel() * 4 == config.w_scale_bytes
    for block in range(tiles * config.column_blocks):
        for step in range(12):
            found = packed[step // 4, block // config.column_blocks, step % 4, block % config.column_blocks]
            assert found == (2.0 ** (int(scale[block, step]) - 127) if block < 10 else 0)


def test_checks_take_the_fastest_and_every_error() -> None:
    medians = {"gemm-cublas": 10.0, "gemm-ours": 9.0, **{case_name(config): 12.0 for config in CONFIGS}}
    best = case_name(CONFIGS[1])
    medians[best] = 6.0
    errors = {case_name(config): 0.5 for config in CONFIGS}
    errors[case_name(CONFIGS[0])] = float("inf")
    first, *rest = checks(128, medians, errors)
    assert (first.name, first.value, first.holds) == (f"M=128: {best} / gemm-ours", 6 / 9, True)
    assert [check.holds for check in rest] == [False, *[True] * (len(CONFIGS) - 1)]


def test_what_is_not_written_is_no_small_error() -> None:
    operands = Operands.random(3, 64, 128, torch.device("cpu"), seed=0)
    x, w = operands.exact(3)
    assert error_of(operands, x @ w.T, 1.0, lambda: None) == float("inf")
    assert 0 < error_of(operands, x @ w.T, 1.0, lambda: operands.out.copy_(x @ w.T)) < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_elsewhere_it_says_what_it_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench-scaled", "--output", str(tmp_path / "x.json")]) == 2
    assert "SM90" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
