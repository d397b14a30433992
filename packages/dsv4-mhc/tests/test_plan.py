# SPDX-License-Identifier: Apache-2.0
"""Tiles cover what they claim to and depend on T nowhere a result could see."""

from __future__ import annotations

import pytest
from dsv4_mhc.errors import ArgumentError, UnsupportedError
from dsv4_mhc.plan import (
    SHARED_LIMIT,
    SHARED_OF_AN_SM,
    Kernel,
    choose_tile,
    coupled_form,
    resident_ctas,
    slice_count,
    tiles,
)
from hypothesis import given, settings
from hypothesis import strategies as st

TUNED = [4096, 5120, 7168]
kernels = pytest.mark.parametrize("kernel", list(Kernel))


@kernels
@pytest.mark.parametrize("hidden", TUNED)
def test_tuned_sizes(kernel: Kernel, hidden: int) -> None:
    found = tiles(kernel, hidden)
    assert slice_count(hidden) == 8
    assert found[-1].tokens >= 16
    assert [tile.tokens for tile in found] == sorted(tile.tokens for tile in found)


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
def test_larger_batches_never_get_smaller_tiles(tokens: int, kernel: Kernel, hidden: int) -> None:
    assert choose_tile(kernel, hidden, tokens + 1).tokens >= choose_tile(kernel, hidden, tokens).tokens


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
