# SPDX-License-Identifier: Apache-2.0
"""Launching the fused kernel, and making every kernel ready beforehand."""

from __future__ import annotations

import logging
import threading

import torch
from dsv4_symm_mem.collectives.cuda import reduce_scatter_cuda
from dsv4_symm_mem.compiled import Tally, gpu_arch, prepare
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.tiles import TileShape

from dsv4_gemm_rs.dispatch.plan import LaunchPlan
from dsv4_gemm_rs.kernels.cache import PARTIALS, gemm_reduce_scatter_kernel, kernels_of
from dsv4_gemm_rs.kernels.sm90.config import FAMILY
from dsv4_gemm_rs.quantize import compile_quantizer

logger = logging.getLogger("dsv4_gemm_rs")

_warm: set[torch.device] = set()
_warming = threading.Lock()


def warm_up(device: torch.device) -> Tally:
    """Make every kernel of the fused and unfused paths ready on `device`, once per process.

    A kernel's first launch loads its module, which must not happen while another kernel spins for a peer or
    while a graph is captured, so all of it is done before the first call.

    Returns:
        What was loaded from the cache of artefacts and what was compiled.
    """
    with _warming:
        if device in _warm:
            return Tally()
        with torch.cuda.device(device):
            arch = gpu_arch(torch.cuda.get_device_capability(device))
            tally = prepare(kernels_of(arch), arch)
            logger.info("kernels for %s on %s: %s", arch, device, tally)
            _launch_all(device)
        _warm.add(device)
        return tally


def staging_bytes(ctas: int) -> int:
    """Device memory in which `ctas` CTAs of any kernel of the family stage tiles for their peers."""
    return ctas * max(config.staging_bytes for config in FAMILY)


def _launch_all(device: torch.device) -> None:
    compile_quantizer(device, round_trip=True)
    compile_quantizer(device)
    scratch = LaunchExchange.scratch(device)
    x = torch.zeros(64, 128, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(320, 128, dtype=torch.bfloat16, device=device)
    out = torch.empty(64, 320, dtype=torch.bfloat16, device=device)
    for config in FAMILY:
        launch(LaunchPlan(config, config.cluster, 1, 1, 0), x, weight, scratch, out)
    for dtype in PARTIALS:
        partial = torch.zeros(64, 320, dtype=dtype, device=device)
        reduce_scatter_cuda(scratch, partial, out, TileShape(64, 128), 0, 1, 1, 1)
    torch.cuda.synchronize(device)


def launch(
    plan: LaunchPlan, x: torch.Tensor, weight: torch.Tensor, launches: LaunchExchange, out: torch.Tensor
) -> None:
    """Launch the kernel on the exchange's current stream.

    Args:
        plan: Numbers of the launch, equal on all ranks.
        x: BF16 [M, K], rows 16-byte aligned.
        weight: BF16 [N, K], likewise.
        launches: This rank's end of the exchange.
        out: BF16 [ceil(M / P), N], likewise; filled completely.
    """
    m, k = x.shape
    gemm_reduce_scatter_kernel(plan.config)(
        x.data_ptr(),
        # A single row may have any stride, which the tensor map would still be encoded with.
        x.stride(0) if m > 1 else k,
        weight.data_ptr(),
        weight.stride(0),
        out.data_ptr(),
        out.stride(0),
        m,
        weight.shape[0],
        k,
        *launches.arguments(plan.signature),
        launches.staging,
        plan.group_rows,
        plan.lag,
        plan.grid,
        stream=launches.stream(),
        memory=(x, weight, out, *launches.memory),
    )
