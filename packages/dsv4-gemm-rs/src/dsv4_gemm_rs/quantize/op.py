# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.dsv4.quantize_mxfp8(Tensor x, str layout, str rule) -> (Tensor, Tensor)`, for traced programs.

The operator is what torch.compile and export record; its fake implementation gives shapes and dtypes (with
symbolic M too) without data. In eager code `quantize_mxfp8` is the better call: it takes `out` and returns
the layout.

Rejected: `torch.library.custom_op`, whose Python wrapper costs more per call than the whole launch. The
library object is a FRAGMENT because other modules define operators in the same namespace; it must outlive the
program, hence the module-level name.
"""

from __future__ import annotations

import torch

from dsv4_gemm_rs.quantize.api import check_input, choice, quantize_mxfp8
from dsv4_gemm_rs.quantize.layout import ScaleLayout, scale_shape
from dsv4_gemm_rs.quantize.rule import ScaleRule

_LIBRARY = torch.library.Library("dsv4", "FRAGMENT")
_LIBRARY.define("quantize_mxfp8(Tensor x, str layout='swizzled', str rule='vllm') -> (Tensor, Tensor)")


def _quantize(
    x: torch.Tensor, layout: str = "swizzled", rule: str = "vllm"
) -> tuple[torch.Tensor, torch.Tensor]:
    quantised = quantize_mxfp8(x, layout=layout, rule=rule)
    return quantised.data, quantised.scale


def _fake(x: torch.Tensor, layout: str = "swizzled", rule: str = "vllm") -> tuple[torch.Tensor, torch.Tensor]:
    wanted, _ = choice(ScaleLayout, "layout", layout), choice(ScaleRule, "rule", rule)
    check_input(x)
    rows, k = x.shape
    return (
        x.new_empty((rows, k), dtype=torch.float8_e4m3fn),
        x.new_empty(scale_shape(rows, k, wanted), dtype=torch.uint8),
    )


_LIBRARY.impl("quantize_mxfp8", _quantize, "CompositeExplicitAutograd")
torch.library.register_fake("dsv4::quantize_mxfp8", _fake, lib=_LIBRARY)

quantize_mxfp8_op = torch.ops.dsv4.quantize_mxfp8
"""The registered operator; x and the choices as for `quantize_mxfp8`, data and scale returned."""
