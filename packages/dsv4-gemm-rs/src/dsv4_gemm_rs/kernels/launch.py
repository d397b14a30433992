# SPDX-License-Identifier: Apache-2.0
"""Launching the fused kernel of whichever architecture, and making every kernel ready beforehand."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import torch
from dsv4_symm_mem.collectives.cuda import all_gather_cuda, reduce_scatter_cuda
from dsv4_symm_mem.compiled import Tally, gpu_arch, prepare
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.tiles import TileShape

from dsv4_gemm_rs.dispatch.plan import LaunchPlan
from dsv4_gemm_rs.kernels.cache import PARTIALS, gemm_reduce_scatter_kernel, kernels_of
from dsv4_gemm_rs.kernels.families import Family, Operand, Strategy, family_of, operand_of
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig as Sm100Config
from dsv4_gemm_rs.packing import PackedWeight, pack
from dsv4_gemm_rs.quantize import compile_quantizer, quantize_mxfp8

logger = logging.getLogger("dsv4_gemm_rs")

_warm: set[tuple[torch.device, Strategy]] = set()
_warming = threading.Lock()


@dataclass(frozen=True)
class Factors:
    """The two matrices of a product x·Wᵀ as the fused kernel takes them.

    Attributes:
        x: [M, K], BF16 or, with scales, E4M3; rows 16-byte aligned, unit column stride.
        weight: [N, K] likewise, or packed where x is BF16.
        x_scale: E8M0 bytes of x, swizzled 128x4, 16-byte aligned; None for BF16.
        weight_scale: Those of the weight.
        quantised: Whether our quantising kernel has just been launched for x, the last on its stream.
    """

    x: torch.Tensor
    weight: torch.Tensor | PackedWeight
    x_scale: torch.Tensor | None = None
    weight_scale: torch.Tensor | None = None
    quantised: bool = False

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """The tensors."""
        scales = (self.x_scale, self.weight_scale)
        weight = self.weight.blocks if isinstance(self.weight, PackedWeight) else self.weight
        return (self.x, weight, *(scale for scale in scales if scale is not None))


def warm_up(device: torch.device, strategy: Strategy = Strategy.PUSH) -> Tally:
    """Make every kernel of the fused and unfused paths ready on `device`, once per process.

    A kernel's first launch loads its module, which must not happen while another kernel spins for a peer or
    while a graph is captured, so all of it is done before the first call.

    Returns:
        What was loaded from the cache of artefacts and what was compiled.
    """
    with _warming:
        if (device, strategy) in _warm:
            return Tally()
        with torch.cuda.device(device):
            capability = torch.cuda.get_device_capability(device)
            arch = gpu_arch(capability)
            tally = prepare(kernels_of(arch, strategy), arch)
            logger.info("kernels for %s on %s: %s", arch, device, tally)
            _launch_all(device, family_of(10 * capability[0] + capability[1], strategy))
        _warm.add((device, strategy))
        return tally


def staging_bytes(arch: int | None, ctas: int, strategy: Strategy = Strategy.PUSH) -> int:
    """Device memory in which `ctas` CTAs of any fused kernel for `arch` stage tiles for their peers."""
    return ctas * max((config.staging_bytes for config in family_of(arch, strategy)), default=0)


def _launch_all(device: torch.device, family: Family) -> None:
    compile_quantizer(device, round_trip=True)
    compile_quantizer(device)
    scratch = LaunchExchange.scratch(device)
    x = torch.zeros(64, 128, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(320, 128, dtype=torch.bfloat16, device=device)
    out = torch.empty(64, 320, dtype=torch.bfloat16, device=device)
    x_scaled, weight_scaled = quantize_mxfp8(x), quantize_mxfp8(weight)
    factors = {
        Operand.BF16: Factors(x, weight),
        Operand.MXFP8: Factors(x_scaled.data, weight_scaled.data, x_scaled.scale, weight_scaled.scale),
        Operand.FP8_WEIGHT: Factors(x, pack(weight_scaled.data, torch.full_like(weight[:, :4], 127).byte())),
    }
    for config in family:
        launch(LaunchPlan(config, config.cluster, 1, 1, 1, 0), factors[operand_of(config)], scratch, out)
    for dtype in PARTIALS:
        partial = torch.zeros(64, 320, dtype=dtype, device=device)
        reduce_scatter_cuda(scratch, partial, out, TileShape(64, 128), 0, 1, 1, 1)
    all_gather_cuda(scratch, torch.zeros_like(out), out, TileShape(64, 128), 0, 1)
    torch.cuda.synchronize(device)


def launch(
    plan: LaunchPlan, factors: Factors, launches: LaunchExchange, out: torch.Tensor, *, early: bool = False
) -> None:
    """Launch the kernel on the exchange's current stream.

    Args:
        plan: Numbers of the launch, equal on all ranks.
        factors: What it multiplies, of the kind that the plan's configuration takes.
        launches: This rank's end of the exchange.
        out: BF16 [ceil(M / P), N], or [M, N] where the plan is of an all-reduce, rows 16-byte aligned; filled
            completely.
        early: Begin while the launch before still runs, which is to be our quantiser's
            (`kernels.overlap`).
    """
    x, weight = factors.x, factors.weight
    m, k = x.shape
    scales: tuple[int, ...] = ()
    places: tuple[int, ...] = (launches.staging, int(early))
    if isinstance(plan.config, Sm100Config):
        scales = tuple(
            0 if scale is None else scale.data_ptr() for scale in (factors.x_scale, factors.weight_scale)
        )
        places = (launches.staging, launches.multicast, int(plan.gathered), int(early))
    if isinstance(weight, PackedWeight):
        held, n = (weight.blocks.data_ptr(), int(weight.split)), weight.n
    else:
        held, n = (weight.data_ptr(), weight.stride(0)), weight.shape[0]
    gemm_reduce_scatter_kernel(plan.config)(
        x.data_ptr(),
        # A single row may have any stride, which the tensor map would still be encoded with.
        x.stride(0) if m > 1 else k,
        *held,
        *scales,
        out.data_ptr(),
        out.stride(0),
        m,
        n,
        k,
        *launches.arguments(plan.signature),
        *places,
        plan.group_rows,
        plan.lag,
        plan.grid,
        stream=launches.stream(),
        memory=(*factors.memory, out, *launches.memory),
    )
