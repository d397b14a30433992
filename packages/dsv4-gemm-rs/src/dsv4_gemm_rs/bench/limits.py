# SPDX-License-Identifier: Apache-2.0
"""Physical limits that a plot is drawn against, from the vendor's data sheets.

H200 SXM data sheet: 989 TFLOP/s dense BF16, 4.8 TB/s of memory, 900 GB/s of NVLink in both directions
together. B200 (HGX data sheet, per GPU): 2.25 PFLOP/s dense BF16, 4.5 PFLOP/s dense FP8, 8 TB/s, 1.8 TB/s. A
real GEMM stays below these rates; that is what makes them limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_gemm_rs.weights import WeightKind


@dataclass(frozen=True)
class Limits:
    """Peak rates of one GPU: BF16 and MXFP8 operations, bytes of memory and of NVLink out, a second each."""

    bf16: float
    mxfp8: float
    memory: float
    nvlink: float


KNOWN = {
    "NVIDIA H200": Limits(bf16=989e12, mxfp8=989e12, memory=4.8e12, nvlink=450e9),
    "NVIDIA H100 80GB HBM3": Limits(bf16=989e12, mxfp8=989e12, memory=3.35e12, nvlink=450e9),
    "NVIDIA B200": Limits(bf16=2.25e15, mxfp8=4.5e15, memory=8e12, nvlink=900e9),
}
"""By the device's name. Hopper multiplies MXFP8 as BF16, so its two rates are one."""


def floor_us(
    device: str, m: int, n: int, k: int, kind: WeightKind, world_size: int, virtual: bool
) -> float | None:
    """Least time of one call in microseconds, or None for an unknown device.

    The larger of arithmetic, memory traffic (each operand read once, the output written once) and, between
    GPUs, the bytes that a rank must send. Virtual ranks share one device's arithmetic and memory and use no
    link.
    """
    limits = KNOWN.get(device)
    if limits is None:
        return None
    ranks_here = world_size if virtual else 1
    rate = limits.bf16 if kind is WeightKind.BF16 else limits.mxfp8
    arithmetic = 2 * m * n * k * ranks_here / rate
    weight_bytes = 2 if kind is WeightKind.BF16 or device.startswith("NVIDIA H") else 1
    memory = ranks_here * (2 * m * k + weight_bytes * n * k + 2 * m * n // world_size) / limits.memory
    wire = 0.0 if virtual else 2 * m * n * (world_size - 1) / world_size / limits.nvlink
    return 1e6 * max(arithmetic, memory, wire)
