# SPDX-License-Identifier: Apache-2.0
"""The numerics report: what it must find on operands whose answer is known, and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dsv4_vllm_integration.cli import main
from dsv4_vllm_integration.numerics import Operands, measure, synthetic


def test_synthetic_scales_lie_in_blocks_as_the_checkpoint_s() -> None:
    made = synthetic(3, 64, 128, 1)
    assert made.scale.shape == (64, 4)
    assert torch.equal(made.scale[0], made.scale[31])
    assert set(made.scale.unique().tolist()) <= {119, 120, 121, 122, 123}


def test_small_integers_are_exact_everywhere() -> None:
    ranks = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(-2, 3, (9, 128), generator=generator).to(torch.bfloat16)
        weight = torch.randint(-1, 2, (64, 128), generator=generator).to(torch.float8_e4m3fn)
        ranks.append(Operands(x, weight, torch.full((64, 4), 127, dtype=torch.uint8)))
    figures, missing = measure(ranks, torch.device("cpu"), ["host"], 2)
    assert not missing
    assert len(figures) == 6
    for entry in figures:
        assert (entry.kernel_max, entry.noise_max, entry.noise_share) == (0, 0, 0), entry


def test_ours_is_closer_than_stock_and_repeats_itself() -> None:
    ranks = [synthetic(64, 128, 256, seed) for seed in range(4)]
    figures, missing = measure(ranks, torch.device("cpu"), ["fused", "host"], 2)
    assert "fused kernels need a GPU" in missing["fused"]
    by_name = {(entry.path, entry.activation): entry for entry in figures}
    for activation in ("mxfp8", "bf16"):
        ours, stock = by_name["host", activation], by_name["vLLM unfused", activation]
        ring = by_name["vLLM unfused, NCCL", activation]
        assert ours.kernel_rms < stock.kernel_rms < ring.kernel_rms
        assert ours.noise_max == 0
        assert ring.noise_share > 0.01
    # Quantising the activations costs more than all roundings of the sum.
    assert by_name["host", "mxfp8"].model_rms > 5 * by_name["host", "bf16"].model_rms


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = [
        {"x": made.x, "weight": made.weight, "scale": made.scale}
        for made in (synthetic(8, 64, 128, seed) for seed in range(2))
    ]
    torch.save(saved, tmp_path / "operands.pt")
    options = ["numerics", "--operands", str(tmp_path / "operands.pt"), "--device", "cpu"]
    assert main([*options, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {entry["path"] for entry in shown["figures"]} == {"host", "vLLM unfused", "vLLM unfused, NCCL"}
    assert main(options) == 0
    assert "| host | mxfp8 |" in capsys.readouterr().out
    torch.save({"x": 1}, tmp_path / "operands.pt")
    assert main(options) == 2
