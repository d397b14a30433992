# SPDX-License-Identifier: Apache-2.0
"""SM90's FP8 tensor cores with block scales against BF16: the product alone, on one GPU, and its error.

The weights are E4M3 with a scale for each 32 x 32, as DeepSeek-V4.1 has them; cuBLAS and our fused kernel
without an exchange multiply the same values in BF16. `quantise` and `round-trip` are what activations
take before the one and before the other. Errors are the largest against FP64 over `ERROR_ROWS` rows, in units
of the tolerance of `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from dsv4_symm_mem.accelerator import accelerator_of
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.communicator import Communicator
from dsv4_symm_mem.errors import UnsupportedError
from dsv4_symm_mem.protocol.launch import LaunchExchange

from dsv4_gemm_rs.bench.limits import floor_us
from dsv4_gemm_rs.bench.report import (
    Check,
    Report,
    describe_machine,
    describe_versions,
    sm_clock_mhz,
    this_command,
    today,
)
from dsv4_gemm_rs.bench.scaled.config import CONFIGS, ScaledConfig
from dsv4_gemm_rs.bench.scaled.packing import packed_scales
from dsv4_gemm_rs.bench.timing import Phase, Step, time_case
from dsv4_gemm_rs.dispatch import Path, Problem
from dsv4_gemm_rs.kernels.launch import Factors, launch
from dsv4_gemm_rs.quantize import (
    Mxfp8,
    ScaleLayout,
    dequantize_mxfp8,
    quantize_mxfp8,
    round_trip_mxfp8,
)
from dsv4_gemm_rs.quantize.rule import BLOCK
from dsv4_gemm_rs.reference import tolerance
from dsv4_gemm_rs.weights import WeightKind
from dsv4_gemm_rs.workspace import Workspace

ERROR_ROWS = 256
FASTER = 1.0
"""Largest ratio of the product in FP8 to the fastest in BF16 that would make it worth having."""
BF16_GEMMS = ("gemm-cublas", "gemm-ours")
SPREAD = 4
"""Blocks of a weight differ in magnitude by up to 2^SPREAD either way."""


@dataclass(frozen=True)
class Operands:
    """One set of operands and its output.

    Attributes:
        x: BF16 activations [M, K].
        x_scaled: The same in MXFP8, scales swizzled.
        x_values: What that stands for, BF16.
        w: E4M3 [N, K].
        w_scale: E8M0 bytes [N/32, K/32].
        w_values: What they stand for, BF16.
        packed: The scales as each configuration's kernel reads them.
        out: BF16 [M, N].
    """

    x: torch.Tensor
    x_scaled: Mxfp8
    x_values: torch.Tensor
    w: torch.Tensor
    w_scale: torch.Tensor
    w_values: torch.Tensor
    packed: dict[ScaledConfig, torch.Tensor]
    out: torch.Tensor

    @classmethod
    def random(cls, m: int, n: int, k: int, device: torch.device, seed: int) -> Operands:
        """Random operands; `seed` gives the same on every device of one type."""
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(m, k, generator=generator, device=device).to(torch.bfloat16)
        w = (torch.randn(n, k, generator=generator, device=device) * 64).to(torch.float8_e4m3fn)
        shape = (n // BLOCK, k // BLOCK)
        low, high = 127 - 6 - SPREAD, 127 - 6 + SPREAD + 1
        w_scale = torch.randint(low, high, shape, generator=generator, device=device).to(torch.uint8)
        rows = w_scale.repeat_interleave(BLOCK, 0)
        return cls(
            x,
            quantize_mxfp8(x),
            round_trip_mxfp8(x),
            w,
            w_scale,
            dequantize_mxfp8(w, rows).to(torch.bfloat16),
            {config: packed_scales(w_scale, config) for config in CONFIGS},
            torch.empty(m, n, dtype=torch.bfloat16, device=device),
        )

    def exact(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first rows of x and all of W in FP64, as the product sees them."""
        seen = quantize_mxfp8(self.x[:rows].contiguous(), layout=ScaleLayout.ROW_MAJOR)
        scale = self.w_scale.repeat_interleave(BLOCK, 0)
        return (
            dequantize_mxfp8(seen.data, seen.scale, torch.float64),
            dequantize_mxfp8(self.w, scale, torch.float64),
        )


def case_name(config: ScaledConfig) -> str:
    """What rows call the product of a configuration."""
    return f"gemm-fp8-{config.tile_n}-{config.temps}x{config.piece_n}"


def multiply(operands: Operands, config: ScaledConfig, launches: LaunchExchange, grid: int) -> None:
    """The product x · Wᵀ in the FP8 tensor cores, on the exchange's current stream."""
    from dsv4_gemm_rs.bench.scaled.kernel import scaled_product_kernel

    o, packed = operands, operands.packed[config]
    m, k = o.x.shape
    n = o.w.shape[0]
    scaled_product_kernel(config)(
        *(o.x_scaled.data.data_ptr(), o.x_scaled.scale.data_ptr(), o.w.data_ptr(), packed.data_ptr()),
        *(o.out.data_ptr(), m, n, k, grid),
        stream=launches.stream(),
        memory=(o.x_scaled.data, o.x_scaled.scale, o.w, packed, o.out),
    )


def cases(
    sets: Sequence[Operands], workspace: Workspace, launches: LaunchExchange, problem: Problem, grid: int
) -> Iterator[tuple[str, Step]]:
    """Every case's name and step."""

    def quantise(rank: Communicator, which: int) -> None:
        quantize_mxfp8(sets[which].x, out=sets[which].x_scaled)

    def round_trip(rank: Communicator, which: int) -> None:
        round_trip_mxfp8(sets[which].x, out=sets[which].x_values)

    def library(rank: Communicator, which: int) -> None:
        torch.mm(sets[which].x_values, sets[which].w_values.T, out=sets[which].out)

    def ours(rank: Communicator, which: int) -> None:
        factors = Factors(sets[which].x_values, sets[which].w_values)
        launch(workspace.plan(problem), factors, launches, sets[which].out)

    def scaled(rank: Communicator, which: int, *, config: ScaledConfig) -> None:
        multiply(sets[which], config, launches, grid)

    yield "quantise", quantise
    yield "round-trip", round_trip
    yield "gemm-cublas", library
    yield "gemm-ours", ours
    for config in CONFIGS:
        yield case_name(config), partial(scaled, config=config)


def error_of(operands: Operands, exact: torch.Tensor, bound: float, step: Callable[[], object]) -> float:
    """Largest error of a product's first rows over its bound; infinite if something is not finite."""
    operands.out.fill_(float("nan"))
    step()
    error = (operands.out[: exact.shape[0]].double() - exact).abs().max().item()
    return error / bound if error == error else float("inf")


def checks(m: int, medians: dict[str, float], errors: dict[str, float]) -> Iterator[Check]:
    """The best product in FP8 against the best in BF16, and every one's error against its bound."""
    names = [case_name(config) for config in CONFIGS]
    best = min(names, key=lambda name: medians[name])
    other = min(BF16_GEMMS, key=lambda name: medians[name])
    ratio = medians[best] / medians[other]
    yield Check(f"M={m}: {best} / {other}", ratio, FASTER, ratio <= FASTER)
    for name in names:
        yield Check(f"M={m}: {name}, error / tolerance", errors[name], 1.0, errors[name] <= 1.0)


def run_scaled_benchmark(
    device: torch.device,
    *,
    tokens: Sequence[int],
    n: int,
    k: int,
    sets: int,
    samples: int,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Measure every case at every M.

    Args:
        device: A CUDA device of compute capability 9.0.
        tokens: Values of M.
        n: Output features, a multiple of 64.
        k: Summed length, a multiple of 128.
        sets: Operands that rotate.
        samples: Samples per case.
        progress: Called with a line for each case as it is done.

    Raises:
        UnsupportedError: Another device.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        raise UnsupportedError("bench-scaled needs an SM90 GPU, whose tensor cores take FP8 without scales")
    group = VirtualGroup(1, device)
    (rank,) = group.ranks
    machine = describe_machine(device, 1, "one GPU")
    grid = torch.cuda.get_device_properties(device).multi_processor_count
    rows: list[dict[str, Any]] = []
    found: list[Check] = []
    for m in tokens:
        rotating = [Operands.random(m, n, k, device, 1 + each) for each in range(sets)]
        problem = Problem(m, n, k, WeightKind.BF16)
        floor = floor_us(str(machine["device"]), m, n, k, WeightKind.BF16, 1, True)
        workspace = Workspace.create(rank, max_tokens=m, n=n, path=Path.FUSED)
        launches = LaunchExchange.scratch(device, accelerator_of(rank))
        steps = dict(cases(rotating, workspace, launches, problem, grid))
        first = rotating[0]
        x, w = first.exact(min(m, ERROR_ROWS))
        exact, bound = x @ w.T, tolerance([x], [w])
        medians: dict[str, float] = {}
        errors: dict[str, float] = {}
        for name, step in steps.items():
            if name.startswith("gemm"):
                errors[name] = error_of(first, exact, bound, partial(step, rank, 0))
            timing = time_case(group, [Phase(step, serial=True)], sets, samples, True)
            medians[name] = timing.median_us
            rows.append(
                {
                    **{"case": name, "m": m, "n": n, "k": k, "kind": "mxfp8", **asdict(timing)},
                    "floor_us": floor,
                    "error_over_tolerance": errors.get(name),
                    "sm_clock_mhz": sm_clock_mhz(device),
                }
            )
            progress(f"M={m:<6} {name:<18} {timing.median_us:>12.1f} us")
        found += checks(m, medians, errors)
        workspace.close()
    return Report(
        name="scaled",
        machine=machine,
        versions=describe_versions(device),
        command=this_command(),
        date=today(),
        rows=rows,
        checks=found,
    )
