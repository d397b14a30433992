# SPDX-License-Identifier: Apache-2.0
"""Counters and traces, on a program whose numbers are known by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dsv4_ptx_emulator.errors import ArgumentError, DeadlockError
from dsv4_ptx_emulator.report.counters import summary_table
from dsv4_ptx_emulator.runtime.system import System

MakeSystem = Callable[..., System]

# Lane i copies a word from `from` to `to`; then lane 0 releases a flag at `flag` and, where `wait` is not 0,
# polls the word there until it is 1.
PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry pass_on(.param .u64 from, .param .u64 to, .param .u64 flag, .param .u64 wait)
{
    .reg .pred %p<4>;
    .reg .b32 %r<5>;
    .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    ld.param.u64 %rd3, [flag];
    ld.param.u64 %rd4, [wait];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd5, %r1, 4;
    add.s64 %rd6, %rd1, %rd5;
    add.s64 %rd7, %rd2, %rd5;
    ld.global.u32 %r2, [%rd6];
    st.global.u32 [%rd7], %r2;
    bar.sync 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    mov.u32 %r3, 1;
    st.release.sys.global.u32 [%rd3], %r3;
    setp.eq.u64 %p2, %rd4, 0;
    @%p2 bra DONE;
AGAIN:
    ld.acquire.sys.global.u32 %r4, [%rd4];
    setp.ne.u32 %p3, %r4, 1;
    @%p3 bra AGAIN;
DONE:
    ret;
}
"""
LANES = 32


def exchange(system: System) -> None:
    """Each of two ranks copies its 32 words to the other, raises a flag there and waits for its own."""
    words = [np.arange(LANES, dtype=np.uint32) + 100 * rank for rank in range(2)]
    mail = [np.zeros(LANES, np.uint32) for _ in range(2)]
    flags = [np.zeros(1, np.uint32) for _ in range(2)]
    for rank, device in enumerate(system.devices):
        system.memory.lease(words[rank], home=rank)
        device.share(mail[rank])
        device.share(flags[rank])
    for rank in range(2):
        targets = (words[rank], mail[1 - rank], flags[1 - rank], flags[rank])
        parameters = b"".join(each.ctypes.data.to_bytes(8, "little") for each in targets)
        system.emulator.launch(
            PTX, "pass_on", grid=(1, 1, 1), block=(LANES, 1, 1), parameters=parameters, rank=rank
        )
    system.run()
    assert [each.tolist() for each in mail] == [words[1].tolist(), words[0].tolist()]


def test_counts(emulator: MakeSystem) -> None:
    system = emulator(ranks=2)
    exchange(system)
    # 32 words and a flag each way; the polled flag is the poller's own.
    sent = LANES * 4 + 4
    assert system.link_bytes() == {(0, 1): sent, (1, 0): sent}
    for rank in range(2):
        counts = system.counters.launches[rank]
        assert (counts.rank, counts.ctas, counts.flags, counts.finished) == (rank, 1, 1, True)
        assert counts.polls >= 1
        # 17 instructions up to the first poll, 3 for each poll, and the return.
        assert counts.instructions >= 17 + 3 + 1
    assert json.loads(json.dumps(system.as_dict()))["link_bytes"] == {"0->1": sent, "1->0": sent}


def test_the_same_seed_is_the_same_run(tmp_path: Path, emulator: MakeSystem) -> None:
    written = []
    for name in ("a", "b"):
        system = emulator(ranks=2, seed=11, trace=True)
        exchange(system)
        system.write_trace(tmp_path / name)
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
    assert len({tuple_of_polls(seed, emulator) for seed in range(8)}) > 1


def tuple_of_polls(seed: int, emulator: MakeSystem) -> tuple[int, ...]:
    system = emulator(ranks=2, seed=seed)
    exchange(system)
    return tuple(counts.polls for counts in system.counters.launches.values())


def test_the_table_names_what_it_counts(emulator: MakeSystem) -> None:
    system = emulator(ranks=2)
    assert system.summary().startswith("launch")
    exchange(system)
    lines = system.summary().splitlines()
    assert lines[0].split()[:3] == ["launch", "rank", "kernel"]
    assert [line.split()[1] for line in lines[1:3]] == ["0", "1"]
    assert lines[-1].split() == ["rank", "1", str(LANES * 4 + 4), "-"]
    assert len(summary_table([]).splitlines()) == 1


def test_the_trace_of_a_deadlock_shows_who_waits(tmp_path: Path, emulator: MakeSystem) -> None:
    text = PTX.replace("setp.ne.u32 %p1, %r1, 0;", "bar.sync 1, 64;\n    setp.ne.u32 %p1, %r1, 0;")
    system = emulator(trace=True)
    data = np.zeros(LANES, np.uint32)
    system.memory.lease(data, home=0)
    parameters = b"".join(each.to_bytes(8, "little") for each in [data.ctypes.data] * 3 + [0])
    system.emulator.launch(text, "pass_on", grid=(1, 1, 1), block=(LANES, 1, 1), parameters=parameters)
    with pytest.raises(DeadlockError) as caught:
        system.run()
    system.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    (wait,) = [event for event in events if event.get("args", {}).get("line")]
    assert wait["name"] in caught.value.waiting[0]
    assert wait["args"]["line"] == text[: text.index("bar.sync 1")].count("\n") + 1
    assert any("pass_on" in event["name"] for event in events)


def test_the_trace_is_one_that_chrome_reads(tmp_path: Path, emulator: MakeSystem) -> None:
    system = emulator(ranks=2, trace=True)
    exchange(system)
    path = tmp_path / "trace.json"
    system.write_trace(path)
    document = json.loads(path.read_text(encoding="utf-8"))
    events = document["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M"}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(span["pid"], span["tid"]) for span in spans} <= named
    assert all(span["dur"] >= 1 and 0 <= span["ts"] <= system.steps for span in spans)
    launches = [span for span in spans if "pass_on" in span["name"]]
    assert sorted(span["pid"] for span in launches) == [0, 1]
    assert document["otherData"]["dropped"] == 0
    with pytest.raises(ArgumentError, match="trace"):
        emulator().write_trace(path)
