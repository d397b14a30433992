# SPDX-License-Identifier: Apache-2.0
"""One call, the way that was decided: the reduce-scatter of a product, alone or as half of an all-reduce.

An all-reduce is two calls of the exchange: the fused (or unfused) GEMM and reduce-scatter, then a gather of
the shards. So every rank gets the bits that a row's owner has summed, in rank order, and whatever serves a
reduce-scatter serves it too. Not fused: the gather starts when the last row is finished. Where sums are read
through multicast it is one call of one kernel, whose owners write them back.
"""

from __future__ import annotations

import torch
from dsv4_symm_mem.collectives.all_gather import all_gather
from dsv4_symm_mem.collectives.cuda import all_gather_cuda
from dsv4_symm_mem.collectives.process_group import all_gather_shards
from dsv4_symm_mem.collectives.reduce_scatter import HOST_TILE
from dsv4_symm_mem.errors import ExchangeError, UnsupportedError
from dsv4_symm_mem.protocol.layout import shard_length
from dsv4_symm_mem.protocol.words import Operation, call_signature

from dsv4_gemm_rs.dispatch import Decision, Exchange, Path
from dsv4_gemm_rs.fused import run_fused
from dsv4_gemm_rs.host import run_host
from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.unfused import run_unfused
from dsv4_gemm_rs.workspace import Workspace


def reduce_scatter_product(
    operands: Operands, workspace: Workspace, decision: Decision, out: torch.Tensor
) -> None:
    """Write this rank's shard [ceil(M / P), N] of the summed product into `out`."""
    if decision.path is Path.HOST:
        run_host(operands, workspace.exchange, out)
    elif decision.path is Path.FUSED:
        run_fused(operands, workspace, out)
    else:
        run_unfused(operands, workspace, decision, out)


def all_reduce_product(
    operands: Operands, workspace: Workspace, decision: Decision, out: torch.Tensor
) -> None:
    """Write the whole summed product [M, N] into `out`, the same bits on every rank."""
    if workspace.world_size == 1:
        reduce_scatter_product(operands, workspace, decision, out)
        return
    if decision.exchange is Exchange.MULTICAST:
        run_fused(operands, workspace, out, gathered=True)
        return
    rows = shard_length(operands.m, workspace.world_size)
    shard = torch.empty(rows, operands.weight.n, dtype=out.dtype, device=out.device)
    try:
        reduce_scatter_product(operands, workspace, decision, shard)
    except ExchangeError:
        # Only where the host drives the exchange; kernels fill the output themselves.
        out.fill_(float("nan"))
        raise
    gather_shards(shard, workspace, decision, out)


def gather_shards(shard: torch.Tensor, workspace: Workspace, decision: Decision, out: torch.Tensor) -> None:
    """Gather the shards of a call that `decision` served into `out` [M, N]."""
    m, n = out.shape
    if decision.exchange is Exchange.ALL_TO_ALL and workspace.process_group is not None:
        all_gather_shards(workspace.process_group, shard, out)
    elif decision.path is not Path.HOST and workspace.launches is not None:
        signature = call_signature(Operation.ALL_GATHER, m, n, HOST_TILE.m, HOST_TILE.n)
        grid = workspace.machine.multiprocessors
        all_gather_cuda(workspace.launches, shard, out, HOST_TILE, signature, grid)
    elif workspace.exchange is not None:
        all_gather(workspace.exchange, shard, out)
    else:
        raise UnsupportedError(f"shards that {decision.exchange.value!r} made cannot be gathered here")
