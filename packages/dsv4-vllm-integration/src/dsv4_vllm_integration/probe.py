# SPDX-License-Identifier: Apache-2.0
"""Is this vLLM one that the plugin knows: its version, and the signatures that the seams rely on.

Contract: every function of vLLM that a seam replaces, wraps or calls is listed with its parameters as of
vLLM 0.33.0, read from that wheel. A difference disables the feature with a sentence that holds what was
expected and what was found. Annotations are not compared: they change without changing calls.

Rejected: comparing versions alone (builds from source carry any version, and patch releases may change a
signature); comparing source text (a comment would disable the feature).
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
from collections.abc import Mapping
from types import ModuleType

VERSIONS = ("0.33",)
"""Minor versions of vLLM that the seams were written against."""

MODEL = "vllm.models.deepseek_v41.nvidia.model"
DRAFT = "vllm.models.deepseek_v41.nvidia.dspark"
ATTENTION = "vllm.models.deepseek_v41.attention"
MEGA_ATTENTION = "vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn"
STOCK_GEMM_RS = "vllm.model_executor.kernels.linear.cute_dsl.gemm_rs_ar"
SEQUENCE_PARALLEL = "vllm.models.common.ops.sequence_parallel"
LINEAR = "vllm.model_executor.layers.linear"
MHC_OPERATIONS = "vllm.models.deepseek_v41.nvidia.ops.mhc"
MHC_TILELANG = "vllm.model_executor.kernels.mhc.tilelang"
MHC_TRITON = "vllm.model_executor.kernels.mhc.triton"
V4_MODEL = "vllm.models.deepseek_v4.nvidia.model"
V4_DRAFT = "vllm.models.deepseek_v4.nvidia.dspark"
V4_MTP = "vllm.models.deepseek_v4.nvidia.mtp"

_MHC = "hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat"
_SEAM = f"x, residual, post_layer_mix, comb_res_mix, fn, {_MHC}"
_DECODER_LAYER = (
    "self, vllm_config, prefix, topk_indices_buffer=, aux_stream_list=, candidate_block_buffer=, "
    "engram_layout=, engram_prefetch_stream=, run_gemm_rs=, mhc_stream=, fuse_mhc_all_reduce="
)

SIGNATURES: dict[str, dict[str, str]] = {
    MODEL: {
        "maybe_init_gemm_rs": "vllm_config, use_sequence_parallel",
        "DeepseekV4DecoderLayer.__init__": _DECODER_LAYER,
        "DeepseekV4Model.__init__": "self, *, vllm_config, prefix=",
        "DeepseekV4Model.finalize_mhc_broadcast_weights": "self",
    },
    V4_MODEL: {
        "DeepseekV4Model.__init__": "self, *, vllm_config, prefix=",
        "DeepseekV4Model.finalize_mhc_broadcast_weights": "self",
    },
    ATTENTION: {
        "DeepseekV4Attention.bind_gemm_rs": "self",
        "DeepseekV4Attention._wo_b_proj": "self, z",
    },
    MEGA_ATTENTION: {"DeepseekV4MegaAttnAttention._can_quantize_o_proj": "self"},
    STOCK_GEMM_RS: {
        "maybe_init_gemm_rs_ar": "vllm_config, *, N, all_reduce",
        "init_gemm_rs_ar": "max_M, N, *, all_reduce=",
        "get_gemm_rs_ar": "",
        "warmup_gemm_rs_ar": "",
        "GemmRsAr.can_run": "self, linear",
        "GemmRsAr.should_run": "self, x",
        "GemmRsAr.apply": "self, x, linear",
        "GemmRsAr.warn_incompatible_projection": "self",
    },
    SEQUENCE_PARALLEL: {"sp_reduce_scatter": "x"},
    LINEAR: {
        "RowParallelLinear.__init__": (
            "self, input_size, output_size, bias=, input_is_parallel=, skip_bias_add=, params_dtype=, "
            "reduce_results=, quant_config=, prefix=, *, return_bias=, disable_tp="
        ),
        "RowParallelLinear.forward": "self, input_",
    },
    MHC_OPERATIONS: {
        "supports_mhc_overlap": "vllm_config",
        "supports_mhc_all_reduce": "vllm_config",
    },
    MHC_TILELANG: {
        "mhc_pre_delayed_tilelang": f"residual, fn, {_MHC}, pre_mix=, x=, norm_weight=, norm_eps=",
        "mhc_fused_post_pre_delayed_tilelang": (f"{_SEAM}, pre_mix=, norm_weight=, norm_eps=, capture_aux="),
        "mhc_pre_tilelang": f"residual, fn, {_MHC}, n_splits=, norm_weight=, norm_eps=",
        "mhc_fused_post_pre_tilelang": f"{_SEAM}, n_splits=, tile_n=, norm_weight=, norm_eps=",
        "mhc_post_tilelang": "x, residual, post_layer_mix, comb_res_mix",
    },
    MHC_TRITON: {"hc_collapse_triton": "x, pre_mix"},
}
"""By module and dotted name: parameters as `parameters_of` writes them, from the wheel of vLLM 0.33.0."""


def vllm_version() -> str | None:
    """The version of the installed vLLM, or None; imports nothing."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def version_obstacle(version: str | None) -> str:
    """Why the seams cannot be used with this version; empty if they can."""
    known = ", ".join(f"{minor}.x" for minor in VERSIONS)
    if version is None:
        return f"vLLM is not installed, expected {known}"
    match = re.match(r"(\d+\.\d+)(?!\d)", version)
    if match is None or match.group(1) not in VERSIONS:
        return f"expected vLLM {known}, found {version}"
    return ""


def parameters_of(function: object) -> str:
    """A callable's parameters in one line: names, `*` before keyword-only ones, `=` after optional ones.

    Raises:
        TypeError: It has no signature.
        ValueError: Its signature cannot be had.
    """
    if isinstance(function, functools.cached_property):
        function = function.func
    if not callable(function):
        raise TypeError(f"{function!r} is not callable")
    parts: list[str] = []
    starred = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            parts.append(f"*{parameter.name}")
            starred = True
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            parts.append(f"**{parameter.name}")
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        parts.append(parameter.name + ("=" if parameter.default is not parameter.empty else ""))
    return ", ".join(parts)


def attribute(module: ModuleType, dotted: str) -> object:
    """`module`'s attribute by dotted name, descriptors of classes as they were written.

    Raises:
        AttributeError: There is none.
    """
    found: object = module
    for part in dotted.split("."):
        if isinstance(found, type):
            for owner in found.__mro__:
                if part in owner.__dict__:
                    found = owner.__dict__[part]
                    break
            else:
                raise AttributeError(part)
        else:
            found = getattr(found, part)
    return found


def signature_obstacle(module: ModuleType, names: Mapping[str, str] | None = None) -> str:
    """What differs between `module` and the signatures that the seams expect; empty if nothing does.

    Args:
        module: An imported module of vLLM.
        names: Expected parameters by dotted name; default all that are listed for the module.
    """
    for dotted, expected in (SIGNATURES[module.__name__] if names is None else names).items():
        where = f"{module.__name__}.{dotted}"
        try:
            function = attribute(module, dotted)
        except AttributeError:
            return f"expected {where}, found no such name"
        try:
            found = parameters_of(function)
        except (TypeError, ValueError) as error:
            return f"expected {where}({expected}), found {error}"
        if found != expected:
            return f"expected {where}({expected}), found ({found})"
    return ""
