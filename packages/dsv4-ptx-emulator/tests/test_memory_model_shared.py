# SPDX-License-Identifier: Apache-2.0
"""Shared memory and the async proxy: barriers, bulk copies, proxy fences, groups; right and wrong."""

from __future__ import annotations

from itertools import count

import pytest
from dsv4_ptx_emulator.errors import ProgramError
from litmus import verdict, verdicts

MODULE = ".shared .align 128 .b8 data[4096];\n.shared .align 8 .b64 bars[4];"
SETUP = """
mov.u32 %r10, data; mov.u32 %r11, bars; setp.eq.u32 %p5, %r3, 0; and.pred %p6, %p0, %p5;
mad.lo.u32 %r12, %r2, 4, %r10;
@%p6 mbarrier.init.shared.b64 [%r11], {count}; @%p6 mbarrier.init.shared.b64 [%r11+8], 1; bar.sync 0;
"""


_numbers = count()


def wait(address: str, parity: int = 0, form: str = "mbarrier.try_wait.parity.shared.b64") -> str:
    label = f"WAIT{next(_numbers)}"
    return f"{label}: {form} %p7, [{address}], {parity}; @!%p7 bra {label};"


def handed_over(tell: str, learn: str) -> str:
    """Warp 0 writes and tells, warp 1 learns and reads."""
    return f"""
    @!%p5 bra READ; st.shared.b32 [%r12], %r4; {tell} bra END;
    READ: {learn} ld.shared.b32 %r14, [%r12+-128];
    END:
    """


def check(body: str, rule: str, *, arrivals: int = 1, **options: object) -> None:
    found = verdicts(SETUP.replace("{count}", str(arrivals)) + body, module=MODULE, **options)
    assert rule in found, found
    # What a schedule meets first may be that nothing has been written, or a lane that did not issue the copy.
    assert found <= {rule, "", "race", "unwritten"}
    if not rule:
        assert found == {""}


@pytest.mark.parametrize(
    ("barrier", "rule"), [("bar.sync 0;", ""), ("", "race"), ("bar.warp.sync -1;", "race")]
)
def test_warps_need_a_barrier(barrier: str, rule: str) -> None:
    check(
        f"st.shared.b32 [%r12], %r4; {barrier} xor.b32 %r13, %r12, 128; ld.shared.b32 %r14, [%r13];",
        rule,
        threads=64,
    )


@pytest.mark.parametrize(("arrive", "rule"), [("bar.arrive 1, 64;", ""), ("", "race")])
def test_arriving_and_waiting_at_a_named_barrier(arrive: str, rule: str) -> None:
    meet = "bar.sync 1, 64;" if arrive else ""
    body = handed_over(arrive, meet)
    check(body, rule, threads=64)


ARRIVALS = {
    "plain": ("mbarrier.arrive.shared.b64 %d5, [%r11];", "mbarrier.try_wait.parity.shared.b64", ""),
    "release": (
        "mbarrier.arrive.release.cta.shared.b64 %d5, [%r11];",
        "mbarrier.try_wait.parity.acquire.cta.shared.b64",
        "",
    ),
    "relaxed arrival": (
        "mbarrier.arrive.relaxed.cta.shared.b64 %d5, [%r11];",
        "mbarrier.try_wait.parity.shared.b64",
        "race",
    ),
    "relaxed wait": (
        "mbarrier.arrive.shared.b64 %d5, [%r11];",
        "mbarrier.try_wait.parity.relaxed.cta.shared.b64",
        "relaxed",
    ),
}


@pytest.mark.parametrize("name", ARRIVALS)
def test_mbarriers_release_and_acquire(name: str) -> None:
    arrive, form, rule = ARRIVALS[name]
    body = handed_over(arrive, wait("%r11", 0, form))
    check(body, rule, threads=64, arrivals=32)


@pytest.mark.parametrize(("sync", "rule"), [("bar.warp.sync -1;", ""), ("", "race")])
def test_one_lane_arrives_for_its_warp(sync: str, rule: str) -> None:
    body = handed_over(f"{sync} @%p0 mbarrier.arrive.shared.b64 %d5, [%r11];", wait("%r11"))
    check(body, rule, threads=64)


def test_an_mbarrier_must_be_initialised_before_its_use() -> None:
    body = """
    mov.u32 %r11, bars; setp.eq.u32 %p5, %r3, 0; and.pred %p6, %p0, %p5;
    @%p6 mbarrier.init.shared.b64 [%r11], 64; {sync} mbarrier.arrive.shared.b64 %d5, [%r11];
    """
    assert verdicts(body.replace("{sync}", "bar.sync 0;"), module=MODULE, threads=64) == {""}
    found = verdicts(body.replace("{sync}", "bar.warp.sync -1;"), module=MODULE)
    assert found == {"uninitialised-barrier"} or found == {""}


LOAD = """
@%p6 mbarrier.arrive.expect_tx.shared.b64 %d5, [%r11], {bytes};
@%p6 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%d0], 2048, [%r11];
"""


def test_loaded_data_is_there_after_the_barrier() -> None:
    check(LOAD.format(bytes=2048) + wait("%r11") + "ld.shared.b32 %r14, [%r12];", "")


@pytest.mark.parametrize(("amount", "finding"), [(0, "incomplete-copy"), (1024, "DeadlockError")])
def test_too_small_an_expectation(amount: int, finding: str) -> None:
    """The phase ends too early; or never, since the count has left zero behind."""
    body = (
        LOAD.format(bytes=amount)
        + wait("%r11")
        + "ld.shared.b32 %r14, [%r12]; ld.shared.b32 %r14, [%r12+1920];"
    )
    assert finding in _tolerant(body)


def _tolerant(body: str) -> set[str]:
    found = set()
    for seed in range(24):
        try:
            found.add(verdict(SETUP.replace("{count}", "1") + body, seed, module=MODULE))
        except ProgramError as error:
            found.add(type(error).__name__)
    return found


def test_without_a_wait() -> None:
    body = "st.shared.b32 [%r12], %r4; fence.proxy.async; bar.warp.sync -1;" + LOAD.format(bytes=2048)
    ending = wait("%r11")
    check(body + ending + "ld.shared.b32 %r14, [%r12];", "")
    check(body + "ld.shared.b32 %r14, [%r12];" + ending, "incomplete-copy")


@pytest.mark.parametrize(
    ("fence", "rule"),
    [
        ("fence.proxy.async;", ""),
        ("fence.proxy.async.shared::cta;", ""),
        ("fence.proxy.async.global;", "proxy-fence"),
        ("fence.acq_rel.gpu;", "proxy-fence"),
        ("", "proxy-fence"),
    ],
)
@pytest.mark.parametrize("touch", ["st.shared.b32 [%r12], %r4;", "@%p8 ld.shared.b32 %r14, [%r12];"])
def test_generic_accesses_before_an_async_write_need_a_fence(touch: str, fence: str, rule: str) -> None:
    prepare = "setp.lt.u32 %p8, %r1, 32;" + LOAD.format(bytes=2048) + wait("%r11")
    again = """
    @%p6 mbarrier.arrive.expect_tx.shared.b64 %d5, [%r11+8], 2048;
    @%p6 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%d0], 2048, [%r11+8];
    """
    check(f"{prepare} {touch} {fence} bar.warp.sync -1; {again} {wait('%r11+8')}", rule)


STORE = """
@%p6 cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r10], 128;
@%p6 cp.async.bulk.commit_group;
"""
FILL = "st.shared.b32 [%r12], %r4; fence.proxy.async.shared::cta; bar.warp.sync -1;"


@pytest.mark.parametrize(
    ("fill", "rule"),
    [
        (FILL, ""),
        (FILL.replace("fence.proxy.async.shared::cta;", ""), "proxy-fence"),
        (FILL.replace("bar.warp.sync -1;", ""), "race"),
    ],
)
def test_an_async_read_of_generic_writes(fill: str, rule: str) -> None:
    check(fill + STORE + "@%p6 cp.async.bulk.wait_group 0;", rule)


@pytest.mark.parametrize(
    ("how", "reuse", "result"),
    [
        ("wait_group 0", "", ""),
        ("wait_group.read 0", "", "incomplete-copy"),
        ("wait_group 1", "reuse", "incomplete-copy"),
        (None, "reuse", "incomplete-copy"),
    ],
)
def test_what_a_wait_for_groups_tells(how: str | None, reuse: str, result: str) -> None:
    """`.read` frees the source and says nothing of the destination (section 9.7.10.28.6.2)."""
    waiting = f"@%p6 cp.async.bulk.{how};" if how else ""
    end = "@%p6 cp.async.bulk.wait_group 0;"
    check(FILL + STORE + waiting + "@%p6 st.shared.b32 [%r10], %r4;" + end, reuse)
    check(FILL + STORE + waiting + "@%p6 ld.global.b32 %r14, [%d2];" + end, result)


@pytest.mark.parametrize(("how", "rule"), [("wait_group 0", ""), ("wait_group.read 0", "incomplete-copy")])
def test_a_flag_after_a_bulk_store(how: str, rule: str) -> None:
    """The pattern of a push over a link: copy, wait, release; acquire, read on the other rank."""
    body = f"""
    setp.eq.u32 %p1, %r9, 0; @!%p1 bra READER;
    {FILL} {STORE}
    @!%p6 bra END;
    cp.async.bulk.{how};
    st.release.sys.global.b32 [%d1], %r4; cp.async.bulk.wait_group 0; bra END;
    READER: @!%p0 bra END;
    SPIN: ld.acquire.sys.global.b32 %r5, [%d1]; setp.ne.u32 %p2, %r5, 1; @%p2 bra SPIN;
    ld.global.b32 %r6, [%d2];
    END:
    """
    check(body, rule, ranks=2)


@pytest.mark.parametrize(("fence", "rule"), [("fence.proxy.async;", ""), ("", "proxy-fence")])
def test_generic_stores_of_a_peer_that_are_loaded_in_bulk(fence: str, rule: str) -> None:
    body = f"""
    setp.eq.u32 %p1, %r9, 0; @!%p1 bra READER;
    @%p6 st.global.b32 [%d0], %r4; @%p6 st.release.sys.global.b32 [%d1], %r4; bra END;
    READER: @!%p6 bra END;
    SPIN: ld.acquire.sys.global.b32 %r5, [%d1]; setp.ne.u32 %p2, %r5, 1; @%p2 bra SPIN;
    {fence}
    {LOAD.format(bytes=2048)} {wait("%r11")}
    END:
    """
    check(body, rule, ranks=2)


@pytest.mark.parametrize(
    ("waiting", "rule"), [("cp.async.wait_group 0;", ""), ("cp.async.wait_all;", ""), ("", "incomplete-copy")]
)
def test_non_bulk_copies(waiting: str, rule: str) -> None:
    body = f"""
    mad.wide.u32 %d5, %r2, 4, %d0;
    cp.async.ca.shared.global [%r12], [%d5], 4; cp.async.commit_group;
    {waiting} st.shared.b32 [%r12], %r4; cp.async.wait_all;
    """
    found = verdicts(SETUP.replace("{count}", "1") + body, module=MODULE)
    assert rule in found
    assert found <= {rule, "", "race"}


@pytest.mark.parametrize(
    ("fence", "sync", "rule"),
    [
        ("fence.proxy.async.shared::cta;", "bar.warp.sync -1;", ""),
        ("", "bar.warp.sync -1;", "proxy-fence"),
        ("fence.proxy.async.shared::cta;", "", "incomplete-copy"),
    ],
)
def test_an_async_read_of_what_lanes_have_copied(fence: str, sync: str, rule: str) -> None:
    """cp.async is of the generic proxy, and each lane waits for its own copies."""
    copy = """
    mad.wide.u32 %d5, %r2, 4, %d0;
    cp.async.ca.shared.global [%r12], [%d5], 4; cp.async.commit_group; cp.async.wait_group 0;
    """
    body = f"{copy} {fence} {sync} {STORE} @%p6 cp.async.bulk.wait_group 0;"
    assert verdicts(SETUP.replace("{count}", "1") + body, module=MODULE) == {rule}


@pytest.mark.parametrize(("arrive", "rule"), [("", ""), (".release", ""), (".relaxed", "race")])
def test_the_barrier_of_a_cluster(arrive: str, rule: str) -> None:
    body = f"""
    xor.b32 %r7, %r0, 1; st.shared.b32 [%r12], %r4;
    barrier.cluster.arrive{arrive}; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r13, %r12, %r7; ld.shared::cluster.b32 %r14, [%r13];
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    check(body, rule, grid=2, cluster=2)


@pytest.mark.parametrize(
    ("arrive", "form", "rule"),
    [
        (".release.cluster", "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64", ""),
        ("", "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64", "scope"),
        (".release.cluster", "mbarrier.try_wait.parity.shared.b64", "scope"),
    ],
)
def test_an_arrival_from_another_cta_needs_cluster_scope(arrive: str, form: str, rule: str) -> None:
    """Without a scope both are of the CTA (sections 9.7.15.16.16 and 9.7.15.16.19)."""
    body = f"""
    barrier.cluster.arrive; barrier.cluster.wait;
    setp.eq.u32 %p1, %r0, 0; @!%p1 bra READER;
    @!%p6 bra DONE;
    mapa.shared::cluster.u32 %r13, %r11, 1; mapa.shared::cluster.u32 %r15, %r10, 1;
    st.shared::cluster.b32 [%r15], %r4;
    mbarrier.arrive{arrive}.shared::cluster.b64 _, [%r13];
    bra DONE;
    READER: @!%p6 bra DONE; {wait("%r11", 0, form)} ld.shared.b32 %r14, [%r10];
    DONE: barrier.cluster.arrive; barrier.cluster.wait;
    """
    check(body, rule, grid=2, cluster=2)
