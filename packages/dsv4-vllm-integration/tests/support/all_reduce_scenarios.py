# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of the GEMM + all-reduce seam; run by `vllm_ranks.run_ranks`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from vllm_layers import (
    attention,
    bf16_layer,
    configuration,
    decoder_layer,
    load_bf16,
    load_mxfp8,
    mxfp8_layer,
    quantized_activation,
    random_activations,
)
from vllm_scenarios import ENABLING, K, N, _on_last_rank, listen, plain, raise_injected

SEAM = "dsv4_vllm_integration.seams.gemm_ar"
PLAIN = {"enable_expert_parallel": False, "data_parallel_size": 1}
"""A server without sequence parallelism."""


def started(sequence_parallel: bool = False, **changes: Any) -> tuple[bool, Any, list[str]]:
    """Register as vLLM does, then ask V4.1's gate: its answer, our object if any, and what was logged."""
    from vllm.models.deepseek_v41.nvidia import model
    from vllm.plugins import load_general_plugins

    lines = listen()
    load_general_plugins()
    answer = model.maybe_init_gemm_rs(configuration(**PLAIN | changes), sequence_parallel)
    return answer, importlib.import_module(SEAM).active(), lines


def layer_of(kind: str, world_size: int, seed: int = 0) -> Any:
    """A `wo_b` that ends in an all-reduce."""
    if kind == "bf16":
        return bf16_layer(N, K, world_size, seed, reduce_results=True)
    return mxfp8_layer(N, K, world_size, kind, reduce_results=True)


def project(rank: int, world_size: int, kind: str, tokens: list[int], seed: int) -> Any:
    """Build a layer, load, warm up and project; then load other weights and project again."""
    from vllm.model_executor.warmup import kernel_warmup
    from vllm.models.deepseek_v41.nvidia import dspark, model

    answer, active, lines = started()
    assert not answer
    assert active is not None, lines
    # The draft model asks again.
    assert not dspark.maybe_init_gemm_rs(configuration(**PLAIN), False)
    assert importlib.import_module(SEAM).active() is active
    assert dspark.DeepseekV4DecoderLayer is model.DeepseekV4DecoderLayer
    layer = layer_of(kind, world_size)
    attn = attention(layer)
    decoder_layer(attn, configuration(**PLAIN))
    assert active.follows(layer), lines
    results: dict[str, Any] = {"addresses": []}
    for load in (seed, seed + 50):
        if kind == "bf16":
            load_bf16(layer, load + rank)
        else:
            load_mxfp8(layer, N, K, load + rank)
        kernel_warmup._warmup_gemm_rs_ar()
        for m in tokens:
            x = random_activations(m, K, m + rank)
            results[f"{load} {m}"] = plain(attn._wo_b_proj(x)), plain(layer(x))
            if kind.startswith("FlashInfer"):
                z = quantized_activation(x)
                results[f"{load} {m} quantised"] = plain(attn._wo_b_proj(z)), plain(layer(z))
        known = active._layers[layer]
        results["addresses"].append(known.weight.prepared.data.data_ptr())
        assert known.fused, lines
    mega: Any = importlib.import_module("vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn")
    mega.can_fuse_query_quant = lambda linears: kind.startswith("FlashInfer")
    results["quantizes"] = attn._can_quantize_o_proj
    assert attn.gemm_rs is None
    results["calls"] = dict(active.workspace.counters.calls)
    results["lines"] = lines
    return results


def touched() -> list[dict[str, Any]]:
    """Attributes of all that the seam replaces, the gate apart."""
    names = (
        ("vllm.model_executor.kernels.linear.cute_dsl.gemm_rs_ar", ""),
        ("vllm.models.deepseek_v41.attention", "DeepseekV4Attention"),
        ("vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn", "DeepseekV4MegaAttnAttention"),
        ("vllm.models.deepseek_v41.nvidia.model", "DeepseekV4DecoderLayer"),
        ("vllm.model_executor.layers.linear", "RowParallelLinear"),
    )
    modules = [(importlib.import_module(module), owner) for module, owner in names]
    return [dict(vars(getattr(module, owner) if owner else module)) for module, owner in modules]


def decline(rank: int, world_size: int, changes: dict[str, Any], sabotage: str) -> Any:
    """Start with a configuration or a fault that keeps the feature off; is it off, and the log."""
    if sabotage:
        SABOTAGE[sabotage](rank)
    before = touched()
    answer, active, lines = started(**changes)
    assert not answer
    assert touched() == before
    layer = layer_of("bf16", world_size, rank)
    attn = attention(layer)
    decoder_layer(attn, configuration(**PLAIN))
    x = random_activations(33, K, rank)
    assert torch.equal(attn._wo_b_proj(x), layer(x))
    return active is None, lines


def untouched(rank: int, world_size: int) -> Any:
    """Without the switch: nothing is replaced and nothing said."""
    from vllm.models.deepseek_v41.nvidia import model

    before, gate = touched(), model.maybe_init_gemm_rs
    answer, active, lines = started()
    return answer, active, lines, touched() == before, model.maybe_init_gemm_rs is gate


def both(rank: int, world_size: int, sequence_parallel: bool) -> Any:
    """Both switches are set: the gate's answer and each feature's status."""
    from dsv4_vllm_integration.states import state_of
    from dsv4_vllm_integration.switches import Feature

    answer, _, _ = started(sequence_parallel)
    return answer, state_of(Feature.GEMM_RS).status.value, state_of(Feature.GEMM_AR).status.value


def folded_layers(rank: int, world_size: int) -> Any:
    """Layers that end otherwise than the feature serves, each beside one that it does; those are followed."""
    _, active, lines = started()
    followed = []
    for options in ({}, {"fuse_mhc_all_reduce": True}):
        layer = layer_of("bf16", world_size)
        decoder_layer(attention(layer), configuration(**PLAIN), **options)
        followed.append(active.follows(layer))
    sharded = layer_of("bf16", world_size)
    decoder_layer(attention(sharded), configuration())
    followed.append(active.follows(sharded))
    returning = layer_of("bf16", world_size)
    returning.return_bias = True
    decoder_layer(attention(returning), configuration(**PLAIN))
    followed.append(active.follows(returning))
    return followed, lines


def fail_later(rank: int, world_size: int, step: str) -> Any:
    """Inject an error on one rank after the feature is on; results must be vLLM's own, on all ranks."""
    layer_weight: Any = importlib.import_module("dsv4_vllm_integration.seams.layer_weight")
    projection: Any = importlib.import_module("dsv4_vllm_integration.seams.projection")
    endings: Any = importlib.import_module("dsv4_vllm_integration.seams.endings")
    _, active, lines = started()
    assert active is not None, lines
    if step == "inspect":
        projection.inspect_layer = raise_injected
    if step == "follow":
        endings.AllReduceProjection.can_run = raise_injected
    layer = layer_of("MarlinMxfp8LinearKernel", world_size)
    attn = attention(layer)
    decoder_layer(attn, configuration(**PLAIN))
    assert active.follows(layer) == (step not in ("inspect", "follow"))
    if step == "prepare" and rank == 1:
        layer_weight.prepare_weight = raise_injected
    load_mxfp8(layer, N, K, 7 + rank)
    if step == "refresh" and rank == 1:
        layer_weight.LayerWeight.current = raise_injected
    if step == "call":
        endings.gemm_ar = raise_injected
    if step == "warm_up" and rank == 1:
        active.workspace._prepare = raise_injected
    x = random_activations(33, K, rank)
    return [torch.equal(attn._wo_b_proj(x), layer(x)) for _ in range(2)], lines


def lose_peer(rank: int, world_size: int) -> Any:
    """One rank leaves out a call; the other must hear of it by an error, not by garbage."""
    from dsv4_symm_mem import ExchangeError

    _, active, lines = started()
    layer = layer_of("bf16", world_size, rank)
    attn = attention(layer)
    decoder_layer(attn, configuration(**PLAIN))
    assert active.follows(layer), lines
    x = random_activations(33, K, rank)
    attn._wo_b_proj(x)
    if rank == 1:
        return "left"
    try:
        attn._wo_b_proj(x)
    except ExchangeError as error:
        return type(error).__name__
    return "no error"


def one_group_of_two(rank: int, world_size: int) -> Any:
    """Two tensor-parallel groups: that of ranks 2 and 3 cannot, that of 0 and 1 projects."""
    if rank == 3:
        setattr(importlib.import_module(ENABLING), "obstacle", raise_injected)  # noqa: B010
    _, active, lines = started()
    if rank >= 2:
        return active is not None, lines
    layer = layer_of("bf16", 2, rank)
    attn = attention(layer)
    decoder_layer(attn, configuration(**PLAIN))
    x = random_activations(33, K, rank)
    difference = float((attn._wo_b_proj(x).double() - layer(x).double()).abs().max())
    return active is not None, difference, dict(active.workspace.counters.calls)


def _folds(rank: int) -> None:
    from vllm.models.deepseek_v41.nvidia import model

    parts: Any = model
    parts.supports_mhc_overlap = parts.supports_mhc_all_reduce = lambda vllm_config: True


def _half_installed(rank: int) -> None:
    seam = importlib.import_module(SEAM).seam
    stock = seam.install

    def install(*given: Any) -> None:
        stock(*given)
        raise_injected()

    if rank == 1:
        seam.install = install


def _other_constructor(rank: int) -> None:
    from vllm.models.deepseek_v41.nvidia.model import DeepseekV4DecoderLayer

    stock = DeepseekV4DecoderLayer.__init__

    def init(self: Any, vllm_config: Any, prefix: str, topk_indices_buffer: Any, more: Any = None) -> None:
        stock(self, vllm_config, prefix, topk_indices_buffer)

    owner: Any = DeepseekV4DecoderLayer
    owner.__init__ = init


SABOTAGE: dict[str, Callable[[int], None]] = {
    "obstacle": _on_last_rank(ENABLING, "obstacle"),
    "facts": _on_last_rank(ENABLING, "facts"),
    "memory": _on_last_rank("dsv4_symm_mem.backends.shared:SharedBackend", "allocate"),
    "install": _on_last_rank(f"{SEAM}:seam", "install"),
    "half installed": _half_installed,
    "constructor": _other_constructor,
    "folds": _folds,
}
