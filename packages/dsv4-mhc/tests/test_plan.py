# SPDX-License-Identifier: Apache-2.0
"""Tiles cover what they claim to and depend on T nowhere a result could see."""

from __future__ import annotations

import pytest
from dsv4_mhc.errors import ArgumentError, UnsupportedError
from dsv4_mhc.plan import SHARED_LIMIT, Kernel, Tile, choose_tile, cluster_size, tiles
from hypothesis import given, settings
from hypothesis import strategies as st

TUNED = [4096, 5120, 7168]
kernels = pytest.mark.parametrize("kernel", list(Kernel))


@kernels
@pytest.mark.parametrize("hidden", TUNED)
def test_tuned_sizes(kernel: Kernel, hidden: int) -> None:
    found = tiles(kernel, hidden)
    assert cluster_size(hidden) == 8
    assert found[0].tokens == 8
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
        assert tile.cluster * tile.batches * tile.groups * 32 == hidden
        assert tile.threads % 128 == 0
        assert tile.threads <= 512
        assert tile.tokens % tile.cluster == 0
        assert tile.stages <= tile.batches
        assert tile.shared_bytes(kernel) <= SHARED_LIMIT
    assert len({tile.cluster for tile in found}) == 1


@given(st.integers(1, 40_000), st.sampled_from(list(Kernel)), st.sampled_from(TUNED))
@settings(max_examples=100, deadline=None)
def test_larger_batches_never_get_smaller_tiles(tokens: int, kernel: Kernel, hidden: int) -> None:
    assert choose_tile(kernel, hidden, tokens + 1).tokens >= choose_tile(kernel, hidden, tokens).tokens


def test_two_ctas_fit_on_an_sm_in_prefill() -> None:
    tile = choose_tile(Kernel.SHIFTED, 5120, 8192)
    assert tile == Tile(5120, 8, 64, 1, 1)
    assert 2 * (tile.shared_bytes(Kernel.SHIFTED) + 1024) <= 228 * 1024


@pytest.mark.parametrize("hidden", [0, -64, 32, 5121])
def test_other_sizes_are_refused(hidden: int) -> None:
    with pytest.raises(ArgumentError, match="multiple of 64"):
        tiles(Kernel.SHIFTED, hidden)


def test_a_size_that_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="shared memory"):
        tiles(Kernel.COUPLED, 64 * 127)
