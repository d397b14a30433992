# SPDX-License-Identifier: Apache-2.0
"""`VLLM_DSV41_GEMM_RS`: DeepSeek-V4.1's `wo_b` on `dsv4_gemm_rs`, where it ends in a reduce-scatter.

Under sequence parallelism ours is tried first at the model's gate (`gate.py`). Once it is on, two functions
of vLLM's `gemm_rs_ar` module answer for it: `get_gemm_rs_ar`, from which layers take the object that they
hold, and `warmup_gemm_rs_ar`; layers, decoder and warm-up then run vLLM's own code. Two methods of the
attention classes are wrapped so that activations which mega-attention already quantised stay quantised:
stock's kernel takes BF16 only, and vLLM gives up the fused quantise for it.

Kimi-K3 shares the `gemm_rs_ar` module but has a gate of its own, which stays as it is; `init_gemm_rs_ar` and
`maybe_init_gemm_rs_ar` do too.

Rejected: replacing the whole module (stock would be no delegate); a model class of our own in the registry
(1,800 lines that change).
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from dsv4_vllm_integration import probe
from dsv4_vllm_integration.seams import gate
from dsv4_vllm_integration.seams.enabling import Seam
from dsv4_vllm_integration.states import Status, announce
from dsv4_vllm_integration.switches import Feature, Settings

if TYPE_CHECKING:
    from dsv4_gemm_rs import Workspace

    from dsv4_vllm_integration.seams.endings import ReduceScatterProjection
    from dsv4_vllm_integration.seams.group import TensorParallelGroup
    from dsv4_vllm_integration.seams.projection import FusedProjection

MODULES = (probe.STOCK_GEMM_RS, probe.ATTENTION, probe.MEGA_ATTENTION, probe.SEQUENCE_PARALLEL)
"""What is replaced or relied on, beside the gate."""


def active() -> FusedProjection | None:
    """The object that layers of this process are bound to, if the feature is on."""
    return seam.projection


def arm(settings: Settings) -> None:
    """Be asked when V4.1's model is built."""
    gate.arm(Feature.GEMM_RS, functools.partial(_ask, settings))


def _ask(settings: Settings, vllm_config: Any, use_sequence_parallel: bool) -> bool:
    if use_sequence_parallel:
        return seam.enable(vllm_config, settings)
    reason = (
        f"vLLM runs this model without sequence parallelism ({gate.sizes(vllm_config)}), so `wo_b` ends in "
        "no reduce-scatter; that takes TP > 1, PP 1, expert parallelism, and DP > 1 or a MegaMoE back end"
    )
    announce(Feature.GEMM_RS, Status.OFF, reason, speak=gate.speaks())
    return False


def _install(group: TensorParallelGroup, workspace: Workspace, settings: Settings) -> ReduceScatterProjection:
    import torch

    from dsv4_vllm_integration.seams.endings import ReduceScatterProjection

    stock = importlib.import_module(probe.STOCK_GEMM_RS)
    attention = importlib.import_module(probe.ATTENTION).DeepseekV4Attention
    mega = importlib.import_module(probe.MEGA_ATTENTION).DeepseekV4MegaAttnAttention
    reduce_scatter = importlib.import_module(probe.SEQUENCE_PARALLEL).sp_reduce_scatter
    projection = ReduceScatterProjection(group, workspace, settings.min_tokens, reduce_scatter)

    def get_gemm_rs_ar() -> Any:
        return projection

    seam.replace_warm_up(projection)
    seam.replace(stock, "get_gemm_rs_ar", get_gemm_rs_ar)

    def wo_b_proj(self: Any, z: Any) -> Any:
        bound = self.gemm_rs
        if bound is projection and not isinstance(z, torch.Tensor) and projection.should_run(z.data):
            return projection.apply_quantized(z, self.wo_b)
        return stock_proj(self, z)

    stock_proj = seam.replace(attention, "_wo_b_proj", wo_b_proj)

    def can_quantize(self: Any) -> bool:
        bound = self.gemm_rs
        if bound is not projection or not projection.takes_quantized(self.wo_b):
            return bool(stock_can.func(self))
        # Stock refuses whenever any kernel is bound; what it says without one is what holds for ours.
        self.gemm_rs = None
        try:
            return bool(stock_can.func(self))
        finally:
            self.gemm_rs = bound

    cached = functools.cached_property(can_quantize)
    cached.__set_name__(mega, "_can_quantize_o_proj")
    stock_can = seam.replace(mega, "_can_quantize_o_proj", cached)
    return projection


seam = Seam(Feature.GEMM_RS, MODULES, _install)


def forget() -> None:
    """Undo everything but the wrapped gate, for tests."""
    seam.uninstall()
