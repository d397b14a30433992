# SPDX-License-Identifier: Apache-2.0
"""The fixture `emulator` in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TEST = """
import numpy as np

PTX = '''
.version 8.0
.target sm_90a
.address_size 64
.visible .entry nothing() { ret; }
'''

def launch(system):
    system.emulator.launch(PTX, "nothing", grid=(1, 1, 1), block=(32, 1, 1))
    return system

def test_runs(emulator):
    launch(emulator(ranks=2)).run()

def test_forgets(emulator):
    launch(emulator())

def test_fails(emulator):
    launch(emulator(seed=5)).run()
    assert False
"""

RACE = """
import numpy as np
import pytest

PTX = '''
.version 8.0
.target sm_90a
.address_size 64
.visible .entry both(.param .b64 p0) {
.reg .b64 %d0; .reg .b32 %r0;
ld.param.b64 %d0, [p0]; mov.u32 %r0, %ctaid.x; st.global.b32 [%d0], %r0; ret; }
'''

@pytest.mark.parametrize("ranks", [1, 2])
def test_two_ctas_store_to_one_word(ranks, emulator):
    system, word = emulator(ranks=ranks), np.zeros(1, np.uint32)
    system.emulator.register(word.ctypes.data, word.nbytes, "word")
    parameters = word.ctypes.data.to_bytes(8, "little")
    system.emulator.launch(PTX, "both", grid=(2, 1, 1), block=(32, 1, 1), parameters=parameters)
    system.run()
"""


def pytest_says(folder: Path, *options: str, test: str = TEST) -> str:
    (folder / "test_it.py").write_text(test, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *options,
        str(folder),
    ]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder).stdout


def test_fixture(tmp_path: Path) -> None:
    shown = pytest_says(tmp_path, "--emulator-seed", "3", "--emulator-traces", str(tmp_path / "traces"))
    assert "1 failed, 2 passed, 1 error" in shown
    assert "never ran 1 launch" in shown
    assert "1 rank(s), sm_90a, seed 5" in shown
    assert len(list((tmp_path / "traces").glob("*.json"))) == 3


def test_the_memory_model_where_there_are_few_ranks(tmp_path: Path) -> None:
    assert "2 passed" in pytest_says(tmp_path, test=RACE)
    shown = pytest_says(tmp_path, "--emulator-memory-model", "1", test=RACE)
    assert "1 failed, 1 passed" in shown
    assert "MemoryModelError" in shown


def test_a_pytest_that_does_not_use_it_does_not_load_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import sys\ndef pytest_sessionfinish():\n    print('numpy' in sys.modules, 'loaded')\n",
        encoding="utf-8",
    )
    (tmp_path / "test_none.py").write_text("def test_none(): pass\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "no:hypothesispytest", str(tmp_path / "test_none.py")]
    shown = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path).stdout
    assert "False loaded" in shown
