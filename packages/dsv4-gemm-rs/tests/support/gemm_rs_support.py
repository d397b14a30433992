# SPDX-License-Identifier: Apache-2.0
"""What several test modules share: a group of ranks with workspaces, and problems with exact answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from dsv4_gemm_rs import Workspace, gemm_rs
from dsv4_gemm_rs.problems import RankProblem, random_problem
from dsv4_gemm_rs.reference import gemm_reduce_scatter, tolerance, worst_error
from dsv4_gemm_rs.weights import Keep, WeightKind
from dsv4_symm_mem import VirtualGroup, VirtualRank
from dsv4_symm_mem.errors import Dsv4Error

T = TypeVar("T")


class Ranks:
    """P virtual ranks with a workspace each."""

    def __init__(self, size: int, **options: Any) -> None:
        self.group = VirtualGroup(size)
        self.workspaces = self.group.run(lambda rank: Workspace.create(rank, **options))

    def run(self, step: Callable[[Workspace], T]) -> list[T]:
        """`step` on every rank at once."""
        return self.group.run(lambda rank: step(self.workspaces[rank.rank]))

    def call(self, problems: Sequence[RankProblem]) -> list[torch.Tensor]:
        """One `gemm_rs` call, each rank with its problem."""
        return self.run(lambda w: gemm_rs(problems[w.rank].x, problems[w.rank].weight, w))

    def errors(self, step: Callable[[Workspace], object]) -> list[Dsv4Error | None]:
        """What `step` raised on each rank."""

        def guarded(workspace: Workspace) -> Dsv4Error | None:
            try:
                step(workspace)
            except Dsv4Error as error:
                return error
            return None

        return self.run(guarded)

    def close(self) -> None:
        """Close all workspaces."""
        self.group.run(lambda rank: self.workspaces[rank.rank].close())


@contextmanager
def ranks(size: int, **options: Any) -> Iterator[Ranks]:
    """Ranks that are closed at the end."""
    opened = Ranks(size, **options)
    yield opened
    opened.close()


def problems_for(
    size: int,
    m: int,
    n: int,
    k: int,
    kind: WeightKind,
    seed: int = 0,
    device: str = "cpu",
    made_on: str = "cpu",
    keep: Keep = Keep.BF16,
) -> list[RankProblem]:
    """A random problem for each rank."""
    seeds = range(seed * size + 1, (seed + 1) * size + 1)
    return [random_problem(m, n, k, kind, device, each, made_on, keep) for each in seeds]


def assert_right(
    outs: Sequence[torch.Tensor], problems: Sequence[RankProblem], *, multicast: bool = False
) -> None:
    """Every rank's shard is within twice the error of the reference rounded the same way, plus 1e-5.

    With `multicast` that is rounding every partial, the own one too. The reference runs where the problems'
    exact values are.
    """
    xs, ws = [p.x_exact for p in problems], [p.weight_exact for p in problems]
    exact = gemm_reduce_scatter(xs, ws)
    assert [tuple(out.shape) for out in outs] == [tuple(e.shape) for e in exact]
    error, allowed = (
        worst_error([out.to(xs[0].device) for out in outs], exact),
        tolerance(xs, ws, multicast=multicast),
    )
    assert error <= allowed, f"error {error} above {allowed}"
    m, length = xs[0].shape[0], exact[0].shape[0]
    for rank, out in enumerate(outs):
        past = out[max(m - rank * length, 0) :]
        assert torch.equal(past, torch.zeros_like(past))


__all__ = ["Ranks", "VirtualRank", "assert_right", "problems_for", "ranks"]
