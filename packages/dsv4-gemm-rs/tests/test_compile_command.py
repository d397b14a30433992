# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled kernels from the command line, and a fused kernel that comes from it.

Compilation happens in processes of its own: the DSL's loader would open its run-time library in this one for
good, and the emulator's would no longer be found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dsv4_gemm_rs import WeightKind, Workspace, gemm_rs
from dsv4_gemm_rs.bench.start import PHASES, measure
from dsv4_gemm_rs.cli import bench_start, compile_kernels
from dsv4_gemm_rs.cli.cached import CacheState
from dsv4_gemm_rs.cli.main import main
from dsv4_gemm_rs.kernels.cache import gemm_reduce_scatter_kernel, kernels_of
from dsv4_gemm_rs.kernels.families import FAMILIES, Strategy
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig
from dsv4_symm_mem import VirtualGroup
from dsv4_symm_mem.artefacts import host
from dsv4_symm_mem.artefacts.folder import CacheFolder
from gemm_rs_support import assert_right, problems_for

ARCH = "sm_120a"
"""No member of the fused family is for it, so few kernels have to be compiled."""
TILE = KernelConfig(64, 128)
COMPILE_TILE = """
import sys
from pathlib import Path
from dsv4_gemm_rs.kernels.cache import gemm_reduce_scatter_kernel
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig
gemm_reduce_scatter_kernel(KernelConfig(64, 128)).obtain("sm_90a", folder=Path(sys.argv[1]))
"""


def needed(arch: str) -> int:
    """Kernels that a workspace makes ready."""
    return len(kernels_of(arch))


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_member_of_the_family_is_needed(arch: int) -> None:
    kernels = kernels_of(f"sm_{arch}a")
    names = [kernel.recipe.name for kernel in kernels]
    assert len(names) == len(set(names)) == len(FAMILIES[arch]) + 5
    assert all(gemm_reduce_scatter_kernel(config) in kernels for config in FAMILIES[arch])
    assert any("sm100" in name for name in names) == (arch >= 100)
    assert len(kernels_of(ARCH)) == 5


def test_the_command_says_which_tiles_calls_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(arch: str, exchange: Strategy, index: int, folder: Path) -> str:
        made.append((arch, exchange, index))
        return "made"

    monkeypatch.setattr(compile_kernels, "_make", make)
    shape = ["--tp", "4", "--n", "5120", "--k", "2048", "--tokens", "300"]
    arguments = ["compile", "--arch", "sm_100a", "sm_90a", "--output", str(tmp_path), "--jobs", "1", *shape]
    assert main(arguments) == 1, "nothing was really compiled"
    archs = ("sm_100a", "sm_90a")
    assert made == [(arch, Strategy.PUSH, i) for arch in archs for i in range(needed(arch))]
    text = capsys.readouterr().out
    assert "148 SMs (sm_100) take the tiles 128x64 for mxfp8 operands; 128x64, 128x128 for bf16" in text
    assert "132 SMs (sm_90) take the tiles 64x128" in text
    assert "for mxfp8 operands" not in text[text.index("(sm_90)") : text.index("(sm_100)")]


def test_the_kernels_of_a_workspace_with_multicast_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(arch: str, exchange: Strategy, index: int, folder: Path) -> str:
        made.append(kernels_of(arch, exchange)[index])
        return "made"

    monkeypatch.setattr(compile_kernels, "_make", make)
    arguments = ["compile", "--exchange", "multicast", "--output", str(tmp_path), "--jobs", "1", "--tp", "4"]
    assert main([*arguments, "--arch", "sm_100a"]) == 1, "nothing was really compiled"
    assert made == kernels_of("sm_100a", Strategy.MULTICAST)
    text = capsys.readouterr().out
    assert "0 of 13 that a workspace with exchange 'multicast' needs are there" in text
    assert "to compile them: dsv4-gemm-rs compile --arch sm_100a --exchange multicast" in text
    assert "(sm_100) take the tiles" in text
    assert main([*arguments, "--arch", "sm_100a", "sm_90a"]) == 2
    assert "push, or one of sm_100a or sm_103a as --arch" in capsys.readouterr().err


def test_compile_list_and_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    missing = CacheState.of([ARCH], folder).missing[ARCH]
    count = needed(ARCH)
    assert len(missing) == count
    # The children's files, which appear at their writing, are this process's to judge.
    assert main(["compile", "--arch", ARCH, "--output", str(folder), "--jobs", "2"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name} for {ARCH}: compiled" in text for name in missing)
    assert f"{ARCH}: {count} of {count} that a workspace needs are there" in text
    assert f"compiled kernels: {folder}, {count} files" in text
    assert main(["compile", "--arch", ARCH, "--output", str(folder), "--jobs", "2"]) == 0
    assert capsys.readouterr().out.count(": loaded in") == count
    next(folder.glob("quantize-torch.bfloat16-swizzled-*.o")).write_bytes(b"")
    assert main(["compile", "--list", "--output", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(", current") for line in lines[:-1]].count(True) == count - 1
    assert sum("not usable: it does not end like an artefact" in line for line in lines) == 1
    assert lines[-1] == f"{count} files in {folder}"
    monkeypatch.setenv("DSV4_CACHE_DIR", str(folder))
    assert main(["doctor", "--ranks", "2", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert f"compiled kernels: {folder}, {count} files" in text
    assert f"sm_90a: 0 of {needed('sm_90a')} that a workspace needs are there" in text
    assert f"sm_100a: 0 of {needed('sm_100a')} that a workspace needs are there" in text
    assert "to compile them: dsv4-gemm-rs compile --arch sm_90a" in text
    state = CacheState.of([ARCH], folder)
    assert state.missing == {ARCH: ["quantize-torch.bfloat16-swizzled"]}
    shown = f"{count - 1} of {count} that a workspace needs are there\n"
    shown += "    missing: quantize-torch.bfloat16-swizzled"
    assert shown in str(state)


def test_the_doctor_says_why_nothing_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4_CACHE_DIR", "/proc/no/such/folder")
    assert main(["doctor", "--ranks", "2", "--device", "cpu", "--json"]) == 0
    cache = json.loads(capsys.readouterr().out)["cache"]
    assert cache["obstacle"].startswith("/proc/no/such/folder cannot be made")
    assert len(cache["missing"]["sm_90a"]) == cache["needed"]["sm_90a"] == needed("sm_90a")
    assert main(["doctor", "--ranks", "2", "--device", "cpu"]) == 0
    assert "not usable: /proc/no/such/folder cannot be made" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--arch", "hopper"], "--arch: got 'hopper'"),
        (["--tp", "0"], "--tp: got 0"),
        (["--jobs", "0"], "--jobs: got 0"),
        (["--output", "/proc/no/such/folder"], "--output: got '/proc/no/such/folder'"),
        (["--list", "--output", "/proc/no/such/folder"], "cannot be made"),
    ],
)
def test_bad_options(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_fused_kernel_from_the_cache_in_the_emulator(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip(
        "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
    )
    if obstacle := library.obstacle():
        pytest.skip(obstacle)
    subprocess.run([sys.executable, "-c", COMPILE_TILE, str(tmp_path)], check=True)
    kernel = gemm_reduce_scatter_kernel(TILE)
    name = kernel.recipe.key("sm_90a").file_name
    artefact = CacheFolder(tmp_path).read(name)
    emulation = request.getfixturevalue("emulator")(2)
    emulation.table.store.add(artefact.cubin, artefact.ptx)
    with emulation.compiling():
        loaded = host.load(tmp_path / name)
    target = emulation.accelerators[0].current_stream().target
    monkeypatch.setitem(kernel._functions, target, loaded)
    monkeypatch.setattr("dsv4_gemm_rs.dispatch.plan.choose", lambda *arguments, **options: TILE)
    problems = problems_for(2, 65, 128, 64, WeightKind.BF16)
    group = VirtualGroup(2, emulation=emulation)
    spaces = group.run(lambda rank: Workspace.create(rank, max_tokens=65, n=128, path="fused"))
    outs = [gemm_rs(p.x, p.weight, space) for p, space in zip(problems, spaces, strict=True)]
    emulation.run()
    assert_right(outs, problems)
    assert spaces[0].counters.as_dict()["kernels"] == {"loaded": 0, "compiled": 0, "seconds": 0.0}
    group.run(lambda rank: spaces[rank.rank].close())


def rows_of(kernels: int, cold: float, warm: float, again: int) -> list[dict[str, object]]:
    times = {phase: 1.0 for phase in PHASES}
    return [
        {"measure": "start", "case": case, "processes": count, **times, "kernels_s": seconds, **made}
        for count in (1, 8)
        for case, seconds, made in (
            ("cold", cold, {"compiled": kernels, "loaded": (count - 1) * kernels}),
            ("warm", warm, {"compiled": again, "loaded": count * kernels - again}),
        )
    ]


def test_the_start_up_report_says_what_misses_its_target() -> None:
    assert all(check.holds for check in bench_start.checks(rows_of(13, 20.0, 0.1, 0)))
    missed = [check.name for check in bench_start.checks(rows_of(13, 20.0, 4.0, 2)) if not check.holds]
    assert missed == [
        "1 process: kernels, warm / cold",
        "1 process: compiled, warm",
        "8 processes: kernels, warm / cold",
        "8 processes: compiled, warm",
    ]
    shown = bench_start.table(rows_of(13, 20.0, 0.1, 0)).splitlines()
    assert [len(line) for line in shown] == [len(shown[0])] * 5


def test_every_phase_of_a_start_is_in_its_process() -> None:
    """An architecture without a fused kernel has the fewest kernels to compile."""
    cold, warm = measure("sm_120a", 1, 1, lambda line: None)[:2]
    for row in (cold, warm):
        phases = [row[phase] for phase in ("torch_s", "package_s", "dsl_s", "kernels_s")]
        # An import that had happened before took a few microseconds.
        assert min(phases) > 1e-3
        assert sum(phases) == pytest.approx(row["total_s"])
    assert (cold["compiled"], cold["loaded"]) == (warm["loaded"], warm["compiled"])
    assert cold["compiled"] > 0
