# SPDX-License-Identifier: Apache-2.0
"""All ranks together: global memory, launches, observers."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dsv4_ptx_emulator.machine.launch import Launch
from dsv4_ptx_emulator.machine.limits import Limits, limits_of
from dsv4_ptx_emulator.machine.memory import Memory
from dsv4_ptx_emulator.machine.multicast import Multicast
from dsv4_ptx_emulator.machine.observer import Access, AsyncEvent, Observer
from dsv4_ptx_emulator.machine.scheduler import Scheduler

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.tensor_memory import TensorEvent
    from dsv4_ptx_emulator.machine.warp import Warp


class Machine:
    """The emulated machine.

    Args:
        arch: Such as "sm_90a".
        ranks: How many GPUs; one global address space for all, see `Region.visible`.
        seed: Decides every interleaving.
        max_steps: Instructions after which a run is given up.

    Attributes:
        limits: What each rank has.
        global_memory: Host memory that is registered.
        multicast: Multicast ranges over it.
        scheduler: Who runs next.
        launches: All launches so far that are not forgotten, oldest first.
        access_hooks, fence_hooks, sync_hooks, event_hooks, async_hooks, tensor_hooks, block_hooks,
            quantum_hooks: Observers' methods; a semantics calls `for hook in machine.event_hooks: hook(...)`.
        scratch: For instruction groups that keep state per machine, by a name of their own.
    """

    def __init__(self, arch: str, ranks: int, seed: int, max_steps: int) -> None:
        self.arch = arch
        self.ranks = ranks
        self.limits: Limits = limits_of(arch)
        self.global_memory = Memory("global")
        self.multicast = Multicast(self.global_memory)
        self.scheduler: Scheduler = Scheduler(self, seed, max_steps)
        self.launches: list[Launch] = []
        self.observers: list[Observer] = []
        self.access_hooks: list[Callable[[Access], None]] = self.global_memory.access_hooks
        self.fence_hooks: list[Callable[[Warp, str, int], None]] = []
        self.sync_hooks: list[Callable[[Warp, str, Any, int], None]] = []
        self.event_hooks: list[Callable[[Any, str, dict[str, Any]], None]] = []
        self.async_hooks: list[Callable[[AsyncEvent], None]] = []
        self.tensor_hooks: list[Callable[[TensorEvent], None]] = []
        self.block_hooks: list[Callable[[Warp, Any, int], None]] = []
        self.quantum_hooks: list[Callable[[Any, int, int], None]] = []
        self.scratch: dict[str, Any] = {}
        self._used = [Fraction(0)] * ranks
        self._tails: dict[tuple[int, int], Launch] = {}
        self._number = 0

    def attach(self, observer: Observer) -> None:
        """Tell `observer` what happens from now on; hooks that it does not override cost nothing."""
        self.observers.append(observer)
        for name in ("access", "fence", "sync", "event", "async", "tensor", "block", "quantum"):
            method = getattr(observer, f"on_{name}")
            if getattr(type(observer), f"on_{name}") is not getattr(Observer, f"on_{name}"):
                getattr(self, f"{name}_hooks").append(method)

    def enqueue(self, launch: Launch) -> None:
        """Put a launch at the end of its stream."""
        key = (launch.rank, launch.stream)
        launch.predecessor = self._tails.get(key)
        self._tails[key] = launch
        self.launches.append(launch)

    def next_number(self) -> int:
        """A number for a new launch."""
        self._number += 1
        return self._number - 1

    def running(self) -> list[Launch]:
        """Launches with resident CTAs."""
        return [launch for launch in self.launches if launch.state == "running"]

    def take(self, rank: int, cost: Fraction) -> bool:
        """Occupy `cost` processors of a rank if they are free."""
        if self._used[rank] + cost > self.limits.processors:
            return False
        self._used[rank] += cost
        return True

    def give(self, rank: int, cost: Fraction) -> None:
        """Free `cost` processors."""
        self._used[rank] -= cost

    def begin_launches(self) -> bool:
        """Begin what may begin, start CTAs where there is room; returns whether anything was started."""
        started = False
        for launch in self.launches:
            if launch.state == "queued" and launch.may_begin():
                launch.state = "running"
                for observer in self.observers:
                    observer.on_launch_begin(launch)
            if launch.state == "running":
                started = self._start_ctas(launch) or started
        return started

    def warp_exited(self, warp: Warp) -> None:
        """A warp's last lane has exited."""
        cta = warp.cta
        cta.running -= 1
        for barrier in cta.barriers.values():
            barrier.check()
        cta.cluster.barrier.check()
        if cta.running:
            return
        for observer in self.observers:
            observer.on_cta_end(cta)
        launch = cta.launch
        if launch.finish(cta) and not launch.transfers:
            self._end(launch)
        self.begin_launches()

    def transfer_done(self, launch: Launch) -> None:
        """A copy of the launch is complete; a launch ends with its last thread or its last copy."""
        launch.transfers -= 1
        if not launch.transfers and launch.exited:
            self._end(launch)
            self.begin_launches()

    def _end(self, launch: Launch) -> None:
        launch.state = "done"
        launch.predecessor = None
        self.launches.remove(launch)
        for observer in self.observers:
            observer.on_launch_end(launch)
        self.scheduler.wake(("done", id(launch)))

    def _start_ctas(self, launch: Launch) -> bool:
        started: list[Cta] = launch.start_clusters()
        for cta in started:
            for observer in self.observers:
                observer.on_cta_begin(cta)
            for warp in cta.warps:
                self.scheduler.add(warp)
        return bool(started)
