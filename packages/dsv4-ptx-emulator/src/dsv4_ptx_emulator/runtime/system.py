# SPDX-License-Identifier: Apache-2.0
"""Emulated devices for the ranks of one process: memory, streams, launches, graphs, and what it all did.

    system = System(ranks=2)
    function = system.compile(host_function, *example_arguments)
    for device in system.devices:
        device.stream().launch(function, (x.data_ptr(), 128), memory=[x])
    system.run()

Contract: a launch is queued on its rank's stream and executed by `run`, together with everything that was
queued on any rank. The memory of a launch is leased (see memory.py) from the launch to its end, so a tensor
that its caller has dropped lives on, and an access elsewhere is reported. Streams keep their order; ranks and
streams interleave as the seed says.

A launch that the emulator finds at fault ends the emulation: `run` raises what was found, each device's next
`synchronize` raises it once more (every rank of a program hears of it), further launches are refused.

A process may have any number of systems. Threads may launch on one; `run` holds them off. What threads launch
after `run` began comes too late for it, so ranks that are threads meet before they synchronise.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.errors import ArgumentError
from dsv4_ptx_emulator.machine.launch import Launch
from dsv4_ptx_emulator.machine.limits import check_launch, limits_of
from dsv4_ptx_emulator.machine.observer import Observer
from dsv4_ptx_emulator.report.counters import Counters, summary_table
from dsv4_ptx_emulator.report.trace import Trace
from dsv4_ptx_emulator.runtime.device import Device, Queued
from dsv4_ptx_emulator.runtime.errors import RuntimeLibraryError
from dsv4_ptx_emulator.runtime.host import HostTable, host_table
from dsv4_ptx_emulator.runtime.memory import HostMemory, Lease
from dsv4_ptx_emulator.runtime.multicast import MulticastMapping

DEFAULT_PROCESSORS = 4
"""SMs that a device claims to have: persistent kernels start as many CTAs, and few are faster to emulate."""


@dataclass
class Graph:
    """Launches that were captured, to be replayed; made by `System.capture`.

    The tensors that the launches were given stay alive as long as the graph.
    """

    system: System
    launches: list[Queued] = field(default_factory=list)

    def replay(self) -> None:
        """Queue all launches once more, each on its rank and stream, in the order of their capture."""
        for queued in self.launches:
            self.system.enqueue(queued)


class System:
    """P emulated devices.

    Args:
        ranks: Number of devices P, at least 1.
        arch: Architecture to compile for and to emulate, such as "sm_90a".
        seed: Decides every interleaving; the same seed replays the same run.
        processors: SMs that each device claims to have, at most the architecture's.
        trace: Whether to record the schedule for `write_trace`.
        options: Further keywords of `Emulator`.

    Attributes:
        emulator: The emulator behind it.
        devices: One for each rank.
        memory: Host memory that kernels may touch.
        counters: What each launch did.
        failure: What ended the emulation, or None.
    """

    def __init__(
        self,
        ranks: int,
        *,
        arch: str = "sm_90a",
        seed: int = 0,
        processors: int = DEFAULT_PROCESSORS,
        trace: bool = False,
        **options: Any,
    ) -> None:
        if ranks < 1:
            raise ArgumentError("ranks", ranks, "at least 1")
        self.arch = arch
        self.limits = limits_of(arch)
        if not 1 <= processors <= self.limits.processors:
            raise ArgumentError("processors", processors, f"1 to {self.limits.processors}")
        self.processors = processors
        self.emulator = Emulator(arch, ranks=ranks, seed=seed, **options)
        machine = self.emulator.machine
        self.memory = HostMemory(machine.global_memory)
        self.counters = Counters()
        self.failure: Exception | None = None
        self.devices = tuple(Device(self, rank) for rank in range(ranks))
        self._lock = threading.RLock()
        self._queue: list[tuple[Queued, list[Lease]]] = []
        self._leases: dict[int, list[Lease]] = {}
        self._capture: Graph | None = None
        self._trace = Trace(machine) if trace else None
        machine.attach(self.counters)
        machine.attach(_Ends(self))
        if self._trace is not None:
            machine.attach(self._trace)

    @property
    def table(self) -> HostTable:
        """The process's table of modules and kernels; builds the stand-in library at first use."""
        return host_table()

    @property
    def accelerators(self) -> Sequence[Device]:
        """The devices, by the name that groups of virtual ranks know them by."""
        return self.devices

    def obstacle(self) -> str:
        """What keeps compiled host functions from being launched here; empty if nothing does."""
        try:
            with self.compiling():
                return ""
        except RuntimeLibraryError as error:
            return str(error)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """The CuTe DSL compiles for these devices inside of this context."""
        with self.table.compiling(self.arch):
            yield

    def compile(self, function: Any, *arguments: Any, options: str = "") -> Any:
        """`cute.compile(function, *arguments, options=options)` for these devices."""
        with self.compiling():
            import cutlass.cute as cute

            return cute.compile(function, *arguments, options=options)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Launches inside of this context, from any thread, go to a graph instead of a queue."""
        with self._lock:
            if self._capture is not None:
                raise RuntimeLibraryError("a capture is going on")
            graph = self._capture = Graph(self)
        try:
            yield graph
        finally:
            self._capture = None

    def enqueue(self, queued: Queued) -> None:
        """Put a launch at the end of its stream, or into the graph that is being captured.

        Raises:
            EmulatorError: The launch exceeds the architecture's limits, or uses an unsupported instruction.
        """
        with self._lock:
            self.require_alive()
            if self._capture is not None:
                self._capture.launches.append(queued)
                return
            launch = queued.launch
            program = self.emulator.program(launch.text, launch.entry, queued.rank)
            shared_bytes = program.static_shared + launch.shared_bytes
            check_launch(self.limits, program.kernel, launch.grid, launch.block, launch.cluster, shared_bytes)
            leases = [self.memory.lease(each, home=queued.rank) for each in queued.memory]
            self._queue.append((queued, leases))

    @property
    def queued(self) -> tuple[Queued, ...]:
        """Launches that wait for `run`, in the order in which they came."""
        return tuple(queued for queued, _ in self._queue)

    @property
    def pending(self) -> int:
        """Launches that are queued and not executed yet."""
        return len(self._queue) + len(self.emulator.machine.launches)

    def run(self) -> None:
        """Execute everything that is queued.

        Raises:
            EmulatorError: What the emulator found; it ends the emulation.
        """
        with self._lock:
            if self.failure is not None:
                raise self.failure
            try:
                self._start()
                self.emulator.run()
            except Exception as error:
                self.failure = error
                for number in list(self._leases):
                    self.launch_ended(number)
                for _, leases in self._queue:
                    self._give_back(leases)
                self._queue.clear()
                raise

    def _start(self) -> None:
        """Hand the queue to the emulator.

        By rank, so that ranks which are threads get the same run whichever of them launched first.
        """
        queue = sorted(self._queue, key=lambda entry: entry[0].rank)
        self._queue.clear()
        for queued, leases in queue:
            launch = queued.launch
            made = self.emulator.launch(
                launch.text,
                launch.entry,
                grid=launch.grid,
                block=launch.block,
                cluster=launch.cluster,
                shared_bytes=launch.shared_bytes,
                parameters=launch.parameters,
                rank=queued.rank,
                stream=launch.stream,
                dependent=launch.pdl,
            )
            self._leases[made.number] = leases

    def require_alive(self) -> None:
        """Refuse when the emulation has ended.

        Raises:
            RuntimeLibraryError: It has; chained to what ended it.
        """
        if self.failure is not None:
            raise RuntimeLibraryError(f"the emulation ended with an error: {self.failure}") from self.failure

    def launch_ended(self, number: int) -> None:
        """Give back the leases of a launch."""
        self._give_back(self._leases.pop(number, []))

    def _give_back(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.memory.release(lease)

    def map_multicast(self, memory: Sequence[Any]) -> MulticastMapping:
        """Map `memory`, equal sizes of it on each rank, to multicast addresses; see `MulticastMapping`."""
        return MulticastMapping(self, dict(enumerate(memory)))

    def link_bytes(self) -> Mapping[tuple[int, int], int]:
        """Bytes moved over each link (source rank, destination rank) by all launches so far."""
        return self.counters.link_bytes()

    def summary(self) -> str:
        """A table of what the launches did."""
        return summary_table(self.counters.launches.values())

    def as_dict(self) -> dict[str, Any]:
        """The same and more, ready for JSON."""
        return {"arch": self.arch, "ranks": len(self.devices), "steps": self.steps, **self.counters.as_dict()}

    def write_report(self, path: Path) -> None:
        """Write `as_dict` as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1), encoding="utf-8")

    @property
    def steps(self) -> int:
        """Instructions and steps of engines executed so far, on all ranks."""
        return int(self.emulator.steps)

    def write_trace(self, path: Path) -> None:
        """Write the schedule as a Chrome trace.

        Raises:
            ArgumentError: The system was made without `trace=True`.
        """
        if self._trace is None:
            raise ArgumentError("trace", False, "True when the system is made, for a schedule to write")
        self._trace.write(path)


class _Ends(Observer):
    """Tells a system which launches have ended."""

    def __init__(self, system: System) -> None:
        self._system = system

    def on_launch_end(self, launch: Launch) -> None:
        """Give back what it had leased."""
        self._system.launch_ended(launch.number)
