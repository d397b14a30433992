# SPDX-License-Identifier: Apache-2.0
"""The host-side control plane of a group: exchanging small objects and agreeing on outcomes.

Contract: whatever can fail on one rank is run through `agree`, which exchanges outcomes before anyone goes
on, so a failure anywhere becomes the same typed error everywhere and no rank waits for one that has left.

Rejected: letting each rank raise on its own and relying on the process group's timeout, which turns a
failed allocation into minutes of waiting on every other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, cast, runtime_checkable

import torch
import torch.distributed as dist

from dsv4_symm_mem.errors import ArgumentError, GroupError, MismatchError

T = TypeVar("T")


@runtime_checkable
class Communicator(Protocol):
    """One rank's handle on its group's control plane; every method but the properties is collective."""

    @property
    def rank(self) -> int:
        """This rank, 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks P."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order."""
        ...


class ProcessGroupCommunicator:
    """A `torch.distributed` process group as a control plane.

    Args:
        group: The process group; never implied, so a sub-group cannot be mistaken for the world.
        device: This rank's device. Default: the current CUDA device under an NCCL group, else the CPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str | None = None) -> None:
        self.group = group
        rank = dist.get_rank(group)
        if rank < 0:
            raise ArgumentError("group", group, "a process group that this process belongs to")
        self.rank = rank
        self.size = dist.get_world_size(group)
        self.device = torch.device(device) if device is not None else _default_device(group)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def all_gather(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order."""
        gathered: list[T | None] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return cast(list[T], gathered)


def _default_device(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in str(dist.get_backend_config(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def communicator_of(
    group: Communicator | dist.ProcessGroup, device: torch.device | str | None = None
) -> Communicator:
    """`group` as a control plane.

    Raises:
        ArgumentError: `group` is None or of another type, or `device` differs from a communicator's own.
    """
    if isinstance(group, dist.ProcessGroup):
        return ProcessGroupCommunicator(group, device)
    if not isinstance(group, Communicator):
        raise ArgumentError(
            "group", group, "a torch.distributed ProcessGroup or a rank of a VirtualGroup (never implied)"
        )
    if device is not None and torch.device(device) != group.device:
        raise ArgumentError("device", str(device), f"{group.device}, the device of the group's rank")
    return group


def agree(communicator: Communicator, step: str, action: Callable[[], T]) -> T:
    """Run `action` on every rank and return its value once it has succeeded on all of them.

    Raises:
        GroupError: The same text on every rank when `action` raised anywhere; on a rank where it raised,
            chained to that exception.
    """
    failure: Exception | None = None
    value: T | None = None
    try:
        value = action()
    except Exception as error:
        failure = error
    outcomes = communicator.all_gather(None if failure is None else f"{type(failure).__name__}: {failure}")
    failures = {rank: why for rank, why in enumerate(outcomes) if why is not None}
    if failures:
        raise GroupError(step, failures) from failure
    return cast(T, value)


def require_equal(communicator: Communicator, step: str, values: Mapping[str, object]) -> None:
    """Check that all ranks hold the same `values`.

    Raises:
        MismatchError: On every rank, naming each value that differs and what each rank holds.
    """
    described = {name: repr(value) for name, value in values.items()}
    gathered = communicator.all_gather(described)
    names = sorted({name for held in gathered for name in held})
    differing = [name for name in names if len({held.get(name, "absent") for held in gathered}) > 1]
    if differing:
        raise MismatchError(
            step,
            {
                rank: ", ".join(f"{name}={held.get(name, 'absent')}" for name in differing)
                for rank, held in enumerate(gathered)
            },
        )
