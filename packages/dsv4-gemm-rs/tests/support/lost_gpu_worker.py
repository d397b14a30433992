# SPDX-License-Identifier: Apache-2.0
"""One rank of test_lost_gpu_processes: calls until one of its peers is lost, and prints what it saw as JSON.

Arguments: rank, size, rendezvous file, rank to lose, signal by which it is lost ("KILL" or "STOP"), deadline.
The lost rank goes with calls of its own still in its stream. The control plane is gloo: NCCL would end the
survivors itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from dsv4_gemm_rs import Workspace, gemm_rs
from dsv4_gemm_rs.problems import random_operands
from dsv4_gemm_rs.weights import WeightKind
from dsv4_symm_mem.communicator import ProcessGroupCommunicator
from dsv4_symm_mem.errors import ExchangeError

GOOD_CALLS = 5
ENQUEUED = 20
M, N, K = 2048, 5120, 1024


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    lost, how, deadline = int(sys.argv[4]), sys.argv[5], float(sys.argv[6])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size
    )
    group = ProcessGroupCommunicator(dist.new_group(backend="gloo"), device)
    workspace = Workspace.create(group, max_tokens=M, n=N, path="fused", deadline=deadline)
    x, weight = random_operands(M, N, K, WeightKind.BF16, device, 1 + rank)
    for _ in range(GOOD_CALLS):
        good = gemm_rs(x, weight, workspace)
    torch.cuda.synchronize()
    group.all_gather(None)
    if rank == lost:
        for _ in range(ENQUEUED):
            gemm_rs(x, weight, workspace)
        os.kill(os.getpid(), signal.SIGKILL if how == "KILL" else signal.SIGSTOP)
    started = time.monotonic()
    report: dict[str, object] = {"kind": "none"}
    calls = 0
    while time.monotonic() - started < 60:
        try:
            out = gemm_rs(x, weight, workspace)
            torch.cuda.synchronize()
            calls += 1
            workspace.check()
            if not torch.equal(out, good):
                report = {"kind": "wrong", "calls": calls}
                break
        except ExchangeError as error:
            report = {
                "kind": type(error).__name__,
                "blamed": error.blamed,
                "epoch": error.epoch,
                "calls": calls,
                "seconds": time.monotonic() - started,
                "nan": bool(out.isnan().all()),
                "text": str(error),
            }
            break
    print(json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
