# SPDX-License-Identifier: Apache-2.0
"""A CTA and a cluster of them: who shares what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.machine.barriers import ClusterBarrier, NamedBarrier
from dsv4_ptx_emulator.machine.memory import Memory
from dsv4_ptx_emulator.machine.region import ALIGNMENT, Region
from dsv4_ptx_emulator.machine.warp import LANES, Warp

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.launch import Launch

SHARED_STRIDE = 1 << 24
"""Distance of the shared windows of neighbouring CTAs of a cluster."""

SHARED_RESERVED = 1024
"""Bytes at the beginning of a window that belong to the system (CUDA Programming Guide, capability 9.0)."""


def index_of(flat: int, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """Coordinates of the `flat`-th element of a grid, x fastest."""
    x, y, _ = grid
    return flat % x, flat // x % y, flat // (x * y)


class Cluster:
    """CTAs that see each other's shared memory; also the "cluster" of a launch without clusters (one CTA).

    Attributes:
        launch: The launch.
        index: %clusterid.
        ctas: By %cluster_ctarank.
        shared: Their shared memory, see machine/memory.py for its addresses.
        barrier: barrier.cluster.
        scratch: For instruction groups that keep state per cluster, by a name of their own.
    """

    def __init__(self, launch: Launch, index: tuple[int, int, int]) -> None:
        self.launch: Launch = launch
        self.index: tuple[int, int, int] = index
        self.shared = Memory("shared")
        self.ctas: list[Cta] = []
        self.barrier = ClusterBarrier(self)
        self.scratch: dict[str, Any] = {}

    def start(self) -> None:
        """Create the CTAs with all of their warps."""
        size = self.launch.cluster
        first = tuple(self.index[axis] * size[axis] for axis in range(3))
        for rank in range(size[0] * size[1] * size[2]):
            inner = index_of(rank, size)
            place = (first[0] + inner[0], first[1] + inner[1], first[2] + inner[2])
            self.ctas.append(Cta(self, rank, place))
        for cta in self.ctas:
            cta.start()


class Cta:
    """One CTA.

    Attributes:
        launch: The launch.
        cluster: Its cluster.
        rank: The rank (GPU) it runs on.
        cluster_rank: %cluster_ctarank.
        index: %ctaid.
        warps: Those not yet exited and those that are.
        running: Warps that have not exited.
        barriers: Named barriers by number, those used so far.
        slot: %smid: the processor it runs on.
        shared_base: Its first byte in `cluster.shared`.
        scratch: For instruction groups that keep state per CTA, by a name of their own.
    """

    def __init__(self, cluster: Cluster, cluster_rank: int, index: tuple[int, int, int]) -> None:
        self.launch: Launch = cluster.launch
        self.cluster: Cluster = cluster
        self.rank = cluster.launch.rank
        self.cluster_rank: int = cluster_rank
        self.index: tuple[int, int, int] = index
        self.shared_base = cluster_rank * SHARED_STRIDE + SHARED_RESERVED
        self.warps: list[Warp] = []
        self.running = 0
        self.slot: int = 0
        self.barriers: dict[int, NamedBarrier] = {}
        self.scratch: dict[str, Any] = {}
        size = -(-self.launch.shared_bytes // ALIGNMENT) * ALIGNMENT
        self.shared_data = np.zeros(size, np.uint8)
        if self.launch.shared_bytes:
            name = f"shared memory of {self.describe()}"
            data = self.shared_data[: self.launch.shared_bytes]
            cluster.shared.add(Region(self.shared_base, data, name, home=self.rank, owner=self))

    def start(self) -> None:
        """Create the warps; after the shared memory of the whole cluster exists."""
        threads = self.launch.threads
        machine = self.launch.machine
        for first in range(0, threads, LANES):
            program = self.launch.program
            self.warps.append(Warp(machine, self, first // LANES, threads - first, program))
        self.running = len(self.warps)

    def describe(self) -> str:
        """Such as "rank 1, CTA (3, 0, 0)"."""
        return f"rank {self.rank}, CTA {self.index}"
