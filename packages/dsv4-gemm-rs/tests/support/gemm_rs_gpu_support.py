# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks of one GPU, driven from one thread; shared by the GPU tests and `sanitized_run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gemm_rs_support
import torch
from dsv4_gemm_rs import WeightKind, Workspace, gemm_rs
from dsv4_gemm_rs.problems import RankProblem
from dsv4_symm_mem import VirtualGroup


class Ranks:
    """P virtual ranks of one GPU, driven from one thread: launches go to each rank's stream in turn."""

    def __init__(self, size: int, max_tokens: int, n: int, **options: Any) -> None:
        self.group = VirtualGroup(size, "cuda")
        create: Callable[[Any], Workspace] = lambda rank: Workspace.create(  # noqa: E731
            rank, max_tokens=max_tokens, n=n, **options
        )
        self.workspaces = self.group.run(create)

    def call(
        self,
        problems: list[RankProblem],
        outs: list[torch.Tensor] | None = None,
        operation: Callable[..., torch.Tensor] = gemm_rs,
    ) -> list[torch.Tensor]:
        """One call of `operation` on every rank; results are ready for the current stream."""
        here = torch.cuda.current_stream()
        results = []
        for rank, problem in zip(self.group.ranks, problems, strict=True):
            stream = rank.stream
            assert stream is not None
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                out = None if outs is None else outs[rank.rank]
                results.append(operation(problem.x, problem.weight, self.workspaces[rank.rank], out=out))
        for rank in self.group.ranks:
            assert rank.stream is not None
            here.wait_stream(rank.stream)
        return results

    def poison(self) -> None:
        """Fill all slots with BF16 NaN bits."""
        for space in self.workspaces:
            assert space.exchange is not None
            space.exchange.blocks[space.rank][space.exchange.layout.slots_offset :].fill_(0xFF)


@contextmanager
def ranks(size: int, max_tokens: int, n: int, **options: Any) -> Iterator[Ranks]:
    opened = Ranks(size, max_tokens, n, **options)
    yield opened
    torch.cuda.synchronize()
    opened.group.run(lambda rank: opened.workspaces[rank.rank].close())


def problems_for(
    size: int, m: int, n: int, k: int, kind: WeightKind, seed: int = 0, made_on: str = "cpu"
) -> list[RankProblem]:
    """A random problem for each rank, on the GPU."""
    return gemm_rs_support.problems_for(size, m, n, k, kind, seed, device="cuda", made_on=made_on)
