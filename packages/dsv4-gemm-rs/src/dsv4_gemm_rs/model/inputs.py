# SPDX-License-Identifier: Apache-2.0
"""What the model of whole calls is fed with, and where every number comes from.

Contract: one set of inputs for a machine serves every kind of call, ours and others'. None is fitted to a
result of ours. Of the B200's, one is read off a result that the model is later compared with (the multicast
rate, off the published kernel's slope), which our calls use only where they are asked to read sums through
multicast; the comparison says so.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from dsv4_gemm_rs.dispatch.rates import SM90, SM100_MXFP8, Rates


@dataclass(frozen=True)
class Inputs:
    """A machine for one kind of operands; microseconds and bytes.

    Attributes:
        rates: Of a fused kernel, see `dispatch.rates`; k steps, fills and launches hold for any GEMM.
        multiprocessors: SMs.
        quantise_us: The quantiser's time whatever it does, its launch included.
        quantise_bytes_per_us: What it reads and writes on top of that.
        collective_us: A library reduce-scatter's time whatever it does.
        collective_bytes_per_us: What it sends on top of that.
        barrier_us: One round trip of flags between ranks.
    """

    rates: Rates
    multiprocessors: int
    quantise_us: float
    quantise_bytes_per_us: float
    collective_us: float
    collective_bytes_per_us: float
    barrier_us: float

    def scaled(self, name: str, factor: float) -> Inputs:
        """The same with the input `name`, of this or of `rates`, times `factor`; not `multiprocessors`."""
        if name in NAMES:
            return replace(self, **{name: getattr(self, name) * factor})
        return replace(self, rates=replace(self.rates, **{name: getattr(self.rates, name) * factor}))

    def value(self, name: str) -> float:
        """The input `name`."""
        return float(getattr(self if name in NAMES else self.rates, name))


NAMES = frozenset(field.name for field in fields(Inputs)) - {"rates"}

_H200_NVLINK, _B200_NVLINK = 450_000.0, 900_000.0
_H200_MEMORY, _B200_MEMORY = 4.8e6, 8.0e6

H200 = Inputs(
    rates=SM90,
    multiprocessors=132,
    quantise_us=2.4,
    quantise_bytes_per_us=3.7e6,
    collective_us=15.0,
    collective_bytes_per_us=210_000.0,
    barrier_us=2.4,
)
"""Measured on two H200s (docs/results)."""

B200 = Inputs(
    rates=SM100_MXFP8,
    multiprocessors=148,
    quantise_us=H200.quantise_us,
    quantise_bytes_per_us=H200.quantise_bytes_per_us * _B200_MEMORY / _H200_MEMORY,
    collective_us=H200.collective_us,
    collective_bytes_per_us=H200.collective_bytes_per_us * _B200_NVLINK / _H200_NVLINK,
    barrier_us=H200.barrier_us,
)

SOURCES = {
    "multiply_us": "3172 TFLOP/s of MXFP8 on 148 SMs, reached on a B200 by gau-nernst's gn-kernels",
    "fill_bytes_per_us": "measured on an H200, per SM; assumed",
    "epilogue_us_per_element": "measured on an H200; assumed",
    "peer_us_per_element": "measured on an H200; assumed",
    "launch_us": "measured on an H200; assumed",
    "cluster_launch_us": "measured on an H200; assumed",
    "link_bytes_per_us": "74 % of the data sheet's 900 GB/s, bulk copies, ParallelKittens (arXiv 2511.13940)",
    "link_latency_us": "measured on H200s; assumed",
    "publish_us": "measured on H200s; assumed",
    "quantise_us": "measured on an H200; assumed",
    "quantise_bytes_per_us": "the share of the memory's rate that the quantiser reaches on an H200 (77 %)",
    "collective_us": "NCCL on two H200s; assumed",
    "collective_bytes_per_us": "the share of the link's rate that NCCL reaches on two H200s (47 %)",
    "multicast_bytes_per_us": "off the published kernel's own slope; calls that push do not use it",
    "barrier_us": "a round trip of flags between two H200s; assumed",
}
"""Of `B200`, by input."""
