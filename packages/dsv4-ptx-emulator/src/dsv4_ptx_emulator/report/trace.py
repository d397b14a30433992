# SPDX-License-Identifier: Apache-2.0
"""The schedule as a Chrome trace (chrome://tracing, Perfetto): who ran when, and who waited for what.

Contract: times are executed instructions of the whole machine, shown as microseconds because the format knows
nothing else. They say what came before what under this seed and nothing about a GPU's time.

A rank is a process, a warp or an asynchronous engine a thread. Turns are short and many, so successive turns
of one agent are one span, which ends when the agent begins to wait; the wait is a span of its own, with its
reason and the line of the PTX.

Format: "Trace Event Format", complete events (ph "X") and metadata (ph "M").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4_ptx_emulator.machine.observer import Access, Observer
from dsv4_ptx_emulator.machine.warp import Warp

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.launch import Launch
    from dsv4_ptx_emulator.machine.machine import Machine
    from dsv4_ptx_emulator.machine.outcome import Wait

GAP = 20_000
"""Steps of others that a warp's span may contain: it ends when the warp waits."""
ENGINE_GAP = 500
"""The same for an asynchronous engine, whose waits nobody tells."""
MAX_EVENTS = 200_000
"""Spans kept; later ones are only counted, so that a long run does not fill the memory."""
LAUNCHES = 0
"""Thread number of a rank's launches; agents count from 1."""


class Trace(Observer):
    """Records a machine's schedule.

    Args:
        machine: Whose steps are the time.

    Attributes:
        dropped: Spans beyond `MAX_EVENTS`.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._events: list[dict[str, Any]] = []
        self._threads: dict[tuple[int, str], int] = {}
        self._open: dict[int, tuple[Any, str, int, int]] = {}
        self._waits: dict[int, tuple[Any, str, int, int]] = {}
        self._begun: dict[int, tuple[Launch, int]] = {}
        self.dropped = 0

    def on_launch_begin(self, launch: Launch) -> None:
        """Remember when."""
        self._begun[launch.number] = (launch, self._machine.scheduler.steps)

    def on_launch_end(self, launch: Launch) -> None:
        """Close the spans of its warps, add the launch's."""
        for key, (agent, *_) in list(self._open.items()):
            cta = getattr(agent, "cta", None)
            if cta is not None and cta.launch is launch:
                self._close(key)
        self._close_launch(launch.number)

    def on_quantum(self, agent: Any, first_step: int, steps: int) -> None:
        """Prolong the agent's span, or begin another."""
        key = id(agent)
        end = first_step + steps
        waited = key in self._waits
        if waited:
            self._close_wait(key, first_step)
        opened = self._open.get(key)
        gap = GAP if isinstance(agent, Warp) else ENGINE_GAP
        if opened is not None and opened[0] is agent and first_step - opened[3] <= gap and not waited:
            self._open[key] = (agent, opened[1], opened[2], end)
            return
        if opened is not None:
            self._close(key)
        self._open[key] = (agent, _label(agent), first_step, end)

    def on_access(self, access: Access) -> None:
        """What an asynchronous engine reads and writes is all that is seen of its turns."""
        if not isinstance(access.agent, Warp):
            self.on_quantum(access.agent, self._machine.scheduler.steps, 1)

    def on_block(self, warp: Warp, wait: Wait, line: int) -> None:
        """The span ends at this turn's end; the wait begins."""
        self._waits[id(warp)] = (warp, wait.text, line, self._machine.scheduler.steps)

    def write(self, path: Path) -> int:
        """Write the trace as JSON; returns the number of spans.

        What is still running or waiting, as after an error, is written up to now.
        """
        now = self._machine.scheduler.steps
        for key in list(self._open):
            self._close(key)
        for key in list(self._waits):
            self._close_wait(key, now)
        for number in list(self._begun):
            self._close_launch(number)
        names: list[dict[str, Any]] = []
        for rank in sorted({rank for rank, _ in self._threads} | {event["pid"] for event in self._events}):
            names.append(_metadata("process_name", rank, 0, f"rank {rank}"))
            names.append(_metadata("thread_name", rank, LAUNCHES, "launches"))
        names += [
            _metadata("thread_name", rank, number, name) for (rank, name), number in self._threads.items()
        ]
        note = "1 us is 1 executed instruction of the whole machine; this is an order, not a time"
        other = {"unit": note, "dropped": self.dropped}
        path.write_text(
            json.dumps({"traceEvents": names + self._events, "otherData": other}), encoding="utf-8"
        )
        return len(self._events)

    def _close_launch(self, number: int) -> None:
        launch, begun = self._begun.pop(number)
        detail = {"grid": launch.grid, "block": launch.block, "cluster": launch.cluster}
        name = f"{number}: {launch.kernel.name}"
        self._add(launch.rank, LAUNCHES, name, begun, self._machine.scheduler.steps, detail)

    def _close_wait(self, key: int, end: int) -> None:
        warp, text, line, since = self._waits.pop(key)
        self._add(warp.rank, self._thread(warp.rank, _label(warp)), text, since, end, {"line": line})

    def _close(self, key: int) -> None:
        agent, label, begun, end = self._open.pop(key)
        self._add(agent.rank, self._thread(agent.rank, label), "run", begun, end, {})

    def _thread(self, rank: int, name: str) -> int:
        return self._threads.setdefault((rank, name), len(self._threads) + 1)

    def _add(self, rank: int, thread: int, name: str, begun: int, end: int, detail: dict[str, Any]) -> None:
        if len(self._events) >= MAX_EVENTS:
            self.dropped += 1
            return
        span = {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": begun, "dur": max(end - begun, 1)}
        self._events.append(span | ({"args": detail} if detail else {}))


def _label(agent: Any) -> str:
    """The agent's name without its rank, which is the process."""
    cta = getattr(agent, "cta", None)
    if isinstance(agent, Warp):
        return f"CTA {agent.cta.index}, warp {agent.index}"
    kind = type(agent).__name__
    return f"CTA {cta.index}, {kind}" if cta is not None else kind


def _metadata(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": {"name": name}}
