# SPDX-License-Identifier: Apache-2.0
"""Every tile of the seam kernels at every size: the same bits, and the time of each.

Results depend on H alone, so the tiles of a kernel are each other's oracle: what a race in one of them does
shows here, where a tolerance would hide it. The times are what `plan.PREFERRED` is chosen by.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from dsv4_mhc.bench.checks import at_most
from dsv4_mhc.bench.run import Operands, call, machine, report_of, rotating
from dsv4_mhc.bench.timing import graph_median
from dsv4_mhc.compile import compile_variant, device_arch, seam_variant
from dsv4_mhc.errors import UnsupportedError
from dsv4_mhc.plan import (
    FUSED_TOKENS,
    RESIDENT_THREADS,
    SHARED_LIMIT,
    Kernel,
    SeamOptions,
    Tile,
    choose_tile,
    forced_tile,
    slice_count,
    tiles,
)

CASES = {Kernel.SHIFTED: "seam_shifted", Kernel.PROJECT: "seam_coupled"}
CLUSTERS = (2, 4, 8)
TOKENS = (8, 16, 32, 48, 64, 80, 96)
STAGES = (2, 3)
DEPTHS = (2, 3)
CLOSE = 1.05
"""The tile that is chosen takes at most so much of the fastest one's time."""


def candidates(kernel: Kernel, hidden: int) -> list[Tile]:
    """The tiles that are compiled for `hidden`, and others that fit into shared memory."""
    slices = slice_count(hidden)
    others = [
        Tile(hidden, cluster, tokens, 1, stages, depth)
        for cluster in CLUSTERS
        for tokens in TOKENS
        for stages in STAGES
        for depth in DEPTHS
        if cluster <= slices and tokens % cluster == 0
    ]
    fitting = [
        tile
        for tile in others
        if tile.threads <= RESIDENT_THREADS and tile.shared_bytes(kernel) <= SHARED_LIMIT
    ]
    return list(dict.fromkeys([*tiles(kernel, hidden), *fitting]))


def _compile(kernel: Kernel, tile: Tile, arch: str) -> None:
    compile_variant(seam_variant(kernel, tile, SeamOptions()), arch)


def _results(operands: Operands) -> list[torch.Tensor]:
    return [*operands.coefficients, operands.residual_out, operands.y]


def differing(case: str, sets: Sequence[Operands], wanted: list[torch.Tensor], runs: int) -> int:
    """How many of the first set's results in `runs` runs are not `wanted`, bit for bit.

    Sets take turns, so that a run meets caches as others left them.
    """
    found = 0
    for _ in range(runs):
        for operands in sets[:2]:
            for result in _results(operands):
                result.fill_(float("nan"))
            call(case, operands)
        for result, want in zip(_results(sets[0]), wanted, strict=True):
            found += not torch.equal(result.view(torch.uint8), want.view(torch.uint8))
    return found


def _rows(kernel: Kernel, hidden: int, count: int, runs: int, samples: int) -> Iterator[dict[str, Any]]:
    case = CASES[kernel]
    sets = rotating(count, hidden)
    call(case, sets[0])
    wanted = [result.clone() for result in _results(sets[0])]
    chosen = choose_tile(kernel, hidden, count)
    for tile in candidates(kernel, hidden):
        with forced_tile(kernel, tile):
            wrong = differing(case, sets, wanted, runs)
            calls = [partial(call, case, operands) for operands in sets]
            time = graph_median(calls, max(1, 20 // len(sets)), samples)
        yield {
            "measure": "mhc-tiles",
            "case": case,
            "hidden": hidden,
            "tokens": count,
            "tile": [tile.cluster, tile.tokens, tile.parallel, tile.stages, tile.depth],
            "chosen": tile == chosen,
            "cold_us": time,
            "different": wrong,
        }


def checks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """That no tile differs, and that each size has a fast one."""
    found = []
    for hidden, case in dict.fromkeys((row["hidden"], row["case"]) for row in rows):
        where = f"H={hidden}: {case}"
        same = [row for row in rows if (row["hidden"], row["case"]) == (hidden, case)]
        found.append(at_most(f"{where}, results that differ", sum(row["different"] for row in same), 0))
        for count in dict.fromkeys(row["tokens"] for row in same):
            times = [(row["cold_us"], row["chosen"]) for row in same if row["tokens"] == count]
            chosen = min(time for time, is_chosen in times if is_chosen)
            found.append(at_most(f"{where}, T={count}: chosen / fastest", chosen / min(times)[0], CLOSE))
    return found


def run(
    tokens: Sequence[int],
    hidden: Sequence[int],
    samples: int,
    runs: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Compare and time all tiles; V4's kernels only where the seam takes two launches.

    Raises:
        UnsupportedError: No CUDA device.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("bench-tiles needs a CUDA device, and torch sees none")
    arch = device_arch(torch.device("cuda"))
    work = [
        (kernel, tile, arch) for kernel in CASES for width in hidden for tile in candidates(kernel, width)
    ]
    progress(f"compiling {len(work)} kernels")
    # Not forked: this process has threads.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, *zip(*work, strict=True)))
    rows: list[dict[str, Any]] = []
    for width in hidden:
        for count in tokens:
            for kernel in CASES:
                if kernel is Kernel.SHIFTED or count > FUSED_TOKENS:
                    for row in _rows(kernel, width, count, runs, samples):
                        rows.append(row)
                        progress(str(row))
    return report_of("mhc-tiles", machine(), rows, checks(rows))
