# SPDX-License-Identifier: Apache-2.0
"""The kernels of this process, loaded or compiled at first use, and which of them an architecture needs.

Contract: `kernels_of` names all that a workspace makes ready when it is created. A workspace serves every M,
N and K, so that is each member of the family, whatever the first call looks like.
"""

from __future__ import annotations

from typing import Any

import torch
from dsv4_symm_mem.collectives.cuda import reduce_scatter_kernel
from dsv4_symm_mem.compiled import Kernel, compiled

from dsv4_gemm_rs.kernels.sm90.config import FAMILY, KernelConfig
from dsv4_gemm_rs.quantize.layout import ScaleLayout

PARTIALS = (torch.bfloat16, torch.float32)
"""Types of finished partials that the stand-alone reduce-scatter takes."""


def gemm_reduce_scatter_kernel(config: KernelConfig) -> Kernel:
    """The compiled SM90 kernel of `config`; its arguments are those of `GemmReduceScatter.__call__`."""

    def build(options: str) -> Any:
        import cutlass.cute as cute

        from dsv4_gemm_rs.kernels.sm90.kernel import GemmReduceScatter, example_arguments

        return cute.compile(GemmReduceScatter(config), *example_arguments(), options=options)

    return compiled(("gemm_rs_sm90", config), build, "dsv4_gemm_rs")


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


def kernels_of(arch: str) -> list[Kernel]:
    """Every kernel that a workspace on GPUs of `arch`, such as "sm_90a", makes ready at its creation."""
    return [
        quantizer_kernel(torch.bfloat16, None),
        quantizer_kernel(torch.bfloat16, ScaleLayout.SWIZZLED),
        *(gemm_reduce_scatter_kernel(config) for config in FAMILY if arch == "sm_90a"),
        *(reduce_scatter_kernel(dtype) for dtype in PARTIALS),
    ]
