# SPDX-License-Identifier: Apache-2.0
"""The fused kernels of this process, compiled at first use."""

from __future__ import annotations

from typing import Any

from dsv4_symm_mem.compiled import Kernel, compiled

from dsv4_gemm_rs.kernels.sm90.config import KernelConfig


def gemm_reduce_scatter_kernel(config: KernelConfig) -> Kernel:
    """The compiled SM90 kernel of `config`; its arguments are those of `GemmReduceScatter.__call__`."""

    def build() -> Any:
        import cutlass.cute as cute

        from dsv4_gemm_rs.kernels.sm90.kernel import GemmReduceScatter, example_arguments

        return cute.compile(GemmReduceScatter(config), *example_arguments(), options="--enable-tvm-ffi")

    return compiled(("gemm_rs_sm90", config), build)
