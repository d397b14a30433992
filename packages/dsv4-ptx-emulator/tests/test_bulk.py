# SPDX-License-Identifier: Apache-2.0
"""Bulk copies in every direction, their completion, and what happens to those who do not wait for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dsv4_ptx_emulator.errors import (
    AsyncMisuseError,
    BarrierMisuseError,
    DeadlockError,
    MisalignedError,
    OutOfBoundsError,
    UnsupportedInstruction,
)
from numpy.typing import NDArray
from probe import run

SEEDS = range(12)

SETUP = """
.shared .align 128 .b8 data[4096];
.shared .align 8 .b64 bar;
mov.u32 %r0, data; mov.u32 %r1, bar; mov.u32 %r2, %laneid;
ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1];
setp.eq.u32 %p0, %r2, 0;
"""

INIT = """
@%p0 mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
"""

WAIT = """
LOOP: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
@!%p1 bra LOOP;
"""

LOAD = """
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 4096;
@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%d0], 4096, [%r1];
"""

STORE = """
@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r0], 4096;
@%p0 cp.async.bulk.commit_group;
"""


def source(count: int = 4096) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(1, 255, count, dtype=np.uint8)


@pytest.mark.parametrize("seed", SEEDS)
def test_there_and_back(seed: int) -> None:
    a, b = source(), np.zeros(4096, np.uint8)
    run(SETUP + INIT + LOAD + WAIT + STORE + "@%p0 cp.async.bulk.wait_group 0;", a, b, seed=seed)
    np.testing.assert_array_equal(a, b)


def test_a_group_that_nobody_waits_for_is_complete_when_the_run_ends() -> None:
    a, b = source(), np.zeros(4096, np.uint8)
    run(SETUP + INIT + LOAD + WAIT + STORE + "@%p0 cp.async.bulk.wait_group.read 0;", a, b)
    np.testing.assert_array_equal(a, b)


def test_data_comes_in_pieces_and_any_order_until_the_barrier_says_so() -> None:
    """A lane that looks at the first and the last word without waiting sees each combination."""
    look = """
    st.shared.b32 [data], 0; st.shared.b32 [data+4092], 0;
    fence.proxy.async; bar.warp.sync 0xffffffff;
    """
    peek = """
    @%p0 ld.shared.b32 %r4, [data+4092];
    @%p0 ld.shared.b32 %r3, [data];
    @%p0 st.global.b32 [%d1], %r3; @%p0 st.global.b32 [%d1+4], %r4;
    """
    seen = set()
    for seed in range(60):
        a, b = source(), np.zeros(8, np.uint8)
        run(SETUP + INIT + look + LOAD + "nanosleep.u32 1;" * (seed % 8) + peek + WAIT, a, b, seed=seed)
        words = b.view(np.uint32)
        assert words[0] in (0, a.view(np.uint32)[0])
        assert words[1] in (0, a.view(np.uint32)[-1])
        seen.add((words[0] != 0, words[1] != 0))
    assert seen == {(False, False), (True, False), (False, True), (True, True)}


def test_read_completion_frees_the_source_but_says_nothing_of_the_destination() -> None:
    fill = """
    @%p0 st.shared.v4.b32 [data], {7,7,7,7}; @%p0 st.shared.v4.b32 [data+16], {7,7,7,7};
    fence.proxy.async;
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r0], 32;
    @%p0 cp.async.bulk.commit_group;
    @%p0 cp.async.bulk.wait_group.read 0;
    @%p0 st.shared.b32 [data], 9; @%p0 st.shared.b32 [data+16], 9;
    @%p0 ld.relaxed.gpu.global.b32 %r3, [%d0];
    @%p0 st.global.b32 [%d1], %r3;
    @%p0 cp.async.bulk.wait_group 0;
    @%p0 ld.global.b32 %r3, [%d0];
    @%p0 st.global.b32 [%d1+4], %r3;
    """
    early = set()
    for seed in range(40):
        a, b = np.zeros(32, np.uint8), np.zeros(8, np.uint8)
        run(SETUP + fill, a, b, seed=seed)
        assert a.view(np.uint32)[[0, 4]].tolist() == [7, 7]
        first, last = b.view(np.uint32).tolist()
        assert last == 7
        early.add(first)
    assert early == {0, 7}


def test_without_read_completion_the_source_may_change_under_the_copy() -> None:
    body = """
    @%p0 st.shared.v4.b32 [data], {7,7,7,7};
    fence.proxy.async;
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r0], 16;
    @%p0 cp.async.bulk.commit_group;
    @%p0 st.shared.b32 [data], 9;
    @%p0 cp.async.bulk.wait_group 0;
    """
    found = set()
    for seed in range(30):
        a, b = np.zeros(16, np.uint8), np.zeros(8, np.uint8)
        run(SETUP + body, a, b, seed=seed)
        found.add(int(a.view(np.uint32)[0]))
    assert found == {7, 9}


@pytest.mark.parametrize("seed", SEEDS)
def test_wait_group_counts_the_latest_groups(seed: int) -> None:
    body = """
    @%p0 st.shared.v4.b32 [data], {1,1,1,1}; @%p0 st.shared.v4.b32 [data+16], {2,2,2,2};
    fence.proxy.async;
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r0], 16;
    @%p0 cp.async.bulk.commit_group;
    @%p0 add.u32 %r5, %r0, 16;
    @%p0 add.u64 %d2, %d0, 16;
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r5], 16;
    @%p0 cp.async.bulk.commit_group;
    @%p0 cp.async.bulk.wait_group 1;
    @%p0 ld.global.b32 %r3, [%d0];
    @%p0 st.global.b32 [%d1], %r3;
    @%p0 cp.async.bulk.wait_group.read 0;
    """
    a, b = np.zeros(32, np.uint8), np.zeros(8, np.uint8)
    run(SETUP + body, a, b, seed=seed)
    assert b.view(np.uint32)[0] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_multicast_reaches_each_cta_of_the_mask_and_its_barrier(seed: int) -> None:
    body = (
        SETUP
        + INIT
        + """
    mov.u32 %r6, %cluster_ctarank;
    and.b32 %r7, %r6, 1;
    setp.eq.u32 %p3, %r7, 0;
    and.pred %p2, %p3, %p0;
    @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1024;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    setp.eq.and.u32 %p4, %r6, 1, %p0;
    mov.u16 %h0, 5;
    @%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r0], [%d0], 1024, [%r1], %h0;
    @!%p3 bra DONE;
    """
        + WAIT
        + """
    mad.wide.u32 %d3, %r6, 1024, %d1;
    @%p2 cp.async.bulk.global.shared::cta.bulk_group [%d3], [%r0], 1024;
    @%p2 cp.async.bulk.commit_group;
    @%p2 cp.async.bulk.wait_group 0;
    DONE:
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    )
    a, b = source(1024), np.zeros(4 * 1024, np.uint8)
    run(body, a, b, grid=4, cluster=4, seed=seed)
    parts = b.reshape(4, 1024)
    np.testing.assert_array_equal(parts[0], a)
    np.testing.assert_array_equal(parts[2], a)
    assert not parts[1].any()
    assert not parts[3].any()


def test_a_cta_outside_of_the_mask_is_left_waiting() -> None:
    body = (
        SETUP
        + INIT
        + """
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r6, %cluster_ctarank;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1024;
    setp.eq.and.u32 %p2, %r6, 0, %p0;
    mov.u16 %h0, 1;
    @%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r0], [%d0], 1024, [%r1], %h0;
    """
        + WAIT
    )
    with pytest.raises(DeadlockError, match=r"CTA \(1, 0, 0\).*1024 bytes pending"):
        run(body, source(1024), np.zeros(16, np.uint8), grid=2, cluster=2)


@pytest.mark.parametrize("seed", SEEDS)
def test_from_cta_to_cta(seed: int) -> None:
    body = (
        SETUP
        + INIT
        + """
    mov.u32 %r6, %cluster_ctarank;
    xor.b32 %r7, %r6, 1;
    mapa.shared::cluster.u32 %r8, %r0, %r7;
    mapa.shared::cluster.u32 %r9, %r1, %r7;
    mad.lo.u32 %r10, %r2, 4, %r0;
    mad.lo.u32 %r11, %r6, 1000, %r2;
    st.shared.b32 [%r10], %r11;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
    fence.proxy.async;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    add.u32 %r8, %r8, 128;
    @%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r8], [%r0], 128, [%r9];
    """
        + WAIT
        + """
    ld.shared.b32 %r12, [%r10+128];
    shl.b32 %r13, %r6, 5; add.u32 %r13, %r13, %r2;
    mad.wide.u32 %d3, %r13, 4, %d1;
    st.global.b32 [%d3], %r12;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    )
    b = np.zeros(256, np.uint8)
    run(body, np.zeros(16, np.uint8), b, grid=2, cluster=2, seed=seed)
    assert b.view(np.uint32).tolist() == [1000 + i for i in range(32)] + list(range(32))


@pytest.mark.parametrize(
    ("words", "dtype", "operator"),
    [
        ("add.u32", np.uint32, np.add),
        ("add.s32", np.int32, np.add),
        ("max.s64", np.int64, np.maximum),
        ("xor.b64", np.uint64, np.bitwise_xor),
        ("add.f32", np.float32, np.add),
        ("add.noftz.f16", np.float16, np.add),
        ("min.f16", np.float16, np.minimum),
    ],
)
def test_reductions(words: str, dtype: type, operator: np.ufunc) -> None:
    rng = np.random.default_rng(2)
    new: NDArray[Any] = rng.integers(-100, 100, 256).astype(dtype)
    old: NDArray[Any] = rng.integers(-100, 100, 256).astype(dtype)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(reduced(words, old, new), operator(old, new))


def test_sums_of_f32_flush() -> None:
    """PTX ISA 9.7.10.28.4.2: subnormal operands and results, to zeros of their sign."""
    old, new = np.zeros((2, 256), np.uint32)
    old[:4] = [1, 0x8000_0001, 0x0080_0001, 0x3F80_0000]
    new[:4] = [0x0080_0000, 0x8000_0001, 0x8080_0000, 0x0000_0001]
    sums = reduced("add.f32", old.view(np.float32), new.view(np.float32)).view(np.uint32)
    assert sums[:4].tolist() == [0x0080_0000, 0x8000_0000, 0, 0x3F80_0000]


def reduced(words: str, old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    """What a reduction of `new` into `old` leaves there."""
    b = old.copy()
    size = new.nbytes
    load = LOAD.replace("4096, [%r1]", f"{size}, [%r1]").replace("_, [%r1], 4096", f"_, [%r1], {size}")
    body = SETUP + INIT + load + WAIT
    body += f"""
    @%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.{words} [%d1], [%r0], {size};
    @%p0 cp.async.bulk.commit_group;
    @%p0 cp.async.bulk.wait_group 0;
    """
    run(body, new.view(np.uint8), b.view(np.uint8))
    return b


def with_load(statement: str) -> str:
    return SETUP + INIT + "mov.u16 %h0, 4;\n" + statement


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (with_load(LOAD.replace("[%d0]", "[%d0+8]")), MisalignedError, "source 0x"),
        (with_load(LOAD.replace("[%r0]", "[%r0+4]")), MisalignedError, "destination 0x"),
        (with_load(LOAD.replace("4096, [%r1]", "4088, [%r1]")), MisalignedError, "size 0xff8"),
        (with_load(LOAD.replace("[%d0]", "[%d0+16]")), OutOfBoundsError, "4096 bytes"),
        (with_load(LOAD.replace("[%r0]", "[%r0+64]")), OutOfBoundsError, "4096 bytes"),
        (SETUP + LOAD, BarrierMisuseError, "no initialised mbarrier"),
        (
            with_load(
                LOAD.replace("::bytes", "::bytes.multicast::cluster").replace(", [%r1];", ", [%r1], %h0;")
            ),
            AsyncMisuseError,
            "CTA mask 0x4 in a cluster of 1",
        ),
        (
            with_load(LOAD.replace("_, [%r1], 4096", "_, [%r1], 4112") + WAIT),
            DeadlockError,
            "16 bytes pending",
        ),
        (with_load(LOAD.replace("_, [%r1], 4096", "_, [%r1], 1048576")), BarrierMisuseError, "the limit is"),
        (INIT.join([SETUP, INIT]), BarrierMisuseError, "initialised again"),
    ],
)
def test_misuse_is_named(body: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(body, source(), np.zeros(4096, np.uint8))


def test_a_barrier_in_another_cta_than_the_data() -> None:
    body = (
        SETUP
        + INIT
        + """
    mapa.shared::cluster.u32 %r9, %r1, 1;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r6, %cluster_ctarank;
    setp.eq.and.u32 %p0, %r6, 0, %p0;
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%d0], 1024, [%r9];
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    )
    with pytest.raises(AsyncMisuseError, match="data goes to CTA 0 of the cluster, the barrier is in CTA 1"):
        run(body, source(), np.zeros(16, np.uint8), grid=2, cluster=2)


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        (
            "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%d1], [%r0], 16, %h0;",
            "modifier .cp_mask",
        ),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.u32 [%d1], [%r0], 16;", "inc.u32"),
        (
            "cp.async.bulk.global.shared::cta.mbarrier::complete_tx::bytes [%d1], [%r0], 16, [%r1];",
            "direction",
        ),
        ("cp.async.bulk.wait_group %r0;", "operand"),
    ],
)
def test_what_is_not_implemented_is_refused_with_its_name(statement: str, named: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=named):
        run(SETUP + statement, source(), np.zeros(16, np.uint8))
