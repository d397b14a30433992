# SPDX-License-Identifier: Apache-2.0
"""`tune` with a timer that makes its times up, and what workspaces do with the file that it writes."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dsv4_gemm_rs import Workspace, _version
from dsv4_gemm_rs import workspace as workspace_module
from dsv4_gemm_rs.cli import tune as command
from dsv4_gemm_rs.cli.main import main
from dsv4_gemm_rs.dispatch.decide import Machine, Problem, least_tokens
from dsv4_gemm_rs.dispatch.thresholds import Shape, Timed
from dsv4_gemm_rs.tuning import file
from dsv4_gemm_rs.tuning.file import TunedTable, find, read, write
from dsv4_gemm_rs.tuning.measure import tune
from dsv4_gemm_rs.weights import WeightKind
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.errors import ArgumentError, GroupError

SHAPE = Shape(90, 4, True, "bf16", 5120, 2048)
ABOUT: dict[str, Any] = {"device": "a GPU", "date": "2026-01-01T00:00:00+00:00", "source": "a test"}


def crossing(at: int) -> Any:
    """A timer whose fused kernel is faster from `at` rows on."""
    return lambda shape, m: Timed(m, 1.0, 0.5 if m < at else 2.0)


def table(least: int, shape: Shape = SHAPE) -> TunedTable:
    entries = tune([shape], [least // 2, least], crossing(least), **ABOUT)
    return TunedTable(_version.__version__, shape.arch, "a GPU", "a test", ABOUT["date"], tuple(entries))


def test_every_shape_is_measured_at_every_m_and_told() -> None:
    asked: list[tuple[Shape, int]] = []
    lines: list[str] = []

    def timer(shape: Shape, m: int) -> Timed:
        asked.append((shape, m))
        return Timed(m, 1.0, 0.5 if m < 96 * shape.k // 2048 else 2.0)

    shapes = [SHAPE, replace(SHAPE, k=4096), replace(SHAPE, k=64)]
    entries = tune(shapes, [256, 16, 64, 64, 128], timer, progress=lines.append, **ABOUT)
    assert asked == [(shape, m) for shape in shapes for m in (16, 64, 128, 256)]
    assert [entry.least_tokens for entry in entries] == [128, 256]
    assert [timed.m for timed in entries[0].measured] == [16, 64, 128, 256]
    assert entries[0].date == "2026-01-01"
    assert "M=64     fused 1.0 us, unfused 0.5 us: unfused" in lines[1]
    assert lines[4].endswith("fused from 128 tokens on")
    assert "no entry" in lines[-1]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the default file lies."""
    monkeypatch.delenv("DSV4_GEMM_RS_TABLE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "dsv4" / "gemm_rs_thresholds.json"


def test_the_file_is_found_where_it_is_said_to_be(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(90) == file.Found(home, None, "")
    write(home, table(64))
    assert find(90).entries == table(64).entries
    assert str(find(90)) == f"{home}, 1 shapes measured on a GPU, 2026-01-01"
    monkeypatch.setenv("DSV4_GEMM_RS_TABLE", "off")
    assert find(90).entries == ()
    other = home.with_name("other.json")
    write(other, table(32))
    monkeypatch.setenv("DSV4_GEMM_RS_TABLE", str(other))
    assert find(90).entries == table(32).entries
    monkeypatch.delenv("DSV4_GEMM_RS_TABLE")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", lambda: home.parent)
    assert file.default_path() == home.parent / ".config/dsv4/gemm_rs_thresholds.json"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": "0.0.1"}, "measured with version 0.0.1 of dsv4-gemm-rs"),
        ({"arch": 100}, "measured on sm_100, here is sm_90"),
        ({"schema": 0}, "schema 0"),
        ({"entries": 3}, "a list of entries"),
        (None, "a table of schema 1"),
    ],
)
def test_what_does_not_count_is_passed_over_unless_it_was_named(
    change: dict[str, Any] | None, why: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, table(64))
    text = home.read_text(encoding="utf-8")
    home.write_text("{" if change is None else json.dumps({**json.loads(text), **change}), encoding="utf-8")
    found = find(90)
    assert found.entries == ()
    assert why in found.obstacle
    assert "does not count" in str(found)
    monkeypatch.setenv("DSV4_GEMM_RS_TABLE", str(home))
    with pytest.raises(ArgumentError, match="DSV4_GEMM_RS_TABLE"):
        find(90)


def test_a_named_file_must_be_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_GEMM_RS_TABLE", str(home))
    with pytest.raises(ArgumentError, match="No such file"):
        find(90)


class Tables:
    """The thresholds of a group of CPU ranks that are taken for GPUs of SM90."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group = VirtualGroup(2, "cpu")
        monkeypatch.setattr(workspace_module, "_arch", lambda accelerator: 90)

    def agreed(self) -> list[Any]:
        return self.group.run(workspace_module._thresholds)


def test_rank_0s_file_counts_for_all(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Tables(monkeypatch)
    assert ranks.agreed() == [(), ()]
    write(home, table(64))
    read_by: list[Path] = []

    def noted(path: Path) -> TunedTable:
        read_by.append(path)
        return read(path)

    monkeypatch.setattr(file, "read", noted)
    assert ranks.agreed() == [table(64).entries] * 2
    assert read_by == [home]


def test_a_bad_file_is_the_same_error_on_all_ranks_or_one_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Tables(monkeypatch)
    write(home, replace(table(64), arch=100))
    with caplog.at_level(logging.WARNING, "dsv4_gemm_rs"):
        assert ranks.agreed() == [(), ()]
    assert len(caplog.records) == 1
    assert "measured on sm_100" in caplog.text
    monkeypatch.setenv("DSV4_GEMM_RS_TABLE", str(home))
    with pytest.raises(GroupError, match="reading own thresholds"):
        ranks.agreed()


def test_a_cpu_group_looks_for_no_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_GEMM_RS_TABLE", str(home))
    group = VirtualGroup(2, "cpu")
    made = group.run(lambda rank: Workspace.create(rank, max_tokens=8, n=64))
    assert [space.machine.table for space in made] == [(), ()]
    group.run(lambda rank: made[rank.rank].close())


@pytest.fixture
def gpus(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command without GPUs: a made-up device and a timer whose crossing is at 96 rows of K = 2048."""

    def timer(*_: object) -> Any:
        return lambda shape, m: Timed(m, 1.0, 0.5 if m < 96 * shape.k // 2048 else 2.0)

    def measured(group: Any, options: argparse.Namespace, timer: Any) -> TunedTable:
        pretended: Any = SimpleNamespace(size=group.size, device=SimpleNamespace(type="cuda"), rank=0)
        monkeypatch.setattr(command, "probe_device", lambda device: SimpleNamespace(arch=90, name="a GPU"))
        return really(pretended, options, timer)

    really = command.measured
    monkeypatch.setattr(command, "graph_timer", timer)
    monkeypatch.setattr(command, "measured", measured)
    return home


TUNE = ["tune", "--ranks", "4", "--device", "cpu", "--tokens", "16", "64", "128", "256", "512"]


def test_the_command_writes_what_later_calls_go_by(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TUNE, "--k", "2048", "4096"]) == 0
    said = capsys.readouterr()
    assert "K=2048: fused from 128 tokens" in said.out
    assert f"written: {gpus}, 0 entries were there before" in said.out
    assert "M=512    fused 1.0 us, unfused 2.0 us: fused" in said.err
    made = read(gpus)
    assert (made.version, made.arch, made.device) == (_version.__version__, 90, "a GPU")
    assert made.command.startswith("dsv4-gemm-rs")
    machine = Machine(90, 4, False, True, True, False, 132, frozenset({90}), table=find(90).entries)
    for k, least in ((2048, 128), (4096, 256)):
        assert least_tokens(machine, Problem(1, 5120, k, WeightKind.MXFP8)) == least


def test_the_command_keeps_other_shapes_and_speaks_json(
    gpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TUNE, "--k", "2048", "4096"]) == 0
    assert main([*TUNE, "--k", "4096", "1024", "--out-features", "7168", "5120", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.split("before\n")[1])
    assert said["path"] == str(gpus)
    assert len(said["entries"]) == 4
    assert len(read(gpus).entries) == 5
    # Another version's file is begun anew.
    write(gpus, replace(read(gpus), version="0.0.1"))
    assert main([*TUNE, "--k", "2048"]) == 0
    assert len(read(gpus).entries) == 1


def test_the_command_measures_though_the_named_table_is_stale(
    gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = gpus.with_name("mine.json")
    write(other, replace(table(64), version="0.0.1"))
    monkeypatch.setenv("DSV4_GEMM_RS_TABLE", str(other))
    assert main([*TUNE, "--k", "2048"]) == 0
    assert read(other).version == _version.__version__
    assert find(90).entries[0].least_tokens == 128
    assert not gpus.exists()


def test_the_command_says_what_it_cannot_do(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--ranks", "1", "--device", "cpu"]) == 2
    assert "nothing to exchange" in capsys.readouterr().err
    assert main([*TUNE, "--tokens", "512", "1024", "--k", "2048"]) == 1
    assert "nothing was written" in capsys.readouterr().err
    assert not gpus.exists()
    assert main([*TUNE, "--tokens", "0"]) == 2
    assert "--tokens" in capsys.readouterr().err


def test_the_command_needs_a_fused_kernel(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TUNE) == 2
    assert "none for this device" in capsys.readouterr().err
