# SPDX-License-Identifier: Apache-2.0
"""The group that a command runs on: torchrun's processes, or virtual ranks of this process."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.communicator import Communicator, ProcessGroupCommunicator
from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs.environment import under_torchrun


def device_option(text: str) -> torch.device:
    """A device named on the command line; argparse reports what is wrong with it."""
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no device ({error})") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("there is no CUDA device")
    return device


def require_positive(**numbers: int | None) -> None:
    """Check options that must be at least 1 where they are given.

    Raises:
        ArgumentError: One is not; names the option.
    """
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ArgumentError(f"--{name}", number, "at least 1")


def default_device() -> torch.device:
    """CUDA where there is a GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def command_group(ranks: int, device: torch.device) -> Iterator[VirtualGroup | Communicator]:
    """Torchrun's group, one process a rank, or `ranks` virtual ranks on `device`."""
    if not under_torchrun():
        yield VirtualGroup(ranks, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield ProcessGroupCommunicator(dist.new_group(), device)
    finally:
        dist.destroy_process_group()
