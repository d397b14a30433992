# SPDX-License-Identifier: Apache-2.0
"""Instructions of the lanes of a warp with each other."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_ptx_emulator.errors import DivergenceError
from numpy.typing import NDArray
from probe import evaluate, run

LANE = np.arange(32)


def words(seed: int = 1) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 2**32, 32, dtype=np.uint32)


@pytest.mark.parametrize("width", [32, 16, 4])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("by", [0, 1, 3, 17])
def test_shuffle(mode: str, by: int, width: int) -> None:
    a = words()
    control = (32 - width) << 8 | (0 if mode == "up" else 31)
    body = f"shfl.sync.{mode}.b32 %r1|%p1, %r0, {by}, {control}, -1;"
    got = evaluate(body, {"%r0": a}, {"%r1": 4, "%p1": 1})
    for lane in range(32):
        segment = lane // width * width
        source = {
            "up": lane - by,
            "down": lane + by,
            "bfly": lane ^ by,
            "idx": segment + by % width,
        }[mode]
        inside = source >= segment if mode == "up" else source <= segment + width - 1
        assert got["%p1"][lane] == inside
        assert got["%r1"][lane] == a[source if inside else lane]


def test_shuffle_by_registers() -> None:
    a, lanes = words(), words(2) % 32
    got = evaluate("shfl.sync.idx.b32 %r2, %r0, %r1, 31, -1;", {"%r0": a, "%r1": lanes}, {"%r2": 4})["%r2"]
    assert np.array_equal(got, a[lanes])


def test_votes() -> None:
    a = words()
    body = """setp.lt.s32 %p1, %r0, 0; setp.ne.b32 %p2, %r0, %r0; vote.sync.any.pred %p3, %p1, -1;
    vote.sync.all.pred %p4, %p1, -1; vote.sync.all.pred %p5, !%p2, -1; vote.sync.uni.pred %p6, %p2, -1;
    vote.sync.uni.pred %p7, %p1, -1; vote.sync.ballot.b32 %r1, %p1, -1; activemask.b32 %r2;"""
    got = evaluate(body, {"%r0": a}, {f"%p{k}": 1 for k in range(3, 8)} | {"%r1": 4, "%r2": 4})
    assert [bool(got[f"%p{k}"][5]) for k in range(3, 8)] == [True, False, True, True, False]
    assert set(got["%r1"].tolist()) == {sum(1 << lane for lane in range(32) if a[lane] >> 31)}
    assert set(got["%r2"].tolist()) == {0xFFFF_FFFF}


@pytest.mark.parametrize(
    "kind", ["add.s32", "min.s32", "max.s32", "min.u32", "max.u32", "add.u32", "and.b32", "or.b32", "xor.b32"]
)
def test_reductions(kind: str) -> None:
    a = words(3)
    got = evaluate(f"redux.sync.{kind} %r1, %r0, -1;", {"%r0": a}, {"%r1": 4})["%r1"]
    name, type_name = kind.split(".")
    values = a.view(np.int32) if type_name == "s32" else a
    function = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[name]
    want = np.asarray(function.reduce(values, dtype=values.dtype)).astype(values.dtype).view(np.uint32)
    assert set(got.tolist()) == {int(want)}


def test_float_reduction() -> None:
    a = np.random.default_rng(4).normal(size=32).astype(np.float32)
    a[3] = np.nan
    body = "redux.sync.max.abs.f32 %r1, %r0, -1; redux.sync.min.NaN.f32 %r2, %r0, -1;"
    got = evaluate(body, {"%r0": a.view(np.uint32)}, {"%r1": 4, "%r2": 4}, arch="sm_100a")
    assert got["%r1"].view(np.float32)[0] == np.nanmax(np.abs(a))
    assert got["%r2"][0] == 0x7FFF_FFFF


def test_match() -> None:
    a = words(5) % 3
    body = """match.any.sync.b32 %r1, %r0, -1; match.all.sync.b32 %r2|%p1, %r0, -1;
    match.all.sync.b32 %r3|%p2, 7, -1;"""
    got = evaluate(body, {"%r0": a}, {"%r1": 4, "%r2": 4, "%p1": 1, "%r3": 4, "%p2": 1})
    for lane in range(32):
        assert got["%r1"][lane] == sum(1 << other for other in range(32) if a[other] == a[lane])
    assert not got["%p1"].any()
    assert not got["%r2"].any()
    assert got["%p2"].all()
    assert set(got["%r3"].tolist()) == {0xFFFF_FFFF}


def test_elect_chooses_one_of_the_members() -> None:
    body = """mov.u32 %r2, %laneid; setp.ge.u32 %p1, %r2, 10; mov.b32 %r4, 99; @!%p1 bra OUT;
    elect.sync %r4|%p2, 0xFFFFFC00; selp.b32 %r5, 1, 0, %p2;
    OUT: bar.warp.sync -1; elect.sync _|%p3, -1;"""
    got = evaluate(body, {"%r5": np.zeros(32, np.uint32)}, {"%r4": 4, "%r5": 4, "%p3": 1})
    assert got["%r4"].tolist() == [99] * 10 + [10] * 22
    assert np.flatnonzero(got["%r5"]).tolist() == [10]
    assert got["%p3"].sum() == 1


def test_halves_with_their_own_masks() -> None:
    a = words(6)
    body = """mov.u32 %r2, %laneid; setp.lt.u32 %p1, %r2, 16; selp.b32 %r3, 0xFFFF, 0xFFFF0000, %p1;
    redux.sync.add.u32 %r4, %r0, %r3; vote.sync.ballot.b32 %r5, %p1, %r3;"""
    got = evaluate(body, {"%r0": a}, {"%r4": 4, "%r5": 4})
    sums = [int(a[:16].sum(dtype=np.uint32)), int(a[16:].sum(dtype=np.uint32))]
    assert got["%r4"].tolist() == [sums[0]] * 16 + [sums[1]] * 16
    assert got["%r5"].tolist() == [0xFFFF] * 16 + [0] * 16


def test_members_meet_again_after_divergence() -> None:
    """Lanes that come late to a shuffle, from a branch that is laid out behind it, are waited for."""
    a = words(7)
    body = """mov.u32 %r2, %laneid; and.b32 %r3, %r2, 1; setp.eq.b32 %p1, %r3, 1; @%p1 bra LATE;
    BACK: shfl.sync.bfly.b32 %r4, %r0, 1, 31, -1; bra OUT;
    LATE: add.s32 %r0, %r0, 5; bra BACK; OUT: add.s32 %r5, %r4, 0;"""
    got = evaluate(body, {"%r0": a}, {"%r5": 4})["%r5"]
    changed = a + np.where(LANE % 2 == 1, 5, 0).astype(np.uint32)
    assert np.array_equal(got, changed[LANE ^ 1])


def test_a_lane_outside_of_its_mask() -> None:
    with pytest.raises(DivergenceError, match="not in its member mask 0x0000ffff"):
        run("vote.sync.any.pred %p1, %p2, 0xFFFF;")


def test_lanes_that_never_meet() -> None:
    body = """mov.u32 %r2, %laneid; setp.lt.u32 %p1, %r2, 4; @%p1 bra OTHER;
    shfl.sync.idx.b32 %r4, %r2, 0, 31, -1; bra OUT;
    OTHER: vote.sync.any.pred %p3, %p1, -1; OUT:"""
    with pytest.raises(DivergenceError, match=r"different instructions.*shfl.*vote|different.*vote.*shfl"):
        run(body)


def test_aligned_needs_the_whole_warp() -> None:
    body = """mov.u32 %r2, %laneid; setp.lt.u32 %p1, %r2, 4; @%p1 bra PART; {rest}
    PART: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    run(body.replace("{rest}", ""), cluster=1)
    with pytest.raises(DivergenceError, match="lanes 0xfffffff0 have exited"):
        run(body.replace("{rest}", "ret;"), cluster=1)
