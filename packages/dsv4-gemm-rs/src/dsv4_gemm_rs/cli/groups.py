# SPDX-License-Identifier: Apache-2.0
"""The group that a command runs on: torchrun's processes, or virtual ranks of this process; its options."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.communicator import ProcessGroupCommunicator
from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs.bench.timing import Group
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


def add_group_options(
    parser: argparse.ArgumentParser, ranks: int = 4, when: str = "virtual ranks when not under torchrun"
) -> None:
    """Add --ranks, of which `ranks` are the default, and --device: what `command_group` goes by."""
    parser.add_argument("--ranks", type=int, default=ranks, help=f"{when} (default {ranks})")
    parser.add_argument(
        "--device", type=device_option, default=None, help="default: cuda if there is one, else cpu"
    )


def add_out_features(parser: argparse.ArgumentParser, **how: Any) -> None:
    """Add --n, as `how` says; also by a name of its own.

    Torchrun's command line comes before this one's, and it takes --n for one of its own options.
    """
    parser.add_argument("--n", "--out-features", dest="n", type=int, **how)


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
def command_group(options: argparse.Namespace) -> Iterator[Group]:
    """Torchrun's group, one process a rank, or virtual ranks on a device, as `add_group_options` has it."""
    device = options.device or default_device()
    if not under_torchrun():
        yield VirtualGroup(options.ranks, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield ProcessGroupCommunicator(dist.new_group(), device)
    finally:
        dist.destroy_process_group()


def speaks(group: Group) -> bool:
    """Whether this process prints and writes for the group."""
    return isinstance(group, VirtualGroup) or group.rank == 0


def progress_of(group: Group) -> Callable[[str], None]:
    """Tells the user of progress, in the process that speaks for the group."""
    return (lambda line: print(line, file=sys.stderr, flush=True)) if speaks(group) else lambda line: None
