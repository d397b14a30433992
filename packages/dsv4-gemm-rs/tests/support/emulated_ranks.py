# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks whose kernels are emulated, driven through the public API from one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from dsv4_gemm_rs import Workspace, gemm_rs
from dsv4_gemm_rs.kernels.families import TileConfig
from dsv4_gemm_rs.problems import RankProblem
from dsv4_symm_mem import VirtualGroup
from dsv4_symm_mem.protocol.layout import shard_length

Choice = Callable[..., TileConfig]
"""Stands in for `dispatch.costs.choose`."""


class Ranks:
    """P virtual ranks with a workspace each.

    Args:
        emulation: Their devices.
        max_tokens: Largest M of a call.
        n: Largest N of a call.
        options: Further keywords of `Workspace.create`.
    """

    def __init__(self, emulation: Any, max_tokens: int, n: int, **options: Any) -> None:
        self.emulation = emulation
        self.size = len(emulation.accelerators)
        self.group = VirtualGroup(self.size, emulation=emulation)
        self.workspaces = self.group.run(
            lambda rank: Workspace.create(rank, max_tokens=max_tokens, n=n, **options)
        )

    def launch(self, rank: int, problem: RankProblem, x: Any = None) -> torch.Tensor:
        """Queue one rank's part of a call, with `x` in place of the problem's activations."""
        m, n = problem.x.shape[0], problem.weight.n
        out = torch.full((shard_length(m, self.size), n), float("nan"), dtype=torch.bfloat16)
        return gemm_rs(problem.x if x is None else x, problem.weight, self.workspaces[rank], out)

    def call(self, problems: Sequence[RankProblem], xs: Sequence[Any] | None = None) -> list[torch.Tensor]:
        """Queue one call on every rank; results are there after `finish`."""
        given = [None] * len(problems) if xs is None else xs
        return [self.launch(rank, problems[rank], given[rank]) for rank in range(self.size)]

    def finish(self) -> None:
        """Execute what is queued, and raise what ended a call."""
        self.emulation.run()
        for space in self.workspaces:
            space.check()

    def poison(self) -> None:
        """Fill all slots with BF16 NaN bits."""
        for space in self.workspaces:
            assert space.exchange is not None
            space.exchange.blocks[space.rank][space.exchange.layout.slots_offset :].fill_(0xFF)


@contextmanager
def ranks(
    emulation: Any, max_tokens: int, n: int, *, config: TileConfig | Choice | None, **options: Any
) -> Iterator[Ranks]:
    """Ranks that are closed at the end.

    Args:
        emulation: Their devices.
        max_tokens: Largest M of a call.
        n: Largest N of a call.
        config: What every call takes, or chooses with; None for the dispatcher's own choice.
        options: Further keywords of `Workspace.create`; by default calls are fused.
    """
    chosen = {"side_effect": config} if callable(config) else {"return_value": config}
    patch = mock.patch("dsv4_gemm_rs.dispatch.plan.choose", **chosen)
    if config is not None:
        patch.start()
    try:
        opened = Ranks(emulation, max_tokens, n, **{"path": "fused"} | options)
        yield opened
        opened.group.run(lambda rank: opened.workspaces[rank.rank].close())
    finally:
        if config is not None:
            patch.stop()


__all__ = ["Choice", "Ranks", "ranks"]
