# SPDX-License-Identifier: Apache-2.0
"""The point at which V4.1's model decides how its output projection ends, and who is asked there.

vLLM decides on its own fused kernel in `maybe_init_gemm_rs` of V4.1's model, which every rank calls before it
builds layers, with and without sequence parallelism (and the draft model again). That function is wrapped
once; each armed feature is asked in turn, and unless one of them takes vLLM's place there, stock's runs as if
we were not there, so `VLLM_ENABLE_GEMM_RS` keeps its meaning.

Rejected: a hook in the model's constructor (memory has to be allocated, and ranks have to agree, before the
layers exist); setting `VLLM_ENABLE_GEMM_RS` (it turns Kimi-K3's and stock's kernel on as well).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dsv4_vllm_integration import probe
from dsv4_vllm_integration.imports import after_import
from dsv4_vllm_integration.states import Status, announce
from dsv4_vllm_integration.switches import Feature

GATE = "maybe_init_gemm_rs"

Ask = Callable[[Any, bool], bool]
"""Of vLLM's configuration and whether it runs sequence parallel: does the feature answer for the gate?"""

_asked: dict[Feature, Ask] = {}


def arm(feature: Feature, ask: Ask) -> None:
    """Have `ask` called, on every rank and never raising, when V4.1's model is built."""
    after_import(probe.MODEL, functools.partial(_join, feature, ask))


def _join(feature: Feature, ask: Ask, model: ModuleType) -> None:
    obstacle = probe.signature_obstacle(model, {GATE: probe.SIGNATURES[probe.MODEL][GATE]})
    if obstacle:
        announce(feature, Status.OFF, obstacle)
        return
    _asked[feature] = ask
    stock = getattr(model, GATE)
    if hasattr(stock, "dsv4_stock"):
        return

    @functools.wraps(stock)
    def maybe_init_gemm_rs(vllm_config: Any, use_sequence_parallel: bool) -> bool:
        answers = [ask(vllm_config, use_sequence_parallel) for ask in _asked.values()]
        return any(answers) or bool(stock(vllm_config, use_sequence_parallel))

    maybe_init_gemm_rs.dsv4_stock = stock  # type: ignore[attr-defined]
    setattr(model, GATE, maybe_init_gemm_rs)
    # The draft model binds the name when it is imported, which may have been before.
    draft = sys.modules.get(probe.DRAFT)
    if draft is not None and getattr(draft, GATE, None) is stock:
        setattr(draft, GATE, maybe_init_gemm_rs)


def sizes(vllm_config: Any) -> str:
    """What decides on sequence parallelism, for people."""
    try:
        parallel = vllm_config.parallel_config
        return (
            f"TP {parallel.tensor_parallel_size}, PP {parallel.pipeline_parallel_size}, "
            f"DP {parallel.data_parallel_size}, expert parallelism "
            f"{'on' if parallel.enable_expert_parallel else 'off'}"
        )
    except AttributeError:
        return "unknown sizes"


def speaks() -> bool:
    """Whether this is rank 0 of its tensor-parallel group, as far as can be told."""
    try:
        return int(importlib.import_module("vllm.distributed").get_tp_group().rank_in_group) == 0
    except Exception:
        return True
