# SPDX-License-Identifier: Apache-2.0
"""The cost model's inputs: what one kernel on one kind of GPU takes for its steps, and where each comes from.

`SM90` is a calibration: one H200, 132 SMs, BF16, random operands, every configuration in turn at M = 512 to
8192 and K = 1024 to 4096, CUDA graphs, medians; the tests hold the model against them. Its link is what
pushes between two H200s reach, both ways at once (docs/results/h200_link.json).

`SM90_FP8` is one too, of the kernel for weights kept in FP8 and its own tiles, measured in the same way.
Converting weights takes a k step 0.3 us whatever the tile's tokens, and both warpgroups share a tile, so an
epilogue has nothing beside it. What it takes to exchange is SM90's.

`SM100_MXFP8` and `SM100_BF16` are assumptions until somebody measures: no SM100 GPU was at hand.
  * multiplying: 3172 TFLOP/s of MXFP8 and 1722 of BF16 on 148 SMs, "realistic" rates that a B200 was measured
    to reach (gau-nernst, gn-kernels).
  * filling shared memory: per SM what was measured on the H200. The shared-memory port (128 bytes a cycle,
    every byte written once and read once) would allow a third more.
  * link: 670 GB/s, 74 % of the data sheet's 900, what bulk copies between B200s were measured to reach
    (ParallelKittens, arXiv 2511.13940).
  * sums read through multicast: 680 GB/s, the slope of a published kernel that reads them on four B200s
    (vLLM's, 16.25 ns a row of N = 5120, less its quantiser's share). SM90's, 75 % of the data sheet, is not
    used.
  * epilogue, launch and latency: as measured on the H200.
With the first two the model puts a product of N = 6144, K = 1536 at 21.5, 35.6 and 59.1 us for M = 2048, 4096
and 8192, where FlashInfer's on a B200 was published with 17.9 to 19.3, 31.1 and 57.9 to 60.8 (vLLM #46393;
the shape is derived from the figures there): large products are met, small ones come out too slow by a sixth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsv4_gemm_rs.kernels.families import Operand

_B200_SMS = 148


@dataclass(frozen=True)
class Rates:
    """Inputs of the cost model; microseconds, bytes, elements.

    Attributes:
        stage_k: Elements of K in a k step of 128 bytes.
        step_us: Of one k step, whatever the tile.
        multiply_us: Of one element of the tile in one k step, on top of it.
        fill_bytes_per_us: Bytes that each SM brings from L2 into shared memory when all are busy.
        fill_bytes_per_us_alone: The same where few are.
        epilogue_us: Of a tile, whatever its size.
        epilogue_us_per_element: On top of it.
        peer_us_per_element: Of adding one peer's partial to an own tile.
        overlapped: Whether a tile's epilogue runs beside the next one's k steps.
        lone: Factor of a k step where a CTA has one tile only.
        launch_us: Of a launch, whatever it does.
        cluster_launch_us: On top of it where CTAs form clusters.
        link_bytes_per_us: Of one rank's link, outwards.
        link_latency_us: From the end of a transfer until an own tile may be added to.
        publish_us: From a tile's last byte until its CTA sends the next: it waits until the tile is complete
            at the peer, and raises the flag.
        multicast_bytes_per_us: What a rank sends where others read sums through multicast.
    """

    stage_k: int
    step_us: float
    multiply_us: float
    fill_bytes_per_us: float
    fill_bytes_per_us_alone: float
    epilogue_us: float
    epilogue_us_per_element: float
    peer_us_per_element: float
    overlapped: bool
    lone: float
    launch_us: float
    cluster_launch_us: float
    link_bytes_per_us: float
    link_latency_us: float
    publish_us: float
    multicast_bytes_per_us: float


SM90 = Rates(
    stage_k=64,
    step_us=0.05,
    multiply_us=1.9e-5,
    fill_bytes_per_us=120_000.0,
    fill_bytes_per_us_alone=125_000.0,
    epilogue_us=0.1,
    epilogue_us_per_element=1.6 / (128 * 256),
    peer_us_per_element=0.6 / (128 * 256),
    overlapped=True,
    lone=1.1,
    launch_us=4.0,
    cluster_launch_us=1.6,
    link_bytes_per_us=357_000.0,
    link_latency_us=3.0,
    publish_us=2.0,
    multicast_bytes_per_us=0.75 * 450_000.0,
)

SM90_FP8 = replace(
    SM90,
    step_us=0.305,
    multiply_us=1.18e-5,
    epilogue_us=0.65,
    epilogue_us_per_element=5.2e-5,
    overlapped=False,
    lone=1.0,
    launch_us=3.75,
)

SM100_MXFP8 = replace(
    SM90,
    stage_k=128,
    step_us=0.0,
    multiply_us=2 * 128 * _B200_SMS / 3172e6,
    fill_bytes_per_us=88_000.0,
    fill_bytes_per_us_alone=110_000.0,
    epilogue_us_per_element=1.2 / (128 * 256),
    lone=1.0,
    launch_us=4.5,
    link_bytes_per_us=670_000.0,
    multicast_bytes_per_us=680_000.0,
)

SM100_BF16 = replace(SM100_MXFP8, stage_k=64, multiply_us=2 * 64 * _B200_SMS / 1722e6)


def rates_of(arch: int | None, operand: Operand) -> Rates:
    """The inputs for a kernel on GPUs of `arch`; those of SM90 where there is none."""
    if arch in (100, 103):
        return SM100_MXFP8 if operand is Operand.MXFP8 else SM100_BF16
    return SM90_FP8 if operand is Operand.FP8_WEIGHT else SM90


def link_rate_of(arch: int | None) -> float:
    """Bytes per microsecond that one rank's link takes on GPUs of `arch`."""
    return rates_of(arch, Operand.BF16).link_bytes_per_us
