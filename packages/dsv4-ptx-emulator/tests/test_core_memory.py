# SPDX-License-Identifier: Apache-2.0
"""Loads, stores, atomics and address arithmetic in every space, and what is wrong with an access."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.errors import MisalignedError, OutOfBoundsError, UninitialisedError
from probe import FIRST_LINE, kernel, run

TID = "mov.u32 %r59, %tid.x; ld.param.b64 %d0, [p0]; mul.wide.u32 %d1, %r59, {step}; add.s64 %d2, %d0, %d1;\n"


def test_vectors_move_whole_rows() -> None:
    data = np.arange(32 * 4, dtype=np.uint32)
    out = np.zeros_like(data)
    run(
        TID.format(step=16)
        + """ld.param.b64 %d3, [p1]; add.s64 %d4, %d3, %d1;
        ld.global.nc.L1::no_allocate.v4.b32 {%r1, %r2, %r3, %r4}, [%d2];
        st.global.L1::no_allocate.v4.b32 [%d4], {%r4, %r3, %r2, %r1};""",
        data,
        out,
    )
    assert np.array_equal(out.reshape(32, 4), data.reshape(32, 4)[:, ::-1])


def test_widths_and_sign() -> None:
    data = np.random.default_rng(1).integers(0, 256, 256, dtype=np.uint8)
    out = np.zeros(32 * 6, np.uint64)
    run(
        TID.format(step=8)
        + """ld.param.b64 %d3, [p1]; mul.wide.u32 %d5, %r59, 48; add.s64 %d4, %d3, %d5;
        ld.global.u8 %r1, [%d2+1]; ld.global.s8 %r2, [%d2+1]; ld.global.s16 %r3, [%d2+2];
        ld.global.s32 %d6, [%d2+4];
        ld.global.v2.u16 {%h1, %h2}, [%d2+4];
        cvt.u64.u32 %d7, %r1; st.global.u64 [%d4], %d7; cvt.u64.u32 %d7, %r2; st.global.u64 [%d4+8], %d7;
        cvt.u64.u32 %d7, %r3; st.global.u64 [%d4+16], %d7; st.global.b64 [%d4+24], %d6;
        cvt.u64.u16 %d7, %h1; st.global.u64 [%d4+32], %d7; st.global.u8 [%d4+40], %h2;""",
        data,
        out,
    )
    rows = data.reshape(32, 8)
    got = out.reshape(32, 6)
    assert np.array_equal(got[:, 0], rows[:, 1])
    assert np.array_equal(got[:, 1], rows[:, 1].view(np.int8).astype(np.int32).view(np.uint32))
    shorts, ints = rows.view(np.int16), rows.view(np.int32)
    assert np.array_equal(got[:, 2], shorts[:, 1].astype(np.int32).view(np.uint32))
    assert np.array_equal(got[:, 3], ints[:, 1].astype(np.int64).view(np.uint64))
    assert np.array_equal(got[:, 4], rows.view(np.uint16)[:, 2])
    assert np.array_equal(got[:, 5], rows[:, 6])


def test_wide_vectors_need_blackwell() -> None:
    data, out = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    aligned = np.zeros(32 * 32 + 32, np.uint8)
    start = -aligned.ctypes.data % 32
    both = aligned[start : start + 1024].view(np.uint32)
    both[:] = data
    target = np.zeros(32 * 32 + 32, np.uint8)
    place = -target.ctypes.data % 32
    out = target[place : place + 1024].view(np.uint32)
    body = (
        TID.format(step=32)
        + """ld.param.b64 %d3, [p1]; add.s64 %d4, %d3, %d1;
        ld.global.v4.b64 {%d5, %d6, %d7, %d8}, [%d2]; st.global.v4.b64 [%d4], {%d6, %d5, %d8, %d7};"""
    )
    run(body, both, out, arch="sm_100a")
    assert np.array_equal(out.reshape(32, 2, 2, 2), data.reshape(32, 2, 2, 2)[:, :, ::-1])
    with pytest.raises(NotImplementedError, match="32 bytes per lane"):
        run(body, both, out, arch="sm_90a")


def test_only_active_lanes_access() -> None:
    data = np.arange(32, dtype=np.uint32)
    run(
        TID.format(step=4)
        + """setp.lt.u32 %p1, %r59, 5; @!%p1 add.s64 %d2, %d2, 100000;
        mov.b32 %r1, 77; @%p1 ld.global.b32 %r1, [%d2]; add.s32 %r1, %r1, 1;
        @%p1 st.global.b32 [%d2], %r1;""",
        data,
    )
    assert data.tolist() == [1, 2, 3, 4, 5, *range(5, 32)]


def test_shared_memory_static_dynamic_and_generic() -> None:
    out = np.zeros(32, np.uint32)
    run(
        TID.format(step=4)
        + """mov.b32 %r1, table; shl.b32 %r2, %r59, 2; add.s32 %r3, %r1, %r2; mov.b32 %r4, dyn;
            add.s32 %r5, %r4, %r2;
        st.shared.b32 [%r3], %r59; mul.lo.s32 %r6, %r59, 3; st.shared::cta.b32 [%r5], %r6; bar.warp.sync -1;
        cvt.u64.u32 %d5, %r5; cvta.shared.u64 %d6, %d5; isspacep.shared %p1, %d6; isspacep.global %p2, %d6;
        xor.b32 %r7, %r2, 4; add.s32 %r7, %r7, %r1; ld.shared.b32 %r8, [%r7]; ld.b32 %r9, [%d6];
        cvta.to.shared.u64 %d7, %d6; cvt.u32.u64 %r10, %d7; sub.s32 %r10, %r10, %r4;
        shl.b32 %r8, %r8, 8; or.b32 %r8, %r8, %r9; shl.b32 %r10, %r10, 16; or.b32 %r8, %r8, %r10;
        selp.b32 %r11, 0x80000000, 0, %p1; or.b32 %r8, %r8, %r11; selp.b32 %r11, 0x40000000, 0, %p2;
        or.b32 %r8, %r8, %r11; st.global.b32 [%d2], %r8;""",
        out,
        shared=128,
        module=".extern .shared .align 1024 .b8 dyn[];\n.shared .align 4 .b8 table[128];",
    )
    lane = np.arange(32, dtype=np.uint32)
    assert np.array_equal(out, (lane ^ 1) << 8 | lane * 3 | lane * 4 << 16 | np.uint32(1 << 31))


def test_global_and_constant_variables() -> None:
    out = np.zeros(2, np.uint32)
    run(
        """ld.param.b64 %d0, [p0]; mov.b64 %d1, counter; mov.b64 %d2, numbers; ld.const.b32 %r1, [%d2+4];
        elect.sync %r2|%p1, -1; @%p1 atom.global.add.u32 %r3, [%d1], %r1; @%p1 ld.global.b32 %r4, [counter];
        @%p1 st.global.v2.b32 [%d0], {%r3, %r4};""",
        out,
        module=".global .align 4 .u32 counter = 5;\n.const .align 4 .u32 numbers[2] = {7, 9};",
    )
    assert out.tolist() == [5, 14]


def test_local_memory_is_per_lane() -> None:
    out = np.zeros(32, np.uint32)
    run(
        ".local .align 16 .b8 depot[32];\n"
        + TID.format(step=4)
        + """mov.b64 %d5, depot; cvta.local.u64 %d6, %d5; st.local.b32 [%d5+4], %r59;
            mul.lo.s32 %r2, %r59, %r59;
        st.b32 [%d6+8], %r2; ld.local.v2.b32 {%r3, %r4}, [depot+8]; ld.b32 %r5, [%d6+4];
        add.s32 %r6, %r3, %r5;
        st.global.b32 [%d2], %r6;""",
        out,
    )
    lane = np.arange(32)
    assert np.array_equal(out, lane * lane + lane)


@pytest.mark.parametrize(
    ("opcode", "start", "operand", "want"),
    [
        ("add.u32", 5, 3, 8),
        ("min.s32", 5, -3, -3),
        ("max.s32", -5, 3, 3),
        ("min.u32", 5, -3, 5),
        ("exch.b32", 5, 3, 3),
        ("and.b32", 6, 3, 2),
        ("or.b32", 6, 3, 7),
        ("xor.b32", 6, 3, 5),
        ("inc.u32", 3, 3, 0),
        ("inc.u32", 2, 3, 3),
        ("dec.u32", 0, 3, 3),
        ("dec.u32", 9, 3, 3),
        ("dec.u32", 2, 3, 1),
    ],
)
def test_atomic_operations(opcode: str, start: int, operand: int, want: int) -> None:
    data = np.array([start, 0], np.int32)
    run(
        f"""ld.param.b64 %d0, [p0]; mov.b32 %r1, {operand}; elect.sync %r2|%p1, -1;
        @%p1 atom.acq_rel.gpu.global.{opcode} %r3, [%d0], %r1; @%p1 st.global.b32 [%d0+4], %r3;""",
        data,
    )
    assert data.tolist() == [want, start]


def test_compare_and_swap_and_wide_and_float() -> None:
    data = np.array([7, 0, 0], np.uint64)
    data[1:2].view(np.float32)[0] = 0.5
    run(
        """ld.param.b64 %d0, [p0]; mov.b64 %d1, 7; mov.b64 %d2, 1; elect.sync %r2|%p1, -1;
            mov.b32 %r1, 0f3F800000;
        mov.b64 %d4, -9;
        @%p1 atom.global.cas.b64 %d3, [%d0], %d1, %d2; @%p1 atom.global.cas.b64 %d3, [%d0], %d1, %d4;
        red.relaxed.gpu.global.add.f32 [%d0+8], %r1; @%p1 atom.global.sys.acq_rel.max.s64 %d5, [%d0+16], %d4;
        @%p1 atom.global.sys.acq_rel.max.s64 %d5, [%d0+16], %d3;""",
        data,
    )
    assert data[0] == 1
    assert data[1:2].view(np.float32)[0] == 32.5
    assert data[2] == 1


def test_only_global_memory_flushes_sums_of_floats() -> None:
    data = np.array([1, 1, 0, 0, 0x7F80_0001], np.uint32)
    run(
        """.shared .align 4 .b32 cell;
        ld.param.b64 %d0, [p0]; mov.b32 %r1, 0x80; elect.sync %r2|%p1, -1; mov.b32 %r4, cell;
        cvt.u64.u32 %d1, %r4; cvta.shared.u64 %d1, %d1;
        @%p1 st.shared.b32 [%r4], 1;
        @%p1 red.relaxed.gpu.add.f32 [%d0], %r1; @%p1 red.relaxed.gpu.global.add.noftz.f32 [%d0+4], %r1;
        @%p1 atom.add.f32 %r3, [%d1], %r1; @%p1 ld.shared.b32 %r5, [%r4]; @%p1 st.global.b32 [%d0+8], %r5;
        @%p1 red.global.add.f32 [%d0+12], %r1; @%p1 red.global.add.f32 [%d0+16], %r1;""",
        data,
    )
    assert data.tolist() == [0, 0x81, 0x81, 0, 0x7FFF_FFFF]


def test_nan_in_sums_of_doubles() -> None:
    nan, other = 0x7FF0_0000_0000_0003, 0xFFF8_0000_0000_0005
    data = np.array([nan, 0, 0x7FF0 << 48, nan, 0], np.uint64)
    run(
        f""".shared .align 8 .b64 cell;
        ld.param.b64 %d0, [p0]; mov.b64 %d1, {other}; mov.b64 %d2, {0xFFF0 << 48}; elect.sync %r2|%p1, -1;
        mov.b32 %r4, cell;
        @%p1 red.global.add.f64 [%d0], %d1; @%p1 red.global.add.f64 [%d0+8], %d1;
        @%p1 red.global.add.f64 [%d0+16], %d2;
        @%p1 ld.global.b64 %d3, [%d0+24]; @%p1 st.shared.b64 [%r4], %d3;
        @%p1 atom.shared.add.f64 %d4, [%r4], %d2; @%p1 ld.shared.b64 %d5, [%r4];
        @%p1 st.global.b64 [%d0+32], %d5;""",
        data,
    )
    assert data.tolist() == [nan, other, 0xFFF8 << 48, nan, nan | 1 << 51]


def test_lanes_of_an_atomic_take_turns() -> None:
    orders = set()
    for seed in range(4):
        data, old = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
        run(
            TID.format(step=4)
            + """ld.param.b64 %d3, [p1]; add.s64 %d4, %d3, %d1; atom.global.add.u32 %r1, [%d0], 1;
            st.global.b32 [%d4], %r1;""",
            data,
            old,
            seed=seed,
        )
        assert data[0] == 32
        assert sorted(old.tolist()) == list(range(32))
        orders.add(tuple(old.tolist()))
    assert len(orders) > 1


def test_cluster_memory() -> None:
    out = np.zeros(64, np.uint32)
    run(
        """ld.param.b64 %d0, [p0]; mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.b32 %r3, cell;
        shl.b32 %r4, %r1, 2; add.s32 %r5, %r3, %r4; xor.b32 %r6, %r2, 1;
        mapa.shared::cluster.u32 %r7, %r5, %r6;
        mad.lo.s32 %r8, %r2, 100, %r1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        st.shared::cluster.b32 [%r7], %r8; barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        ld.shared.b32 %r9, [%r5]; getctarank.shared::cluster.u32 %r10, %r7; mad.lo.s32 %r9, %r10, 1000, %r9;
        mad.lo.s32 %r11, %r2, 32, %r1; mul.wide.u32 %d1, %r11, 4; add.s64 %d2, %d0, %d1;
        st.global.b32 [%d2], %r9;""",
        out,
        grid=2,
        cluster=2,
        module=".shared .align 4 .b8 cell[128];",
    )
    lane = np.arange(32)
    assert np.array_equal(out, np.concatenate([1000 + 100 + lane, lane]))


def test_shared_memory_of_a_cta_that_has_ended() -> None:
    body = """mov.u32 %r2, %cluster_ctarank; mov.b32 %r3, cell; st.shared.b32 [%r3], %r2;
    setp.eq.b32 %p1, %r2, 1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; @%p1 ret;
    mov.b32 %r4, 0; LOOP: nanosleep.u32 1; add.s32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 2000; @%p2 bra LOOP;
    mapa.shared::cluster.u32 %r5, %r3, 1; ld.shared::cluster.b32 %r6, [%r5];"""
    with pytest.raises(OutOfBoundsError, match=r"shared memory of rank 0, CTA \(1, 0, 0\), which has ended"):
        run(body, grid=2, cluster=2, module=".shared .align 4 .b8 cell[128];")


def test_out_of_bounds_names_the_neighbour() -> None:
    data = np.zeros(32, np.uint32)
    with pytest.raises(
        OutOfBoundsError, match=r"rank 0, CTA \(0, 0, 0\), warp 0, line \d+.*buffer 0"
    ) as caught:
        run(TID.format(step=4) + "ld.global.b32 %r1, [%d2+4];", data)
    assert caught.value.line == FIRST_LINE + 1
    with pytest.raises(OutOfBoundsError, match="not mapped"):
        run(TID.format(step=4) + "st.global.b32 [%d2+-4], %r59;", data)
    assert not data.any()
    with pytest.raises(OutOfBoundsError, match="shared address"):
        run("mov.b32 %r1, 1024; ld.shared.b32 %r2, [%r1+128];", data, shared=128)
    with pytest.raises(OutOfBoundsError):
        run("mov.b32 %r1, 0; ld.shared.b32 %r2, [%r1];", data, shared=128)


@pytest.mark.parametrize(
    "body", ["ld.global.b64 %d5, [%d2+4];", "st.global.v4.b32 [%d2+8], {%r1, %r1, %r1, %r1};"]
)
def test_misaligned(body: str) -> None:
    data = np.zeros(128, np.uint64)
    with pytest.raises(MisalignedError, match="not a multiple of"):
        run(TID.format(step=16) + body, data)


def test_memory_of_another_rank() -> None:
    data = np.zeros(32, np.uint32)
    text = kernel("ld.param.b64 %d0, [p0]; st.global.b32 [%d0], 1;")
    for visible, fails in ((None, False), ([0, 1], False), ([0], True)):
        emulator = Emulator(ranks=2)
        emulator.register(data.ctypes.data, data.nbytes, "a", rank=0, visible=visible)
        parameters = data.ctypes.data.to_bytes(8, "little")
        emulator.launch(text, "probe", grid=(1, 1, 1), block=(32, 1, 1), parameters=parameters, rank=1)
        if fails:
            with pytest.raises(OutOfBoundsError, match=r"a at .* is not mapped on rank 1"):
                emulator.run()
        else:
            emulator.run()


def test_uninitialised_shared_memory() -> None:
    module = ".shared .align 16 .b8 cell[256];"
    body = "mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.b32 %r3, cell; add.s32 %r4, %r3, %r2;"
    run(body + "st.shared.b32 [%r4], %r1; ld.shared.b32 %r5, [%r4];", module=module)
    with pytest.raises(UninitialisedError, match="byte 128 of the shared memory of rank 0, CTA"):
        run(body + "st.shared.b32 [%r4], %r1; ld.shared.b32 %r5, [%r4+4];", module=module)
    with pytest.raises(UninitialisedError, match="byte 0 "):
        run("mov.b32 %r3, cell; ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r3];", module=module)


def test_a_byte_in_front_of_a_buffer() -> None:
    """The second time round the load takes the short way, where a negative index must not wrap."""
    data = np.zeros(64, np.uint8)
    body = "LOOP: ld.global.u8 %r1, [%d2]; sub.s64 %d2, %d2, 1; bra LOOP;"
    with pytest.raises(OutOfBoundsError, match="; 1 bytes before buffer 0"):
        run(TID.format(step=1) + body, data)
