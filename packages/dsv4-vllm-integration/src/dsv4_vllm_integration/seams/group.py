# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel group, and agreeing on things in it.

Contract: whatever must be alike on all ranks is gathered over the tensor-parallel group, never over the
world: with data parallelism the other groups may not be at the same point. Control goes over the group's CPU
side, so nothing waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from dsv4_symm_mem import Communicator, ProcessGroupCommunicator


@dataclass(frozen=True)
class TensorParallelGroup:
    """One rank's view of its tensor-parallel group.

    Attributes:
        control: Exchanges small objects between the ranks, over the CPU.
        data: The group that tensors travel in, as `Workspace.create` takes it.
        device: This rank's device.
    """

    control: Communicator
    data: Any
    device: torch.device

    @property
    def rank(self) -> int:
        """This rank."""
        return self.control.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.control.size


def group_of(coordinator: Any) -> TensorParallelGroup:
    """The group behind vLLM's `GroupCoordinator` for tensor parallelism.

    Its `cpu_group` and `device_group` may also be communicators of ours, as virtual ranks have.
    """
    control = coordinator.cpu_group
    if not isinstance(control, Communicator):
        control = ProcessGroupCommunicator(control, "cpu")
    return TensorParallelGroup(control, coordinator.device_group, torch.device(coordinator.device))


def first_problem(group: TensorParallelGroup, problem: str) -> str:
    """What keeps some rank from going on, with the rank's number; empty if nothing does. Collective."""
    problems = group.control.all_gather(problem)
    for rank, text in enumerate(problems):
        if text:
            alike = all(other == text for other in problems)
            return text if alike else f"rank {rank}: {text}"
    return ""


def differing(group: TensorParallelGroup, facts: Mapping[str, object]) -> str:
    """Which of `facts` differ between ranks, with their values; empty if none does. Collective."""
    gathered = group.control.all_gather({name: repr(value) for name, value in facts.items()})
    for name in facts:
        values = [held.get(name, "absent") for held in gathered]
        if len(set(values)) > 1:
            return f"ranks differ in {name}: {', '.join(values)}"
    return ""
