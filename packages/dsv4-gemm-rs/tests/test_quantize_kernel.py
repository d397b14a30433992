# SPDX-License-Identifier: Apache-2.0
"""The GPU quantiser as far as a machine without a GPU can tell: what it compiles to, and its grid.

Bit equality on a device is in `test_quantize_gpu.py`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ARCHS = ["sm_90a", "sm_100a"]
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
VARIANTS = [f"{dtype}-{layout}" for dtype in BYTES for layout in ("swizzled", "row_major", "none")]

# A process of its own per architecture: the DSL keeps process-wide state, and the suite must not load it.
COMPILE = """
import json, sys, torch
from dsv4_gemm_rs.quantize import ScaleLayout
from dsv4_gemm_rs.quantize.kernel import compile_kernel
arch, folder, *variants = sys.argv[1:]
texts = {}
for variant in variants:
    dtype, layout = variant.split("-")
    options = f"--keep-ptx --dump-dir {folder}"
    layout = None if layout == "none" else ScaleLayout(layout)
    compiled = compile_kernel(arch, getattr(torch, dtype), layout, options=options)
    texts[variant] = compiled.__ptx__
json.dump(texts, sys.stdout)
"""


@pytest.fixture(scope="module", params=ARCHS)
def ptx(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("ptx")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, request.param, str(folder), *VARIANTS],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    texts: dict[str, str] = json.loads(done.stdout)
    assert all(f".target {request.param}" in text for text in texts.values())
    return texts


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_instructions(ptx: dict[str, str], variant: str) -> None:
    dtype, layout = variant.split("-")
    text, strips, element = ptx[variant], 2, BYTES[dtype]
    assert len(re.findall(r"ld\.global\.nc\S*\.v4\.b32", text)) == strips * 8 * element // 16
    narrow = "u16" if element == 2 else "b32"
    assert len(re.findall(rf"ld\.global\.nc\.{narrow}", text)) == strips * 8
    stores = {"swizzled": ["cs.v2.b32", "b32"], "row_major": ["cs.v2.b32", "u8"], "none": ["v4.b32"]}[layout]
    assert sorted(re.findall(r"st\.global\.(\S+)", text)) == sorted(strips * stores)
    assert len(re.findall(r"ld\.global", text)) == strips * (8 * element // 16 + 8)
    assert ".local" not in text, "registers spilled"
    # What begins early reads swizzled scales or a round trip; the first thing that a CTA does is to allow it.
    allowed = text.count("griddepcontrol.launch_dependents")
    assert allowed == (layout != "row_major")
    assert not allowed or text.index("griddepcontrol") < text.index("ld.global")
    assert ".shared" not in text


@pytest.mark.parametrize("variant", VARIANTS)
def test_arithmetic_instructions(ptx: dict[str, str], variant: str) -> None:
    text, round_trip = ptx[variant], variant.endswith("none")
    assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", text)) == 2 * 8 // 2
    assert len(re.findall(r"cvt\.rn\.f16x2\.e4m3x2", text)) == 2 * 8 // 2 * round_trip
    assert len(re.findall(r"cvt\.rn\.bf16x2\.f32", text)) == 2 * 8 // 2 * round_trip
    assert len(re.findall(r"mul\.rn\.f32", text)) == 2 * 8 * (1 + round_trip)
    assert ".ftz" not in text, "subnormal elements would be lost"
    packed = {"bfloat16": "bf16x2", "float16": "f16x2", "float32": "f32"}[variant.split("-")[0]]
    assert len(re.findall(rf"fma\.rn\.{packed}", text)) == 2 * 8 * BYTES[variant.split("-")[0]] // 4
    assert len(re.findall(r"max\.f32", text)) == 2 * 8
    shuffles = 2 * (4 if variant.endswith("swizzled") else 2)
    assert len(re.findall(r"shfl\.sync\.bfly", text)) == shuffles
    assert "div." not in text
    assert "rem." not in text


@pytest.mark.parametrize(
    ("options", "allows"),
    [
        ("--enable-tvm-ffi --gpu-arch sm_89", False),
        ("--enable-tvm-ffi --gpu-arch sm_90a", True),
        ("--gpu-arch sm_103a --keep-ptx", True),
        ("--enable-tvm-ffi", True),
    ],
)
def test_an_early_start_is_allowed_from_sm90_on(options: str, allows: bool) -> None:
    """Ada has the quantiser and not the instruction; an emulator's options name no architecture."""
    from dsv4_gemm_rs.quantize import ScaleLayout
    from dsv4_gemm_rs.quantize.kernel import announces_itself

    assert announces_itself(ScaleLayout.SWIZZLED, options) == allows
    assert not announces_itself(ScaleLayout.ROW_MAJOR, options)
    assert announces_itself(None, options) == allows


@pytest.mark.parametrize("rows", [1, 31, 32, 128, 1000, 8192, 70_000])
@pytest.mark.parametrize("k", [32, 96, 128, 160, 1024, 2048, 7168, 16384, 128 * 65_536 * 4])
def test_grid_covers_the_matrix_once(rows: int, k: int) -> None:
    from dsv4_gemm_rs.quantize.kernel import MAX_GRID_Y, STRIPS, UNROLL, grid
    from dsv4_gemm_rs.quantize.layout import k_tiles

    tiles = k_tiles(k)
    x, y, log2 = grid(rows, tiles)
    width, height = 1 << log2, (STRIPS >> log2) * UNROLL
    assert width * height == STRIPS * UNROLL
    assert (x - 1) * height < rows <= x * height
    assert (y - 1) * width < tiles <= y * width
    assert y <= MAX_GRID_Y


@pytest.mark.parametrize(
    ("k", "width"), [(32, 1), (384, 1), (1024, 8), (2048, 16), (4096, 16), (5120, 8), (7168, 8), (16384, 16)]
)
def test_no_lane_idles_where_a_narrower_block_would_not(k: int, width: int) -> None:
    from dsv4_gemm_rs.quantize.kernel import strips_across
    from dsv4_gemm_rs.quantize.layout import k_tiles

    assert 1 << strips_across(k_tiles(k)) == width


def test_round_up_carries_exactly_above_448() -> None:
    """The kernel's addition before it reads the exponent, against the rule's comparison."""
    import torch
    from dsv4_gemm_rs.quantize.kernel import ROUND_UP
    from dsv4_gemm_rs.quantize.rule import ScaleRule, scale_bytes

    fraction = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF], dtype=torch.int32)
    bits = (torch.arange(255, dtype=torch.int32) << 23)[:, None] | fraction
    for rule in ScaleRule:
        kernel = (((bits.long() + ROUND_UP[rule]) >> 23).clamp(min=8) - 8).int()
        assert torch.equal(kernel, scale_bytes(bits, rule))
