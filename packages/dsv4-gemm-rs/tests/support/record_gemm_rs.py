# SPDX-License-Identifier: Apache-2.0
"""Run the recorded calls on an H200 and keep what comes out: `python record_gemm_rs.py FOLDER`.

Writes gemm_rs_h200.json and gemm_rs_h200.npz into FOLDER. Needs one sm_90a GPU; ranks are virtual. Only the
tile configurations of the cases are compiled, each by a process of its own where the machine has the cores
for it: they meet in the kernels' cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from dsv4_gemm_rs.kernels.cache import kernels_of
from dsv4_gemm_rs.problems import RankProblem
from dsv4_gemm_rs.reference import gemm_reduce_scatter, tolerance, worst_error
from dsv4_gemm_rs.weights import prepare_weight
from dsv4_symm_mem.protocol.layout import shard_length
from gemm_rs_cases import CASES, CONFIGS, Case, fingerprint, joined, on_tiles
from gemm_rs_gpu_support import ranks

JSON, ARRAYS = "gemm_rs_h200.json", "gemm_rs_h200.npz"
ARCH = "sm_90a"


def only_these_tiles() -> ExitStack:
    """Let a workspace make ready the cases' configurations and no others, for as long as this is open."""
    stack = ExitStack()
    stack.enter_context(mock.patch.dict("dsv4_gemm_rs.kernels.families.FAMILIES", {90: CONFIGS}))
    return stack


def compile_one(number: int) -> None:
    """Put one of the kernels into the cache."""
    with only_these_tiles():
        kernels_of(ARCH)[number].obtain(ARCH)


def compile_all() -> None:
    """Put all of them there, at once."""
    with only_these_tiles():
        count = len(kernels_of(ARCH))
    with ThreadPoolExecutor(max(1, min(count, (os.cpu_count() or 1) - 2))) as pool:
        list(pool.map(_in_a_process, range(count)))


def _in_a_process(number: int) -> None:
    done = subprocess.run(
        [sys.executable, __file__, "--compile", str(number)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        # The workspace tries again and reports it.
        print(f"kernel {number}: {done.stderr.strip().splitlines()[-1:]}", flush=True)


def on_gpu(problem: RankProblem) -> RankProblem:
    """The operands on the GPU; the exact values stay."""
    weight = problem.weight
    moved = prepare_weight(weight.data.cuda(), None if weight.scale is None else weight.scale.cuda())
    return RankProblem(problem.x.cuda(), moved, problem.x_exact, problem.weight_exact)


def run(case: Case, problems: list[RankProblem]) -> list[torch.Tensor]:
    """The ranks' results, on the CPU; slots and outputs are poisoned before."""
    with on_tiles(case.config), ranks(case.size, case.m, case.n, path="fused", deadline=20.0) as group:
        group.poison()
        rows = shard_length(case.m, case.size)
        outs = [
            torch.full((rows, case.n), float("nan"), dtype=torch.bfloat16, device="cuda")
            for _ in range(case.size)
        ]
        group.call([on_gpu(problem) for problem in problems], outs)
        torch.cuda.synchronize()
        for space in group.workspaces:
            space.check()
        return [out.cpu() for out in outs]


def main(folder: Path) -> None:
    """Record every case; one that fails is named and left out."""
    folder.mkdir(parents=True, exist_ok=True)
    compile_all()
    device = torch.cuda.get_device_properties(0)
    hashes: dict[str, dict[str, str | float]] = {}
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.uint16]]] = {}
    with only_these_tiles():
        for case in CASES:
            problems = case.problems()
            try:
                outs = run(case, problems)
            except Exception as error:
                print(f"{case.name}: {type(error).__name__}: {error}", flush=True)
                continue
            xs, ws = [p.x_exact for p in problems], [p.weight_exact for p in problems]
            worst = worst_error(outs, gemm_reduce_scatter(xs, ws))
            if worst > tolerance(xs, ws):
                print(f"{case.name}: wrong by {worst}, which is above {tolerance(xs, ws)}", flush=True)
                continue
            bits = joined(outs)
            hashes[case.name] = {
                "operands": fingerprint(problems),
                "result": hashlib.sha256(bits.tobytes()).hexdigest(),
                "error": worst,
            }
            if not case.exact:
                arrays[case.name] = bits
            # Written each time: what is there stays if a later case ends the process.
            whole = {"device": device.name, "torch": torch.__version__, "cases": hashes}
            (folder / JSON).write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
            np.savez_compressed(folder / ARRAYS, **arrays)  # type: ignore[arg-type]
    print(f"{len(hashes)} of {len(CASES)} calls recorded")


if __name__ == "__main__":
    if sys.argv[1] == "--compile":
        compile_one(int(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
