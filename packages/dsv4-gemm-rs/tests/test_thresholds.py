# SPDX-License-Identifier: Apache-2.0
"""Thresholds: what follows from measurements, which shape a call goes by, what a table must look like."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from dsv4_gemm_rs.dispatch.thresholds import (
    Entry,
    Shape,
    Timed,
    as_json,
    from_json,
    merged,
    nearest,
    packaged,
    threshold,
)
from dsv4_symm_mem.errors import ArgumentError

SHAPE = Shape(90, 2, False, "bf16", 5120, 2048)


def timed(*ratios: float) -> tuple[Timed, ...]:
    """M = 16, 32, ... with fused taking these parts of what unfused takes."""
    return tuple(Timed(16 << i, 10 * ratio, 10.0) for i, ratio in enumerate(ratios))


def entry(shape: Shape, *ratios: float) -> Entry:
    measured = timed(*ratios)
    return Entry(shape, threshold(measured), measured, "a GPU", "2026-01-01", "a test")


@pytest.mark.parametrize(
    ("ratios", "least"),
    [
        ((1.2, 0.9, 0.8), 32),
        ((1.2, 1.0, 0.8), 32),
        ((1.2, 0.9, 1.01, 0.8), 128),
        ((1.2, 0.9, 1.01), None),
        ((1.2,), None),
    ],
)
def test_fused_is_never_slower_from_the_threshold_on(ratios: tuple[float, ...], least: int | None) -> None:
    assert threshold(timed(*ratios)) == least
    assert threshold(timed(*ratios)[::-1]) == least


@pytest.mark.parametrize("ratios", [(), (0.9,), (0.9, 0.8)])
def test_where_fused_never_lost_the_threshold_is_not_known(ratios: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError, match="an M at which fused is slower"):
        threshold(timed(*ratios))


def test_the_nearest_shape_counts() -> None:
    low, high = entry(SHAPE, 1.2, 0.9), entry(replace(SHAPE, k=4096), 1.2, 1.2, 0.9)
    table = (low, high)
    for k, found in ((1, low), (2048, low), (2895, low), (2897, high), (65536, high)):
        assert nearest(table, replace(SHAPE, k=k)) is found
    assert nearest(table, replace(SHAPE, world_size=8, n=7168, k=4096)) is high
    # Half way between: the one that goes fused later, in whichever order they stand.
    between = (entry(replace(SHAPE, n=2560), 1.2, 0.9), entry(replace(SHAPE, n=10240), 1.2, 1.2, 0.9))
    assert nearest(between, SHAPE) is nearest(between[::-1], SHAPE) is between[1]
    never = entry(replace(SHAPE, n=2560), 1.2)
    assert nearest((never, between[1]), SHAPE) is nearest((between[1], never), SHAPE) is never


@pytest.mark.parametrize("other", [{"arch": 100}, {"shared": True}, {"operand": "fp8_weight"}])
def test_shapes_of_another_kind_say_nothing(other: dict[str, object]) -> None:
    assert nearest((entry(SHAPE, 1.2, 0.9),), replace(SHAPE, **other)) is None  # type: ignore[arg-type]


def test_own_entries_replace_those_of_the_same_shape() -> None:
    base = (entry(SHAPE, 1.2, 0.9), entry(replace(SHAPE, k=4096), 1.2, 0.9))
    own = (entry(SHAPE, 1.2, 1.2, 0.9), entry(replace(SHAPE, n=7168), 1.2, 0.9))
    assert merged(base, own) == (base[1], *own)


def test_tables_survive_json_and_are_checked() -> None:
    table = (entry(SHAPE, 1.2, 0.9), entry(replace(SHAPE, k=4096), 1.2))
    text = json.dumps(as_json(table))
    assert from_json(json.loads(text)) == table
    held = json.loads(text)
    held[0]["least_tokens"] = 16
    with pytest.raises(ArgumentError, match=r"least_tokens of sm_90.*got 16, expected 32"):
        from_json(held)
    wrong: list[Any] = [None, [1], [{}], [{**json.loads(text)[0], "measured": "x"}]]
    for broken in wrong:
        with pytest.raises(ArgumentError, match="a list of entries"):
            from_json(broken)
    held = json.loads(text)
    held[0]["shape"]["k"] = 0
    with pytest.raises(ArgumentError, match="a list of entries"):
        from_json(held)


def test_the_packages_table_names_its_sources() -> None:
    table = packaged()
    assert table
    assert len({each.shape for each in table}) == len(table)
    assert all(each.source.startswith("docs/results/") and each.device and each.date for each in table)
