# SPDX-License-Identifier: Apache-2.0
"""The compiled quantiser in the emulator, bit for bit against the torch path, special values included.

`test_quantize_gpu.py` asks the same of a device, of more shapes and types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsv4_gemm_rs.kernels.cache import quantizer_kernel
from dsv4_gemm_rs.quantize import ScaleLayout, ScaleRule, quantize_mxfp8, round_trip_mxfp8
from dsv4_gemm_rs.quantize.layout import k_tiles, padded_rows, scale_shape
from dsv4_gemm_rs.quantize.rule import BLOCK
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.protocol.launch import LaunchExchange
from quantize_support import adversarial

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

POISON = 0xFF


def run(
    emulation: Any, x: torch.Tensor, layout: ScaleLayout | None, rule: ScaleRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel makes of `x`: bytes of data, and scales."""
    from dsv4_gemm_rs.quantize import kernel

    (rank,) = VirtualGroup(1, "cpu", emulation=emulation).ranks
    exchange = LaunchExchange.scratch(rank.device, rank.accelerator)
    m, k = x.shape
    rows = padded_rows(m) if layout is ScaleLayout.SWIZZLED else m
    data = torch.full((m, k * (2 if layout is None else 1)), POISON, dtype=torch.uint8)
    scale = torch.full(scale_shape(m, k, layout or ScaleLayout.ROW_MAJOR), POISON, dtype=torch.uint8)
    grid_x, grid_y, across_log2 = kernel.grid(rows, k_tiles(k))
    row_bytes = x.stride(0) * x.element_size()
    quantizer_kernel(x.dtype, layout)(
        *(x.data_ptr(), data.data_ptr(), scale.data_ptr()),
        *(m, rows, k // BLOCK, row_bytes, int((x.data_ptr() | row_bytes) % 16 == 0), kernel.ROUND_UP[rule]),
        *(across_log2, grid_x, grid_y),
        stream=exchange.stream(),
        memory=(x, data, scale),
    )
    emulation.run()
    return data, scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", [*ScaleLayout, None], ids=str)
def test_bits_are_the_rules(
    dtype: torch.dtype, layout: ScaleLayout | None, emulator: Callable[..., Any]
) -> None:
    rule = ScaleRule.OCP if dtype is torch.float16 else ScaleRule.VLLM
    for rows, k, offset in ((67, 160, 0), (5, 256, 1)):
        held = torch.zeros(rows, k + 8, dtype=dtype)
        x = held[:, offset : offset + k]
        x.copy_(adversarial(rows, k, dtype))
        data, scale = run(emulator(1, processors=2), x, layout, rule)
        if layout is None:
            assert torch.equal(data, round_trip_mxfp8(x, rule=rule).view(torch.uint8))
            assert (scale == POISON).all()
        else:
            wanted = quantize_mxfp8(x, layout=layout, rule=rule)
            assert torch.equal(data, wanted.data.view(torch.uint8))
            assert torch.equal(scale, wanted.scale)
