# SPDX-License-Identifier: Apache-2.0
"""What an architecture has: the limits that a launch is checked against.

Numbers: CUDA Programming Guide, "Technical specifications per compute capability" (9.0 and 10.0), and the
processors of an H200 (132) and a B200 (148).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from dsv4_ptx_emulator.errors import ArgumentError, ResourceLimitError

if TYPE_CHECKING:
    from dsv4_ptx_emulator.ptx.module import Kernel


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources of one GPU.

    Attributes:
        processors: Streaming multiprocessors.
        shared_per_block: Bytes of shared memory that a CTA may have, static and dynamic.
        shared_per_processor: Bytes that the CTAs of a processor share; each CTA takes 1 KiB more than it
            asks for.
        threads_per_processor: Resident threads.
        blocks_per_processor: Resident CTAs.
        registers_per_processor: 32-bit registers.
        threads_per_block: Largest CTA.
        cluster: Largest cluster, for kernels that opt in to more than the portable 8 CTAs.
    """

    processors: int
    shared_per_block: int = 227 * 1024
    shared_per_processor: int = 228 * 1024
    threads_per_processor: int = 2048
    blocks_per_processor: int = 32
    registers_per_processor: int = 65536
    threads_per_block: int = 1024
    cluster: int = 16


LIMITS: Mapping[str, Limits] = {
    "sm_90": Limits(132),
    "sm_90a": Limits(132),
    "sm_100": Limits(148),
    "sm_100a": Limits(148),
    "sm_100f": Limits(148),
}

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)


def limits_of(arch: str) -> Limits:
    """The limits of an architecture.

    Raises:
        ArgumentError: It is not known.
    """
    if arch not in LIMITS:
        raise ArgumentError("arch", arch, f"one of {', '.join(LIMITS)}")
    return LIMITS[arch]


def check_launch(
    limits: Limits,
    kernel: Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int],
    shared: int,
) -> int:
    """How many CTAs of a launch fit on a processor.

    Raises:
        ResourceLimitError: The launch does not fit at all, or contradicts the kernel's directives.
    """
    threads, ctas = prod(block), prod(cluster)
    name = kernel.name
    required = kernel.directives.get("reqntid")
    if required and tuple([*required, 1, 1][:3]) != block:
        raise ResourceLimitError(f"{name}: block {block}, but .reqntid {required}")
    largest = kernel.directives.get("maxntid")
    if largest and threads > prod(largest):
        raise ResourceLimitError(f"{name}: {threads} threads, but .maxntid {largest}")
    wanted = kernel.directives.get("reqnctapercluster")
    if wanted and prod(wanted) not in (0, ctas):
        raise ResourceLimitError(f"{name}: cluster {cluster}, but .reqnctapercluster {wanted}")
    if threads > limits.threads_per_block:
        raise ResourceLimitError(f"{name}: {threads} threads in a CTA, at most {limits.threads_per_block}")
    for axis in range(3):
        if not 0 < grid[axis] <= MAX_GRID[axis]:
            raise ResourceLimitError(f"{name}: grid {grid} exceeds {MAX_GRID}")
        if not 0 < block[axis] <= MAX_BLOCK[axis]:
            raise ResourceLimitError(f"{name}: block {block} exceeds {MAX_BLOCK}")
        if cluster[axis] < 1 or grid[axis] % cluster[axis]:
            raise ResourceLimitError(f"{name}: grid {grid} is not a multiple of the cluster {cluster}")
    if ctas > limits.cluster:
        raise ResourceLimitError(f"{name}: {ctas} CTAs in a cluster, at most {limits.cluster}")
    if shared > limits.shared_per_block:
        raise ResourceLimitError(
            f"{name}: {shared} bytes of shared memory, at most {limits.shared_per_block}"
        )
    fit = min(
        limits.threads_per_processor // (-(-threads // 32) * 32),
        limits.blocks_per_processor,
        limits.shared_per_processor // (shared + 1024),
    )
    registers = kernel.directives.get("maxnreg")
    if registers:
        fit = min(fit, limits.registers_per_processor // (registers[0] * threads))
    if fit < 1:
        raise ResourceLimitError(f"{name}: not even one CTA fits on a processor")
    return fit
