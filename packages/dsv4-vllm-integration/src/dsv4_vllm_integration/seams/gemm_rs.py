# SPDX-License-Identifier: Apache-2.0
"""`VLLM_DSV41_GEMM_RS`: DeepSeek-V4.1's `wo_b` on `dsv4_gemm_rs`.

vLLM decides on its own fused kernel in `maybe_init_gemm_rs` of V4.1's model, which every rank calls before it
builds layers (and the draft model again). That function is wrapped: under sequence parallelism ours is tried
first, and where it declines, stock's runs as if we were not there, so `VLLM_ENABLE_GEMM_RS` keeps its
meaning. Once ours is on, two functions of vLLM's `gemm_rs_ar` module answer for it: `get_gemm_rs_ar`, from
which layers take the object that they hold, and `warmup_gemm_rs_ar`; layers, decoder and warm-up then run
vLLM's own code. Two methods of the attention classes are wrapped so that activations which mega-attention
already quantised stay quantised: stock's kernel takes BF16 only, and vLLM gives up the fused quantise for it.

Kimi-K3 shares the `gemm_rs_ar` module but has a gate of its own, which stays as it is; `init_gemm_rs_ar` and
`maybe_init_gemm_rs_ar` do too.

Rejected: setting `VLLM_ENABLE_GEMM_RS` (it turns Kimi-K3's and stock's kernel on as well); replacing the
whole module (stock would be no delegate); a model class of our own in the registry (1,800 lines that change).
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dsv4_vllm_integration import probe
from dsv4_vllm_integration.imports import after_import
from dsv4_vllm_integration.states import Status, announce, logger
from dsv4_vllm_integration.switches import GEMM_RS, Feature, Settings

if TYPE_CHECKING:
    from dsv4_gemm_rs import Workspace

    from dsv4_vllm_integration.seams.group import TensorParallelGroup
    from dsv4_vllm_integration.seams.projection import FusedProjection

GATE = "maybe_init_gemm_rs"
MAX_RANKS = 8
"""Tensor parallelism that the kernels were tested with."""

_active: FusedProjection | None = None


def active() -> FusedProjection | None:
    """The object that layers of this process are bound to, if the feature is on."""
    return _active


def arm(settings: Settings) -> None:
    """Wrap the gate of V4.1's model once that is imported."""
    after_import(probe.MODEL, functools.partial(_wrap_gate, settings))


def _wrap_gate(settings: Settings, model: ModuleType) -> None:
    obstacle = probe.signature_obstacle(model, {GATE: probe.SIGNATURES[probe.MODEL][GATE]})
    if obstacle:
        announce(Feature.GEMM_RS, Status.OFF, obstacle)
        return
    stock = getattr(model, GATE)
    if hasattr(stock, "dsv4_stock"):
        return

    @functools.wraps(stock)
    def maybe_init_gemm_rs(vllm_config: Any, use_sequence_parallel: bool) -> bool:
        if use_sequence_parallel:
            if enable(vllm_config, settings):
                return True
        else:
            announce(Feature.GEMM_RS, Status.OFF, _no_sequence_parallelism(vllm_config), speak=_speaks())
        return bool(stock(vllm_config, use_sequence_parallel))

    maybe_init_gemm_rs.dsv4_stock = stock  # type: ignore[attr-defined]
    setattr(model, GATE, maybe_init_gemm_rs)
    # The draft model binds the name when it is imported, which may have been before.
    draft = sys.modules.get(probe.DRAFT)
    if draft is not None and getattr(draft, GATE, None) is stock:
        setattr(draft, GATE, maybe_init_gemm_rs)


def _no_sequence_parallelism(vllm_config: Any) -> str:
    try:
        parallel = vllm_config.parallel_config
        sizes = (
            f"TP {parallel.tensor_parallel_size}, PP {parallel.pipeline_parallel_size}, "
            f"DP {parallel.data_parallel_size}, expert parallelism "
            f"{'on' if parallel.enable_expert_parallel else 'off'}"
        )
    except AttributeError:
        sizes = "unknown sizes"
    return (
        f"vLLM runs this model without sequence parallelism ({sizes}), so `wo_b` ends in no reduce-scatter; "
        "that takes TP > 1, PP 1, expert parallelism, and DP > 1 or a MegaMoE back end"
    )


def _speaks() -> bool:
    """Whether this is rank 0 of its tensor-parallel group, as far as can be told."""
    try:
        return int(importlib.import_module("vllm.distributed").get_tp_group().rank_in_group) == 0
    except Exception:
        return True


def enable(vllm_config: Any, settings: Settings) -> bool:
    """Turn the feature on if every rank can; collective over the tensor-parallel group. Never raises."""
    try:
        from dsv4_vllm_integration.seams.group import group_of

        group = group_of(importlib.import_module("vllm.distributed").get_tp_group())
    except Exception as error:
        announce(Feature.GEMM_RS, Status.OFF, f"no tensor-parallel group: {error}")
        return False
    try:
        if _active is not None:
            return _serves(_active, vllm_config)
        reason = _enable(group, vllm_config, settings)
    except Exception as error:
        # Everything that can fail on one rank alone was caught before and agreed on; this is a lost peer.
        logger.exception("dsv4 gemm_rs: the ranks could not agree")
        reason = f"{type(error).__name__}: {error}"
    if reason:
        announce(Feature.GEMM_RS, Status.OFF, reason, speak=group.rank == 0)
    return not reason


def _enable(group: TensorParallelGroup, vllm_config: Any, settings: Settings) -> str:
    """Why the feature stays off, equal on all ranks; empty once it is on."""
    from dsv4_vllm_integration.seams.group import differing, first_problem

    facts: dict[str, object] = {}
    try:
        problem = obstacle(vllm_config, group.size, settings)
        facts = _facts(vllm_config, settings)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problem = first_problem(group, problem) or differing(group, facts)
    if problem:
        return problem
    workspace: Workspace | None = None
    problem = ""
    try:
        workspace = _create(group, facts)
        problem = _path_problem(workspace)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problem = first_problem(group, problem)
    if not problem and workspace is not None:
        try:
            _install(group, workspace, settings)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problem = first_problem(group, problem)
    if problem:
        _uninstall()
        if workspace is not None:
            workspace.close()
        return problem
    assert workspace is not None  # no rank reported a problem
    decision = workspace.decide(_problem(workspace, workspace.max_tokens))
    announce(
        Feature.GEMM_RS,
        Status.ON,
        f"{decision.path.value} for {settings.min_tokens} to {workspace.max_tokens} tokens, "
        f"TP {group.size}, N {workspace.n}, {_megabytes(workspace)} MiB of symmetric memory on each rank "
        f"({decision.reason}); {GEMM_RS.name}=0 turns it off",
        speak=group.rank == 0,
    )
    return ""


def obstacle(vllm_config: Any, ranks: int, settings: Settings) -> str:
    """What in the configuration, or in this vLLM, keeps the feature off; empty if nothing does."""
    import torch

    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    if not 1 < ranks <= MAX_RANKS:
        return f"TP {ranks}, expected 2 to {MAX_RANKS}"
    if parallel.use_ubatching:
        return "ubatching runs two streams, and the kernels need one order of calls"
    if model.dtype != torch.bfloat16:
        return f"the model is {model.dtype}, expected torch.bfloat16"
    if getattr(vllm_config, "lora_config", None) is not None:
        return "LoRA wraps wo_b, which the fused kernel would bypass"
    if getattr(model, "enable_sleep_mode", False):
        return "sleep mode may discard memory that the kernels rely on"
    if getattr(importlib.import_module("vllm.envs"), "VLLM_BATCH_INVARIANT", False):
        return "VLLM_BATCH_INVARIANT is set, and tile shapes follow the number of tokens"
    if max_tokens < settings.min_tokens:
        return f"batches have at most {max_tokens} tokens, fewer than {settings.min_tokens}"
    hidden = model.hf_config.hidden_size
    if hidden % 64:
        return f"hidden size {hidden} is no multiple of 64"
    for name in (probe.STOCK_GEMM_RS, probe.ATTENTION, probe.MEGA_ATTENTION, probe.SEQUENCE_PARALLEL):
        found = probe.signature_obstacle(importlib.import_module(name))
        if found:
            return found
    return ""


def _facts(vllm_config: Any, settings: Settings) -> dict[str, object]:
    from dsv4_gemm_rs import __version__ as gemm_rs_version

    return {
        "max_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "n": vllm_config.model_config.hf_config.hidden_size,
        "min_tokens": settings.min_tokens,
        "vllm": probe.vllm_version(),
        "dsv4-gemm-rs": gemm_rs_version,
    }


def _serves(projection: FusedProjection, vllm_config: Any) -> bool:
    """Whether a further model of this process fits the workspace; equal on all ranks."""
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    hidden = vllm_config.model_config.hf_config.hidden_size
    return bool(max_tokens <= projection.workspace.max_tokens and hidden == projection.workspace.n)


def _create(group: TensorParallelGroup, facts: dict[str, object]) -> Workspace:
    from dsv4_gemm_rs import Workspace

    max_tokens, n = facts["max_tokens"], facts["n"]
    assert isinstance(max_tokens, int)
    assert isinstance(n, int)
    return Workspace.create(group.data, max_tokens=max_tokens, n=n, device=group.device)


def _problem(workspace: Workspace, tokens: int) -> Any:
    from dsv4_gemm_rs import WeightKind
    from dsv4_gemm_rs.dispatch import Problem

    return Problem(tokens, workspace.n, 128, WeightKind.MXFP8)


def _path_problem(workspace: Workspace) -> str:
    from dsv4_vllm_integration.seams.projection import path_obstacle

    return path_obstacle(workspace, _problem(workspace, workspace.max_tokens))


def _megabytes(workspace: Workspace) -> int:
    exchange = workspace.exchange
    return 0 if exchange is None else round(exchange.layout.total_bytes / 2**20)


_restore: list[tuple[Any, str, Any]] = []


def _replace(owner: Any, name: str, value: Any) -> Any:
    """Set an attribute and remember what was there."""
    stock = owner.__dict__[name]
    _restore.append((owner, name, stock))
    setattr(owner, name, value)
    return stock


def _uninstall() -> None:
    global _active
    while _restore:
        owner, name, stock = _restore.pop()
        setattr(owner, name, stock)
    _active = None


def _install(group: TensorParallelGroup, workspace: Workspace, settings: Settings) -> None:
    global _active
    import torch

    from dsv4_vllm_integration.seams.projection import FusedProjection

    stock = importlib.import_module(probe.STOCK_GEMM_RS)
    attention = importlib.import_module(probe.ATTENTION).DeepseekV4Attention
    mega = importlib.import_module(probe.MEGA_ATTENTION).DeepseekV4MegaAttnAttention
    reduce_scatter = importlib.import_module(probe.SEQUENCE_PARALLEL).sp_reduce_scatter
    projection = FusedProjection(group, workspace, settings.min_tokens, reduce_scatter)

    def get_gemm_rs_ar() -> Any:
        return projection

    def warmup_gemm_rs_ar() -> int:
        try:
            ours = projection.warm_up()
        except Exception:
            logger.exception("dsv4 gemm_rs: warm-up failed")
            ours = 0
        return ours + int(stock_warmup())

    stock_warmup = _replace(stock, "warmup_gemm_rs_ar", warmup_gemm_rs_ar)
    _replace(stock, "get_gemm_rs_ar", get_gemm_rs_ar)

    def wo_b_proj(self: Any, z: Any) -> Any:
        bound = self.gemm_rs
        if bound is projection and not isinstance(z, torch.Tensor) and projection.should_run(z.data):
            return projection.apply_quantized(z, self.wo_b)
        return stock_proj(self, z)

    stock_proj = _replace(attention, "_wo_b_proj", wo_b_proj)

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
    stock_can = _replace(mega, "_can_quantize_o_proj", cached)
    _active = projection


def forget() -> None:
    """Undo everything but the wrapped gate, for tests."""
    _uninstall()
