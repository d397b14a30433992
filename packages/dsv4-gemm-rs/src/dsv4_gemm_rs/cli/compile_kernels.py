# SPDX-License-Identifier: Apache-2.0
"""`compile`: fill the cache of compiled kernels, on any machine, so that a server only loads.

Contract: everything that a workspace on the given architectures makes ready at its creation is in the cache
afterwards, or the exit code says that it is not. No GPU is needed. A workspace serves every M, N, K and
number of ranks with one set of kernels, so a shape does not shorten the work; if one is given, the command
says which members of the family its calls take.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dsv4_symm_mem.artefacts.folder import CACHE_VARIABLE, CacheFolder, default_folder
from dsv4_symm_mem.compiled import gpu_arch
from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs.cli.cached import CacheState, listing
from dsv4_gemm_rs.cli.groups import require_positive
from dsv4_gemm_rs.dispatch import Machine, Problem
from dsv4_gemm_rs.dispatch.decide import operand_for
from dsv4_gemm_rs.dispatch.plan import plan_launch
from dsv4_gemm_rs.kernels.cache import kernels_of
from dsv4_gemm_rs.kernels.families import MULTICAST_FAMILIES, Strategy
from dsv4_gemm_rs.problems import default_k
from dsv4_gemm_rs.weights import WeightKind
from dsv4_gemm_rs.workspace import FUSED_ARCHS

DEFAULT_ARCH = "sm_90a"
MULTIPROCESSORS = {90: 132, 100: 148, 103: 148}
"""Of an H100 or H200 SXM, a B200 and a B300; only for saying which members are taken."""
MAX_JOBS = 8


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser("compile", help="compile all kernels into the cache; needs no GPU")
    fused = " ".join(gpu_arch(divmod(arch, 10)) for arch in sorted(FUSED_ARCHS))
    parser.add_argument(
        "--arch",
        nargs="+",
        default=[DEFAULT_ARCH],
        help=f"default {DEFAULT_ARCH}; there are fused kernels for {fused}",
    )
    parser.add_argument(
        "--exchange",
        type=Strategy,
        choices=list(Strategy),
        default=Strategy.PUSH,
        help="of the workspaces that are to find their kernels (default push)",
    )
    parser.add_argument(
        "--output", type=Path, default=None, help=f"the cache (default {CACHE_VARIABLE} or ~/.cache/dsv4)"
    )
    parser.add_argument("--tp", type=int, default=None, help="ranks of calls to say the kernels of")
    parser.add_argument("--n", type=int, default=None, help="output features N of such calls")
    parser.add_argument("--k", type=int, default=None, help="input features of a rank of such calls")
    parser.add_argument("--tokens", type=int, default=8192, help="largest M of such calls (default 8192)")
    parser.add_argument(
        "--jobs", type=int, default=None, help=f"processes (default: cores, at most {MAX_JOBS})"
    )
    parser.add_argument("--list", action="store_true", help="list what the cache holds, and compile nothing")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile or list; returns 1 if something was compiled but could not be kept."""
    require_positive(tp=options.tp, n=options.n, k=options.k, tokens=options.tokens, jobs=options.jobs)
    for arch in options.arch:
        if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
            raise ArgumentError("--arch", arch, "an architecture such as sm_90a")
        if options.exchange is not Strategy.PUSH and arch not in _with_multicast():
            known = " or ".join(_with_multicast())
            raise ArgumentError("--exchange", options.exchange.value, f"push, or one of {known} as --arch")
    cache = CacheFolder(options.output or default_folder())
    if cache.obstacle or (cache.read_only and not options.list):
        raise ArgumentError("--output", str(cache.path), f"a folder to keep them in ({cache.read_only})")
    if options.list:
        print(listing(cache))
        return 0
    assert cache.path is not None, "it would have been an obstacle"
    started = time.perf_counter()
    jobs = options.jobs or min(os.cpu_count() or 1, MAX_JOBS)
    exchange = options.exchange
    tasks = [
        (arch, exchange, index) for arch in options.arch for index in range(len(kernels_of(arch, exchange)))
    ]
    for number, line in enumerate(_made(tasks, cache.path, jobs), 1):
        print(f"[{number}/{len(tasks)}] {line}", flush=True)
    state = CacheState.of(options.arch, cache.path, exchange)
    print(f"{time.perf_counter() - started:.1f} s with {min(jobs, len(tasks))} processes\n{state}")
    if (options.tp, options.n, options.k) != (None, None, None):
        for arch in sorted(FUSED_ARCHS):
            if gpu_arch(divmod(arch, 10)) in options.arch:
                print(_taken(options, arch))
    return int(any(state.missing.values()))


def _with_multicast() -> list[str]:
    return [gpu_arch(divmod(arch, 10)) for arch in sorted(MULTICAST_FAMILIES)]


def _made(tasks: list[tuple[str, Strategy, int]], folder: Path, jobs: int) -> Iterator[str]:
    """A line for each kernel that is in the cache now."""
    if jobs == 1:
        yield from (_make(*task, folder) for task in tasks)
        return
    # The DSL has threads and state of its own, so no process is forked from one that may have used it.
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=get_context("spawn")) as pool:
        for done in as_completed(pool.submit(_make, *task, folder) for task in tasks):
            yield done.result()


def _make(arch: str, exchange: Strategy, index: int, folder: Path) -> str:
    kernel = kernels_of(arch, exchange)[index]
    obtained = kernel.obtain(arch, folder=folder)
    assert obtained is not None, "only who does not wait gets nothing"
    return f"{kernel.recipe.name} for {arch}: {obtained.origin.value} in {obtained.seconds:.1f} s"


def _taken(options: argparse.Namespace, arch: int) -> str:
    """Which members of the family calls of the given shape take on a GPU of `arch`."""
    ranks, multiprocessors = options.tp or 1, MULTIPROCESSORS[arch]
    n, k = options.n or 5120, options.k or default_k(ranks)
    machine = Machine(
        arch, ranks, False, True, True, False, multiprocessors, FUSED_ARCHS, strategy=options.exchange
    )
    taken = []
    for kind, packed in ((WeightKind.MXFP8, False), (WeightKind.BF16, False), (WeightKind.MXFP8, True)):
        problems = (Problem(m, n, k, kind, packed) for m in range(1, options.tokens + 1))
        configs = dict.fromkeys(plan_launch(machine, problem).config for problem in problems)
        tiles = ", ".join(f"{config.tile_m * config.cluster}x{config.tile_n}" for config in configs)
        taken.append((operand_for(arch, kind, packed=packed).value, tiles))
    shown = "; ".join(f"{tiles} for {operand} operands" for operand, tiles in dict(taken).items())
    return (
        f"fused calls of up to {options.tokens} tokens with N={n}, K={k} on {ranks} ranks of "
        f"{multiprocessors} SMs (sm_{arch}) take the tiles {shown}; a workspace makes the whole family ready"
    )
