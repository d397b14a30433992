# SPDX-License-Identifier: Apache-2.0
"""Fused kernels begin while the quantiser before them runs (programmatic dependent launch), and are right.

Both kernels are compiled ones, one behind the other on a stream, call after call. In the emulator the second
may start as soon as all CTAs of the first have said so, whatever those still have to write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from dsv4_gemm_rs import Keep, WeightKind
from dsv4_gemm_rs.dispatch import Problem
from dsv4_gemm_rs.kernels.cache import quantizer_kernel
from dsv4_gemm_rs.kernels.launch import Factors, launch
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig as Sm90Config
from dsv4_gemm_rs.kernels.sm90.swapped_config import SwappedConfig
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig, Operand
from dsv4_gemm_rs.problems import RankProblem
from dsv4_gemm_rs.quantize import ScaleLayout
from dsv4_gemm_rs.quantize.layout import k_tiles, padded_rows, scale_shape
from dsv4_gemm_rs.quantize.rule import BLOCK, ScaleRule
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.layout import Strategy, shard_length
from emulated_ranks import ranks
from gemm_rs_support import assert_right, problems_for
from sm100_support import Group, Operands, operands_of

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
Uneven: Any = pytest.importorskip("dsv4_ptx_emulator.machine.scheduler").Uneven
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

ARCH = "sm_100a"
SMALL = KernelConfig(Operand.MXFP8, 64)
PULLED = replace(SMALL, strategy=Strategy.MULTICAST)
PAIR = replace(SMALL, tile_n=128, cluster=2)
SIZE, N, K = 2, 128, 256


def quantise(
    problem: RankProblem, data: torch.Tensor, scale: torch.Tensor | None, launches: LaunchExchange
) -> None:
    """Launch the compiled quantiser: to `data` and swizzled `scale`, or, without, there and back."""
    from dsv4_gemm_rs.quantize import kernel

    m = problem.x.shape[0]
    rows = m if scale is None else padded_rows(m)
    grid_x, grid_y, across_log2 = kernel.grid(rows, k_tiles(K))
    quantizer_kernel(torch.bfloat16, None if scale is None else ScaleLayout.SWIZZLED)(
        *(problem.x.data_ptr(), data.data_ptr(), 0 if scale is None else scale.data_ptr()),
        *(m, rows, K // BLOCK, 2 * K, 1, kernel.ROUND_UP[ScaleRule.VLLM]),
        *(across_log2, grid_x, grid_y),
        stream=launches.stream(),
        memory=(problem.x, data) if scale is None else (problem.x, data, scale),
    )


class Calls:
    """Quantiser and SM100 kernel on every rank, several times, on activations that change in between."""

    def __init__(self, system: Any, config: KernelConfig, rows: list[int]) -> None:
        self.group = Group(system, config, max(rows), N)
        self.group.poison()
        self.made: list[tuple[list[torch.Tensor], list[RankProblem]]] = []
        for m in rows:
            problems = problems_for(SIZE, m, N, K, WeightKind.MXFP8, seed=m)
            outs = []
            for rank, problem in enumerate(problems):
                weight = operands_of(problem, Operand.MXFP8)
                data = torch.zeros(m, K, dtype=torch.float8_e4m3fn)
                scale = torch.full(scale_shape(m, K, ScaleLayout.SWIZZLED), 0xFF, dtype=torch.uint8)
                quantise(problem, data, scale, self.group.exchanges[rank])
                operands = Operands(data, scale, weight.w, weight.w_scale)
                outs.append(self.group.launch(rank, operands, early=True))
            self.made.append((outs, problems))

    def check(self) -> None:
        self.group.finish()
        multicast = self.group.config.strategy is Strategy.MULTICAST
        for outs, problems in self.made:
            assert_right(outs, problems, multicast=multicast)
        self.group.close()


def sm90_calls(system: Any, keep: Keep, rows: list[int]) -> None:
    """The same of the SM90 kernels, for weights held as BF16 or as FP8."""
    config = SwappedConfig(64, 128) if keep is Keep.FP8 else Sm90Config(64, 128)
    with ranks(system, max(rows), N, config=config) as group:
        group.poison()
        made = []
        for m in rows:
            problems = problems_for(SIZE, m, N, K, WeightKind.MXFP8, m, keep=keep)
            outs = []
            for problem, space in zip(problems, group.workspaces, strict=True):
                assert space.launches is not None
                data = torch.full((m, K), float("nan"), dtype=torch.bfloat16)
                quantise(problem, data, None, space.launches)
                packed = problem.weight.packed
                factors = Factors(data, problem.weight.bf16() if packed is None else packed, quantised=True)
                out = torch.full((shard_length(m, SIZE), N), float("nan"), dtype=torch.bfloat16)
                shape = Problem(m, N, K, WeightKind.MXFP8, packed=packed is not None)
                launch(space.plan(shape), factors, space.launches, out, early=True)
                outs.append(out)
            made.append((outs, problems))
        group.finish()
        for outs, problems in made:
            assert_right(outs, problems)


@pytest.mark.parametrize("config", [SMALL, PULLED, PAIR], ids=["push", "multicast", "pair"])
def test_right_call_after_call(config: KernelConfig, emulator: Callable[..., Any]) -> None:
    emulation = emulator(SIZE, arch=ARCH, processors=2, checks=True if config is PAIR else "memory-model")
    Calls(emulation, config, [131, 1, 67]).check()


@pytest.mark.parametrize("keep", list(Keep))
@pytest.mark.parametrize("uneven", [Uneven.NOBODY, Uneven.WARPS])
def test_right_call_after_call_on_sm90(keep: Keep, uneven: Any, emulator: Callable[..., Any]) -> None:
    sm90_calls(emulator(SIZE, processors=2, checks="memory-model", uneven=uneven), keep, [131, 1, 67])


@pytest.mark.parametrize("arch", [ARCH, "sm_90a"])
def test_it_does_begin_early(arch: str, emulator: Callable[..., Any]) -> None:
    from dsv4_ptx_emulator.machine.observer import Observer

    class Order(Observer):
        """Fused launches that began while another of their rank was running."""

        def __init__(self) -> None:
            self.running: list[Any] = []
            self.early = 0

        def on_launch_begin(self, launch: Any) -> None:
            self.early += any(other.rank == launch.rank for other in self.running)
            self.running.append(launch)

        def on_launch_end(self, launch: Any) -> None:
            self.running.remove(launch)

    emulation = emulator(SIZE, arch=arch, processors=2)
    seen = Order()
    emulation.emulator.machine.attach(seen)
    if arch == ARCH:
        Calls(emulation, SMALL, [131, 131, 131]).check()
    else:
        sm90_calls(emulation, Keep.BF16, [131, 131, 131])
    # Of each rank every fused call, and no quantiser behind one.
    assert seen.early == 3 * SIZE


def scenario(system: Any) -> None:
    """For the emulator's mutation runs."""
    Calls(system, SMALL, [131, 67]).check()


scenario.ranks, scenario.processors, scenario.arch = SIZE, 2, ARCH  # type: ignore[attr-defined]


def sm90_scenario(system: Any) -> None:
    """The same for SM90."""
    sm90_calls(system, Keep.BF16, [131, 67])


sm90_scenario.ranks, sm90_scenario.processors = SIZE, 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("launched", [scenario, sm90_scenario], ids=["sm100", "sm90"])
def test_the_wait_is_needed(launched: Callable[..., None]) -> None:
    from dsv4_ptx_emulator.mutation.trial import attempt

    outcome = attempt(launched, 0, lambda text: text.replace("griddepcontrol.wait;", ""))
    assert outcome.by.startswith("memory model"), outcome
