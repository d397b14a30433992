# SPDX-License-Identifier: Apache-2.0
"""`VLLM_DSV41_GEMM_AR`: DeepSeek-V4.1's `wo_b` on `dsv4_gemm_rs`, where it ends in an all-reduce.

Without sequence parallelism vLLM has no seam of its own here: `wo_b` is a row-parallel layer that reduces its
result. At the model's gate (`gate.py`), called before the layers are made, the ranks agree and allocate; the
gate's answer stays stock's, for a layer that is told yes there expects a reduce-scatter. Then two methods are
wrapped. `DeepseekV4DecoderLayer.__init__` shows each new `wo_b`, of the model and of its draft, after the
layer has settled whether it reduces and before its weights are loaded. `DeepseekV4Attention._wo_b_proj`,
through which every attention class projects, sends large batches of followed layers to the kernel: BF16, and
already quantised ones where the weight is MXFP8. `gemm_rs` of the attention stays None, so whatever vLLM
decides by it (its fused quantisation before `wo_b`) is what it decides without us.

On SM100 vLLM may fold this all-reduce into its hyper-connection kernel; then `wo_b` does not reduce, and the
feature declines before it allocates.

Rejected: `RowParallelLinear.register_oot` (every row-parallel layer of every model); replacing the layer's
`forward` (it is found on the class, and a wrapper on the instance would hide from tools that replace layers).
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from dsv4_vllm_integration import probe
from dsv4_vllm_integration.seams import gate
from dsv4_vllm_integration.seams.enabling import Seam
from dsv4_vllm_integration.states import Status, announce, logger
from dsv4_vllm_integration.switches import GEMM_RS, Feature, Settings

if TYPE_CHECKING:
    from dsv4_gemm_rs import Workspace

    from dsv4_vllm_integration.seams.endings import AllReduceProjection
    from dsv4_vllm_integration.seams.group import TensorParallelGroup
    from dsv4_vllm_integration.seams.projection import FusedProjection

MODULES = (probe.MODEL, probe.STOCK_GEMM_RS, probe.ATTENTION, probe.LINEAR, probe.MHC_OPERATIONS)
"""What is replaced or relied on. The gate is in the first, and ours has stock's signature."""


def active() -> FusedProjection | None:
    """The object that serves layers of this process, if the feature is on."""
    return seam.projection


def arm(settings: Settings) -> None:
    """Be asked when V4.1's model is built."""
    gate.arm(Feature.GEMM_AR, functools.partial(_ask, settings))


def _ask(settings: Settings, vllm_config: Any, use_sequence_parallel: bool) -> bool:
    if not use_sequence_parallel:
        seam.enable(vllm_config, settings)
        return False
    reason = (
        f"vLLM runs this model with sequence parallelism ({gate.sizes(vllm_config)}), so `wo_b` ends in a "
        f"reduce-scatter; {GEMM_RS.name}=1 is for that"
    )
    announce(Feature.GEMM_AR, Status.OFF, reason, speak=gate.speaks())
    return False


def _folded_obstacle(vllm_config: Any) -> str:
    """Whether vLLM will fold the all-reduce into its hyper-connections, by its own two tests."""
    model = importlib.import_module(probe.MODEL)
    if model.supports_mhc_overlap(vllm_config) and model.supports_mhc_all_reduce(vllm_config):
        return "vLLM folds this all-reduce into its hyper-connection kernel, so `wo_b` does not reduce"
    return ""


def _install(group: TensorParallelGroup, workspace: Workspace, settings: Settings) -> AllReduceProjection:
    import torch

    from dsv4_vllm_integration.seams.endings import AllReduceProjection

    decoder_layer = importlib.import_module(probe.MODEL).DeepseekV4DecoderLayer
    attention = importlib.import_module(probe.ATTENTION).DeepseekV4Attention
    projection = AllReduceProjection(group, workspace, settings.min_tokens)
    seam.replace_warm_up(projection)

    def init(self: Any, *given: Any, **options: Any) -> None:
        stock_init(self, *given, **options)
        try:
            if not projection.can_run(self.attn.wo_b):
                projection.warn_incompatible_projection()
        except Exception as error:
            logger.warning("dsv4 gemm_ar: a layer stays with vLLM: %s: %s", type(error).__name__, error)

    stock_init = seam.replace(
        decoder_layer, "__init__", functools.wraps(decoder_layer.__dict__["__init__"])(init)
    )

    def wo_b_proj(self: Any, z: Any) -> Any:
        linear = self.wo_b
        if projection.follows(linear):
            if isinstance(z, torch.Tensor):
                if projection.should_run(z):
                    return projection.apply(z, linear)
            elif projection.takes_quantized(linear) and projection.should_run(z.data):
                return projection.apply_quantized(z, linear)
        return stock_proj(self, z)

    stock_proj = seam.replace(
        attention, "_wo_b_proj", functools.wraps(attention.__dict__["_wo_b_proj"])(wo_b_proj)
    )
    return projection


seam = Seam(Feature.GEMM_AR, MODULES, _install, _folded_obstacle)


def forget() -> None:
    """Undo everything but the wrapped gate, for tests."""
    seam.uninstall()
