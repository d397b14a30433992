# SPDX-License-Identifier: Apache-2.0
"""Non-bulk asynchronous copies: sizes, zero fill, groups of each lane, arrival at an mbarrier."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_ptx_emulator.errors import AsyncMisuseError, UnsupportedInstruction
from numpy.typing import NDArray
from probe import run

SETUP = """
.shared .align 128 .b8 data[1024];
.shared .align 8 .b64 bar;
mov.u32 %r0, data; mov.u32 %r1, bar; mov.u32 %r2, %tid.x;
setp.eq.u32 %p0, %r2, 0;
ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1];
mad.wide.u32 %d2, %r2, 16, %d0; mad.wide.u32 %d3, %r2, 16, %d1;
mad.lo.u32 %r3, %r2, 16, %r0;
mov.b32 %r20, 0xffffffff;
st.shared.v4.b32 [%r3], {%r20, %r20, %r20, %r20};
"""
BACK = """
ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r3];
st.global.v4.b32 [%d3], {%r20, %r21, %r22, %r23};
"""


def copied(body: str, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    source = np.random.default_rng(4).integers(0, 255, (32, 16), dtype=np.uint8)
    out = np.zeros((32, 16), np.uint8)
    run(SETUP + body + BACK, source.reshape(-1), out.reshape(-1), seed=seed)
    return source, out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("end", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_sizes(size: int, end: str, seed: int) -> None:
    cache = "cg" if size == 16 else "ca"
    source, out = copied(f"cp.async.{cache}.shared.global [%r3], [%d2], {size};\n{end}", seed)
    np.testing.assert_array_equal(out[:, :size], source[:, :size])
    assert (out[:, size:] == 255).all()


def test_the_source_size_and_the_predicate_fill_with_zeros() -> None:
    source, out = copied(
        "min.u32 %r4, %r2, 16;\ncp.async.cg.shared.global.L2::128B [%r3], [%d2], 16, %r4;\ncp.async.wait_all;"
    )
    for lane in range(32):
        assert out[lane].tolist() == source[lane, : min(lane, 16)].tolist() + [0] * max(0, 16 - lane)
    source, out = copied("cp.async.cg.shared.global [%r3], [%d2], 16, %p0;\ncp.async.wait_all;")
    assert not out[0].any()
    np.testing.assert_array_equal(out[1:], source[1:])


def test_without_waiting_anything_may_be_there() -> None:
    seen = set()
    for seed in range(20):
        source, out = copied("cp.async.cg.shared.global [%r3], [%d2], 16;" + "nanosleep.u32 1;" * 3, seed)
        fresh = (out == source).all(axis=1)
        assert (fresh | (out == 255).all(axis=1)).all()
        seen.add(bool(fresh.all()))
        seen.add(bool(fresh.any()))
    assert seen == {True, False}


@pytest.mark.parametrize("noinc", ["", ".noinc"])
@pytest.mark.parametrize("seed", range(4))
def test_arrival_at_a_barrier(noinc: str, seed: int) -> None:
    """Without .noinc an arrival adds to what is pending, so the thread's own arrival is still needed."""
    own = "" if noinc else "mbarrier.arrive.shared.b64 _, [%r1];"
    source, out = copied(
        f"""
    @%p0 mbarrier.init.shared.b64 [%r1], 32;
    bar.sync 0;
    cp.async.ca.shared.global [%r3], [%d2], 8;
    add.u32 %r5, %r3, 8; add.u64 %d4, %d2, 8;
    cp.async.ca.shared.global [%r5], [%d4], 8;
    cp.async.mbarrier.arrive{noinc}.shared.b64 [%r1];
    {own}
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
    @!%p1 bra WAIT;
    """,
        seed,
    )
    np.testing.assert_array_equal(out, source)


def test_misuse() -> None:
    with pytest.raises(AsyncMisuseError, match="source size above 4"):
        copied("cp.async.ca.shared.global [%r3], [%d2], 4, 5;")
    with pytest.raises(UnsupportedInstruction, match="a copy of 8 bytes"):
        copied("cp.async.cg.shared.global [%r3], [%d2], 8;")
