# SPDX-License-Identifier: Apache-2.0
"""A kernel launch, and the order of launches: streams, programmatic dependent launch, residency.

CTAs start in the order of their clusters' numbers as long as they fit on the rank's processors, and stay
until their last warp has exited; what does not fit waits. How full the rank is, is counted in processors
(a CTA of which four fit takes a quarter), not per processor: which processor a CTA gets is not defined
anyway.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.machine.cta import Cluster, Cta, index_of
from dsv4_ptx_emulator.machine.limits import check_launch
from dsv4_ptx_emulator.machine.memory import Memory
from dsv4_ptx_emulator.machine.region import Region
from dsv4_ptx_emulator.machine.warp import LANES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.isa.program import Program
    from dsv4_ptx_emulator.machine.machine import Machine
    from dsv4_ptx_emulator.ptx.module import Kernel

Extent = tuple[int, int, int]


class Constants(dict[tuple[int, int], "NDArray[Any]"]):
    """Kernel parameters as arrays of 32 equal values, by (byte offset, bits), made when first asked for."""

    def __init__(self, parameters: NDArray[np.uint8]) -> None:
        super().__init__()
        self._bytes = parameters

    def __missing__(self, key: tuple[int, int]) -> NDArray[Any]:
        """Make the array."""
        offset, bits = key
        size = bits // 8
        raw = self._bytes[offset : offset + size].tobytes()
        value = np.frombuffer(raw * LANES, np.dtype(f"u{size}"))
        self[key] = value
        return value


class Launch:
    """One launch of a kernel on one rank.

    Attributes:
        number: Counted from 0 over the machine.
        machine: The machine.
        rank: Where it runs.
        stream: Launches of a rank's stream run one after another.
        kernel: What runs.
        program: The kernel, decoded.
        grid: CTAs.
        block: Threads of a CTA.
        cluster: CTAs of a cluster; (1, 1, 1) without clusters.
        explicit_cluster: Whether a cluster was asked for.
        static_bytes: Shared memory of the kernel's own variables.
        dynamic_bytes: Shared memory asked for at launch.
        constants: What the parameters are, for `ld.param`.
        parameters: The `param` space; the parameter block begins at 0.
        dependent: May begin before its predecessor in the stream has ended (programmatic dependent launch).
        state: "queued", "running" or "done".
        resident: CTAs that run.
        transfers: Asynchronous copies in flight; stores to global memory may outlive the CTAs.
        scratch: For instruction groups that keep state per launch, by a name of their own.
    """

    def __init__(
        self,
        machine: Machine,
        number: int,
        rank: int,
        kernel: Kernel,
        program: Program,
        grid: Extent,
        block: Extent,
        cluster: Extent | None,
        dynamic_bytes: int,
        parameters: bytes,
        stream: int,
        dependent: bool,
    ) -> None:
        self.machine = machine
        self.number: int = number
        self.rank = rank
        self.kernel = kernel
        self.program = program
        self.grid: Extent = grid
        self.block: Extent = block
        self.explicit_cluster: bool = cluster is not None
        self.cluster: Extent = cluster or (1, 1, 1)
        self.static_bytes = program.static_shared
        self.dynamic_bytes: int = dynamic_bytes
        self.stream = stream
        self.dependent = dependent
        self.state = "queued"
        self.resident: list[Cta] = []
        self.transfers = 0
        self.scratch: dict[str, Any] = {}
        self.predecessor: Launch | None = None
        self.parameters = Memory("param")
        size = max(kernel.parameter_bytes, len(parameters))
        block_bytes = np.zeros(max(-(-size // 64) * 64, 64), np.uint8)
        block_bytes[: len(parameters)] = np.frombuffer(parameters, np.uint8)
        self.constants = Constants(block_bytes)
        self.parameters.add(Region(0, block_bytes, f"parameters of {kernel.name}", home=rank))
        fit = check_launch(machine.limits, kernel, grid, block, self.cluster, self.shared_bytes)
        self._cost = Fraction(prod(self.cluster), fit)
        self._clusters = prod(grid) // prod(self.cluster)
        self._next = 0
        self._released: set[tuple[int, int, int]] = set()
        self._signalled = 0

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return prod(self.block)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.static_bytes + self.dynamic_bytes

    def describe(self) -> str:
        """Such as "launch 3 of kernel_x on rank 1, stream 0"."""
        return f"launch {self.number} of {self.kernel.name} on rank {self.rank}, stream {self.stream}"

    def may_begin(self) -> bool:
        """Whether the stream's order lets it begin now."""
        before = self.predecessor
        if before is None or before.state == "done":
            return True
        return self.dependent and before.released()

    def released(self) -> bool:
        """Whether every CTA has allowed dependents to begin, or has exited."""
        return self.state == "done" or self._signalled == prod(self.grid)

    def release_dependents(self, cta: Cta) -> None:
        """A thread of `cta` executed griddepcontrol.launch_dependents, or the CTA has exited."""
        if cta.index not in self._released:
            self._released.add(cta.index)
            self._signalled += 1

    def start_clusters(self) -> list[Cta]:
        """Start as many clusters as fit now; returns their CTAs."""
        started: list[Cta] = []
        extent = (
            self.grid[0] // self.cluster[0],
            self.grid[1] // self.cluster[1],
            self.grid[2] // self.cluster[2],
        )
        while self._next < self._clusters and self.machine.take(self.rank, self._cost):
            cluster = Cluster(self, index_of(self._next, extent))
            cluster.shared.access_hooks = self.machine.global_memory.access_hooks
            cluster.start()
            for cta in cluster.ctas:
                cta.slot = (
                    self._next * len(cluster.ctas) + cta.cluster_rank
                ) % self.machine.limits.processors
            started += cluster.ctas
            self._next += 1
        self.resident += started
        return started

    def finish(self, cta: Cta) -> bool:
        """The last warp of `cta` has exited; returns whether that was the launch's last CTA.

        The cluster's place is free when all of its CTAs have exited.
        """
        self.release_dependents(cta)
        self.resident.remove(cta)
        if all(other.running == 0 for other in cta.cluster.ctas):
            self.machine.give(self.rank, self._cost)
        return self.exited

    @property
    def exited(self) -> bool:
        """Whether all CTAs have run and exited."""
        return not self.resident and self._next == self._clusters
