# SPDX-License-Identifier: Apache-2.0
"""The reference back end: the fused schedule and protocol performed by the host, tile by tile.

Contract: the same tiles in the same order, the same slots, flags and epochs as a fused kernel, and the same
result up to the order of FP32 accumulation within a tile's K. It runs wherever there is an arena, without a
GPU on virtual ranks, and is what the demonstration and the protocol tests drive.
"""

from __future__ import annotations

import torch
from dsv4_symm_mem.collectives.reduce_scatter import HOST_TILE, push_tiles
from dsv4_symm_mem.protocol.host import HostExchange
from dsv4_symm_mem.protocol.tiles import Tile

from dsv4_gemm_rs.operands import Operands
from dsv4_gemm_rs.quantize import dequantize_mxfp8, quantize_mxfp8
from dsv4_gemm_rs.schedule import Schedule
from dsv4_gemm_rs.weights import Activation, WeightKind


def activations_fp32(operands: Operands) -> torch.Tensor:
    """The activations as the product sees them, FP32 [M, K]: quantised and back for MXFP8 weights."""
    x, scale = operands.x, operands.x_scale
    if scale is not None:
        return dequantize_mxfp8(x, scale)
    if operands.weight.kind is WeightKind.BF16 or operands.weight.activation is Activation.BF16:
        return x.float()
    quantised = quantize_mxfp8(x)
    return dequantize_mxfp8(quantised.data, quantised.scale)


def weight_fp32(operands: Operands) -> torch.Tensor:
    """The weight as plain FP32 [N, K]."""
    weight = operands.weight
    if weight.scale is None:
        return weight.data.float()
    return dequantize_mxfp8(weight.data, weight.scale)


def run_host(operands: Operands, exchange: HostExchange | None, out: torch.Tensor) -> None:
    """Perform one call; `exchange` is None for a single rank without symmetric memory.

    Raises:
        ExchangeError: A peer failed, is late or runs another call; `out` is NaN then.
    """
    activations, weight = activations_fp32(operands), weight_fp32(operands)

    def partial(tile: Tile) -> torch.Tensor:
        rows = activations[tile.rows.start : tile.rows.stop]
        return rows @ weight[tile.columns.start : tile.columns.stop].T

    if exchange is None:
        out.copy_(activations @ weight.T)
        return
    schedule = Schedule(operands.m, operands.weight.n, exchange.layout.world_size, exchange.rank, HOST_TILE)
    push_tiles(exchange, schedule.grid, schedule, partial, out)
