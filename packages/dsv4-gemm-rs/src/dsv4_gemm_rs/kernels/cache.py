# SPDX-License-Identifier: Apache-2.0
"""The kernels of this process, loaded or compiled at first use, and which of them an architecture needs.

Contract: `kernels_of` names all that a workspace makes ready when it is created. A workspace serves every M,
N and K and every kind of operands, so that is each member of the family, whatever the first call looks like.
"""

from __future__ import annotations

from typing import Any

import torch
from dsv4_symm_mem.collectives.cuda import all_gather_kernel, reduce_scatter_kernel
from dsv4_symm_mem.compiled import Kernel, compiled, gpu_arch

from dsv4_gemm_rs.kernels.families import FAMILIES, Strategy, TileConfig, family_of
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig as Sm90Config
from dsv4_gemm_rs.kernels.sm90.swapped_config import SwappedConfig
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig as Sm100Config
from dsv4_gemm_rs.quantize.layout import ScaleLayout

PARTIALS = (torch.bfloat16, torch.float32)
"""Types of finished partials that the stand-alone reduce-scatter takes."""


def gemm_reduce_scatter_kernel(config: TileConfig) -> Kernel:
    """The compiled kernel of `config`; its arguments are those of its `GemmReduceScatter.__call__`."""

    def build(options: str) -> Any:
        import cutlass.cute as cute

        if isinstance(config, Sm90Config):
            from dsv4_gemm_rs.kernels.sm90 import kernel as sm90

            return cute.compile(sm90.GemmReduceScatter(config), *sm90.example_arguments(), options=options)
        if isinstance(config, SwappedConfig):
            from dsv4_gemm_rs.kernels.sm90 import swapped_kernel as swapped

            made = swapped.SwappedGemmReduceScatter(config)
            return cute.compile(made, *swapped.example_arguments(), options=options)
        if isinstance(config, Sm100Config):
            from dsv4_gemm_rs.kernels.sm100 import kernel as sm100

            return cute.compile(sm100.GemmReduceScatter(config), *sm100.example_arguments(), options=options)
        raise TypeError(f"no kernel has the configuration {config!r}")

    names = {Sm100Config: "gemm_rs_sm100", SwappedConfig: "gemm_rs_sm90_fp8"}
    name = names.get(type(config), "gemm_rs_sm90")
    return compiled((name, config), build, "dsv4_gemm_rs")


def quantizer_kernel(dtype: torch.dtype, layout: ScaleLayout | None) -> Kernel:
    """The compiled quantiser; its arguments are those of `quantize.kernel.launch_grid`.

    Args:
        dtype: dtype of x.
        layout: Layout of the scales; None for the round trip.
    """

    def build(options: str) -> Any:
        from dsv4_gemm_rs.quantize.kernel import compile_launch

        return compile_launch(dtype, layout, options)

    output = "round_trip" if layout is None else layout.value
    return compiled(("quantize", str(dtype), output), build, "dsv4_gemm_rs")


def kernels_of(arch: str, strategy: Strategy = Strategy.PUSH) -> list[Kernel]:
    """Every kernel that a workspace on GPUs of `arch`, such as "sm_90a", makes ready at its creation."""
    by_name = {gpu_arch(divmod(each, 10)): each for each in FAMILIES}
    return [
        quantizer_kernel(torch.bfloat16, None),
        quantizer_kernel(torch.bfloat16, ScaleLayout.SWIZZLED),
        *(gemm_reduce_scatter_kernel(config) for config in family_of(by_name.get(arch), strategy)),
        *(reduce_scatter_kernel(dtype) for dtype in PARTIALS),
        all_gather_kernel(),
    ]
