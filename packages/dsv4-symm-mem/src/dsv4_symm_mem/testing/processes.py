# SPDX-License-Identifier: Apache-2.0
"""The process group of a test run under torchrun: NCCL over one GPU per rank, or gloo on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from dsv4_symm_mem.communicator import ProcessGroupCommunicator

COLLECTIVE_TIMEOUT = timedelta(seconds=60)


@contextmanager
def torchrun_group() -> Iterator[ProcessGroupCommunicator]:
    """This process's rank of a group over all processes that torchrun started.

    A rank that fails a test goes on to the next one; a collective that it skipped then times out on the
    others after a minute instead of hanging the run.
    """
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    # Two packages' suites may run in one session; the first to come opens the world and the last closes it.
    first = not dist.is_initialized()
    if first:
        dist.init_process_group("nccl" if on_gpus else "gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        yield ProcessGroupCommunicator(dist.new_group(timeout=COLLECTIVE_TIMEOUT), device)
    finally:
        if first:
            dist.destroy_process_group()
