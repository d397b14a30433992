# SPDX-License-Identifier: Apache-2.0
"""Named barriers of a CTA (PTX ISA 9.7.15.1) and the barrier of a cluster (9.7.15.3).

A named barrier counts threads, whole warps at a time. Without a count it waits for all threads that have
not exited (CUDA: `__syncthreads` waits for all non-exited threads), so an exit may complete it.

The cluster's barrier keeps, per warp, which lanes have arrived in the present phase; a lane that has
arrived must wait before it arrives again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsv4_ptx_emulator.errors import BarrierMisuseError
from dsv4_ptx_emulator.machine.warp import LANES

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.cta import Cluster, Cta
    from dsv4_ptx_emulator.machine.warp import Warp

BARRIERS = 16
"""Named barriers that a CTA has."""


class NamedBarrier:
    """One named barrier.

    Attributes:
        phase: How often it has completed.
        arrived: Warps that have arrived in this phase, by index; a warp twice where it arrived twice.
        threads: Threads that this phase waits for; None for all that have not exited.
        votes: What each warp's lanes brought to `bar.red`.
        result: Votes of the last completed phase.
    """

    def __init__(self, cta: Cta, number: int) -> None:
        self.cta = cta
        self.number = number
        self.phase = 0
        self.arrived: list[int] = []
        self.threads: int | None = None
        self.votes: list[tuple[int, int]] = []
        self.result: list[tuple[int, int]] = []

    @property
    def channel(self) -> Any:
        """What a warp waits on."""
        return ("bar", id(self.cta), self.number)

    def expected(self) -> int:
        """Threads that have to arrive."""
        if self.threads is not None:
            return self.threads
        return LANES * sum(1 for warp in self.cta.warps if warp.live_bits)

    def arrive(self, warp: Warp, threads: int | None, line: int, vote: tuple[int, int] = (0, 0)) -> int:
        """The warp arrives; returns the phase that it must see end.

        Raises:
            BarrierMisuseError: The count is no multiple of 32, differs from other warps', or is exceeded.
        """
        where = warp.describe()
        if threads is not None and (threads % LANES or not 0 < threads <= 1024):
            raise BarrierMisuseError(
                f"barrier {self.number}: {threads} threads is no multiple of {LANES} up to 1024",
                line=line,
                where=where,
            )
        if self.arrived and threads != self.threads:
            raise BarrierMisuseError(
                f"barrier {self.number}: waits for {threads or 'all'} threads, but warps {self.arrived} "
                f"said {self.threads or 'all'}",
                line=line,
                where=where,
            )
        if warp.index in self.arrived:
            raise BarrierMisuseError(
                f"barrier {self.number}: the warp arrives twice in one phase", line=line, where=where
            )
        phase = self.phase
        self.threads = threads
        self.arrived.append(warp.index)
        self.votes.append(vote)
        self.check()
        return phase

    def check(self) -> None:
        """Complete the phase if everybody is there."""
        if self.arrived and LANES * len(self.arrived) >= self.expected():
            self.phase += 1
            self.result = self.votes
            self.arrived, self.votes, self.threads = [], [], None
            self.cta.launch.machine.scheduler.wake(self.channel)

    def describe(self) -> str:
        """For the deadlock report."""
        return (
            f"barrier {self.number} of {self.cta.describe()}: {LANES * len(self.arrived)} of "
            f"{self.expected()} threads have arrived (warps {self.arrived})"
        )


class ClusterBarrier:
    """The barrier of all threads of a cluster.

    Attributes:
        phase: How often it has completed.
        arrived: Lanes that have arrived in this phase, by warp.
        pending: Per warp, the lanes that have arrived and not yet waited, and the phase in which they
            arrived.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.phase = 0
        self.arrived: dict[Warp, int] = {}
        self.pending: dict[Warp, dict[int, int]] = {}

    @property
    def channel(self) -> Any:
        """What a warp waits on."""
        return ("barrier.cluster", id(self.cluster))

    def arrive(self, warp: Warp, line: int) -> None:
        """The warp's active lanes arrive.

        Raises:
            BarrierMisuseError: One of them has arrived already and not waited since.
        """
        waiting = self.pending.setdefault(warp, {})
        if any(bits & warp.active_bits for bits in waiting.values()):
            raise BarrierMisuseError(
                "barrier.cluster.arrive twice without a wait between", line=line, where=warp.describe()
            )
        waiting[self.phase] = waiting.get(self.phase, 0) | warp.active_bits
        self.arrived[warp] = self.arrived.get(warp, 0) | warp.active_bits
        self.check()

    def passes(self, warp: Warp, line: int) -> bool:
        """Whether the phase has ended in which the active lanes arrived; if so they may arrive again.

        Raises:
            BarrierMisuseError: One of them has not arrived.
        """
        waiting = self.pending.get(warp, {})
        covered = 0
        for bits in waiting.values():
            covered |= bits
        if warp.active_bits & ~covered:
            raise BarrierMisuseError(
                "barrier.cluster.wait without an arrive before it", line=line, where=warp.describe()
            )
        if waiting.get(self.phase, 0) & warp.active_bits:
            return False
        self.pending[warp] = {
            phase: bits & ~warp.active_bits for phase, bits in waiting.items() if bits & ~warp.active_bits
        }
        return True

    def check(self) -> None:
        """Complete the phase if every lane that has not exited has arrived."""
        if not self.arrived:
            return
        missing = [
            warp
            for cta in self.cluster.ctas
            for warp in cta.warps
            if warp.live_bits & ~self.arrived.get(warp, 0)
        ]
        if not missing:
            self.phase += 1
            self.arrived = {}
            self.cluster.launch.machine.scheduler.wake(self.channel)

    def describe(self) -> str:
        """For the deadlock report."""
        missing = [
            f"{cta.index} warp {warp.index}"
            for cta in self.cluster.ctas
            for warp in cta.warps
            if warp.live_bits & ~self.arrived.get(warp, 0)
        ]
        return f"the cluster's barrier, phase {self.phase}, not reached by CTA {', '.join(missing[:4])}" + (
            f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        )
