# SPDX-License-Identifier: Apache-2.0
"""Branches, loops, barriers, special registers, traps."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_ptx_emulator.errors import (
    BarrierMisuseError,
    DeadlockError,
    ResourceLimitError,
    TrapError,
    UnsupportedInstruction,
)
from probe import FIRST_LINE, evaluate, run

LANE = np.arange(32, dtype=np.uint32)


def test_each_lane_loops_as_often_as_it_wants() -> None:
    body = """mov.b32 %r1, 0; mov.b32 %r2, 0;
    LOOP: setp.ge.u32 %p1, %r1, %r0; @%p1 bra OUT; add.s32 %r2, %r2, %r1; add.s32 %r1, %r1, 1; bra LOOP;
    OUT: add.s32 %r2, %r2, 1000;"""
    got = evaluate(body, {"%r0": LANE}, {"%r2": 4})["%r2"]
    assert got.tolist() == [n * (n - 1) // 2 + 1000 for n in range(32)]


def test_nested_ifs_with_early_exit() -> None:
    out = np.zeros(32, np.uint32)
    run(
        """ld.param.b64 %d0, [p0]; mov.u32 %r0, %laneid; mul.wide.u32 %d1, %r0, 4; add.s64 %d1, %d0, %d1;
        and.b32 %r1, %r0, 3; setp.eq.b32 %p1, %r1, 0; @%p1 ret; mov.b32 %r3, 1;
        setp.lt.u32 %p2, %r1, 2; @%p2 bra ONE; setp.eq.b32 %p3, %r1, 3; @!%p3 bra TWO; mov.b32 %r3, 3;
        bra JOIN;
        TWO: mov.b32 %r3, 2; bra JOIN; ONE: mov.b32 %r3, 11;
        JOIN: bar.warp.sync -1; vote.sync.ballot.b32 %r4, %p2, 0xEEEEEEEE; shl.b32 %r5, %r3, 24;
        and.b32 %r4, %r4, 0xFFFFFF; or.b32 %r4, %r4, %r5; st.global.b32 [%d1], %r4;""",
        out,
    )
    ballot = sum(1 << lane for lane in range(32) if lane % 4 == 1) & 0xFFFFFF
    values = {0: 0, 1: 11 << 24 | ballot, 2: 2 << 24 | ballot, 3: 3 << 24 | ballot}
    assert out.tolist() == [values[lane % 4] for lane in range(32)]


def test_special_registers() -> None:
    out = np.zeros((2, 2, 64, 8), np.uint32)
    names = [
        "%ctaid.x",
        "%nctaid.x",
        "%ntid.x",
        "%warpid",
        "%lanemask_lt",
        "%cluster_ctarank",
        "%clusterid.x",
        "%nclusterid.x",
    ]
    body = """ld.param.b64 %d0, [p0]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;
        mad.lo.s32 %r2, %r1, 64, %r0;
    mul.wide.u32 %d1, %r2, 32; add.s64 %d2, %d0, %d1;"""
    body += "".join(f"mov.u32 %r5, {name}; st.global.b32 [%d2+{4 * k}], %r5;" for k, name in enumerate(names))
    run(body, out, threads=64, grid=4, cluster=2)
    flat = out.reshape(4, 64, 8)
    for cta in range(4):
        for thread in range(64):
            lane = thread % 32
            want = [cta, 4, 64, thread // 32, (1 << lane) - 1, cta % 2, cta // 2, 2]
            assert flat[cta, thread].tolist() == want


def test_clocks_advance() -> None:
    got = evaluate(
        "mov.u64 %d1, %globaltimer; mov.u64 %d2, %globaltimer; mov.u32 %r1, %clock; mov.u64 %d3, %clock64;",
        {"%r0": LANE},
        {"%d1": 8, "%d2": 8, "%d3": 8},
    )
    assert (got["%d1"] > 0).all()
    assert (got["%d2"] > got["%d1"]).all()
    assert (got["%d3"] > got["%d2"]).all()


EXCHANGE = """ld.param.b64 %d0, [p0]; mov.u32 %r0, %tid.x; mov.b32 %r1, cell; shl.b32 %r2, %r0, 2;
add.s32 %r3, %r1, %r2;
st.shared.b32 [%r3], %r0; {barrier} xor.b32 %r4, %r2, 508; add.s32 %r4, %r4, %r1; ld.shared.b32 %r5, [%r4];
mul.wide.u32 %d1, %r0, 4; add.s64 %d2, %d0, %d1; st.global.b32 [%d2], %r5;"""
CELL = ".shared .align 4 .b8 cell[512];"


@pytest.mark.parametrize(
    "barrier",
    [
        "bar.sync 0;",
        "barrier.sync.aligned 1, 128;",
        "barrier.cta.sync 15;",
        "bar.red.popc.u32 %r9, 2, 128, %p1;",
    ],
)
def test_barrier_orders_shared_memory(barrier: str) -> None:
    for seed in range(5):
        out = np.zeros(128, np.uint32)
        run(EXCHANGE.format(barrier=barrier), out, threads=128, module=CELL, seed=seed)
        assert np.array_equal(out, np.arange(128) ^ 127)


def test_barrier_reductions() -> None:
    out = np.zeros(3, np.uint32)
    run(
        """ld.param.b64 %d0, [p0]; mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 70; setp.lt.u32 %p2, %r0, 999;
        bar.red.popc.u32 %r1, 0, %p1; bar.red.and.pred %p3, 1, 96, %p1; bar.red.or.pred %p4, 2, !%p2;
        selp.b32 %r2, 1, 0, %p3; selp.b32 %r3, 1, 0, %p4; setp.ne.b32 %p5, %r0, 64; @%p5 ret;
        st.global.b32 [%d0], %r1; st.global.b32 [%d0+4], %r2; st.global.b32 [%d0+8], %r3;""",
        out,
        threads=96,
    )
    assert out.tolist() == [70, 0, 0]


def test_producer_and_consumer_warps() -> None:
    """bar.arrive does not wait; bar.sync of the other half does (PTX ISA 9.7.15.1, example)."""
    out = np.zeros(32, np.uint32)
    run(
        """ld.param.b64 %d0, [p0]; mov.u32 %r0, %tid.x; mov.u32 %r9, %laneid; mov.b32 %r1, cell;
            shl.b32 %r2, %r9, 2;
        add.s32 %r3, %r1, %r2; setp.ge.u32 %p1, %r0, 32; @%p1 bra CONSUMER;
        st.shared.b32 [%r3], %r9; bar.arrive 3, 64; ret;
        CONSUMER: bar.sync 3, 64; ld.shared.b32 %r5, [%r3]; mul.wide.u32 %d1, %r9, 4; add.s64 %d2, %d0, %d1;
        st.global.b32 [%d2], %r5;""",
        out,
        threads=64,
        module=CELL,
    )
    assert np.array_equal(out, LANE)


def test_exited_warps_are_not_waited_for() -> None:
    run("mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 64; @%p1 ret; bar.sync 0;", threads=128)
    with pytest.raises(DeadlockError, match=r"barrier 1 of .*: 64 of 128 threads"):
        run("mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 64; @%p1 ret; bar.sync 1, 128;", threads=128)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bar.sync 0, 40;", "no multiple of 32"),
        ("mov.b32 %r1, 16; bar.sync %r1;", "no barrier 16"),
        ("barrier.cluster.wait.aligned;", "without an arrive"),
        ("barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;", "twice without a wait"),
        ("bar.arrive 1, 96; bar.arrive 1, 96;", "twice in one phase"),
        ("bar.arrive 1, 96;", "ends with barrier 1 .* 64 of 96 threads"),
        (
            "mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 32; @%p1 bra A; bar.sync 1, 128; A: bar.sync 1, 96;",
            "waits for",
        ),
        ("setmaxnreg.dec.sync.aligned.u32 41;", "multiple of 8"),
        ("setmaxnreg.dec.sync.aligned.u32 40; setmaxnreg.dec.sync.aligned.u32 48;", "now 40"),
    ],
)
def test_misuse(body: str, message: str) -> None:
    with pytest.raises(BarrierMisuseError, match=message):
        run(body, threads=64, cluster=1)


def test_trap() -> None:
    with pytest.raises(TrapError, match="trap executed") as caught:
        run("mov.u32 %r0, %laneid; setp.eq.b32 %p1, %r0, 9; @%p1 trap;")
    assert caught.value.line == FIRST_LINE
    run("mov.u32 %r0, %laneid; setp.eq.b32 %p1, %r0, 99; @%p1 trap;")


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("frobnicate.b32 %r1, %r2;", "the instruction"),
        ("add.wide.s32 %r1, %r2, %r3;", r"modifier \.wide"),
        ("add.b32 %r1, %r2, %r3;", r"type \.b32"),
        ("ld.global.L1::sometimes.b32 %r1, [%d1];", "L1::sometimes"),
        ("ld.acq_rel.gpu.global.b32 %r1, [%d1];", "acq_rel"),
        ("ld.global.v16.b8 %r1, [%d1];", "v16"),
        ("setp.foo.s32 %p1, %r1, %r2;", r"comparison \.foo"),
        ("shfl.sync.left.b32 %r1, %r2, 1, 31, -1;", "left"),
        ("bar.sync.unaligned 0;", "unaligned"),
        ("mov.u32 %r1, %pm0;", "special register %pm0"),
        ("cvt.rn.e3m4x2.f32 %h1, %r1, %r2;", "e3m4x2"),
        ("atom.global.mul.u32 %r1, [%d1], %r2;", "mul"),
        ("fence.proxy.sideways;", "sideways"),
    ],
)
def test_unsupported_is_refused_when_the_kernel_is_loaded(body: str, detail: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=detail) as caught:
        run("ret;\n" + body)
    assert caught.value.line == FIRST_LINE + 1
    assert caught.value.opcode == body.split(" ")[0].rstrip(";")


def test_limits_of_the_architecture() -> None:
    with pytest.raises(ResourceLimitError, match="232449 bytes of shared memory, at most 232448"):
        run("", shared=227 * 1024 + 1)
    run("", shared=227 * 1024)
    with pytest.raises(ResourceLimitError, match="1056 threads"):
        run("", threads=1056)
    with pytest.raises(ResourceLimitError, match="32 CTAs in a cluster"):
        run("", grid=32, cluster=32)
    with pytest.raises(ResourceLimitError, match="not a multiple of the cluster"):
        run("", grid=3, cluster=2)
