# SPDX-License-Identifier: Apache-2.0
"""`verify` finds what is wrong, and `full-report` survives steps that fail, hang or are not there."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4_gemm_rs.cli import (
    bench,
    bench_link,
    bench_start,
    compile_kernels,
    doctor,
    full_report,
    inspect_kernels,
    model,
    tune,
    verify,
)
from dsv4_gemm_rs.cli.full_report import Outcome, Step, perform, steps_for
from dsv4_gemm_rs.cli.main import main
from dsv4_gemm_rs.kernels.families import Family, Operand, Strategy
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig
from dsv4_symm_mem import VirtualGroup

ARGUMENTS = ["verify", "--ranks", "2", "--device", "cpu", "--tokens", "1", "7", "--n", "128", "--k", "128"]


def test_verify_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # A reduce-scatter of BF16 in one form and of MXFP8 in two, an all-reduce of each, with two lengths.
    assert (found["checked"], found["wrong"]) == (10, 0)
    assert {row["kind"] for row in found["rows"]} == {"bf16", "mxfp8"}


def test_verify_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(x: torch.Tensor, weight: Any, workspace: Any, out: torch.Tensor) -> None:
        out.fill_(7.0 if workspace.rank == 1 else 0.0)

    monkeypatch.setattr(verify, "gemm_rs", spoiled)
    monkeypatch.setattr(verify, "gemm_ar", spoiled)
    assert main(ARGUMENTS) == 1
    text = capsys.readouterr().out
    assert text.count("WRONG: ") == 10
    assert "0 of 10 calls are right" in text


def test_verify_launches_every_configuration(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    library = pytest.importorskip(
        "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
    )
    if obstacle := library.obstacle():
        pytest.skip(obstacle)

    def few(arch: int | None, operand: Operand, strategy: Strategy = Strategy.PUSH) -> Family:
        return (KernelConfig(operand, 64),)

    monkeypatch.setattr(verify, "members", few)
    make: Callable[..., Any] = request.getfixturevalue("emulator")
    group = VirtualGroup(2, emulation=make(2, arch="sm_100a"))
    rows = verify.worst_of(group.run(lambda rank: verify.verify(rank, [(64, 128)], [0, 9])))
    assert all(row["passed"] for row in rows), rows
    calls = [row["call"] for row in rows]
    assert calls.count("tile 128x64") == 4
    assert calls.count("gemm_rs on quantised activations, unfused") == 2


def test_steps_suit_the_number_of_gpus(tmp_path: Path) -> None:
    def named(gpus: int) -> list[str]:
        return [step.name for step in steps_for(gpus, "sm_100a", tmp_path)]

    assert [name for name in named(8) if "GPUs" in name] == [
        f"{what}, {ranks} GPUs{exchange}"
        for what, exchanges in (("correctness", 2), ("benchmark", 2), ("thresholds", 1))
        for exchange in ("", ", multicast")[:exchanges]
        for ranks in (2, 4, 8)
    ]
    assert "link" not in named(1)
    assert "compile, multicast" in named(1)
    assert "benchmark, 2 virtual ranks" in named(1)
    for step in steps_for(4, "sm_103a", tmp_path):
        assert ("--nproc-per-node=4" in step.command) == ("4 GPUs" in step.name or step.name == "doctor")
        assert ("--exchange multicast" in " ".join(step.command)) == ("multicast" in step.name)
        if step.result is not None:
            assert f"--output {step.result}" in " ".join(step.command)


def test_every_step_is_a_command_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    def noted(options: Any) -> int:
        parsed.append(options.command)
        return 0

    modules = (bench, bench_link, bench_start, compile_kernels, doctor, inspect_kernels, model, tune, verify)
    for module in modules:
        monkeypatch.setattr(module, "run", noted)
    ours = [step for gpus in (1, 4) for step in steps_for(gpus, "sm_100a", tmp_path) if len(step.command) > 4]
    for step in ours:
        assert main(step.command[step.command.index("dsv4_gemm_rs.cli.main") + 1 :]) == 0
    assert len(parsed) == len(ours)
    assert set(parsed) >= {"compile", "doctor", "verify", "bench", "bench-link", "bench-start", "inspect"}


def test_steps_that_fail_hang_print_or_write(tmp_path: Path) -> None:
    def step(program: str, **options: Any) -> Step:
        return Step("step", (sys.executable, "-c", program), **options)

    made = perform(step("print('a warning'); print('{\"right\": 3}')"))
    assert (made.exit, made.result) == (0, {"right": 3})
    there = tmp_path / "there"
    there.touch()
    made = perform(step("import sys; print(len(sys.argv))", inputs=(tmp_path / "missing", there)))
    assert (made.output, made.command.split()[-1]) == ("2\n", str(there))
    made = perform(step("import sys; print('x' * 9000, '{'); sys.exit(3)"))
    assert (made.exit, made.result, len(made.output)) == (3, None, full_report.KEPT_CHARACTERS)
    written = tmp_path / "result.json"
    program = f"open({str(written)!r}, 'w').write('[1, 2]'); print('{{}}')"
    assert perform(step(program, result=written)).result == [1, 2]
    assert perform(step("pass", result=tmp_path / "none.json")).result is None
    started = time.perf_counter()
    # A child of the step holds its output open and must go, too.
    forking = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    made = perform(step(forking, limit_s=0.5))
    assert made.exit is None
    assert time.perf_counter() - started < 20
    assert perform(Step("step", ("no-such-program-here",))).output == "there is no no-such-program-here"


def test_the_file_holds_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 0))

    obstacle = "symmetric memory has no multicast address on some rank; rank 0: switched off"

    def performed(step: Step) -> Outcome:
        assert not step.multicast
        code = None if step.name == "link" else 0
        found = {"of": step.name, "multicast_obstacle": obstacle}
        return Outcome(step.name, " ".join(step.command), code, 1.0, "", found)

    monkeypatch.setattr(full_report, "perform", performed)
    output = tmp_path / "report.json"
    assert main(["full-report", "--output", str(output)]) == 1
    text = capsys.readouterr().out
    through = ["compile, multicast", "correctness, 2 GPUs, multicast", "benchmark, 2 GPUs, multicast"]
    assert f"failed steps: link; skipped steps: {', '.join(through)}" in text
    assert f"compile, multicast: skipped: {obstacle} in 0 s" in text
    held = json.loads(output.read_text())
    assert {step["name"]: step["skipped"] for step in held["steps"] if step["skipped"]} == dict.fromkeys(
        through, obstacle
    )
    assert [step["name"] for step in held["steps"]] == [
        step.name for step in steps_for(2, "sm_100a", tmp_path)
    ]
    assert "--arch sm_100a" in held["steps"][2]["command"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json"]


@pytest.mark.parametrize(
    ("gpus", "arch", "found", "why"),
    [
        (8, "sm_90a", {}, "no kernel for sm_90a that reads through multicast"),
        (1, "sm_100a", {}, "several GPUs, and there is 1"),
        (8, "sm_103a", {"multicast_obstacle": "switched off"}, "switched off"),
        (8, "sm_100a", {"multicast_obstacle": ""}, ""),
        # Where nobody could find out, they are tried.
        (8, "sm_100a", None, ""),
    ],
)
def test_when_steps_through_multicast_are_skipped(gpus: int, arch: str, found: Any, why: str) -> None:
    said = full_report.multicast_obstacle(gpus, arch, [Outcome("doctor", "", 0, 1.0, "", found)])
    assert why in said
    assert bool(said) == bool(why)


def test_without_a_gpu_there_is_nothing_to_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["full-report", "--output", str(tmp_path / "report.json")]) == 2
    assert "needs at least one GPU" in capsys.readouterr().err
    assert main(["full-report", "--list"]) == 0
    assert "benchmark, 8 GPUs" in capsys.readouterr().out
