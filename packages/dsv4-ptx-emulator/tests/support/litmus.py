# SPDX-License-Identifier: Apache-2.0
"""Litmus tests: a few lines of PTX that the memory model allows, or does not."""

from __future__ import annotations

import struct

import numpy as np
from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.errors import MemoryModelError, UninitialisedError
from probe import kernel

SEEDS = 12
"""Schedules that a right program has to pass, and within which a wrong one has to be found."""

START = """
ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1]; ld.param.b64 %d2, [p2]; ld.param.b64 %d9, [p3];
mov.u32 %r0, %ctaid.x; mov.u32 %r1, %laneid; mov.u32 %r2, %tid.x; shr.u32 %r3, %r2, 5; cvt.u32.u64 %r9, %d9;
setp.eq.u32 %p0, %r1, 0; mov.b32 %r4, 1;
"""
"""p0 is data, p1 a flag, p2 a second buffer, p3 the rank: %d0, %d1, %d2, %r9.

%r0 is the CTA, %r1 the lane, %r3 the warp, %p0 lane 0, %r4 one.
"""


def verdict(
    body: str,
    seed: int,
    *,
    ranks: int = 1,
    grid: int = 1,
    threads: int = 32,
    cluster: int | None = None,
    module: str = "",
    arch: str = "sm_90a",
    launches: int = 1,
    dependent: bool = False,
) -> str:
    """The rule that a run violates; "" if none; "unwritten" for a read of what has not been written yet.

    Every rank launches the body. The data and the second buffer live on rank 0 and the flag on the last one;
    all ranks may touch all three.
    """
    emulator = Emulator(arch, ranks=ranks, seed=seed, max_steps=200_000, checks="memory-model")
    data, flag, second = np.zeros(1024, np.uint32), np.zeros(64, np.uint64), np.zeros(1024, np.uint32)
    buffers = []
    for buffer, home in ((data, 0), (flag, ranks - 1), (second, 0)):
        aligned = np.zeros(buffer.nbytes + 128, np.uint8)
        start = -aligned.ctypes.data % 128
        emulator.register(aligned.ctypes.data + start, buffer.nbytes, rank=home)
        buffers.append((aligned, aligned.ctypes.data + start))
    text = kernel(START + body, arch=arch, module=module, params=4, threads=threads)
    for _ in range(launches):
        for rank in range(ranks):
            emulator.launch(
                text,
                "probe",
                grid=(grid, 1, 1),
                block=(threads, 1, 1),
                cluster=(cluster, 1, 1) if cluster else None,
                parameters=struct.pack("<4Q", *(address for _, address in buffers), rank),
                rank=rank,
                dependent=dependent,
            )
    try:
        emulator.run()
    except MemoryModelError as error:
        return error.rule if error.line and error.first_line else "without lines"
    except UninitialisedError:
        return "unwritten"
    return ""


def verdicts(body: str, **options: object) -> set[str]:
    """All verdicts of `SEEDS` schedules."""
    return {verdict(body, seed, **options) for seed in range(SEEDS)}  # type: ignore[arg-type]
