# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of the GEMM + reduce-scatter seam; run by `vllm_ranks.run_ranks`."""

from __future__ import annotations

import functools
import importlib
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from vllm_layers import (
    attention,
    bf16_layer,
    configuration,
    load_bf16,
    load_mxfp8,
    mxfp8_layer,
    quantized_activation,
    random_activations,
)

N = 128
K = 128


class Lines(logging.Handler):
    """Collects what the plugin logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def listen() -> list[str]:
    """Messages of the plugin's logger from now on."""
    handler = Lines()
    logger = logging.getLogger("vllm.dsv4_vllm_integration")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    return handler.lines


def started(**changes: Any) -> tuple[bool, list[str]]:
    """Register as vLLM does, then ask V4.1's gate; its answer and what was logged."""
    from vllm.models.deepseek_v41.nvidia import model
    from vllm.plugins import load_general_plugins

    lines = listen()
    load_general_plugins()
    return model.maybe_init_gemm_rs(configuration(**changes), True), lines


def stock_result(x: Any, layer: Any) -> torch.Tensor:
    """What vLLM computes without any fused kernel."""
    from vllm.models.common.ops.sequence_parallel import sp_reduce_scatter

    result: torch.Tensor = sp_reduce_scatter(layer(x))
    return result


def plain(tensor: torch.Tensor) -> Any:
    """A tensor as bytes and shape, to travel between processes without shared memory."""
    buffer = io.BytesIO()
    torch.save(tensor.clone(), buffer)
    return buffer.getvalue()


def project(rank: int, world_size: int, kind: str, tokens: list[int], seed: int) -> Any:
    """Bind, load, warm up and project; then load other weights and project again."""
    from dsv4_vllm_integration.seams import gemm_rs
    from vllm.model_executor.warmup import kernel_warmup
    from vllm.models.deepseek_v41.nvidia import dspark, model
    from vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn import DeepseekV4MegaAttnAttention

    answer, lines = started()
    assert answer, lines
    assert dspark.maybe_init_gemm_rs is model.maybe_init_gemm_rs
    # The draft model asks again.
    assert dspark.maybe_init_gemm_rs(configuration(), True)
    layer = bf16_layer(N, K, world_size, 0) if kind == "bf16" else mxfp8_layer(N, K, world_size, kind)
    attn = attention(layer)
    attn.bind_gemm_rs()
    active = gemm_rs.active()
    assert active is not None
    assert attn.gemm_rs is active, lines
    results: dict[str, Any] = {"quantizes": None, "addresses": []}
    for load in (seed, seed + 50):
        if kind == "bf16":
            load_bf16(layer, load + rank)
        else:
            load_mxfp8(layer, N, K, load + rank)
        kernel_warmup._warmup_gemm_rs_ar()
        for m in tokens:
            x = random_activations(m, K, m + rank)
            results[f"{load} {m}"] = plain(attn._wo_b_proj(x)), plain(stock_result(x, layer))
            if kind.startswith("FlashInfer"):
                z = quantized_activation(x)
                results[f"{load} {m} quantised"] = plain(attn._wo_b_proj(z)), plain(stock_result(z, layer))
        known = active._layers[layer]
        results["addresses"].append(known.weight.prepared.data.data_ptr())
        assert known.fused, lines
    with_ours = DeepseekV4MegaAttnAttention._can_quantize_o_proj
    import vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn as mega

    # The producer's own test asks for CUDA; all else of it holds here.
    mega.can_fuse_query_quant = lambda linears: kind.startswith("FlashInfer")
    assert with_ours.attrname == "_can_quantize_o_proj"
    results["quantizes"] = attn._can_quantize_o_proj
    assert attn.gemm_rs is active
    results["calls"] = dict(active.workspace.counters.calls)
    results["lines"] = lines
    return results


def decline(rank: int, world_size: int, changes: dict[str, Any], sabotage: str) -> Any:
    """Start with a configuration or a fault that keeps the feature off; the gate's answer and the log."""
    from vllm.model_executor.kernels.linear.cute_dsl import gemm_rs_ar
    from vllm.models.deepseek_v41 import attention as attention_module
    from vllm.models.deepseek_v41.nvidia import flash_mla_mega_attn

    before = dict(vars(gemm_rs_ar)), dict(vars(attention_module.DeepseekV4Attention))
    if sabotage:
        SABOTAGE[sabotage](rank)
        before = dict(vars(gemm_rs_ar)), dict(vars(attention_module.DeepseekV4Attention))
    mega_before = dict(vars(flash_mla_mega_attn.DeepseekV4MegaAttnAttention))
    answer, lines = started(**changes)
    assert dict(vars(gemm_rs_ar)) == before[0]
    assert dict(vars(attention_module.DeepseekV4Attention)) == before[1]
    assert dict(vars(flash_mla_mega_attn.DeepseekV4MegaAttnAttention)) == mega_before
    return answer, lines


WATCHED = [
    "vllm.models.deepseek_v41.nvidia.model",
    "vllm.models.deepseek_v41.nvidia.dspark",
    "vllm.models.deepseek_v41.attention",
    "vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn",
    "vllm.models.deepseek_v4.nvidia.model",
    "vllm.models.kimi_k3.nvidia.model",
    "vllm.model_executor.kernels.linear.cute_dsl.gemm_rs_ar",
    "vllm.model_executor.kernels.mhc.tilelang",
    "vllm.model_executor.kernels.mhc.triton",
    "vllm.envs",
]


def snapshot() -> dict[str, Any]:
    """Every attribute of the modules that the plugin can touch, and of their classes."""
    found: dict[str, Any] = {"meta_path": list(sys.meta_path)}
    for name in WATCHED:
        module = importlib.import_module(name)
        found[name] = dict(vars(module))
        for owner in vars(module).values():
            if isinstance(owner, type) and owner.__module__ == name:
                found[f"{name}.{owner.__name__}"] = dict(vars(owner))
    found["known"] = dict(importlib.import_module("vllm.envs").environment_variables)
    return found


def load(rank: int, world_size: int) -> Any:
    """Load plugins as vLLM does: each feature's status, and whether anything was changed."""
    from dsv4_vllm_integration.states import state_of
    from dsv4_vllm_integration.switches import Feature
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    before = snapshot()
    load_general_plugins()
    load_general_plugins()
    statuses = {feature.value: state_of(feature).status.value for feature in Feature}
    if set(statuses.values()) != {"unset"} or "VLLM_PLUGINS" not in os.environ:
        # Names of this prefix that vLLM doesn't know would end a server that was told to be strict.
        current_platform.validate_environ(hard_fail=True)
    return statuses, snapshot() == before


def without_sequence_parallelism(rank: int, world_size: int) -> Any:
    """The gate's answer and the log of a server whose `wo_b` ends in an all-reduce."""
    from vllm.models.deepseek_v41.nvidia import model
    from vllm.plugins import load_general_plugins

    lines = listen()
    load_general_plugins()
    return model.maybe_init_gemm_rs(configuration(), False), lines


def one_group_of_two(rank: int, world_size: int) -> Any:
    """Data parallelism: the tensor-parallel group of ranks 2 and 3 cannot, that of 0 and 1 projects."""
    if rank == 3:
        setattr(importlib.import_module(ENABLING), "obstacle", raise_injected)  # noqa: B010
    answer, lines = started()
    if rank >= 2:
        return answer, lines
    layer = bf16_layer(N, K, 2, rank)
    attn = attention(layer)
    attn.bind_gemm_rs()
    x = random_activations(33, K, rank)
    return answer, float((attn._wo_b_proj(x).double() - stock_result(x, layer).double()).abs().max())


def read_configuration(rank: int, world_size: int) -> Any:
    """Names that the gate reads and that vLLM's own classes do not have."""
    import vllm.config as config

    def names(owner: Any) -> set[str]:
        found = {name for base in owner.__mro__ for name in vars(base)}
        return found.union(*(getattr(base, "__annotations__", {}) for base in owner.__mro__))

    read = configuration()
    owners = {"": config.VllmConfig, "parallel_config": config.ParallelConfig}
    owners |= {"model_config": config.ModelConfig, "scheduler_config": config.SchedulerConfig}
    return [
        f"{part}.{name}"
        for part, owner in owners.items()
        for name in vars(getattr(read, part) if part else read)
        if name not in names(owner)
    ]


def load_only(rank: int, world_size: int) -> Any:
    """Load plugins in a process that has imported no model: statuses, and which seams' modules came along."""
    from dsv4_vllm_integration.states import state_of
    from dsv4_vllm_integration.switches import Feature
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    statuses = {feature.value: state_of(feature).status.value for feature in Feature}
    return statuses, [name for name in WATCHED if name in sys.modules and name != "vllm.envs"]


def ask_stock(rank: int, world_size: int) -> Any:
    """Both switches are set and ours declines: V4.1's and Kimi-K3's gates must ask stock's kernel."""
    from vllm.model_executor.kernels.linear.cute_dsl import gemm_rs_ar
    from vllm.models.kimi_k3.nvidia import model as kimi

    asked: list[Any] = []

    def maybe_init_gemm_rs_ar(vllm_config: Any, *, N: int, all_reduce: bool) -> bool:  # noqa: N803
        asked.append((N, all_reduce))
        return True

    gemm_rs_ar.maybe_init_gemm_rs_ar = maybe_init_gemm_rs_ar
    answer, _ = started(use_ubatching=True)
    answers = [answer, kimi.maybe_init_gemm_rs_ar(configuration(), True)]
    # Once ours is on, Kimi-K3's gate is still stock's.
    importlib.import_module("os").environ["DSV4_GEMM_RS_PATH"] = "host"
    from vllm.models.deepseek_v41.nvidia import model

    answers.append(model.maybe_init_gemm_rs(configuration(), True))
    answers.append(kimi.maybe_init_gemm_rs_ar(configuration(hidden_size=192), True))
    return answers, asked


def raise_injected(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected")


def _on_last_rank(target: str, name: str) -> Callable[[int], None]:
    def spoil(rank: int) -> None:
        owner: Any = importlib.import_module(target.partition(":")[0])
        for part in filter(None, target.partition(":")[2].split(".")):
            owner = getattr(owner, part)
        if rank == 1:
            setattr(owner, name, raise_injected)

    return spoil


def _other_signature(rank: int) -> None:
    from vllm.model_executor.kernels.linear.cute_dsl.gemm_rs_ar import GemmRsAr

    def apply(self: Any, x: Any, linear: Any, out: Any = None) -> Any: ...

    GemmRsAr.apply = apply


def _no_such_name(rank: int) -> None:
    from vllm.models.deepseek_v41.attention import DeepseekV4Attention

    del DeepseekV4Attention._wo_b_proj


def _other_threshold(rank: int) -> None:
    if rank == 1:
        os.environ["VLLM_DSV41_GEMM_RS_MIN_TOKENS"] = "64"


ENABLING = "dsv4_vllm_integration.seams.enabling"
SABOTAGE: dict[str, Callable[[int], None]] = {
    "obstacle": _on_last_rank(ENABLING, "obstacle"),
    "memory": _on_last_rank("dsv4_symm_mem.backends.shared:SharedBackend", "allocate"),
    "install": _on_last_rank("dsv4_vllm_integration.seams.gemm_rs:seam", "install"),
    "facts": _on_last_rank(ENABLING, "facts"),
    "signature": _other_signature,
    "name": _no_such_name,
    "threshold": _other_threshold,
}


def fail_later(rank: int, world_size: int, step: str) -> Any:
    """Inject an error on one rank after the feature is on; results must be vLLM's own, on all ranks."""
    layer_weight: Any = importlib.import_module("dsv4_vllm_integration.seams.layer_weight")
    projection: Any = importlib.import_module("dsv4_vllm_integration.seams.projection")
    answer, lines = started()
    assert answer, lines
    layer = mxfp8_layer(N, K, world_size, "MarlinMxfp8LinearKernel")
    attn = attention(layer)
    if step == "inspect":
        projection.inspect_layer = raise_injected
    attn.bind_gemm_rs()
    if step == "prepare" and rank == 1:
        layer_weight.prepare_weight = raise_injected
    load_mxfp8(layer, N, K, 7 + rank)
    if step == "refresh" and rank == 1:
        layer_weight.LayerWeight.current = raise_injected
    if step == "call":
        importlib.import_module("dsv4_vllm_integration.seams.endings").__dict__["gemm_rs"] = raise_injected
    if step == "warm_up" and rank == 1:
        attn_workspace = attn.gemm_rs.workspace
        attn_workspace._prepare = raise_injected
    x = random_activations(33, K, rank)
    # A layer that was not bound leaves the reduce-scatter to the decoder.
    stock = layer if attn.gemm_rs is None else functools.partial(stock_result, layer=layer)
    assert (attn.gemm_rs is None) == (step == "inspect")
    return [torch.equal(attn._wo_b_proj(x), stock(x)) for _ in range(2)], lines


def lose_peer(rank: int, world_size: int) -> Any:
    """One rank leaves out a call; the other must hear of it by an error, not by garbage."""
    from dsv4_symm_mem import ExchangeError

    answer, lines = started()
    assert answer, lines
    layer = bf16_layer(N, K, world_size, rank)
    attn = attention(layer)
    attn.bind_gemm_rs()
    x = random_activations(33, K, rank)
    attn._wo_b_proj(x)
    if rank == 1:
        return "left"
    try:
        attn._wo_b_proj(x)
    except ExchangeError as error:
        return type(error).__name__
    return "no error"
