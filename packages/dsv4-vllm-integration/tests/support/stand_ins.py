# SPDX-License-Identifier: Apache-2.0
"""Row-parallel layers with the attributes that vLLM's have, for machines on which vLLM cannot be installed.

Where vLLM can be, `vllm_layers` builds its own objects and the tests there hold these attributes to be right.
"""

from __future__ import annotations

from typing import Any

import torch
from dsv4_gemm_rs import ScaleLayout, quantize_mxfp8
from dsv4_gemm_rs.quantize import swizzle_scales


class FlashInferCutedslMxfp8LinearKernel:
    """Keeps the weight as a [K, N] view of contiguous [N, K], scales swizzled and flat."""

    def lay_out(self, layer: Any) -> None:
        """As vLLM's kernel of this name does."""
        layer.weight = layer.weight.contiguous().t()
        layer.weight_scale = swizzle_scales(layer.weight_scale)


class FlashInferCutlassMxfp8LinearKernel:
    """Keeps the weight as it is, scales swizzled and flat."""

    def lay_out(self, layer: Any) -> None:
        """As vLLM's kernel of this name does."""
        layer.weight_scale = swizzle_scales(layer.weight_scale)


class MarlinMxfp8LinearKernel:
    """Repacks the weight into 32-bit words of another shape and moves the scales."""

    def lay_out(self, layer: Any) -> None:
        """As far as is visible from outside."""
        layer.weight = layer.weight.view(torch.int32).t().contiguous()
        layer.weight_scale = layer.weight_scale.t().contiguous()


class Method:
    """A quantisation method with its kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def process_weights_after_loading(self, layer: Any) -> None:
        """Let the kernel lay the weight out."""
        if self.kernel is not None:
            self.kernel.lay_out(layer)


KERNELS = {
    kind.__name__: kind
    for kind in (
        FlashInferCutedslMxfp8LinearKernel,
        FlashInferCutlassMxfp8LinearKernel,
        MarlinMxfp8LinearKernel,
    )
}


class Layer:
    """A row-parallel layer [N, K] of one rank before loading; `kind` is "bf16" or a kernel's name.

    One of `tp_size` ranks that reduces its result; under sequence parallelism these four attributes are not
    looked at.
    """

    def __init__(self, n: int, k: int, kind: str, device: torch.device, tp_size: int = 1) -> None:
        self.kind = kind
        self.reduce_results = True
        self.tp_size = tp_size
        self.input_is_parallel = True
        self.return_bias = False
        self.bias = None
        self.called = 0
        self.quant_method = Method(KERNELS[kind]() if kind in KERNELS else None)
        dtype = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
        self.weight = torch.empty(n, k, dtype=dtype, device=device)
        if kind != "bf16":
            self.weight_scale = torch.empty(n, k // 32, dtype=torch.uint8, device=device)

    def load(self, dense: torch.Tensor, *, broken: bool = False) -> None:
        """Load a checkpoint's weight; a second time into the addresses that the kernel holds.

        A `broken` one has a scale that is NaN.
        """
        device = self.weight.device
        if self.kind == "bf16":
            self.weight.data.copy_(dense.to(torch.bfloat16))
            self.quant_method.process_weights_after_loading(self)
            return
        held = self.weight, self.weight_scale
        quantised = quantize_mxfp8(dense, layout=ScaleLayout.ROW_MAJOR)
        self.weight, self.weight_scale = quantised.data.to(device), quantised.scale.to(device)
        if broken:
            self.weight_scale[0, 0] = 255
        first = held[1].shape == self.weight_scale.shape
        self.quant_method.process_weights_after_loading(self)
        if not first:
            held[0].copy_(self.weight)
            held[1].copy_(self.weight_scale)
            self.weight, self.weight_scale = held

    def __call__(self, x: Any) -> Any:
        """The unfused projection; the tests only count how often it is asked for."""
        self.called += 1
        return x
