# SPDX-License-Identifier: Apache-2.0
"""Microseconds of whole calls: BF16 activations in, this rank's rows of the sum out.

Contract: the kernels' waves are those of `dispatch.costs`, with the inputs' rates; what is added here are the
steps around them. Calls are taken to follow each other on one stream without gaps, as in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4_symm_mem.protocol.layout import ceil_div

from dsv4_gemm_rs.dispatch.costs import choose, estimate_us, k_step_us
from dsv4_gemm_rs.kernels.families import TileConfig
from dsv4_gemm_rs.model.inputs import Inputs
from dsv4_gemm_rs.quantize.rule import BLOCK


@dataclass(frozen=True)
class Call:
    """One call: M rows and N columns on each of P ranks, K summed on each."""

    m: int
    n: int
    k: int
    world_size: int

    @property
    def partial_bytes(self) -> int:
        """S, a rank's whole partial in BF16."""
        return 2 * self.m * self.n

    @property
    def wire_bytes(self) -> float:
        """What a rank has to send at least: S·(P-1)/P."""
        return self.partial_bytes * (self.world_size - 1) / self.world_size


def quantise_us(inputs: Inputs, call: Call) -> float:
    """BF16 in, E4M3 and a scale for every 32 of them out."""
    return inputs.quantise_us + call.m * call.k * (2 + 1 + 1 / BLOCK) / inputs.quantise_bytes_per_us


def gemm_us(inputs: Inputs, family: Sequence[TileConfig], call: Call) -> float:
    """A product alone, by the best tile."""
    shape = (call.m, call.n, call.k, 1, inputs.multiprocessors)
    return estimate_us(inputs.rates, choose(inputs.rates, family, *shape), *shape)


def fused_us(inputs: Inputs, family: Sequence[TileConfig], call: Call) -> float:
    """Our fused kernel alone, by the tile that the dispatcher takes."""
    shape = (call.m, call.n, call.k, call.world_size, inputs.multiprocessors)
    return estimate_us(inputs.rates, choose(inputs.rates, family, *shape), *shape)


def alone_us(inputs: Inputs, family: Sequence[TileConfig], call: Call) -> float:
    """Our fused kernel in the tiles of the call, without its exchange."""
    shape = (call.m, call.n, call.k)
    config = choose(inputs.rates, family, *shape, call.world_size, inputs.multiprocessors)
    return estimate_us(inputs.rates, config, *shape, 1, inputs.multiprocessors)


def collective_us(inputs: Inputs, call: Call) -> float:
    """A library's reduce-scatter of a finished partial."""
    return inputs.collective_us + call.wire_bytes / inputs.collective_bytes_per_us


def ours_us(inputs: Inputs, family: Sequence[TileConfig], call: Call) -> float:
    """Quantiser, then the fused kernel."""
    return quantise_us(inputs, call) + fused_us(inputs, family, call)


def unfused_us(inputs: Inputs, family: Sequence[TileConfig], call: Call) -> float:
    """Quantiser, a library's product, a library's reduce-scatter."""
    return quantise_us(inputs, call) + gemm_us(inputs, family, call) + collective_us(inputs, call)


def pulled_us(inputs: Inputs, config: TileConfig, call: Call) -> float:
    """Quantiser, then a fused kernel of tiles `config` whose owners read sums through multicast.

    Every rank's whole partial crosses its link. A wave's tiles are read when they are finished; at the end
    ranks wait for each other, so that none goes on while another still reads its memory.
    """
    rates = inputs.rates
    workers = inputs.multiprocessors // config.cluster
    tiles = ceil_div(call.m, config.tile_m * config.cluster) * ceil_div(call.n, config.tile_n)
    epilogue = rates.epilogue_us + rates.epilogue_us_per_element * config.tile_m * config.tile_n
    multiplied = rates.launch_us + (rates.cluster_launch_us if config.cluster > 1 else 0.0)
    link = 0.0
    for first in range(0, tiles, workers):
        busy = min(workers, tiles - first)
        multiplied += ceil_div(call.k, rates.stage_k) * k_step_us(rates, config, busy / workers)
        sent = call.partial_bytes * busy / tiles / rates.multicast_bytes_per_us
        link = max(link, multiplied + epilogue) + sent
    return quantise_us(inputs, call) + link + rates.link_latency_us + inputs.barrier_us
