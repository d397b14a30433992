# SPDX-License-Identifier: Apache-2.0
"""A process killed or stopped in the middle of a call: the others end by the deadline and blame it."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).parent / "support" / "lost_process_worker.py"
DEADLINE = 2.0
SIZE = 3

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"),
    reason="the shared back end between CPU processes needs an x86-64 processor",
)


def start(tmp_path: Path, lost: int, how: str) -> list[subprocess.Popen[str]]:
    store = tmp_path / "store"
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(SIZE), str(store), str(lost), how, str(DEADLINE)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert lines, err
    parsed: dict[str, Any] = json.loads(lines[-1])
    return parsed


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("how", ["KILL", "STOP"])
def test_survivors_end_and_blame_the_lost_rank(tmp_path: Path, lost: int, how: str) -> None:
    workers = start(tmp_path, lost, how)
    try:
        for rank, worker in enumerate(workers):
            if rank == lost:
                continue
            seen = report(worker)
            assert seen["call"] == seen["epoch"] == 6
            assert seen["kind"] in ("PeerTimeoutError", "PeerAbortError")
            assert seen["blamed"] == lost, seen
            assert seen["nan"], seen
            assert seen["seconds"] < DEADLINE + 10
        if how == "STOP":
            # It wakes up with all its peers' data at hand, so its own call is good; its next one is refused.
            workers[lost].send_signal(signal.SIGCONT)
            woken = report(workers[lost])
            assert (woken["kind"], woken["call"], woken["epoch"]) == ("PeerAbortError", 7, 6), woken
            assert woken["blamed"] == lost
        else:
            assert workers[lost].wait(timeout=60) == -signal.SIGKILL
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()


def test_nothing_is_left_in_shared_memory_by_killed_processes(tmp_path: Path) -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("no /dev/shm on this system")
    before = set(folder.glob("dsv4-symm-*"))
    workers = start(tmp_path, 1, "KILL")
    for worker in workers:
        worker.wait(timeout=60)
        worker.communicate()
    deadline = time.monotonic() + 5
    while set(folder.glob("dsv4-symm-*")) - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not set(folder.glob("dsv4-symm-*")) - before
