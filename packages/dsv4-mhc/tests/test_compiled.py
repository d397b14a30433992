# SPDX-License-Identifier: Apache-2.0
"""Kernels compile for every architecture, and the code is what their texts say: read from source and ptxas.

A representative set: `dsv4-mhc compile` with every architecture, hidden size and quantisation compiles all,
which takes a quarter of an hour.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dsv4_mhc import compile as compilation
from dsv4_mhc.compile import ARCHITECTURES, Variant, compile_variant, seam_variant
from dsv4_mhc.errors import ArgumentError, UnsupportedError
from dsv4_mhc.plan import Kernel, SeamOptions, choose_tile

tilelang = pytest.importorskip("tilelang", reason="tilelang is not installed")
pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")

SEAM = seam_variant(Kernel.SHIFTED, choose_tile(Kernel.SHIFTED, 5120, 8192), SeamOptions())
DECODE = seam_variant(Kernel.COUPLED, choose_tile(Kernel.COUPLED, 5120, 1), SeamOptions())

ENGRAM = seam_variant(Kernel.ENGRAM, choose_tile(Kernel.ENGRAM, 4096, 64), SeamOptions())
ROW = Variant("collapse", (7168, SeamOptions(), False))


@cache
def compiled(variant: Variant, arch: str = "sm_90a") -> Any:
    return compile_variant(variant, arch)


def shared_bytes(kernel: Any) -> int:
    return int(re.findall(r"v_int64\) = \(\(int64_t\)(\d+)\)", kernel.get_host_source())[-1])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_seam_compiles(arch: str) -> None:
    assert "mhc_shifted_kernel" in compiled(SEAM, arch).get_kernel_source()


@pytest.mark.parametrize("variant", [DECODE, ENGRAM, ROW], ids=lambda variant: variant.module)
def test_other_kernels_compile(variant: Variant) -> None:
    assert f"mhc_{variant.module}_kernel" in compiled(variant, "sm_100a").get_kernel_source()


@pytest.mark.parametrize("variant", [SEAM, DECODE], ids=["shifted", "coupled"])
def test_source_has_what_it_should(variant: Variant) -> None:
    kernel = compiled(variant)
    source = kernel.get_kernel_source()
    tile = variant.arguments[0]
    body = source[source.index('extern "C" __global__') :]
    assert body.count("dsv4_project<3>") == 2
    assert body.count("dsv4_fetch(") == (3 if variant is SEAM else 0)
    assert body.count("dsv4_cluster_wait()") == 1
    assert body.count("dsv4_meet(") == (1 if variant is SEAM else 2)
    assert "fence" not in body
    assert "int tokens" in source
    assert "*(uint4*)(residual_out" in source
    assert shared_bytes(kernel) <= tile.shared_bytes(Kernel(variant.module))


@pytest.mark.parametrize("variant", [SEAM, DECODE, ENGRAM], ids=lambda variant: variant.module)
def test_nothing_is_read_before_the_launch_before_has_ended(variant: Variant) -> None:
    source = compiled(variant, "sm_100a" if variant is ENGRAM else "sm_90a").get_kernel_source()
    body = source[source.index('extern "C" __global__') :]
    before = body[body.index("{") : body.index("dsv4_grid_wait()")]
    names = r"\b(?:residual|output|post_in|comb_in|carried|memory|norm_weight|scale|base)\b"
    assert re.findall(names, before) == []
    assert before.count("fn[") == before.count("dsv4_warm(")


@pytest.mark.parametrize("variant", [DECODE, Variant("post", (5120,))], ids=lambda variant: variant.module)
def test_nothing_spills(variant: Variant, tmp_path: Path) -> None:
    root = Path(os.path.dirname(tilelang.__file__))
    unit = tmp_path / "kernel.cu"
    unit.write_text(compiled(variant).get_kernel_source(), encoding="utf-8")
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}"]
    flags = ["-w", "-std=c++20", "-arch=sm_90a", "-DENABLE_BF16", "-cubin", "-Xptxas", "-v"]
    command = ["nvcc", *flags, *includes, str(unit), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr


def test_a_second_process_loads_from_disk(tmp_path: Path) -> None:
    program = (
        "import time; from dsv4_mhc.compile import Variant, compile_variant; import tilelang;"
        "start = time.perf_counter(); compile_variant(Variant('expand', (64,)), 'sm_90a');"
        "print(time.perf_counter() - start)"
    )
    environment = os.environ | {"TILELANG_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    first = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    second = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert float(second.stdout.split()[-1]) < float(first.stdout.split()[-1])
    assert {path for path in tmp_path.rglob("*.cu")} <= files
    assert any(path.suffix == ".so" for path in files)


def test_other_architectures_are_refused() -> None:
    with pytest.raises(ArgumentError, match="sm_80"):
        compile_variant(SEAM, "sm_80")


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        ({"tilelang": (0, 1, 11), "apache-tvm-ffi": (0, 1, 12)}, "tilelang 0.1.11"),
        ({"tilelang": (0, 1, 15), "apache-tvm-ffi": (0, 1, 13)}, "apache-tvm-ffi 0.1.13"),
    ],
)
def test_versions_that_abort_are_refused_before(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, tuple[int, ...]], named: str
) -> None:
    monkeypatch.setattr(compilation, "_version", versions.__getitem__)
    with pytest.raises(UnsupportedError, match=re.escape(named)):
        compilation.check_versions.__wrapped__()
