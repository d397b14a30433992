# SPDX-License-Identifier: Apache-2.0
"""Signals, abort words and the placement of everything in a block."""

from __future__ import annotations

import itertools

import pytest
from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.layout import CONTROL_BYTES, ExchangeLayout, Strategy, shard_length, shard_rows
from dsv4_symm_mem.protocol.slots import unit_rows, units_of
from dsv4_symm_mem.protocol.tiles import TileGrid, TileShape
from dsv4_symm_mem.protocol.words import (
    MAX_EPOCH,
    MAX_LEVEL,
    Abort,
    AbortKind,
    Operation,
    bank_of,
    call_signature,
    epoch_of,
    signal,
    wait_level,
)


def test_a_signal_fits_a_signed_word_and_gives_its_epoch_back() -> None:
    for epoch in (1, 2, 2**31, 2**32 + 5, MAX_EPOCH):
        for signature in (0, 1, 0xFFFF):
            word = signal(epoch, signature)
            assert 0 < word < 2**63
            assert epoch_of(word) == epoch
    assert epoch_of(0) == 0
    assert [bank_of(e) for e in (1, 2, 3)] == [1, 0, 1]


def test_signatures_tell_calls_apart() -> None:
    base = (Operation.REDUCE_SCATTER, 1024, 5120, 128, 256)
    signatures = {call_signature(*base)}
    for i, other in itertools.product(range(1, 5), (1, 2, 64, 100, 1025, 5121)):
        changed = list(base)
        changed[i] = other
        signatures.add(call_signature(*changed))  # type: ignore[arg-type]
    signatures.add(call_signature(Operation.ALL_REDUCE, *base[1:]))
    assert len(signatures) == 26
    # Recorded value: ranks of different versions must agree on it.
    assert call_signature(*base) == 19390


@pytest.mark.parametrize("kind", list(AbortKind))
def test_abort_words_round_trip(kind: AbortKind) -> None:
    for abort in (Abort(1, 0, kind), Abort(2**42 - 1, 127, kind, MAX_LEVEL)):
        assert Abort.decode(abort.encode()) == abort
        assert 0 < abort.encode() < 2**63
    assert Abort.decode(0) is None


def test_the_greater_abort_word_is_the_one_nearer_the_cause() -> None:
    late, early = wait_level(7, 64), wait_level(3, 64)
    assert wait_level(64, 64) == 0 < early < late <= MAX_LEVEL == wait_level(10**6, 10**7)
    ordered = [
        Abort(9, 3, AbortKind.TIMEOUT, late),
        Abort(9, 1, AbortKind.TIMEOUT, early),
        Abort(9, 2, AbortKind.TIMEOUT, wait_level(64, 64)),
        Abort(8, 0, AbortKind.TIMEOUT, late),
        Abort(9, 3, AbortKind.MISMATCH, late),
        Abort(9, 3, AbortKind.FAILED),
    ]
    words = [abort.encode() for abort in ordered]
    assert words == sorted(words)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("m", [0, 1, 2, 7, 8, 9, 127, 128, 129, 1025])
def test_shards_partition_the_rows(size: int, m: int) -> None:
    rows = [row for rank in range(size) for row in shard_rows(m, size, rank)]
    assert rows == list(range(m))
    assert all(len(shard_rows(m, size, rank)) <= shard_length(m, size) for rank in range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_regions_are_aligned_and_do_not_overlap(size: int) -> None:
    layout = ExchangeLayout(size, max_tiles=5, slot_bytes=256)
    for owner in range(size):
        regions = [(0, CONTROL_BYTES)]
        for bank in (0, 1):
            regions += [
                (layout.flag_offset(bank, source, tile), 8) for source in range(size) for tile in range(6)
            ]
            slots = [(layout.slot_offset(bank, owner, s), 256) for s in range(size) if s != owner]
            assert all(offset % 128 == 0 for offset, _ in slots)
            regions += slots
        covered = sorted(regions)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(covered))
        assert covered[-1][0] + covered[-1][1] <= layout.total_bytes
    assert layout.token_index == 5


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_partials_that_stay_have_a_bank_that_slots_of_the_other_bank_never_touch(size: int) -> None:
    layout = ExchangeLayout(size, 5, 16384, Strategy.MULTICAST)
    assert layout.sum_flags == 2
    banks = []
    for bank in (0, 1):
        regions = {(layout.partial_offset(bank, owner), 16384) for owner in range(size)}
        assert len(regions) == size
        slots = {
            (layout.slot_offset(bank, owner, source), 16384)
            for owner in range(size)
            for source in range(size)
            if owner != source
        }
        assert slots <= regions
        words = {
            (layout.flag_offset(bank, source, index), 8)
            for source in range(size)
            for index in (*range(6), layout.sum_flag_index(0), layout.sum_flag_index(1))
        }
        banks.append(regions | words)
    covered = sorted(banks[0]) + sorted(banks[1])
    assert len(set(covered)) == len(covered)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(sorted(covered)))
    assert max(a + n for a, n in covered) == layout.total_bytes


def test_a_push_layout_does_not_depend_on_there_being_another() -> None:
    push, both = ExchangeLayout(4, 7, 384), ExchangeLayout(4, 7, 384, Strategy.MULTICAST)
    assert (push.flag_row_bytes, push.sum_flags) == (128, 0)
    assert both.total_bytes - push.total_bytes == 2 * 384 + (both.slots_offset - push.slots_offset)


@pytest.mark.parametrize(
    ("tile_m", "tile_n", "rows", "units"),
    [(128, 64, 8, 2), (128, 128, 4, 4), (128, 256, 2, 8), (64, 192, 2, 4), (8, 512, 1, 1)],
)
def test_units_cover_a_tile(tile_m: int, tile_n: int, rows: int, units: int) -> None:
    assert (unit_rows(tile_n), units_of(tile_m, tile_n)) == (rows, units)
    assert units * rows * 8 >= tile_m


def test_layout_arguments_are_checked() -> None:
    for arguments in ((0, 1, 128), (129, 1, 128), (2, -1, 128), (2, 1, 100)):
        with pytest.raises(ArgumentError):
            ExchangeLayout(*arguments)


@pytest.mark.parametrize("m", [0, 1, 5, 64, 65, 129])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_tiles_cover_the_partial_once(m: int, size: int) -> None:
    grid = TileGrid(m, 70, size, TileShape(16, 32))
    seen = [
        (row, column)
        for owner in range(size)
        for tile in grid.tiles(owner)
        for row in tile.rows
        for column in tile.columns
    ]
    assert sorted(seen) == list(itertools.product(range(m), range(70)))
    assert all(
        set(tile.rows) <= set(shard_rows(m, size, owner))
        for owner in range(size)
        for tile in grid.tiles(owner)
    )
