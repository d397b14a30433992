# SPDX-License-Identifier: Apache-2.0
"""The command `dsv4-emulate`: descriptions, functions, traces, the list, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from dsv4_ptx_emulator.cli.main import main

PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry scale(.param .u64 data, .param .u32 factor, .param .f32 bias)
{
    .reg .b32 %r<4>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [data];
    ld.param.u32 %r1, [factor];
    ld.param.f32 %f3, [bias];
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f1, [%rd3];
    cvt.rn.f32.u32 %f2, %r1;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    st.global.f32 [%rd3], %f1;
    ret;
}
"""
DESCRIPTION = """
ptx = "kernel.ptx"
[[buffer]]
name = "x"
shape = [32]
dtype = "float32"
fill = "count"
save = "after.npy"
[[launch]]
entry = "scale"
block = 32
parameters = ["u64 x", "u32 3", "f32 0.5"]
"""
PROGRAM = """
import numpy as np

def double(system):
    data = np.ones(32, np.float32)
    lease = system.memory.lease(data, home=1)
    parameters = data.ctypes.data.to_bytes(8, "little") + (2).to_bytes(4, "little") + bytes(4)
    size = {"grid": (1, 1, 1), "block": (32, 1, 1)}
    system.emulator.launch(open("kernel.ptx").read(), "scale", **size, parameters=parameters, rank=1)
    system.run()
    return f"sum {data.sum():g} on {len(system.devices)} ranks"

double.ranks = 2

def wrong(system):
    assert len(system.devices) == 0, "there are devices"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a kernel, a description and a module."""
    (tmp_path / "kernel.ptx").write_text(PTX, encoding="utf-8")
    (tmp_path / "kernel.toml").write_text(DESCRIPTION, encoding="utf-8")
    (tmp_path / "program_of_test_cli.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "program_of_test_cli", raising=False)
    return tmp_path


def test_a_description(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "kernel.toml", "--seeds", "2"]) == 0
    assert np.array_equal(
        np.load(folder / "after.npy"), np.arange(32, dtype=np.float32) * 3 + np.float32(0.5)
    )
    shown = capsys.readouterr().out
    assert "scale" in shown
    assert "seed 1:" in shown
    assert main(["run", "kernel.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["launches"][0]["kernel"] == "scale"


def test_a_function(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "program_of_test_cli:double"]) == 0
    assert "sum 64 on 2 ranks" in capsys.readouterr().out
    assert main(["run", "program_of_test_cli:double", "--ranks", "3"]) == 0
    assert "on 3 ranks" in capsys.readouterr().out
    assert main(["run", "program_of_test_cli:wrong", "--seed", "4"]) == 1
    assert "there are devices" in capsys.readouterr().err


def test_a_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "kernel.toml", "schedule.json"]) == 0
    assert json.loads((folder / "schedule.json").read_text(encoding="utf-8"))["traceEvents"]
    assert "schedule.json" in capsys.readouterr().out


def test_a_finding_is_1_and_says_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = DESCRIPTION.replace("shape = [32]", "shape = [31]")
    (folder / "kernel.toml").write_text(text, encoding="utf-8")
    assert main(["trace", "kernel.toml", "schedule.json"]) == 1
    shown = capsys.readouterr().err
    assert "seed 0" in shown
    assert "OutOfBoundsError" in shown
    assert (folder / "schedule.json").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("ptx =", "px ="), "ptx"),
        (('name = "x"', ""), "buffer.name"),
        (('entry = "scale"', 'entry = "scales"'), "scale"),
        (("u32 3", "u32 x x"), "parameters"),
        (("u32 3", "u64 3"), "4 bytes"),
        ((', "f32 0.5"', ""), "as scale declares"),
        (('fill = "count"', 'fill = "full"'), "fill"),
        (('"float32"', '"float31"'), "dtype"),
        (("block = 32", "block = [1, 2, 3, 4]"), "block"),
        (("kernel.ptx", "kernels.ptx"), "kernels.ptx"),
        (("[[launch]]", "[[launch"), "TOML"),
    ],
)
def test_a_request_that_cannot_be_met_is_2(
    change: tuple[str, str], complaint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "kernel.toml").write_text(DESCRIPTION.replace(*change), encoding="utf-8")
    assert main(["run", "kernel.toml"]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("target", ["nothing", "no_such_module:f", "program_of_test_cli:no_such_function"])
def test_an_unknown_target_is_2(target: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", target]) == 2
    assert "target" in capsys.readouterr().err


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list-instructions"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 50
    assert all(len(line.split()) >= 3 for line in lines), "an opcode, its section, what it does"
    assert main(["list-instructions", "--markdown"]) == 0
    assert capsys.readouterr().out.count("| `") == len(lines)
