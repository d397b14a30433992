# SPDX-License-Identifier: Apache-2.0
"""Message passing through a flag, in each way that orders it and in each that does not."""

from __future__ import annotations

import pytest
from litmus import verdicts

STORE = "st.global.b32 [%d0], %r4;"
LOAD = "ld.global.b32 %r6, [%d0];"


def passing(write: str, read: str, is_writer: str = "setp.eq.u32 %p1, %r0, 0;") -> str:
    """Lane 0 of the writer writes; lane 0 of everybody else spins until %r5, as `read` gets it, is 1."""
    return f"""
    {is_writer}
    @!%p0 bra END;
    @!%p1 bra READER;
    {write}
    bra END;
    READER:
    {read}
    END:
    """


def spin(poll: str, after: str = "") -> str:
    return f"SPIN: {poll} setp.ne.u32 %p2, %r5, 1; @%p2 bra SPIN; {after} {LOAD}"


RELEASES = {
    "release": f"{STORE} st.release.gpu.global.b32 [%d1], %r4;",
    "fence": f"{STORE} fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [%d1], %r4;",
    "membar": f"{STORE} membar.gl; st.volatile.global.b32 [%d1], %r4;",
    "release then relaxed": f"{STORE} st.release.gpu.global.b32 [%d1], %r0;"
    " st.relaxed.gpu.global.b32 [%d1], %r4;",
    "atomic": f"{STORE} atom.release.gpu.global.add.u32 %r7, [%d1], 1;",
    "red": f"{STORE} red.release.gpu.global.add.u32 [%d1], 1;",
    "system": f"{STORE} st.release.sys.global.b32 [%d1], %r4;",
}
ACQUIRES = {
    "acquire": spin("ld.acquire.gpu.global.b32 %r5, [%d1];"),
    "fence": spin("ld.relaxed.gpu.global.b32 %r5, [%d1];", "fence.acq_rel.gpu;"),
    "membar": spin("ld.volatile.global.b32 %r5, [%d1];", "membar.gl;"),
    "atomic": spin("atom.acquire.gpu.global.or.b32 %r5, [%d1], 0;"),
}


@pytest.mark.parametrize("write", RELEASES)
@pytest.mark.parametrize("read", ACQUIRES)
def test_each_release_meets_each_acquire(write: str, read: str) -> None:
    assert verdicts(passing(RELEASES[write], ACQUIRES[read]), grid=2) == {""}


WRONG = {
    "relaxed write": (f"{STORE} st.relaxed.gpu.global.b32 [%d1], %r4;", ACQUIRES["acquire"], "relaxed"),
    "relaxed read": (RELEASES["release"], spin("ld.relaxed.gpu.global.b32 %r5, [%d1];"), "relaxed"),
    "relaxed both": (
        f"{STORE} st.relaxed.gpu.global.b32 [%d1], %r4;",
        spin("ld.relaxed.gpu.global.b32 %r5, [%d1];"),
        "relaxed",
    ),
    "fence after the flag": (
        f"{STORE} st.relaxed.gpu.global.b32 [%d1], %r4; fence.acq_rel.gpu;",
        ACQUIRES["fence"],
        "relaxed",
    ),
    "fence before the poll": (
        RELEASES["fence"],
        "fence.acq_rel.gpu;" + spin("ld.relaxed.gpu.global.b32 %r5, [%d1];"),
        "relaxed",
    ),
    "data after the flag": (f"st.release.gpu.global.b32 [%d1], %r4; {STORE}", ACQUIRES["acquire"], "race"),
    "release of the CTA": (f"{STORE} st.release.cta.global.b32 [%d1], %r4;", ACQUIRES["acquire"], "scope"),
    "acquire of the CTA": (RELEASES["release"], spin("ld.acquire.cta.global.b32 %r5, [%d1];"), "scope"),
    "fence of the CTA": (
        f"{STORE} fence.acq_rel.cta; st.relaxed.gpu.global.b32 [%d1], %r4;",
        ACQUIRES["acquire"],
        "scope",
    ),
    "weak flag": (f"{STORE} st.global.b32 [%d1], %r4;", ACQUIRES["acquire"], "weak-flag"),
    "weak poll": (RELEASES["release"], spin("ld.global.b32 %r5, [%d1];"), "weak-flag"),
    "half of the flag": (
        f"{STORE} mov.b64 %d5, 1; st.release.gpu.global.b64 [%d1], %d5;",
        ACQUIRES["acquire"],
        "mixed-size",
    ),
    "red does not acquire": (
        RELEASES["release"],
        spin("red.relaxed.gpu.global.add.u32 [%d1], 0; fence.acq_rel.gpu; mov.b32 %r5, 1;"),
        "race",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_found(name: str) -> None:
    write, read, rule = WRONG[name]
    found = verdicts(passing(write, read), grid=2)
    assert rule in found
    assert found <= {rule, "", "scope", "race"}


TO_A_PEER = "setp.eq.u32 %p1, %r9, 0;"


@pytest.mark.parametrize(
    ("release", "acquire", "rule"),
    [("sys", "sys", ""), ("gpu", "sys", "scope"), ("sys", "gpu", "scope"), ("gpu", "gpu", "scope")],
)
def test_between_ranks_only_system_scope_will_do(release: str, acquire: str, rule: str) -> None:
    write = f"{STORE} st.release.{release}.global.b32 [%d1], %r4;"
    read = spin(f"ld.acquire.{acquire}.global.b32 %r5, [%d1];")
    found = verdicts(passing(write, read, TO_A_PEER), ranks=2)
    assert rule in found
    assert found <= {rule, ""}


def test_a_third_thread_gets_what_the_second_acquired() -> None:
    chain = """
    @!%p0 bra END;
    setp.eq.u32 %p1, %r0, 0; @%p1 bra FIRST; setp.eq.u32 %p1, %r0, 1; @%p1 bra SECOND;
    S3: ld.acquire.gpu.global.b32 %r5, [%d1+8]; setp.ne.u32 %p2, %r5, 1; @%p2 bra S3;
    ld.global.b32 %r6, [%d0]; bra END;
    SECOND:
    S2: ld.{acquire}.gpu.global.b32 %r5, [%d1]; setp.ne.u32 %p2, %r5, 1; @%p2 bra S2;
    st.release.gpu.global.b32 [%d1+8], %r4; bra END;
    FIRST: st.global.b32 [%d0], %r4; st.release.gpu.global.b32 [%d1], %r4;
    END:
    """
    assert verdicts(chain.replace("{acquire}", "acquire"), grid=3) == {""}
    assert "relaxed" in verdicts(chain.replace("{acquire}", "relaxed"), grid=3)


def test_atomics_carry_earlier_releases_along() -> None:
    """A counter: the last of three to add may read what all have written (section 8.9.2)."""
    counter = """
    @!%p0 bra END;
    mul.wide.u32 %d5, %r0, 4; add.s64 %d6, %d0, %d5; st.global.b32 [%d6], %r4;
    atom.{order}.gpu.global.add.u32 %r5, [%d1], 1;
    setp.ne.u32 %p2, %r5, 2; @%p2 bra END;
    ld.global.b32 %r6, [%d0]; ld.global.b32 %r6, [%d0+4]; ld.global.b32 %r6, [%d0+8];
    END:
    """
    assert verdicts(counter.replace("{order}", "acq_rel"), grid=3) == {""}
    assert verdicts(counter.replace("{order}", "relaxed"), grid=3) == {"relaxed"}
    assert "relaxed" in verdicts(counter.replace("{order}", "acquire"), grid=3)


def test_a_fence_that_is_sequentially_consistent_orders_without_a_flag() -> None:
    """Of two that store, fence and load the other's strong word, both may not miss."""
    dekker = """
    @!%p0 bra END;
    mul.wide.u32 %d5, %r0, 8; add.s64 %d6, %d1, %d5;
    xor.b32 %r7, %r0, 1; mul.wide.u32 %d5, %r7, 8; add.s64 %d7, %d1, %d5;
    st.relaxed.gpu.global.b32 [%d6], %r4; fence.sc.gpu; ld.relaxed.gpu.global.b32 %r5, [%d7];
    END:
    """
    assert verdicts(dekker, grid=2) == {""}


@pytest.mark.parametrize(
    ("sync", "rule"), [("bar.warp.sync -1;", ""), ("", "race"), ("elect.sync %r7|%p3, -1;", "race")]
)
def test_lanes_are_threads(sync: str, rule: str) -> None:
    """Each lane stores, lane 0 raises the flag for all: that takes bar.warp.sync in between."""
    body = f"""
    setp.eq.u32 %p1, %r0, 0; @!%p1 bra READER;
    mul.wide.u32 %d5, %r1, 4; add.s64 %d6, %d0, %d5; st.global.b32 [%d6], %r4;
    {sync}
    @%p0 st.release.gpu.global.b32 [%d1], %r4;
    bra END;
    READER:
    SPIN: ld.acquire.gpu.global.b32 %r5, [%d1]; setp.ne.u32 %p2, %r5, 1; @%p2 bra SPIN;
    mul.wide.u32 %d5, %r1, 4; add.s64 %d6, %d0, %d5; ld.global.b32 %r6, [%d6];
    END:
    """
    assert rule in verdicts(body, grid=2)
    assert verdicts(body, grid=2) <= {rule, ""}


def test_one_lane_acquires_for_itself_alone() -> None:
    body = """
    setp.eq.u32 %p1, %r0, 0; @!%p1 bra READER;
    @%p0 st.global.b32 [%d0], %r4; @%p0 st.release.gpu.global.b32 [%d1], %r4; bra END;
    READER:
    @!%p0 bra ON;
    SPIN: ld.acquire.gpu.global.b32 %r5, [%d1]; setp.ne.u32 %p2, %r5, 1; @%p2 bra SPIN;
    ON: {sync}
    ld.global.b32 %r6, [%d0];
    END:
    """
    assert verdicts(body.replace("{sync}", "bar.warp.sync -1;"), grid=2) == {""}
    assert "race" in verdicts(body.replace("{sync}", ""), grid=2)


def test_a_launch_comes_after_the_one_before() -> None:
    body = "@%p0 ld.global.b32 %r6, [%d0]; @%p0 st.global.b32 [%d0], %r4;"
    assert verdicts(body, launches=3) == {""}
    assert "race" in verdicts(body, launches=3, ranks=2)


@pytest.mark.parametrize(("wait", "rule"), [("griddepcontrol.wait;", ""), ("", "race")])
def test_a_dependent_launch_comes_after_its_wait(wait: str, rule: str) -> None:
    """Even where the launch before happens to have ended when it begins."""
    body = f"{wait} @%p0 ld.global.b32 %r6, [%d0]; @%p0 st.global.b32 [%d0], %r4;"
    assert verdicts(body, launches=2, dependent=True) == {rule}


def test_strong_accesses_of_a_sufficient_scope_may_race() -> None:
    assert verdicts("@%p0 red.gpu.global.add.u32 [%d0], 1;", grid=4) == {""}
    assert "scope" in verdicts("@%p0 red.cta.global.add.u32 [%d0], 1;", grid=4)
    assert "scope" in verdicts("@%p0 red.gpu.global.add.u32 [%d0], 1;", ranks=2)
    assert verdicts("@%p0 red.sys.global.add.u32 [%d0], 1;", ranks=2) == {""}


@pytest.mark.parametrize(
    ("order", "rule"), [("acq_rel.gpu", ""), ("relaxed.gpu", "strong-race"), ("acq_rel.cta", "scope")]
)
def test_the_last_to_leave_changes_what_all_have_read(order: str, rule: str) -> None:
    """All accesses are strong, so nothing is a data race; yet the load may return the last one's value."""
    body = f"""
    @!%p0 bra END;
    ld.relaxed.sys.global.b32 %r6, [%d0];
    atom.{order}.global.add.u32 %r5, [%d1], 1; setp.ne.u32 %p2, %r5, 1; @%p2 bra END;
    st.relaxed.gpu.global.b32 [%d0], %r4;
    END:
    """
    found = verdicts(body, grid=2)
    assert rule in found
    assert found <= {rule, "scope"}


@pytest.mark.parametrize(
    ("lock", "unlock", "rule"),
    [
        ("acquire.gpu", "release.gpu", ""),
        ("relaxed.gpu", "release.gpu", "strong-race"),
        ("acquire.gpu", "relaxed.gpu", "strong-race"),
        ("acquire.gpu", "release.cta", "scope"),
        ("acquire.cta", "release.gpu", "scope"),
    ],
)
def test_a_lock_orders_the_strong_writes_that_it_guards(lock: str, unlock: str, rule: str) -> None:
    body = f"""
    @!%p0 bra END;
    LOCK: atom.{lock}.global.cas.b32 %r5, [%d1], 0, 1; setp.ne.u32 %p2, %r5, 0; @%p2 bra LOCK;
    st.relaxed.gpu.global.b32 [%d0], %r4;
    st.{unlock}.global.b32 [%d1], 0;
    END:
    """
    found = verdicts(body, grid=2)
    assert rule in found
    assert found <= {rule, ""}
