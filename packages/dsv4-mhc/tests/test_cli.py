# SPDX-License-Identifier: Apache-2.0
"""The command line, and the parts of the benchmark that need no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4_mhc.bench.bytes import STREAM_UNITS, floor_bytes
from dsv4_mhc.bench.checks import CHAIN, checks
from dsv4_mhc.bench.report import markdown
from dsv4_mhc.cli import main as cli
from dsv4_mhc.compile import Variant, variants
from dsv4_mhc.errors import ArgumentError
from dsv4_mhc.plan import Kernel, Quant


def test_variants_never_name_a_number_of_tokens() -> None:
    found = variants(5120, quants=[Quant.NONE, Quant.MXFP8])
    assert len(found) == len(set(found))
    assert {variant.module for variant in found} == {
        *("expand", "mean", "post", "collapse", "shifted", "coupled", "engram"),
    }
    assert len(found) < 60


def test_wiring_limits_variants() -> None:
    assert not any(variant.module == Kernel.ENGRAM for variant in variants(4096, wiring="v4"))
    assert not any(variant.module == Kernel.COUPLED for variant in variants(5120, wiring="v4.1"))
    with pytest.raises(ArgumentError, match="wiring"):
        variants(5120, wiring="v5")


def test_compile_says_what_it_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Variant, str]] = []
    monkeypatch.setattr(cli, "compile_variant", lambda variant, arch: asked.append((variant, arch)))
    assert cli.main(["compile", "--arch", "sm_90a", "sm_100a", "--hidden", "5120", "--wiring", "v4.1"]) == 0
    assert len(asked) == 2 * len(variants(5120, wiring="v4.1"))
    assert f"{len(asked)} kernels" in capsys.readouterr().out


def test_compile_refuses_a_hidden_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "--hidden", "100"]) == 2
    assert "multiple of 64" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("command", ["bench", "bench-tiles"])
def test_bench_without_a_gpu_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    assert cli.main([command, "--output", str(tmp_path / "x.json")]) == 2
    assert "CUDA" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_floor_of_the_seam() -> None:
    per_token = floor_bytes("seam_shifted", 1001, 5120) - floor_bytes("seam_shifted", 1000, 5120)
    assert per_token == 10 * 2 * 5120 + 192
    assert floor_bytes("post", 1, 5120) == 9 * 2 * 5120 + 80
    assert all(floor_bytes(case, 0, 5120) >= 0 for case in STREAM_UNITS)


def test_markdown_has_a_table_for_each_hidden_size() -> None:
    rows = [
        {
            "measure": "mhc",
            "case": "post",
            "tokens": 1,
            "hidden": 4096,
            "floor_us": 1.0,
            "warm_us": 1.5,
            "cold_us": 2.0,
        },
        {
            "measure": "mhc",
            "case": "post",
            "tokens": 8,
            "hidden": 4096,
            "floor_us": 1.0,
            "error": "RuntimeError: no",
        },
        {
            "measure": "mhc",
            "case": "post",
            "tokens": 1,
            "hidden": 5120,
            "floor_us": 1.0,
            "warm_us": 1.5,
            "cold_us": 4.0,
        },
    ]
    machine = {"device": "a GPU", "copy_bytes_per_us": 4.3e6}
    missed = [{"name": "post", "value": 2.0, "target": 1.0, "holds": False}]
    text = markdown({"machine": machine, "rows": rows, "checks": missed})
    assert "| post | 2.0 (0.50) | failed |" in text
    assert text.count("H = ") == 2
    assert "0 of 1 checks hold" in text


def test_checks_follow_the_rows() -> None:
    def row(case: str, tokens: int, cold: float, floor: float = 1.0) -> dict[str, Any]:
        return {"case": case, "tokens": tokens, "hidden": 5120, "cold_us": cold, "floor_us": floor}

    rows = [
        row("seam_shifted", 8192, 214.0, 195.0),
        row(CHAIN, 8192, 380.0),
        row("seam_shifted", 8, 6.0),
        row("seam_coupled", 8, 9.5),
        {**row("post", 8, 1.0), "error": "RuntimeError"},
    ]
    errors = [{"hidden": 5120, "name": "pre", "ours": 1e-6, "tf32": 1e-4}]
    found = {check["name"]: check["holds"] for check in checks(rows, errors)}
    assert found["H=5120, T=8192: seam_shifted, µs"]
    assert found["H=5120, T=8192: seam_shifted / floor"]
    assert found[f"H=5120, T=8192: seam_shifted / {CHAIN}"]
    assert found["H=5120, T=8: seam_shifted, µs"]
    assert not found["H=5120, T=8: seam_coupled, µs"]
    assert found["H=5120: largest error of pre / TF32's"]
    assert len(found) == 6
