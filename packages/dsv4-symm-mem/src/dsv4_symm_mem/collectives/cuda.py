# SPDX-License-Identifier: Apache-2.0
"""The stand-alone kernels as calls: checks, compilation, launch on the current stream."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_symm_mem.collectives.operands import check_gathered, check_operands
from dsv4_symm_mem.compiled import Kernel, compiled
from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.slots import BLOCK_COLUMNS
from dsv4_symm_mem.protocol.tiles import TileGrid, TileShape


def reduce_scatter_kernel(dtype: torch.dtype) -> Kernel:
    """The compiled kernel for FP32 or BF16 partials."""

    def build(options: str) -> Any:
        import cutlass.cute as cute

        from dsv4_symm_mem.collectives.reduce_scatter_kernel import ReduceScatter, example_arguments

        kernel = ReduceScatter(from_float=dtype == torch.float32)
        return cute.compile(kernel, *example_arguments(), options=options)

    return compiled(("reduce_scatter", dtype), build)


def reduce_scatter_cuda(
    launches: LaunchExchange,
    partial: torch.Tensor,
    out: torch.Tensor,
    shape: TileShape,
    signature: int,
    group_rows: int,
    lag: int,
    grid: int,
) -> None:
    """Reduce-scatter a finished partial; only enqueues work.

    Args:
        launches: This rank's end of the exchange.
        partial: FP32 or BF16 [M, N], unit column stride; N a multiple of 32.
        out: BF16 [ceil(M / P), N], filled completely.
        shape: Tile shape of the call, equal on all ranks.
        signature: `call_signature` of the call.
        group_rows: Row tiles per owner in a group.
        lag: Groups by which own tiles trail.
        grid: CTAs, all resident at once.

    Raises:
        ArgumentError: Wrong dtype, shape, stride or device, or a shard larger than the slots; before anything
            is launched.
    """
    check_operands(partial, out, launches.layout.world_size)
    m, n = partial.shape
    if n % BLOCK_COLUMNS or (m > 0 and (partial.stride(1) != 1 or partial.stride(0) * partial.itemsize % 16)):
        layout = (tuple(partial.shape), partial.stride())
        raise ArgumentError(
            "partial", layout, f"N a multiple of {BLOCK_COLUMNS}, rows 16-byte multiples apart"
        )
    TileGrid(m, n, launches.layout.world_size, shape).require_fits(launches.layout)
    reduce_scatter_kernel(partial.dtype)(
        partial.data_ptr(),
        partial.stride(0),
        out.data_ptr(),
        out.stride(0),
        m,
        n,
        shape.m,
        shape.n,
        *launches.arguments(signature),
        group_rows,
        lag,
        grid,
        stream=launches.stream(),
        memory=(partial, out, *launches.memory),
    )


def all_gather_kernel() -> Kernel:
    """The compiled all-gather of BF16 shards."""

    def build(options: str) -> Any:
        import cutlass.cute as cute

        from dsv4_symm_mem.collectives.all_gather_kernel import AllGather, example_arguments

        return cute.compile(AllGather(), *example_arguments(), options=options)

    return compiled(("all_gather",), build)


def all_gather_cuda(
    launches: LaunchExchange,
    shard: torch.Tensor,
    out: torch.Tensor,
    shape: TileShape,
    signature: int,
    grid: int,
) -> None:
    """Gather every rank's shard; only enqueues work.

    Args:
        launches: This rank's end of the exchange.
        shard: BF16 [ceil(M / P), N], rows 16-byte aligned; rows past the rank's are not read.
        out: BF16 [M, N], likewise, filled completely; N a multiple of 32. May not overlap `shard`.
        shape: Tile shape of the call, equal on all ranks.
        signature: `call_signature` of the call.
        grid: CTAs, all resident at once.

    Raises:
        ArgumentError: Wrong dtype, shape, stride or device, or a shard larger than the slots; before anything
            is launched.
    """
    check_gathered(shard, out, launches.layout.world_size)
    m, n = out.shape
    for name, tensor in (("shard", shard), ("out", out)):
        strided = tensor.shape[0] > 0 and (tensor.stride(1) != 1 or tensor.stride(0) % 8)
        if n % BLOCK_COLUMNS or strided or tensor.data_ptr() % 16:
            layout = (tuple(tensor.shape), tensor.stride())
            raise ArgumentError(
                name, layout, f"N a multiple of {BLOCK_COLUMNS}, rows 16-byte multiples apart and aligned"
            )
    TileGrid(m, n, launches.layout.world_size, shape).require_fits(launches.layout)
    all_gather_kernel()(
        shard.data_ptr(),
        shard.stride(0),
        out.data_ptr(),
        out.stride(0),
        m,
        n,
        shape.m,
        shape.n,
        *launches.arguments(signature),
        grid,
        stream=launches.stream(),
        memory=(shard, out, *launches.memory),
    )
