# SPDX-License-Identifier: Apache-2.0
"""How long a process takes until its kernels are there, with an empty cache and with a full one.

Contract: every figure comes from a fresh process, because imports happen once; it runs this file by its path,
or the package would be imported before its clock starts. Of processes that start together the slowest counts,
as a group waits for it. Kernels are made ready and not launched, so no GPU is needed; what the driver takes
to move machine code to a device is not in it.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PHASES = ("torch_s", "package_s", "dsl_s", "kernels_s", "total_s", "kernels_cpu_s")
"""Importing PyTorch, these packages and the DSL; making the kernels ready; all of it; and the processor time
of making them ready, which other work on the machine hardly changes."""
WARM_LIMIT = 0.1
"""Most of the cold time that making kernels ready may take with a full cache."""


def measure(arch: str, processes: int, samples: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows of the report: cold and warm, for one process and for `processes` at once.

    Args:
        arch: Architecture to compile for.
        processes: Number that start together.
        samples: Starts with a full cache, of which the median counts; those with an empty one happen once.
        progress: Told what has been measured.
    """
    rows = []
    for count in (1, processes):
        with tempfile.TemporaryDirectory(prefix="dsv4-start-") as folder:
            for case, repetitions in (("cold", 1), ("warm", samples)):
                starts = [_start(arch, Path(folder), count) for _ in range(repetitions)]
                row = {
                    "measure": "start",
                    "case": case,
                    "processes": count,
                    **{phase: statistics.median(start[phase] for start in starts) for phase in PHASES},
                    **{kind: starts[0][kind] for kind in ("compiled", "loaded")},
                }
                rows.append(row)
                progress(f"{count} process(es), {case}: kernels ready in {row['kernels_s']:.2f} s")
    return rows


def _start(arch: str, folder: Path, count: int) -> dict[str, float]:
    """Start `count` processes at once: the longest of each phase, and what all of them did together."""
    command = [sys.executable, "-P", __file__, arch, str(folder)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    answers: list[Mapping[str, float]] = []
    for process in running:
        output, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        answers.append(json.loads(output))
    longest = {phase: max(answer[phase] for answer in answers) for phase in PHASES}
    return {**longest, **{kind: sum(a[kind] for a in answers) for kind in ("compiled", "loaded")}}


def _worker(arch: str, folder: str) -> dict[str, float]:
    times = [time.perf_counter()]
    import torch  # noqa: F401

    times.append(time.perf_counter())
    from dsv4_symm_mem.compiled import prepare

    from dsv4_gemm_rs.kernels.cache import kernels_of

    times.append(time.perf_counter())
    import cutlass.cute  # noqa: F401

    times.append(time.perf_counter())
    processor = time.process_time()
    tally = prepare(kernels_of(arch), arch, folder=Path(folder))
    processor = time.process_time() - processor
    times.append(time.perf_counter())
    seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
    return dict(
        zip(PHASES, [*seconds, times[-1] - times[0], processor], strict=True),
        compiled=tally.counts["compiled"],
        loaded=tally.counts["loaded"],
    )


if __name__ == "__main__":
    print(json.dumps(_worker(*sys.argv[1:])))
