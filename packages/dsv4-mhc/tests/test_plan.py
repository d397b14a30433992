# SPDX-License-Identifier: Apache-2.0
"""Tiles cover what they claim to and depend on T nowhere a result could see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dsv4_mhc.bench.tiles import CLOSE, candidates, checks
from dsv4_mhc.errors import ArgumentError, UnsupportedError
from dsv4_mhc.plan import (
    CLUSTERS,
    FUSED_TOKENS,
    SHARED_LIMIT,
    SHARED_OF_AN_SM,
    Kernel,
    Tile,
    choose_tile,
    coupled_form,
    forced_tile,
    resident_ctas,
    slice_count,
    tiles,
)
from hypothesis import given, settings
from hypothesis import strategies as st

TUNED = [4096, 5120, 7168]
MEASURED = json.loads((Path(__file__).parent / "data" / "tiles_h200.json").read_text(encoding="utf-8"))
"""What `dsv4-mhc bench-tiles` compares, of one H200: case, hidden, tokens, tile and microseconds."""
SIZES = sorted({(row["case"], row["hidden"], row["tokens"]) for row in MEASURED})
kernels = pytest.mark.parametrize("kernel", list(Kernel))


def tokens_at_once(tile: Tile) -> int:
    return tile.tokens * CLUSTERS[tile.cluster]


@kernels
@pytest.mark.parametrize("hidden", TUNED)
def test_tuned_sizes(kernel: Kernel, hidden: int) -> None:
    found = tiles(kernel, hidden)
    assert slice_count(hidden) == 8
    assert found[-1].tokens >= 16
    held = [tokens_at_once(tile) for tile in found]
    assert held == sorted(held)


@given(st.integers(1, 160), st.sampled_from(list(Kernel)))
@settings(max_examples=200, deadline=None)
def test_tiles_divide_the_work(sixty_fours: int, kernel: Kernel) -> None:
    hidden = 64 * sixty_fours
    try:
        found = tiles(kernel, hidden)
    except UnsupportedError:
        assert hidden % 256
        return
    for tile in found:
        assert tile.slices * tile.steps * 64 == hidden
        assert tile.cluster * tile.per_cta == tile.slices
        assert tile.threads == 32 * (tile.tokens // 8) * tile.per_cta * tile.parallel <= 512
        assert tile.tokens == tile.owned * tile.cluster
        assert 1 <= tile.parallel <= tile.steps
        assert tile.parallel == 1 or not tile.stages
        assert tile.shared_bytes(kernel) <= SHARED_LIMIT
        assert resident_ctas(kernel, tile) * (tile.shared_bytes(kernel) + 1024) <= SHARED_OF_AN_SM
    if kernel is Kernel.ENGRAM:
        assert len({tile.parallel for tile in found}) == 1


@given(st.integers(1, 40_000), st.sampled_from(list(Kernel)), st.sampled_from(TUNED))
@settings(max_examples=100, deadline=None)
def test_larger_batches_never_get_tiles_of_which_a_device_holds_less(
    tokens: int, kernel: Kernel, hidden: int
) -> None:
    more, less = (choose_tile(kernel, hidden, count) for count in (tokens + 1, tokens))
    assert tokens_at_once(more) >= tokens_at_once(less)


@pytest.mark.parametrize(("case", "hidden", "tokens"), SIZES)
def test_the_chosen_tile_was_among_the_fastest(case: str, hidden: int, tokens: int) -> None:
    kernel = Kernel.SHIFTED if case == "seam_shifted" else coupled_form(hidden, tokens)
    if kernel is Kernel.COUPLED:
        assert tokens <= FUSED_TOKENS
        return  # measured were the tiles of the two launches
    times = {
        tuple(row["tile"]): row["cold_us"]
        for row in MEASURED
        if (row["case"], row["hidden"], row["tokens"]) == (case, hidden, tokens)
    }
    tile = choose_tile(kernel, hidden, tokens)
    chosen = times[tile.cluster, tile.tokens, tile.parallel, tile.stages, tile.depth]
    assert chosen <= CLOSE * min(times.values())


def test_a_forced_tile_is_one_kernels_and_ends() -> None:
    usual = choose_tile(Kernel.SHIFTED, 5120, 64)
    other = tiles(Kernel.SHIFTED, 5120)[-1]
    assert other != usual
    with forced_tile(Kernel.SHIFTED, other):
        assert choose_tile(Kernel.SHIFTED, 5120, 64) == other
        assert choose_tile(Kernel.COUPLED, 5120, 64) == choose_tile(Kernel.COUPLED, 5120, 65)
    assert choose_tile(Kernel.SHIFTED, 5120, 64) == usual


@pytest.mark.parametrize("kernel", [Kernel.SHIFTED, Kernel.PROJECT])
@pytest.mark.parametrize("hidden", [*TUNED, 320])
def test_compared_tiles_are_the_compiled_ones_and_others_that_fit(kernel: Kernel, hidden: int) -> None:
    found = candidates(kernel, hidden)
    assert set(tiles(kernel, hidden)) <= set(found)
    assert len(found) == len(set(found))
    assert len(found) > len(tiles(kernel, hidden)) or hidden == 320
    assert all(tile.shared_bytes(kernel) <= SHARED_LIMIT and tile.threads <= 512 for tile in found)


def test_tiles_that_differ_or_are_slow_miss_their_checks() -> None:
    def row(tokens: int, time: float, chosen: bool, different: int = 0) -> dict[str, object]:
        size = {"case": "seam_shifted", "hidden": 5120, "tokens": tokens}
        return {**size, "cold_us": time, "chosen": chosen, "different": different}

    good = [row(1, 10.0, True), row(1, 9.9, False), row(2, 5.0, True)]
    assert all(check["holds"] for check in checks(good))
    missed = [check for check in checks([*good, row(2, 4.0, False, 3)]) if not check["holds"]]
    assert [check["value"] for check in missed] == [3, 1.25]


@given(st.integers(1, 160), st.integers(1, 10_000))
@settings(max_examples=100, deadline=None)
def test_a_v4_seam_always_has_a_form(sixty_fours: int, tokens: int) -> None:
    hidden = 64 * sixty_fours
    assert choose_tile(coupled_form(hidden, tokens), hidden, tokens).hidden == hidden


@pytest.mark.parametrize("hidden", [0, -64, 32, 5121])
def test_other_sizes_are_refused(hidden: int) -> None:
    with pytest.raises(ArgumentError, match="multiple of 64"):
        tiles(Kernel.SHIFTED, hidden)


def test_a_size_that_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="shared memory"):
        tiles(Kernel.COUPLED, 64 * 127)
