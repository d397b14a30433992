# SPDX-License-Identifier: Apache-2.0
"""A process with a GPU of its own, killed or stopped with calls in flight: the others end and blame it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).parent / "support" / "lost_gpu_worker.py"
DEADLINE = 2.0

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=180)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert process.returncode == 0, err
    assert lines, err
    parsed: dict[str, Any] = json.loads(lines[-1])
    return parsed


@pytest.mark.parametrize("how", ["KILL", "STOP"])
def test_survivors_end_and_blame_the_lost_rank(tmp_path: Path, how: str) -> None:
    size = torch.cuda.device_count()
    lost = size - 1
    arguments = [str(size), str(tmp_path / "store"), str(lost), how, str(DEADLINE)]
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank, worker in enumerate(workers):
            if rank == lost:
                continue
            seen = report(worker)
            assert seen["kind"] in ("PeerTimeoutError", "PeerAbortError"), seen
            assert seen["blamed"] == lost, seen
            assert seen["nan"], seen
            assert seen["seconds"] < DEADLINE + 10, seen
        if how == "STOP":
            workers[lost].send_signal(signal.SIGCONT)
            woken = report(workers[lost])
            assert woken["kind"] in ("PeerTimeoutError", "PeerAbortError"), woken
        else:
            assert workers[lost].wait(timeout=60) == -signal.SIGKILL
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
