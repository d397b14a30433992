# SPDX-License-Identifier: Apache-2.0
"""MXFP8 and BF16 GEMM with reduce-scatter or all-reduce, fused where a kernel for the machine exists.

    group = torch.distributed.group.WORLD
    workspace = Workspace.create(group, max_tokens=8192, n=5120)
    weight = prepare_weight(w_e4m3, w_scale)
    shard = gemm_rs(x, weight, workspace)

Importing this package needs no GPU and no driver, and does not import the CuTe DSL.
"""

from __future__ import annotations

from dsv4_gemm_rs._version import __version__
from dsv4_gemm_rs.api import gemm_ar, gemm_rs
from dsv4_gemm_rs.dispatch import Decision, Path
from dsv4_gemm_rs.quantize import Mxfp8, ScaleLayout, ScaleRule, dequantize_mxfp8, quantize_mxfp8
from dsv4_gemm_rs.weights import Activation, Keep, PreparedWeight, WeightKind, prepare_weight
from dsv4_gemm_rs.workspace import Workspace

__all__ = [
    "Activation",
    "Decision",
    "Keep",
    "Mxfp8",
    "Path",
    "PreparedWeight",
    "ScaleLayout",
    "ScaleRule",
    "WeightKind",
    "Workspace",
    "__version__",
    "dequantize_mxfp8",
    "gemm_ar",
    "gemm_rs",
    "prepare_weight",
    "quantize_mxfp8",
]
