# SPDX-License-Identifier: Apache-2.0
"""The host-driven all-gather: every shard everywhere, poison, changing shapes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from dsv4_symm_mem.arena import SymmetricArena
from dsv4_symm_mem.backends import VirtualGroup, VirtualRank
from dsv4_symm_mem.collectives.all_gather import all_gather
from dsv4_symm_mem.collectives.reduce_scatter import reduce_scatter
from dsv4_symm_mem.errors import ArgumentError, CallMismatchError, ExchangeError, PeerAbortError
from dsv4_symm_mem.protocol.host import HostExchange
from dsv4_symm_mem.protocol.layout import ExchangeLayout, shard_length
from dsv4_symm_mem.protocol.tiles import TileShape

TILE = TileShape(16, 32)
N = 70


class Ranks:
    """P virtual ranks with an exchange each, whose slots hold NaN."""

    def __init__(self, size: int, deadline: float = 20.0) -> None:
        self.group = VirtualGroup(size)
        layout = ExchangeLayout(size, max_tiles=64, slot_bytes=64 * 16 * 32 * 2)

        def create(rank: VirtualRank) -> HostExchange:
            arena = SymmetricArena.create(rank, layout.total_bytes)
            block = arena.allocate((layout.total_bytes,), torch.uint8, "block")
            block.local[layout.slots_offset :].fill_(0xFF)
            return HostExchange(layout, block, rank.rank, deadline)

        self.exchanges = self.group.run(create)

    def gather(self, rank: VirtualRank, whole: torch.Tensor, m: int) -> torch.Tensor:
        """One rank's call; rows of its shard past M are NaN."""
        length = shard_length(m, rank.size)
        shard = torch.full((length, N), float("nan"), dtype=torch.bfloat16)
        rows = whole[rank.rank * length : (rank.rank + 1) * length]
        shard[: len(rows)] = rows
        out = torch.full((m, N), float("nan"), dtype=torch.bfloat16)
        all_gather(self.exchanges[rank.rank], shard, out, TILE)
        return out


def matrix(m: int, seed: int) -> torch.Tensor:
    return torch.randn(m, N, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_gets_every_shard(size: int) -> None:
    ranks = Ranks(size)
    for seed, m in enumerate((100, 0, 1, size - 1, size, size + 1, 33, 100)):
        whole = matrix(m, seed)
        outs = ranks.group.run(lambda rank, whole=whole, m=m: ranks.gather(rank, whole, m))  # type: ignore[misc]
        assert all(torch.equal(out, whole) for out in outs)


def test_mixes_with_reduce_scatters() -> None:
    size, m = 3, 50
    ranks = Ranks(size)
    partials = [torch.randint(-8, 9, (m, N)).float() for _ in range(size)]

    def step(rank: VirtualRank) -> torch.Tensor:
        exchange = ranks.exchanges[rank.rank]
        shard = torch.empty(shard_length(m, size), N, dtype=torch.bfloat16)
        out = torch.empty(m, N, dtype=torch.bfloat16)
        for _ in range(3):
            reduce_scatter(exchange, partials[rank.rank], shard, TILE)
            all_gather(exchange, shard, out, TILE)
        return out

    total = torch.stack(partials).sum(0).bfloat16()
    assert all(torch.equal(out, total) for out in ranks.group.run(step))


def test_a_missing_rank_is_blamed_and_the_output_is_nan() -> None:
    ranks = Ranks(3, deadline=0.2)
    outs = {}

    def step(rank: VirtualRank) -> ExchangeError | None:
        if rank.rank == 1:
            return None
        shard = torch.zeros(10, N, dtype=torch.bfloat16)
        outs[rank.rank] = torch.zeros(30, N, dtype=torch.bfloat16)
        with pytest.raises(ExchangeError) as caught:
            all_gather(ranks.exchanges[rank.rank], shard, outs[rank.rank], TILE)
        return caught.value

    errors = ranks.group.run(step)
    assert {error.blamed for error in errors if error is not None} == {1}
    assert all(out.isnan().all() for out in outs.values())


def test_ranks_in_different_operations_are_told() -> None:
    ranks = Ranks(2)
    kinds = []

    def step(rank: VirtualRank) -> None:
        exchange = ranks.exchanges[rank.rank]
        shard, whole = torch.zeros(10, N).bfloat16(), torch.zeros(20, N).bfloat16()
        try:
            if rank.rank == 0:
                all_gather(exchange, shard, whole, TILE)
            else:
                reduce_scatter(exchange, whole, shard, TILE)
        except ExchangeError as error:
            kinds.append(type(error))

    ranks.group.run(step)
    assert len(kinds) == 2
    assert CallMismatchError in kinds
    assert set(kinds) <= {CallMismatchError, PeerAbortError}


@pytest.mark.parametrize(
    ("shard", "out", "name"),
    [
        (torch.zeros(5, N).bfloat16(), torch.zeros(10, N), "out"),
        (torch.zeros(4, N).bfloat16(), torch.zeros(10, N).bfloat16(), "shard"),
        (torch.zeros(5, N), torch.zeros(10, N).bfloat16(), "shard"),
        (torch.zeros(5000, N).bfloat16(), torch.zeros(10_000, N).bfloat16(), "partial"),
    ],
)
def test_bad_operands_are_named_before_anything_is_sent(
    shard: torch.Tensor, out: torch.Tensor, name: str
) -> None:
    ranks = Ranks(2)
    with pytest.raises(ArgumentError, match=f"{name}: got"):
        all_gather(ranks.exchanges[0], shard, out, TILE)
    assert ranks.exchanges[0].epoch == 0
