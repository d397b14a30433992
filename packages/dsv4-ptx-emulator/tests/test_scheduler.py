# SPDX-License-Identifier: Apache-2.0
"""Interleaving: what the seed decides, what it cannot, waiting, polling, deadlocks, streams."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.errors import DeadlockError, StepLimitError
from dsv4_ptx_emulator.machine.launch import Launch
from dsv4_ptx_emulator.machine.observer import Observer
from dsv4_ptx_emulator.machine.scheduler import Uneven
from numpy.typing import NDArray
from probe import kernel, run

Words = NDArray[np.uint32]
TICKET = """ld.param.b64 %d0, [p0]; mov.u32 %r9, %ctaid.x; elect.sync %r2|%p1, -1; @!%p1 ret;
atom.global.add.u32 %r1, [%d0], 1; mul.wide.u32 %d1, %r9, 4; add.s64 %d2, %d0, %d1;
st.global.b32 [%d2+4], %r1;"""


def tickets(seed: int) -> list[int]:
    data = np.zeros(17, np.uint32)
    run(TICKET, data, grid=16, seed=seed)
    assert data[0] == 16
    return [int(ticket) for ticket in data[1:]]


def test_the_seed_decides_and_replays() -> None:
    first = [tickets(seed) for seed in range(6)]
    assert all(sorted(order) == list(range(16)) for order in first)
    assert len({tuple(order) for order in first}) > 3
    assert [tickets(seed) for seed in range(6)] == first


def tickets_of_two(seed: int, uneven: Uneven) -> Words:
    """Tickets of eight warps of one CTA, then of eight of another."""
    data = np.zeros(17, np.uint32)
    place = "mov.u32 %r3, %tid.x; shr.u32 %r3, %r3, 5; mad.lo.u32 %r9, %r9, 8, %r3;"
    body = TICKET.replace("elect.sync", f"{place} elect.sync", 1)
    run(body, data, threads=256, grid=2, seed=seed, uneven=uneven)
    return data[1:]


def test_ctas_may_run_apart() -> None:
    even, uneven = (
        {int((tickets_of_two(seed, mode)[:8] < 8).sum()) for seed in range(12)}
        for mode in (Uneven.NOBODY, Uneven.CTAS)
    )
    assert not {0, 8} & even
    assert {0, 8} <= uneven


def test_one_warp_of_each_cta_may_stay_behind() -> None:
    behind = set()
    for seed in range(40):
        last = np.flatnonzero(tickets_of_two(seed, Uneven.WARPS) >= 14)
        assert sorted(last // 8) == [0, 1]
        behind |= {int(warp) for warp in last}
    assert behind == set(range(16))


def test_a_lone_warp_runs() -> None:
    data = np.zeros(17, np.uint32)
    run(TICKET, data, grid=16, uneven=Uneven.WARPS)
    assert data[0] == 16


class Quanta(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def on_quantum(self, agent: Any, first_step: int, steps: int) -> None:
        self.seen.append((agent.describe(), first_step, steps))


def launch(
    emulator: Emulator,
    body: str,
    buffers: Sequence[NDArray[Any]],
    *,
    rank: int = 0,
    grid: int = 1,
    **options: Any,
) -> Launch:
    text = kernel(body, params=len(buffers))
    parameters = b"".join(struct.pack("<Q", buffer.ctypes.data) for buffer in buffers)
    return emulator.launch(
        text, "probe", grid=(grid, 1, 1), block=(32, 1, 1), parameters=parameters, rank=rank, **options
    )


def machine(buffers: Sequence[NDArray[Any]], **options: Any) -> Emulator:
    emulator = Emulator(**options)
    for buffer in buffers:
        emulator.register(buffer.ctypes.data, buffer.nbytes)
    return emulator


def test_replay_is_the_same_step_by_step() -> None:
    traces = []
    for _ in range(2):
        data = np.zeros(17, np.uint32)
        emulator = machine([data], seed=3)
        quanta = Quanta()
        emulator.attach(quanta)
        launch(emulator, TICKET, [data], grid=16)
        emulator.run()
        traces.append(quanta.seen)
    assert traces[0] == traces[1]
    assert sum(steps for _, _, steps in traces[0]) == emulator.steps


RAISE = "ld.param.b64 %d0, [p0]; st.relaxed.sys.global.b64 [%d0+8], 5; st.release.sys.global.b64 [%d0], 1;"
AWAIT = """ld.param.b64 %d0, [p0]; LOOP: ld.acquire.sys.global.b64 %d1, [%d0];
ld.relaxed.sys.global.b64 %d3, [%d0+128];
setp.eq.b64 %p1, %d1, 0; @%p1 bra LOOP; ld.global.b64 %d2, [%d0+8]; add.s64 %d2, %d2, 1;
st.global.b64 [%d0+16], %d2;"""


def test_ranks_wait_for_each_other() -> None:
    """Polls end when the flag is raised, however long the other rank takes, and cost little until then."""
    for seed in range(8):
        data = np.zeros(32, np.uint64)
        emulator = machine([data], ranks=2, seed=seed)
        launch(emulator, AWAIT, [data], rank=0)
        slow = (
            "mov.b32 %r1, 0; S: add.s32 %r1, %r1, 1; nanosleep.u32 1; setp.lt.u32 %p1, %r1, 3000; @%p1 bra S;"
        )
        launch(emulator, slow + RAISE, [data], rank=1)
        emulator.run()
        assert data[:3].tolist() == [1, 5, 6]
        assert emulator.steps < 3000 * 4 + 1000


@pytest.mark.parametrize("places", [(128, 0), (0, 128)])
def test_a_poll_ends_soon_after_the_flag_is_raised(places: tuple[int, int]) -> None:
    """Not only when everybody else is done; whichever of several polled words changes, at whatever moment."""
    wait = f"""ld.param.b64 %d0, [p0];
    LOOP: ld.relaxed.sys.global.b64 %d1, [%d0+{places[0]}]; ld.acquire.sys.global.b64 %d2, [%d0+{places[1]}];
    or.b64 %d1, %d1, %d2; setp.eq.b64 %p1, %d1, 0; @%p1 bra LOOP; st.global.b64 [%d0+16], 1;"""
    for seed in range(60):
        raised = seed % 6 if seed < 50 else 200
        look = f"""ld.param.b64 %d0, [p0]; mov.b32 %r1, 0; mov.b32 %r2, 0;
        S: nanosleep.u32 1; setp.eq.u32 %p2, %r1, {raised}; @%p2 st.release.sys.global.b64 [%d0], 1;
        ld.global.b64 %d1, [%d0+16]; setp.ne.b64 %p3, %d1, 0; @%p3 bra SEEN;
        add.s32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 1000; @%p1 bra S; ret;
        SEEN: st.global.b32 [%d0+24], %r1;"""
        data = np.zeros(32, np.uint64)
        emulator = machine([data], ranks=2, seed=seed)
        launch(emulator, wait, [data], rank=0)
        launch(emulator, look, [data], rank=1)
        emulator.run()
        assert raised <= data[3] < raised + 50
        assert data[2] == 1


def test_a_flag_that_nobody_raises_is_a_deadlock() -> None:
    data = np.zeros(32, np.uint64)
    emulator = machine([data])
    launch(emulator, AWAIT, [data])
    with pytest.raises(DeadlockError) as caught:
        emulator.run()
    (line,) = caught.value.waiting
    assert "rank 0, CTA (0, 0, 0), warp 0, line 1" in line
    assert "polls" in line
    assert emulator.steps < 10_000


def test_a_deadline_ends_a_poll() -> None:
    """Nothing else can happen, so the clock runs on until the program gives up."""
    data = np.zeros(32, np.uint64)
    emulator = machine([data])
    body = """ld.param.b64 %d0, [p0]; mov.u64 %d5, %globaltimer; add.s64 %d5, %d5, 20000000000;
    LOOP: ld.acquire.sys.global.b64 %d1, [%d0]; mov.u64 %d6, %globaltimer; setp.ge.u64 %p2, %d6, %d5;
    @%p2 bra LATE;
    setp.eq.b64 %p1, %d1, 0; @%p1 bra LOOP; LATE: st.global.b64 [%d0+8], 9;"""
    launch(emulator, body, [data])
    emulator.run()
    assert data[1] == 9
    assert emulator.steps < 10_000


def test_lanes_of_a_warp_wait_for_each_other() -> None:
    """Independent thread scheduling: a lane may spin for another of its warp, on either side of a branch."""
    for condition in ("lt", "ge"):
        data = np.zeros(32, np.uint64)
        emulator = machine([data])
        body = f"""ld.param.b64 %d0, [p0]; mov.u32 %r1, %laneid; setp.{condition}.u32 %p1, %r1, 3;
            @%p1 bra SPIN;
        st.release.gpu.global.b64 [%d0], 1; bra OUT;
        SPIN: ld.acquire.gpu.global.b64 %d1, [%d0]; setp.eq.b64 %p2, %d1, 0; @%p2 bra SPIN;
        st.global.b64 [%d0+8], 1; OUT:"""
        launch(emulator, body, [data])
        emulator.run()
        assert data[:2].tolist() == [1, 1]
        data[:] = 0
        body = f"""ld.param.b64 %d0, [p0]; mov.u32 %r1, %laneid; setp.{condition}.u32 %p1, %r1, 3;
            @%p1 bra SET;
        SPIN: ld.acquire.gpu.global.b64 %d1, [%d0]; setp.eq.b64 %p2, %d1, 0; @%p2 bra SPIN;
        st.global.b64 [%d0+8], 1; bra OUT; SET: st.release.gpu.global.b64 [%d0], 1; OUT:"""
        launch(emulator, body, [data])
        emulator.run()
        assert data[:2].tolist() == [1, 1]


def test_a_lock_that_lanes_of_a_warp_contend_for() -> None:
    """compare-and-swap spins are no polls: the lanes that spin must not starve the one with the lock."""
    data = np.zeros(32, np.uint32)
    emulator = machine([data])
    body = """ld.param.b64 %d0, [p0];
    TRY: atom.acquire.gpu.global.cas.b32 %r1, [%d0], 0, 1; setp.ne.b32 %p1, %r1, 0; @%p1 bra TRY;
    ld.relaxed.gpu.global.b32 %r2, [%d0+4]; add.s32 %r2, %r2, 1; st.relaxed.gpu.global.b32 [%d0+4], %r2;
    st.release.gpu.global.b32 [%d0], 0;"""
    launch(emulator, body, [data], grid=3)
    emulator.run()
    assert data[:2].tolist() == [0, 96]


def test_step_limit_says_what_everybody_does() -> None:
    data = np.zeros(1, np.uint32)
    emulator = machine([data], max_steps=5000)
    launch(emulator, "LOOP: bra LOOP;", [data])
    with pytest.raises(StepLimitError, match=r"(?s)steps executed.*warp 0, line \d+: bra"):
        emulator.run()


def test_barrier_deadlock_names_the_barrier() -> None:
    with pytest.raises(DeadlockError) as caught:
        run(
            "mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 32; @%p1 bra A; bar.sync 2; ret; A: bar.sync 3;",
            threads=64,
        )
    assert len(caught.value.waiting) == 2
    assert any("barrier 2" in line and "warp 1" in line for line in caught.value.waiting)
    assert any("barrier 3" in line and "warp 0" in line for line in caught.value.waiting)


STEP = """ld.param.b64 %d0, [p0]; elect.sync %r2|%p1, -1; @!%p1 ret; ld.global.b32 %r1, [%d0];
mul.lo.s32 %r1, %r1, {by};
add.s32 %r1, %r1, {plus}; st.global.b32 [%d0], %r1;"""


def test_streams_keep_their_order_and_ranks_overlap() -> None:
    order = set()
    for seed in range(6):
        data = [np.ones(1, np.uint32) for _ in range(2)]
        emulator = machine(data, ranks=2, seed=seed)
        ends: list[int] = []

        class Ends(Observer):
            def on_launch_end(self, launch: Launch, ends: list[int] = ends) -> None:
                ends.append(launch.number)

        emulator.attach(Ends())
        for by, plus in ((3, 1), (5, 2), (7, 0)):
            for rank in range(2):
                launch(emulator, STEP.format(by=by, plus=plus), [data[rank]], rank=rank, stream=4)
        emulator.run()
        assert [int(x[0]) for x in data] == [((1 * 3 + 1) * 5 + 2) * 7] * 2
        assert [n for n in ends if n % 2 == 0] == [0, 2, 4]
        assert [n for n in ends if n % 2 == 1] == [1, 3, 5]
        order.add(tuple(ends))
    assert len(order) > 1


FIRST = """ld.param.b64 %d0, [p0]; griddepcontrol.launch_dependents; mov.b32 %r1, 0;
S: add.s32 %r1, %r1, 1; nanosleep.u32 1; setp.lt.u32 %p1, %r1, 200; @%p1 bra S; st.global.b32 [%d0], 1;"""
SECOND = """ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1]; ld.global.b32 %r1, [%d0];
st.global.b32 [%d1], %r1;
griddepcontrol.wait; ld.global.b32 %r2, [%d0]; st.global.b32 [%d1+4], %r2;"""


def test_programmatic_dependent_launch() -> None:
    early = set()
    for seed in range(10):
        flag, seen = np.zeros(1, np.uint32), np.zeros(2, np.uint32)
        emulator = machine([flag, seen], seed=seed)
        launch(emulator, FIRST, [flag], grid=2)
        launch(emulator, SECOND, [flag, seen], dependent=True)
        emulator.run()
        assert seen[1] == 1, "what precedes griddepcontrol.wait may come early, what follows may not"
        early.add(int(seen[0]))
    assert 0 in early
    flag[:], seen[:] = 0, 0
    launch(emulator, FIRST, [flag], grid=2)
    launch(emulator, SECOND, [flag, seen])
    emulator.run()
    assert seen.tolist() == [1, 1], "without the attribute a launch waits for the one before"


def test_a_dependent_launch_waits_for_every_cta_to_allow_it() -> None:
    late = """ld.param.b64 %d0, [p0]; mov.u32 %r9, %ctaid.x; setp.eq.u32 %p2, %r9, 0; @%p2 bra ALLOW;
    mov.b32 %r1, 0;
    S: add.s32 %r1, %r1, 1; nanosleep.u32 1; setp.lt.u32 %p1, %r1, 100; @%p1 bra S; st.global.b32 [%d0], 1;
    ALLOW: griddepcontrol.launch_dependents;"""
    for seed in range(5):
        flag, seen = np.zeros(1, np.uint32), np.zeros(2, np.uint32)
        emulator = machine([flag, seen], seed=seed)
        launch(emulator, late, [flag], grid=2)
        launch(emulator, SECOND, [flag, seen], dependent=True)
        emulator.run()
        assert seen.tolist() == [1, 1]


def test_lanes_that_diverged_run_together_again() -> None:
    """The lowest pc runs first, so what follows an if or a loop is executed once and not once per group."""
    data = np.zeros(1, np.uint32)
    tail = "nanosleep.u32 1;" * 300
    body = """mov.u32 %r1, %laneid; mov.b32 %r2, 0; setp.lt.u32 %p1, %r1, 7;
    @%p1 bra ELSE; add.s32 %r3, %r1, 1; bra JOIN;
    ELSE: add.s32 %r3, %r1, 2; JOIN: add.s32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, %r1; @%p2 bra JOIN;"""
    emulator = machine([data])
    launch(emulator, body + tail, [data])
    emulator.run()
    assert emulator.steps < 300 + 32 * 3 + 20


def test_more_ctas_than_fit_take_turns() -> None:
    data = np.zeros(401, np.uint32)
    emulator = run(TICKET, data, grid=400, shared=200 * 1024)
    assert data[0] == 400
    assert not emulator.machine.launches


def test_a_grid_that_needs_all_of_its_ctas_at_once() -> None:
    """A grid-wide barrier works as long as the grid fits, and is reported when it does not."""
    body = """ld.param.b64 %d0, [p0]; elect.sync %r2|%p1, -1; @!%p1 ret; mov.u32 %r3, %nctaid.x;
    atom.acq_rel.gpu.global.add.u32 %r1, [%d0], 1;
    LOOP: ld.acquire.gpu.global.b32 %r1, [%d0]; setp.lt.u32 %p2, %r1, %r3; @%p2 bra LOOP;"""
    for grid, fits in ((132, True), (133, False)):
        data = np.zeros(1, np.uint32)
        if fits:
            run(body, data, grid=grid, shared=200 * 1024)
        else:
            with pytest.raises(DeadlockError, match="polls"):
                run(body, data, grid=grid, shared=200 * 1024)
        assert data[0] == 132
