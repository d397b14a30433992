# SPDX-License-Identifier: Apache-2.0
"""The mbarrier instructions in PTX: tokens, remote arrivals, blocking waits, and the names of misuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dsv4_ptx_emulator.errors import (
    BarrierMisuseError,
    DeadlockError,
    MisalignedError,
    OutOfBoundsError,
    UninitialisedError,
    UnsupportedInstruction,
)
from numpy.typing import NDArray
from probe import run

SETUP = """
.shared .align 8 .b64 bar;
.shared .align 8 .b64 other;
mov.u32 %r1, bar; mov.u32 %r2, %tid.x; mov.u32 %r3, other;
setp.eq.u32 %p0, %r2, 0;
ld.param.b64 %d0, [p0];
mad.wide.u32 %d1, %r2, 4, %d0;
"""


def words(body: str, count: int = 32, **options: Any) -> NDArray[np.uint32]:
    out = np.zeros(count, np.uint32)
    run(SETUP + body, out.view(np.uint8), **options)
    return out


@pytest.mark.parametrize("seed", range(4))
def test_tokens_tell_phases_apart_and_count_what_was_pending(seed: int) -> None:
    """32 lanes arrive at a barrier for 16: lanes see 16 down to 1 twice."""
    out = words(
        """
    @%p0 mbarrier.init.shared.b64 [%r1], 16;
    bar.sync 0;
    mbarrier.arrive.shared.b64 %d2, [%r1];
    mbarrier.pending_count.b64 %r4, %d2;
    st.global.b32 [%d1], %r4;
    """,
        seed=seed,
    )
    assert out.tolist() == [*range(16, 0, -1)] * 2


def test_test_wait_with_a_token() -> None:
    out = words(
        """
    @%p0 mbarrier.init.shared::cta.b64 [%r1], 33;
    bar.sync 0;
    mbarrier.arrive.release.cta.shared::cta.b64 %d2, [%r1];
    mbarrier.test_wait.acquire.cta.shared::cta.b64 %p1, [%r1], %d2;
    selp.b32 %r4, 1, 0, %p1;
    @%p0 mbarrier.arrive.shared::cta.b64 _, [%r1];
    mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %d2;
    selp.b32 %r5, 2, 0, %p1;
    mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], 1;
    selp.b32 %r6, 4, 0, %p1;
    or.b32 %r4, %r4, %r5; or.b32 %r4, %r4, %r6;
    st.global.b32 [%d1], %r4;
    """
    )
    assert out.tolist() == [2] * 32


@pytest.mark.parametrize("seed", range(8))
def test_producer_and_consumers_through_several_phases(seed: int) -> None:
    """Warp 0 writes a word four times; warp 1 reads each value exactly once."""
    body = """
    .shared .align 4 .b32 word;
    @%p0 mbarrier.init.shared.b64 [%r1], 32;
    @%p0 mbarrier.init.shared.b64 [%r3], 32;
    bar.sync 0;
    mov.u32 %r10, 0;
    setp.ge.u32 %p2, %r2, 32;
    @%p2 bra CONSUME;
    PRODUCE:
    and.b32 %r11, %r10, 1; xor.b32 %r11, %r11, 1;
    FREE: mbarrier.try_wait.parity.shared.b64 %p3, [%r3], %r11;
    @!%p3 bra FREE;
    add.u32 %r12, %r10, 5;
    @%p0 st.shared.b32 [word], %r12;
    bar.warp.sync 0xffffffff;
    mbarrier.arrive.shared.b64 _, [%r1], 1;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p3, %r10, 4;
    @%p3 bra PRODUCE;
    ret;
    CONSUME:
    and.b32 %r11, %r10, 1;
    FULL: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p3, [%r1], %r11;
    @!%p3 bra FULL;
    ld.shared.b32 %r12, [word];
    sub.u32 %r13, %r2, 32;
    mad.lo.u32 %r13, %r13, 4, %r10;
    mad.wide.u32 %d3, %r13, 4, %d0;
    st.global.b32 [%d3], %r12;
    mbarrier.arrive.shared.b64 _, [%r3], 1;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p3, %r10, 4;
    @%p3 bra CONSUME;
    """
    out = words(body, 128, threads=64, seed=seed)
    assert out.reshape(32, 4).tolist() == [[5, 6, 7, 8]] * 32


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_from_another_cta(seed: int) -> None:
    body = """
    .shared .align 4 .b32 word;
    @%p0 mbarrier.init.shared.b64 [%r1], 2;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r6, %cluster_ctarank; xor.b32 %r7, %r6, 1;
    mapa.shared::cluster.u32 %r8, %r1, %r7;
    mov.u32 %r9, word;
    mapa.shared::cluster.u32 %r9, %r9, %r7;
    add.u32 %r10, %r6, 40;
    @%p0 st.shared::cluster.b32 [%r9], %r10;
    @%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8], 2;
    WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1], 0, 0x989680;
    @!%p1 bra WAIT;
    ld.shared.b32 %r11, [word];
    mad.wide.u32 %d2, %r6, 4, %d0;
    @%p0 st.global.b32 [%d2], %r11;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    assert words(body, 2, grid=2, cluster=2, seed=seed).tolist() == [41, 40]


def test_generic_addresses() -> None:
    out = words(
        """
    cvta.shared.u64 %d5, %r1;
    """.replace("%r1", "%d6").replace("cvta", "cvt.u64.u32 %d6, %r1;\n    cvta")
        + """
    @%p0 mbarrier.init.b64 [%d5], 32;
    bar.sync 0;
    mbarrier.arrive.b64 _, [%d5];
    mbarrier.test_wait.parity.b64 %p1, [%d5], 0;
    selp.b32 %r4, 1, 0, %p1;
    st.global.b32 [%d1], %r4;
    """
    )
    assert out.tolist() == [1] * 32


def test_lanes_with_different_barriers_do_not_hold_each_other_up() -> None:
    """Half of the lanes wait for what the other half does after its own wait."""
    body = """
    @%p0 mbarrier.init.shared.b64 [%r1], 16;
    @%p0 mbarrier.init.shared.b64 [%r3], 16;
    bar.sync 0;
    setp.lt.u32 %p2, %r2, 16;
    selp.b32 %r4, %r1, %r3, %p2;
    @%p2 mbarrier.arrive.shared.b64 _, [%r1];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r4], 0;
    and.pred %p3, %p1, %p2;
    @%p3 mbarrier.arrive.shared.b64 _, [%r3];
    @!%p1 bra WAIT;
    st.global.b32 [%d1], 1;
    """
    assert words(body).tolist() == [1] * 32


def test_invalidated_memory_can_be_used_and_initialised_again() -> None:
    body = """
    @%p0 mbarrier.init.shared.b64 [%r1], 1;
    @%p0 mbarrier.inval.shared.b64 [%r1];
    @%p0 mbarrier.init.shared.b64 [%r1], 32;
    bar.sync 0;
    mbarrier.arrive_drop.shared.b64 %d2, [%r1];
    mbarrier.pending_count.b64 %r4, %d2;
    st.global.b32 [%d1], %r4;
    """
    assert words(body).tolist() == [*range(32, 0, -1)]


INIT = "@%p0 mbarrier.init.shared.b64 [%r1], 1;\n bar.sync 0;\n"


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("mbarrier.arrive.shared.b64 _, [%r1];", BarrierMisuseError, "no initialised mbarrier"),
        (
            "WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra WAIT;",
            UninitialisedError,
            "which nothing has written",
        ),
        (INIT + "@%p0 mbarrier.arrive.shared.b64 _, [%r1], 2;", BarrierMisuseError, "only 1 arrivals"),
        (INIT + "@%p0 mbarrier.init.shared.b64 [%r1], 1;", BarrierMisuseError, "initialised again"),
        (
            INIT + "@%p0 st.shared.b64 [%r1], 0;\n@%p0 mbarrier.arrive.shared.b64 _, [%r1];",
            BarrierMisuseError,
            "no initialised mbarrier",
        ),
        (
            INIT + "@%p0 mbarrier.inval.shared.b64 [%r1];\n@%p0 mbarrier.inval.shared.b64 [%r1];",
            BarrierMisuseError,
            "no initialised mbarrier",
        ),
        ("@%p0 mbarrier.init.shared.b64 [%r1], 0;", BarrierMisuseError, "range is 1 to"),
        ("@%p0 mbarrier.init.shared.b64 [%r1+4], 1;", MisalignedError, "multiple of 8"),
        (
            "add.u32 %r1, %r1, 0x1000000;\n" + INIT,
            OutOfBoundsError,
            "not in the shared memory of the executing",
        ),
        (
            INIT + "WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;\n@!%p1 bra WAIT;",
            DeadlockError,
            r"phase of parity 0 \(1 of 1 arrivals, 0 bytes pending\)",
        ),
        (
            INIT + "mov.b64 %d2, 7; mbarrier.test_wait.shared.b64 %p1, [%r1], %d2;",
            BarrierMisuseError,
            "0x0+7",
        ),
        (
            INIT + "mbarrier.arrive.shared::cluster.b64 %d2, [%r1];",
            UnsupportedInstruction,
            "a state of a barrier in shared::cluster",
        ),
        (INIT + "mbarrier.arrive.expect_tx.shared.b64 _, [%r1];", UnsupportedInstruction, "without a count"),
        (
            INIT + "mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0, 100;",
            UnsupportedInstruction,
            "form with 4 operands",
        ),
        (INIT + "mbarrier.arrive.shared.b32 _, [%r1];", UnsupportedInstruction, "modifier .b32"),
    ],
)
def test_misuse_is_named(body: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        words(body)
    if error is BarrierMisuseError:
        assert raised.value.line > 0  # type: ignore[attr-defined]
        assert "warp 0" in str(raised.value)
