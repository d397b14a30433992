# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints for people, what it prints for programs, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dsv4_gemm_rs import gemm_rs
from dsv4_gemm_rs.bench.report import Report
from dsv4_gemm_rs.cli import demo
from dsv4_gemm_rs.cli.main import main
from dsv4_symm_mem.errors import ArgumentError

SMALL = ["--ranks", "2", "--n", "128", "--k", "128"]


def test_the_demo_passes_and_says_which_path_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL, "--tokens", "9", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "PASSED" in text
    assert "not fused: fused kernels need a GPU" in text
    assert "1,152 bytes sent by each rank" in text


@pytest.mark.parametrize("kind", ["mxfp8", "bf16"])
@pytest.mark.parametrize("path", ["host", "unfused"])
def test_the_demo_speaks_json(kind: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", *SMALL, "--tokens", "9", "--kind", kind, "--path", path, "--json", "--device", "cpu"]
    assert main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["passed"]
    assert said["bit_equal_repeat"]
    assert said["error"] <= said["tolerance"]
    assert said["calls"]["calls"] == {path: 2}


def test_without_a_gpu_the_demo_runs_the_kernel_in_the_emulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip(
        "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
    )
    if obstacle := library.obstacle():
        pytest.skip(obstacle)
    monkeypatch.setattr(demo, "default_device", lambda: torch.device("cpu"))
    trace = tmp_path / "schedule.json"
    assert main(["demo", *SMALL, "--tokens", "130", "--trace", str(trace), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["passed"]
    assert said["bit_equal_repeat"]
    assert said["decision"].startswith("fused (dsv4 SM90 kernel")
    # 65 rows go each way as five blocks of 16 rows; flags and tokens come on top.
    least = said["wire_bytes_per_rank"]
    assert all(least <= sent <= 80 / 65 * least + 256 for sent in said["link_bytes_per_rank"])
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert main(["demo", *SMALL, "--tokens", "9", "--trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert "sm_90a emulated by dsv4-ptx-emulator" in shown
    assert f"trace:      {trace}" in shown


def test_without_an_emulator_the_demo_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(demo, "installed_emulators", dict)
    assert main(["demo", *SMALL, "--tokens", "9"]) == 0
    assert "dsv4-ptx-emulator is not installed" in capsys.readouterr().out.splitlines()[0]


def test_the_demo_fails_on_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = gemm_rs
    monkeypatch.setattr(demo, "gemm_rs", lambda *arguments: right(*arguments) + 1)
    assert main(["demo", *SMALL, "--tokens", "9", "--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_request_that_cannot_be_met_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL, "--tokens", "9", "--path", "fused", "--device", "cpu"]) == 2
    assert "'fused' was requested, but fused kernels need a GPU" in capsys.readouterr().err
    assert main(["demo", "--ranks", "0"]) == 2
    assert "size: got 0" in capsys.readouterr().err
    assert main(["bench", *SMALL, "--samples", "0"]) == 2
    assert "--samples: got 0" in capsys.readouterr().err
    assert main(["bench", *SMALL, "--keep", "fp8", "--device", "cpu"]) == 2
    assert "kept in FP8 on SM90 alone" in capsys.readouterr().err
    assert main(["bench", *SMALL, "--exchange", "multicast", "--device", "cpu"]) == 2
    assert "no kernel for a CPU that reads through multicast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["demo", "--tokens", "-1"], "--tokens: got -1"),
        (["demo", "--k", "0"], "--k: got 0"),
        (["demo", "--k", "96"], "K a positive multiple of 128"),
        (["bench", "--n", "-64"], "--n: got -64"),
        (["bench", "--out-features", "-64"], "--n: got -64"),
        (["bench", "--output", "/proc/nowhere/x.json"], "--output: got '/proc/nowhere/x.json'"),
    ],
)
def test_bad_options_are_named_before_any_work(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--device", "cpu"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("device", ["tpu", "cuda:x"])
def test_a_device_that_is_none_is_a_usage_error(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--device", device])
    assert caught.value.code == 2
    assert "is no device" in capsys.readouterr().err


def test_the_doctor_describes_and_decides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ranks", "2", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "2 ranks, symmetric memory: virtual" in text
    assert "multicast: no, " in text
    assert "exchange through multicast: no, this version has no kernel for a CPU" in text
    assert main(["doctor", "--ranks", "2", "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["devices"]) == 2
    assert {d["kind"] for d in said["decisions"]} == {"mxfp8", "bf16"}
    assert "no kernel for a CPU that reads through multicast" in said["multicast_obstacle"]


def test_the_benchmark_writes_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    output = tmp_path / "results" / "kernel.json"
    options = ["--workspaces", "2", "--samples", "3", "--output", str(output), "--device", "cpu"]
    assert main(["bench", *SMALL, "--tokens", "4", "9", *options]) == 0
    captured = capsys.readouterr()
    assert "gemm-then-reduce-scatter" in captured.out
    assert "M=9" in captured.out
    assert captured.err.count(" us") == 14
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    report = Report.read(output)
    assert {row["case"] for row in report.rows} == {
        "quantise",
        "gemm-cublas",
        "unfused-call",
        "reduce-scatter",
        "all-gather",
        "gemm-then-reduce-scatter",
        "dispatched",
    }
    assert all(row["median_us"] > 0 and row["samples"] == 3 for row in report.rows)
    assert {row["exchange"] for row in report.rows} == {"push"}
    assert captured.out.startswith("exchange: push\n")
    assert [row["wire_bytes"] for row in report.rows if row["case"] == "gemm-cublas"] == [512, 1152]
    assert report.machine["ranks"] == 2
    assert report.versions["torch"]
    assert report.date
    assert report.command
    assert [check.holds for check in report.checks] == [c.value <= c.target for c in report.checks]


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("", "{}", '{"schema": 0}', '{"schema": 1, "checks": []}'):
        path.write_text(text)
        with pytest.raises(ArgumentError, match="a result file of schema 1"):
            Report.read(path)
