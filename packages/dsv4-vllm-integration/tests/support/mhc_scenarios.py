# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of the hyper-connection seam; run by `vllm_ranks.run_ranks`."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from vllm_layers import configuration
from vllm_scenarios import listen, raise_injected


def hyper_connections(rank: int, world_size: int, fault: str) -> Any:
    """Build V4.1's and V4's model class with their layers left out, then call vLLM's functions."""
    from vllm.model_executor.kernels.mhc import tilelang
    from vllm.models.deepseek_v4.nvidia import model as v4
    from vllm.models.deepseek_v41.nvidia import model as v41

    for module in (v4, v41):

        def build(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
            torch.nn.Module.__init__(self)

        module.DeepseekV4Model.__init__ = build
        module.DeepseekV4Model.finalize_mhc_broadcast_weights = lambda self: None
    if fault == "signature":

        def mhc_post_tilelang(x: Any, residual: Any) -> Any: ...

        tilelang.mhc_post_tilelang = mhc_post_tilelang
    if fault in ("call", "not compiled"):

        def stock(x: Any, residual: Any, post_layer_mix: Any, comb_res_mix: Any) -> str:
            return "stock"

        tilelang.mhc_post_tilelang = stock
    lines = listen()
    importlib.import_module("vllm.plugins").load_general_plugins()
    seam: Any = importlib.import_module("dsv4_vllm_integration.seams.mhc")
    if fault == "prepare" and rank == 1:
        seam._exercise = raise_injected
    hidden = 128
    config = configuration(hidden_size=hidden)
    config.model_config.hf_config.hc_mult = 4
    config.model_config.hf_config.hc_sinkhorn_iters = 20
    built = [v41.DeepseekV4Model(vllm_config=config), v4.DeepseekV4Model(vllm_config=config)]
    if fault in ("call", "not compiled"):
        return _fail_one_call(fault, hidden), lines
    if fault:
        return seam._seam.on, lines
    assert seam._seam.on, lines
    consumers = (v41, importlib.import_module("vllm.models.deepseek_v41.nvidia.ops.mhc"))
    assert all(hasattr(module.mhc_post_tilelang, "dsv4_stock") for module in consumers)
    return _compare_hyper_connections(hidden, built), lines


def _fail_one_call(fault: str, hidden: int) -> list[Any]:
    """What vLLM's post map gives before, during and after an error in ours."""
    from dsv4_mhc import NotCompiledError
    from dsv4_vllm_integration.seams.mhc_calls import CALLS
    from vllm.model_executor.kernels.mhc import tilelang

    def not_compiled(*_: Any) -> Any:
        raise NotCompiledError("injected")

    def call() -> Any:
        made = tilelang.mhc_post_tilelang(
            torch.zeros(3, hidden, dtype=torch.bfloat16),
            torch.zeros(3, 4, hidden, dtype=torch.bfloat16),
            torch.zeros(3, 4, 1),
            torch.zeros(3, 4, 4),
        )
        return made if isinstance(made, str) else "ours"

    ours, found = CALLS["mhc_post_tilelang"], [call()]
    CALLS["mhc_post_tilelang"] = raise_injected if fault == "call" else not_compiled
    found.append(call())
    CALLS["mhc_post_tilelang"] = ours
    return [*found, call()]


def _compare_hyper_connections(hidden: int, models: list[Any]) -> dict[str, list[float]]:
    """Largest differences of each result from vLLM's torch references, by function."""
    from vllm.model_executor.kernels.mhc import tilelang
    from vllm.models.deepseek_v41.nvidia.ops.mhc import mhc_shifted_post_pre

    # The package binds the name `torch` to PyTorch's.
    reference: Any = importlib.import_module("vllm.model_executor.kernels.mhc.torch")

    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def differences(ours: Any, theirs: Any) -> list[float]:
        pairs = list(zip(ours, theirs, strict=True))
        assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
        return [float((a.double() - b.double()).abs().max()) if a.numel() else 0.0 for a, b in pairs]

    def normed(y: torch.Tensor) -> torch.Tensor:
        rows = y.float()
        scaled = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * norm.float()
        return scaled.to(torch.bfloat16)

    def references() -> dict[str, list[float]]:
        delayed = reference.mhc_pre_delayed_torch(residual, *site, pre_mix=pre_mix)
        first = reference.mhc_pre_delayed_torch(residual, *site)
        after = reference.mhc_post_torch(x, residual, post, comb)
        later = reference.mhc_pre_delayed_torch(after, *site, pre_mix=pre_mix)
        coupled = reference.mhc_pre_torch(residual, *site)
        shifted = mhc_shifted_post_pre(*before, *site, pre_mix=pre_mix, norm_weight=norm, capture_aux=True)
        return {
            "delayed": differences(
                tilelang.mhc_pre_delayed_tilelang(residual, *site, pre_mix=pre_mix, norm_weight=norm),
                (delayed[0], delayed[1], normed(delayed[2]), delayed[3]),
            ),
            "first": differences(
                tilelang.mhc_pre_delayed_tilelang(residual, *site, norm_weight=norm),
                (first[0], first[1], normed(first[2]), first[3]),
            ),
            "shifted": differences(
                shifted,
                (after, later[0], later[1], normed(later[2]), later[3], after.mean(dim=1)),
            ),
            "coupled": differences(
                tilelang.mhc_pre_tilelang(residual, *site, norm_weight=norm),
                (coupled[0], coupled[1], normed(coupled[2])),
            ),
            "post": differences((tilelang.mhc_post_tilelang(*before),), (after,)),
        }

    tokens = 5
    residual = normal(tokens, 4, hidden).to(torch.bfloat16)
    x = normal(tokens, hidden).to(torch.bfloat16)
    post, comb, pre_mix = normal(tokens, 4, 1).abs(), normal(tokens, 4, 4).abs(), normal(tokens, 4).abs()
    norm = normal(hidden).to(torch.bfloat16)
    fn = torch.nn.Parameter(normal(24, 4 * hidden) * 0.05, requires_grad=False)
    site = (fn, normal(3).abs(), normal(24), 1e-6, 1e-6, 1e-6, 2.0, 20)
    before = (x, residual, post, comb)
    found = references()
    # A reload through `.data`, which no version counter sees, followed by vLLM's own hook.
    fn.data.copy_(normal(24, 4 * hidden) * 0.05)
    models[0].finalize_mhc_broadcast_weights()
    return found | {f"{name} reloaded": values for name, values in references().items()}
