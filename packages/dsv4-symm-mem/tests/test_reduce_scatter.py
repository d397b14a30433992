# SPDX-License-Identifier: Apache-2.0
"""The host-driven reduce-scatter: exact sums, poison, skew, changing shapes, and every way a call can end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from dsv4_symm_mem.arena import SymmetricArena
from dsv4_symm_mem.backends import VirtualGroup, VirtualRank
from dsv4_symm_mem.collectives.reduce_scatter import push_tiles, reduce_scatter
from dsv4_symm_mem.errors import (
    ArgumentError,
    CallMismatchError,
    ExchangeError,
    PeerAbortError,
    PeerTimeoutError,
)
from dsv4_symm_mem.protocol.host import HostExchange
from dsv4_symm_mem.protocol.layout import ExchangeLayout, shard_length
from dsv4_symm_mem.protocol.tiles import Tile, TileGrid, TileShape
from dsv4_symm_mem.protocol.words import Operation, call_signature

TILE = TileShape(16, 32)
N = 70


class Ranks:
    """P virtual ranks with one exchange block each."""

    def __init__(self, size: int, deadline: float = 20.0) -> None:
        self.group = VirtualGroup(size)
        self.layout = ExchangeLayout(size, max_tiles=64, slot_bytes=64 * 16 * 32 * 2)
        self.blocks: dict[int, torch.Tensor] = {}

        def create(rank: VirtualRank) -> HostExchange:
            arena = SymmetricArena.create(rank, self.layout.total_bytes)
            block = arena.allocate((self.layout.total_bytes,), torch.uint8, "block")
            self.blocks[rank.rank] = block.local
            return HostExchange(self.layout, block, rank.rank, deadline)

        self.exchanges = self.group.run(create)

    def poison_slots(self) -> None:
        """Fill every slot with BF16 NaN bits."""
        for block in self.blocks.values():
            block[self.layout.slots_offset :].fill_(0xFF)

    def call(
        self, partials: list[torch.Tensor], before: Callable[[int], None] = lambda rank: None
    ) -> torch.Tensor:
        m = partials[0].shape[0]

        def step(rank: VirtualRank) -> torch.Tensor:
            before(rank.rank)
            out = torch.full((shard_length(m, rank.size), N), float("nan"), dtype=torch.bfloat16)
            reduce_scatter(self.exchanges[rank.rank], partials[rank.rank], out, TILE)
            return out

        return torch.cat(self.group.run(step))

    def outcomes(self, step: Callable[[VirtualRank], object]) -> list[ExchangeError | None]:
        def guarded(rank: VirtualRank) -> ExchangeError | None:
            try:
                step(rank)
            except ExchangeError as error:
                return error
            return None

        return self.group.run(guarded)


def integers(size: int, m: int, seed: int) -> list[torch.Tensor]:
    """Partials whose sums BF16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, (m, N), generator=generator).float() for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_exact_on_integers_for_every_awkward_m(size: int) -> None:
    ranks = Ranks(size)
    for seed, m in enumerate((0, 1, size - 1, size, size + 1, 15, 16, 17, 127, 128, 129)):
        ranks.poison_slots()
        partials = integers(size, m, seed)
        out = ranks.call(partials)
        assert torch.equal(out[:m].float(), sum(partials, torch.zeros(m, N)))
        assert torch.equal(out[m:], torch.zeros_like(out[m:]))
        assert [e.epoch for e in ranks.exchanges] == [seed + 1] * size


def test_sums_are_fp32_in_rank_order_with_the_own_partial_unrounded() -> None:
    size, m = 3, 40
    partials = [torch.randn(m, N, generator=torch.Generator().manual_seed(i)) for i in range(size)]
    out = Ranks(size).call(partials)
    length = shard_length(m, size)
    for rank in range(size):
        rows = slice(rank * length, min((rank + 1) * length, m))
        terms = [p[rows] if i == rank else p[rows].bfloat16().float() for i, p in enumerate(partials)]
        assert torch.equal(out[rows], ((terms[0] + terms[1]) + terms[2]).bfloat16())


def test_bits_repeat_under_skew_and_changing_shapes() -> None:
    size = 4
    ranks = Ranks(size)
    delays = random.Random(1)
    seen: dict[int, torch.Tensor] = {}
    for call in range(60):
        m = delays.choice((0, 1, 3, 4, 5, 33, 64, 129))
        partials = [
            torch.randn(m, N, generator=torch.Generator().manual_seed(100 * m + i)) for i in range(size)
        ]
        waits = [delays.random() * 2e-3 for _ in range(size)]
        if call % 3 == 0:
            ranks.poison_slots()
        out = ranks.call(partials, before=lambda rank, waits=waits: time.sleep(waits[rank]))  # type: ignore[misc]
        assert torch.equal(seen.setdefault(m, out), out)


def test_outputs_outlive_later_calls() -> None:
    ranks = Ranks(2)
    first = ranks.call(integers(2, 30, 0))
    kept = first.clone()
    for seed in range(1, 5):
        ranks.call(integers(2, 30, seed))
    assert torch.equal(first, kept)


def test_bf16_partials_are_taken_as_they_are() -> None:
    partials = [p.bfloat16() for p in integers(2, 20, 3)]
    out = Ranks(2).call(partials)
    assert torch.equal(out.float(), partials[0].float() + partials[1].float())


def test_nan_stays_in_its_element() -> None:
    partials = integers(2, 20, 3)
    expected = partials[0] + partials[1]
    partials[1][3, 5] = float("nan")
    expected[3, 5] = float("nan")
    assert torch.equal(Ranks(2).call(partials).float().nan_to_num(99), expected.nan_to_num(99))


def test_a_missing_rank_is_blamed_and_nobody_waits_for_ever() -> None:
    ranks = Ranks(3, deadline=1.5)
    partials = integers(3, 48, 0)
    outs = [torch.zeros(16, N, dtype=torch.bfloat16) for _ in range(3)]

    def step(rank: VirtualRank) -> None:
        if rank.rank != 1:
            reduce_scatter(ranks.exchanges[rank.rank], partials[rank.rank], outs[rank.rank], TILE)

    started = time.monotonic()
    errors = ranks.outcomes(step)
    assert time.monotonic() - started < 15
    survivors = [e for e in errors if e is not None]
    assert len(survivors) == 2
    assert errors[1] is None
    assert {e.blamed for e in survivors} == {1}
    assert {e.epoch for e in survivors} == {1}
    assert any(isinstance(e, PeerTimeoutError) and "waited for tile 0 of rank 1" in str(e) for e in survivors)
    assert outs[0].isnan().all()
    assert outs[2].isnan().all()
    for rank in range(3):
        with pytest.raises(ExchangeError, match="call 1"):
            ranks.exchanges[rank].check()
        with pytest.raises(ExchangeError):
            reduce_scatter(ranks.exchanges[rank], partials[rank], outs[rank], TILE)


def test_a_rank_that_was_kept_waiting_is_not_blamed_for_the_dead_one() -> None:
    # Rank 2 dies after its first tile for rank 1. Rank 0 waits for it before sending rank 1 its second
    # tile, so rank 1, whose deadline comes first, sees only rank 0's silence.
    ranks = Ranks(3, deadline=10.0)
    ranks.exchanges[1].deadline = 1.5
    grid = TileGrid(96, 32, 3, TILE)
    tiles = {owner: list(grid.tiles(owner)) for owner in range(3)}
    orders = {
        0: [tiles[1][0], tiles[2][0], tiles[0][0], tiles[1][1], tiles[2][1], tiles[0][1]],
        1: [tiles[2][0], tiles[0][0], tiles[1][0], tiles[2][1], tiles[0][1], tiles[1][1]],
    }
    signature = call_signature(Operation.REDUCE_SCATTER, 96, 32, TILE.m, TILE.n)

    def step(rank: VirtualRank) -> None:
        if rank.rank == 2:
            ranks.exchanges[2].begin(signature).publish(1, 0)
            return
        out = torch.empty(32, 32, dtype=torch.bfloat16)
        ones = torch.ones(TILE.m, TILE.n)
        push_tiles(ranks.exchanges[rank.rank], grid, orders[rank.rank], lambda tile: ones, out)

    errors = ranks.outcomes(step)
    assert all(isinstance(error, ExchangeError) for error in errors[:2])
    for exchange in ranks.exchanges:
        with pytest.raises(ExchangeError) as caught:
            exchange.check()
        assert caught.value.blamed == 2


def test_a_peer_with_a_shape_that_raises_other_flags_is_a_mismatch() -> None:
    ranks = Ranks(2, deadline=1.5)

    def step(rank: VirtualRank) -> None:
        # With one row, rank 0 owns it all and expects a tile of rank 1; with none, rank 1 sends a token.
        m = 1 - rank.rank
        out = torch.empty(shard_length(m, 2), N, dtype=torch.bfloat16)
        reduce_scatter(ranks.exchanges[rank.rank], torch.zeros(m, N), out, TILE)

    errors = ranks.outcomes(step)
    assert any(isinstance(error, CallMismatchError) for error in errors)


def test_no_deadline_waits_as_long_as_it_takes() -> None:
    ranks = Ranks(2, deadline=0.0)
    partials = integers(2, 20, 0)
    out = ranks.call(partials, before=lambda rank: time.sleep(0.5 * rank))
    assert torch.equal(out.float(), partials[0] + partials[1])


def test_another_shape_in_the_same_call_is_a_mismatch_not_a_timeout() -> None:
    ranks = Ranks(2, deadline=20.0)

    def step(rank: VirtualRank) -> None:
        m = 40 + 8 * rank.rank
        out = torch.empty(shard_length(m, 2), N, dtype=torch.bfloat16)
        reduce_scatter(ranks.exchanges[rank.rank], torch.zeros(m, N), out, TILE)

    started = time.monotonic()
    errors = ranks.outcomes(step)
    assert time.monotonic() - started < 15
    assert all(e is not None for e in errors)
    assert any(isinstance(e, CallMismatchError) for e in errors)


def test_a_rank_that_fails_inside_a_call_ends_it_for_all() -> None:
    ranks = Ranks(3)
    grid = TileGrid(48, N, 3, TILE)

    def step(rank: VirtualRank) -> None:
        def partial(tile: Tile) -> torch.Tensor:
            if rank.rank == 2 and tile.owner == 1:
                raise MemoryError("device out of memory")
            return torch.ones(len(tile.rows), len(tile.columns))

        order = [t for d in (1, 2, 3) for t in grid.tiles((rank.rank + d) % 3)]
        out = torch.empty(16, N, dtype=torch.bfloat16)
        if rank.rank == 2:
            with pytest.raises(MemoryError):
                push_tiles(ranks.exchanges[2], grid, order, partial, out)
            assert out.isnan().all()
        else:
            push_tiles(ranks.exchanges[rank.rank], grid, order, partial, out)

    errors = ranks.outcomes(step)
    # Rank 2 had sent rank 0 all its tiles, so rank 0's call is good unless the end came while it waited.
    assert errors[0] is None or errors[0].blamed == 2
    assert isinstance(errors[1], PeerAbortError)
    assert errors[1].blamed == 2
    for exchange in ranks.exchanges:
        with pytest.raises(ExchangeError) as caught:
            exchange.check()
        assert caught.value.blamed == 2


def test_operands_are_checked_before_anything_is_sent() -> None:
    ranks = Ranks(2)
    exchange = ranks.exchanges[0]
    out = torch.empty(10, N, dtype=torch.bfloat16)
    for partial, result in (
        (torch.zeros(20, N, dtype=torch.float16), out),
        (torch.zeros(20), out),
        (torch.zeros(20, N), out[:5]),
        (torch.zeros(20, N), out.float()),
        (torch.zeros(20, N + 1), out),
    ):
        with pytest.raises(ArgumentError):
            reduce_scatter(exchange, partial, result, TILE)
    with pytest.raises(ArgumentError, match="a shard of at most"):
        reduce_scatter(exchange, torch.zeros(4000, N), torch.empty(2000, N, dtype=torch.bfloat16), TILE)
    assert exchange.epoch == 0
    partials = integers(2, 20, 0)
    assert torch.equal(ranks.call(partials).float(), partials[0] + partials[1])
