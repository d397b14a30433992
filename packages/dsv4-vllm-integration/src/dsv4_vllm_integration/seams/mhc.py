# SPDX-License-Identifier: Apache-2.0
"""`VLLM_DSV41_MHC`: hyper-connections of DeepSeek-V4 and V4.1 by `dsv4_mhc`.

On NVIDIA GPUs both models call plain functions of `vllm.model_executor.kernels.mhc`, bound by name. Those are
replaced in the modules that define them, right after their import and so before a model binds a name. Until
the feature is on, and for calls that it does not serve, the replacement is one test and vLLM's own function.

It is turned on when a model has been built, by agreement of the tensor-parallel ranks: ranks without sequence
parallelism compute the same streams, and rounding apart could route their tokens to different experts. Before
that every kernel variant that calls can reach is compiled or loaded, by calling them. Where vLLM prefers
Mega-mHC or its overlapped form (SM100), it goes on doing so: those are decided before these functions.

Rejected: `CustomOp.register_oot` (on NVIDIA only GLM-5-Next instantiates those classes); replacing names in
the models' modules (each new consumer would be missed).

Limit: an error of a kernel in a call gives that function back to vLLM on this rank alone. Arguments are
checked before a launch and are alike on all ranks, so only a lost device can part them.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dsv4_vllm_integration import probe
from dsv4_vllm_integration.imports import after_import
from dsv4_vllm_integration.states import Status, announce, logger
from dsv4_vllm_integration.switches import MHC, Feature

if TYPE_CHECKING:
    from dsv4_vllm_integration.seams.mhc_calls import Packed

MODELS = {probe.MODEL: "v4.1", probe.V4_MODEL: "v4"}
LOADERS = (probe.MODEL, probe.DRAFT, probe.V4_MODEL, probe.V4_DRAFT, probe.V4_MTP)
"""Modules with classes that load weights."""
WARM_TOKENS = (1, 64, 192, 384, 768, 2048)
"""One batch of each size of tile that dsv4-mhc chooses between."""


class _Seam:
    """The feature's state in this process."""

    def __init__(self) -> None:
        self.on = False
        self.obstacle = ""
        self.packed: Packed | None = None
        self.lost: set[str] = set()


_seam = _Seam()


def arm() -> None:
    """Replace the functions once their modules are imported."""
    for name in (probe.MHC_TILELANG, probe.MHC_TRITON):
        after_import(name, _replace_functions)
    for name in LOADERS:
        after_import(name, _follow_loads)
    for name in MODELS:
        after_import(name, _follow_model)


def _off(reason: str, *, speak: bool = True) -> None:
    _seam.on = False
    _seam.obstacle = reason
    announce(Feature.MHC, Status.OFF, reason, speak=speak)


def _replace_functions(module: ModuleType) -> None:
    obstacle = probe.signature_obstacle(module)
    if obstacle:
        _off(obstacle)
        return
    for name in probe.SIGNATURES[module.__name__]:
        stock = getattr(module, name)
        if hasattr(stock, "dsv4_stock"):
            continue
        replacement = _replacement(name, stock)
        setattr(module, name, replacement)
        for consumer in list(sys.modules.values()):
            if getattr(consumer, "__name__", "").startswith("vllm.") and vars(consumer).get(name) is stock:
                setattr(consumer, name, replacement)


def _replacement(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def replaced(*arguments: Any, **options: Any) -> Any:
        if _seam.on and name not in _seam.lost:
            found = _call(name, arguments, options)
            if found is not None:
                return found
        return stock(*arguments, **options)

    replaced.dsv4_stock = stock  # type: ignore[attr-defined]
    return replaced


def _call(name: str, arguments: Any, options: Any) -> Any:
    from dsv4_mhc import NotCompiledError

    from dsv4_vllm_integration.seams.mhc_calls import CALLS

    try:
        return CALLS[name](_seam.packed, *arguments, **options)
    except NotCompiledError:
        return None
    except Exception as error:
        _seam.lost.add(name)
        logger.warning("dsv4 mhc: %s goes back to vLLM: %s: %s", name, type(error).__name__, error)
        return None


def _follow_loads(module: ModuleType) -> None:
    """Pack weights again whenever a class of `module` has loaded any."""
    for owner in vars(module).values():
        if isinstance(owner, type) and owner.__module__ == module.__name__:
            for name in ("load_weights", "finalize_mhc_broadcast_weights"):
                if name in vars(owner) and not hasattr(vars(owner)[name], "dsv4_stock"):
                    setattr(owner, name, _then_refresh(vars(owner)[name]))


def _then_refresh(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def loaded(*arguments: Any, **options: Any) -> Any:
        result = stock(*arguments, **options)
        if _seam.packed is not None:
            try:
                _seam.packed.refresh()
            except Exception as error:
                _off(f"weights could not be packed again: {type(error).__name__}: {error}")
        return result

    loaded.dsv4_stock = stock  # type: ignore[attr-defined]
    return loaded


def _follow_model(module: ModuleType) -> None:
    obstacle = probe.signature_obstacle(
        module, {name: text for name, text in probe.SIGNATURES[module.__name__].items() if "Model." in name}
    )
    if obstacle:
        _off(obstacle)
        return
    model = vars(module)["DeepseekV4Model"]
    stock = model.__init__
    if hasattr(stock, "dsv4_stock"):
        return

    @functools.wraps(stock)
    def built(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        stock(self, vllm_config=vllm_config, prefix=prefix)
        enable(vllm_config, MODELS[module.__name__])

    built.dsv4_stock = stock  # type: ignore[attr-defined]
    model.__init__ = built


def enable(vllm_config: Any, wiring: str) -> None:
    """Turn the feature on if every rank can; collective over the tensor-parallel group. Never raises."""
    try:
        from dsv4_vllm_integration.seams.group import first_problem, group_of

        group = group_of(importlib.import_module("vllm.distributed").get_tp_group())
    except Exception as error:
        _off(f"no tensor-parallel group: {error}")
        return
    try:
        try:
            problem = _seam.obstacle or _prepare(vllm_config, wiring, group.device)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problem = first_problem(group, problem)
    except Exception as error:
        logger.exception("dsv4 mhc: the ranks could not agree")
        problem = f"{type(error).__name__}: {error}"
    if problem:
        _off(problem, speak=group.rank == 0)
        return
    _seam.on = True
    hidden = vllm_config.model_config.hf_config.hidden_size
    text = f"dsv4-mhc at the seams of {wiring}, hidden size {hidden}; {MHC.name}=0 turns it off"
    announce(Feature.MHC, Status.ON, text, speak=group.rank == 0)


def _prepare(vllm_config: Any, wiring: str, device: Any) -> str:
    """Load every variant that calls can reach; why that is not possible, or nothing."""
    from dsv4_vllm_integration.seams.mhc_calls import STREAMS, Packed

    for name in (probe.MHC_TILELANG, probe.MHC_TRITON):
        module = importlib.import_module(name)
        for function in probe.SIGNATURES[name]:
            if not hasattr(getattr(module, function), "dsv4_stock"):
                return f"{name}.{function} was not replaced"
    config = vllm_config.model_config.hf_config
    if config.hc_mult != STREAMS:
        return f"{config.hc_mult} streams, expected {STREAMS}"
    if config.hidden_size % 64:
        return f"hidden size {config.hidden_size} is no multiple of 64"
    if _seam.packed is None:
        _seam.packed = Packed()
    most = vllm_config.scheduler_config.max_num_batched_tokens
    for tokens in WARM_TOKENS:
        if tokens <= most or tokens == WARM_TOKENS[0]:
            _exercise(wiring, tokens, config.hidden_size, config.hc_sinkhorn_iters, device)
    return ""


def _exercise(wiring: str, tokens: int, hidden: int, iterations: int, device: Any) -> None:
    """Make each call that a model of this wiring makes, on zeros."""
    import torch

    from dsv4_vllm_integration.seams.mhc_calls import CALLS, STREAMS, Packed

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    packed = Packed()
    residual = zeros(tokens, STREAMS, hidden, dtype=torch.bfloat16)
    x = zeros(tokens, hidden, dtype=torch.bfloat16)
    post, comb = zeros(tokens, STREAMS, 1), zeros(tokens, STREAMS, STREAMS)
    norm = zeros(hidden, dtype=torch.bfloat16)
    site = (zeros(24, STREAMS * hidden), zeros(3), zeros(24), 1e-6, 1e-6, 1e-6, 2.0, iterations)
    before = (x, residual, post, comb)
    CALLS["mhc_post_tilelang"](packed, *before)
    if wiring == "v4":
        CALLS["mhc_pre_tilelang"](packed, residual, *site, norm_weight=norm)
        CALLS["mhc_fused_post_pre_tilelang"](packed, *before, *site, norm_weight=norm)
        return
    carried = zeros(tokens, STREAMS)
    CALLS["mhc_pre_delayed_tilelang"](packed, residual, *site, pre_mix=carried, norm_weight=norm)
    CALLS["mhc_fused_post_pre_delayed_tilelang"](
        packed, *before, *site, pre_mix=carried, norm_weight=norm, capture_aux=True
    )
    CALLS["hc_collapse_triton"](packed, residual, carried)


def forget() -> None:
    """Return to the state of a fresh process; replaced functions stay and call vLLM's."""
    global _seam
    _seam = _Seam()
