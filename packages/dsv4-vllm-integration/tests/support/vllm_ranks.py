# SPDX-License-Identifier: Apache-2.0
"""Ranks of a tensor-parallel group made of processes on the CPU, each with vLLM's own group objects.

Processes are forked from a server that has imported vLLM's modules once, since that takes long. A scenario
is a function of (rank, world_size, arguments); what it returns comes back, in rank order.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOAD = [
    "vllm.distributed.parallel_state",
    "vllm.models.deepseek_v41.nvidia.dspark",
    "vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn",
    "vllm.model_executor.kernels.linear.cute_dsl.gemm_rs_ar",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.models.deepseek_v4.nvidia.dspark",
    "vllm.models.deepseek_v4.nvidia.mtp",
    "vllm.models.kimi_k3.nvidia.model",
    "dsv4_gemm_rs",
    "dsv4_vllm_integration.seams.projection",
    "dsv4_vllm_integration.seams.mhc_calls",
]
SECONDS = 120.0

Scenario = Callable[..., Any]


def start_group(rank: int, world_size: int, folder: Path, tensor_parallel: int) -> None:
    """Initialise vLLM's process groups, over gloo, with tensor-parallel groups of successive ranks."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        parallel_state.init_distributed_environment(
            world_size, rank, f"file://{folder / 'store'}", rank, "gloo"
        )
        parallel_state.initialize_model_parallel(tensor_parallel)


def _rank_main(
    scenario: Scenario,
    rank: int,
    world_size: int,
    folder: str,
    environment: Mapping[str, str],
    arguments: Sequence[Any],
    tensor_parallel: int,
    answer: Connection,
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(environment)
    try:
        if world_size > 1:
            start_group(rank, world_size, Path(folder), tensor_parallel)
        answer.send(("done", scenario(rank, world_size, *arguments)))
    except BaseException:
        answer.send(("failed", traceback.format_exc()))
    answer.close()
    # vLLM's and gloo's clean-up wait for peers that may have failed.
    os._exit(0)


def run_ranks(
    scenario: Scenario,
    world_size: int,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    tensor_parallel: int = 0,
    method: str = "forkserver",
) -> list[Any]:
    """What `scenario` returned on each rank; by default all are one tensor-parallel group.

    Processes are started by `method`, one of `multiprocessing`'s.

    Raises:
        AssertionError: A rank raised, or did not end in time; with its traceback.
    """
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(
                    scenario,
                    rank,
                    world_size,
                    folder,
                    dict(environment or {}),
                    arguments,
                    tensor_parallel or world_size,
                    theirs,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            ends.append((process, ours))
        answers: list[Any] = []
        failures = []
        for rank, (_, ours) in enumerate(ends):
            try:
                assert ours.poll(SECONDS), "no answer in time"
                outcome, value = ours.recv()
            except (AssertionError, EOFError) as error:
                outcome, value = "failed", f"{type(error).__name__}: {error}"
            if outcome == "failed":
                failures.append(f"rank {rank}: {value}")
            answers.append(value)
        for process, _ in ends:
            process.join(5)
            if process.is_alive():
                process.kill()
    assert not failures, "\n".join(failures)
    return answers
