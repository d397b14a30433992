# SPDX-License-Identifier: Apache-2.0
"""MXFP8 quantisation: the rule (scale and rounding), the scale-factor layouts, and the GPU kernel."""

from __future__ import annotations

from dsv4_gemm_rs.quantize.api import (
    Mxfp8,
    compile_quantizer,
    dequantize_mxfp8,
    quantize_mxfp8,
    round_trip_mxfp8,
)
from dsv4_gemm_rs.quantize.layout import (
    ScaleLayout,
    infer_layout,
    swizzle_scales,
    swizzled_scale_numel,
    unswizzle_scales,
)
from dsv4_gemm_rs.quantize.op import quantize_mxfp8_op
from dsv4_gemm_rs.quantize.rule import BLOCK, ScaleRule

__all__ = [
    "BLOCK",
    "Mxfp8",
    "ScaleLayout",
    "ScaleRule",
    "compile_quantizer",
    "dequantize_mxfp8",
    "infer_layout",
    "quantize_mxfp8",
    "quantize_mxfp8_op",
    "round_trip_mxfp8",
    "swizzle_scales",
    "swizzled_scale_numel",
    "unswizzle_scales",
]
