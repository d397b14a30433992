# SPDX-License-Identifier: Apache-2.0
"""Turning a feature of the output projection on, on all ranks or on none.

Contract: `Seam.enable` never raises. It is collective over the tensor-parallel group: the ranks exchange what
could keep one of them from going on (configuration, signatures, versions, memory, replacing functions of
vLLM), and one rank's obstacle leaves every rank with stock vLLM, nothing of it replaced and the memory given
back. The workspace is allocated here, before layers exist, so vLLM's memory profile has it in.

A feature is one `Seam`: what it adds to the common obstacles, and the function that replaces its part of vLLM
through `Seam.replace`, which remembers what was there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsv4_vllm_integration import probe
from dsv4_vllm_integration.states import Status, announce, logger
from dsv4_vllm_integration.switches import BY_FEATURE, Feature, Settings

if TYPE_CHECKING:
    from dsv4_gemm_rs import Workspace
    from dsv4_gemm_rs.dispatch import Problem

    from dsv4_vllm_integration.seams.group import TensorParallelGroup
    from dsv4_vllm_integration.seams.projection import FusedProjection

MAX_RANKS = 8
"""Tensor parallelism that the kernels were tested with."""

Install = Callable[["TensorParallelGroup", "Workspace", Settings], "FusedProjection"]
"""Replaces a feature's part of vLLM and returns what answers there now."""


def nothing_more(vllm_config: Any) -> str:
    """No further obstacle."""
    return ""


@dataclass
class Seam:
    """One feature's state in this process.

    Attributes:
        feature: The feature.
        modules: Modules of vLLM whose signatures it relies on.
        install: Replaces its part of vLLM, through `replace`.
        further_obstacle: What else in a configuration keeps it off; empty text if nothing does.
        projection: What layers of this process are bound to, while it is on.
    """

    feature: Feature
    modules: tuple[str, ...]
    install: Install
    further_obstacle: Callable[[Any], str] = nothing_more
    projection: FusedProjection | None = None
    _restore: list[tuple[Any, str, Any]] = field(default_factory=list)

    def enable(self, vllm_config: Any, settings: Settings) -> bool:
        """Turn the feature on if every rank can; collective over the tensor-parallel group. Never raises."""
        try:
            from dsv4_vllm_integration.seams.group import group_of

            group = group_of(importlib.import_module("vllm.distributed").get_tp_group())
        except Exception as error:
            announce(self.feature, Status.OFF, f"no tensor-parallel group: {error}")
            return False
        try:
            if self.projection is not None:
                return serves(self.projection, vllm_config)
            reason = self._enable(group, vllm_config, settings)
        except Exception as error:
            # Everything that can fail on one rank alone was caught before and agreed on; this is a lost peer.
            logger.exception("dsv4 %s: the ranks could not agree", self.feature.value)
            reason = f"{type(error).__name__}: {error}"
        if reason:
            announce(self.feature, Status.OFF, reason, speak=group.rank == 0)
        return not reason

    def _enable(self, group: TensorParallelGroup, vllm_config: Any, settings: Settings) -> str:
        """Why the feature stays off, equal on all ranks; empty once it is on."""
        from dsv4_vllm_integration.seams.group import differing, first_problem

        held: dict[str, object] = {}
        try:
            problem = obstacle(vllm_config, group.size, settings, self.modules)
            problem = problem or self.further_obstacle(vllm_config)
            held = facts(vllm_config, settings)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problem = first_problem(group, problem) or differing(group, held)
        if problem:
            return problem
        workspace: Workspace | None = None
        problem = ""
        try:
            workspace = _create(group, held)
            problem = _path_problem(workspace)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problem = first_problem(group, problem)
        if not problem and workspace is not None:
            try:
                self.projection = self.install(group, workspace, settings)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            problem = first_problem(group, problem)
        if problem:
            self.uninstall()
            if workspace is not None:
                workspace.close()
            return problem
        assert workspace is not None  # no rank reported a problem
        decision = workspace.decide(_problem(workspace))
        announce(
            self.feature,
            Status.ON,
            f"{decision.path.value} for {settings.min_tokens} to {workspace.max_tokens} tokens, "
            f"TP {group.size}, N {workspace.n}, {_megabytes(workspace)} MiB of symmetric memory on each rank "
            f"({decision.reason}); {BY_FEATURE[self.feature].name}=0 turns it off",
            speak=group.rank == 0,
        )
        return ""

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Set an attribute of vLLM, remember what was there and return it."""
        stock = owner.__dict__[name]
        self._restore.append((owner, name, stock))
        setattr(owner, name, value)
        return stock

    def replace_warm_up(self, projection: FusedProjection) -> None:
        """Have vLLM's warm-up, which comes before graph capture, warm `projection` up as well."""
        stock_module = importlib.import_module(probe.STOCK_GEMM_RS)

        def warmup_gemm_rs_ar() -> int:
            try:
                ours = projection.warm_up()
            except Exception:
                logger.exception("dsv4 %s: warm-up failed", self.feature.value)
                ours = 0
            return ours + int(stock())

        stock = self.replace(stock_module, "warmup_gemm_rs_ar", warmup_gemm_rs_ar)

    def uninstall(self) -> None:
        """Give vLLM back what was replaced."""
        while self._restore:
            owner, name, stock = self._restore.pop()
            setattr(owner, name, stock)
        self.projection = None


def obstacle(vllm_config: Any, ranks: int, settings: Settings, modules: tuple[str, ...] = ()) -> str:
    """What in the configuration, or in this vLLM, keeps a feature off; empty if nothing does."""
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
    for name in modules:
        found = probe.signature_obstacle(importlib.import_module(name))
        if found:
            return found
    return ""


def facts(vllm_config: Any, settings: Settings) -> dict[str, object]:
    """What has to be equal on all ranks."""
    from dsv4_gemm_rs import __version__ as gemm_rs_version

    return {
        "max_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "n": vllm_config.model_config.hf_config.hidden_size,
        "min_tokens": settings.min_tokens,
        "vllm": probe.vllm_version(),
        "dsv4-gemm-rs": gemm_rs_version,
    }


def serves(projection: FusedProjection, vllm_config: Any) -> bool:
    """Whether a further model of this process fits the workspace; equal on all ranks."""
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    hidden = vllm_config.model_config.hf_config.hidden_size
    return bool(max_tokens <= projection.workspace.max_tokens and hidden == projection.workspace.n)


def _create(group: TensorParallelGroup, held: dict[str, object]) -> Workspace:
    from dsv4_gemm_rs import Workspace

    max_tokens, n = held["max_tokens"], held["n"]
    assert isinstance(max_tokens, int)
    assert isinstance(n, int)
    return Workspace.create(group.data, max_tokens=max_tokens, n=n, device=group.device)


def _problem(workspace: Workspace) -> Problem:
    from dsv4_gemm_rs import WeightKind
    from dsv4_gemm_rs.dispatch import Problem

    return Problem(workspace.max_tokens, workspace.n, 128, WeightKind.MXFP8)


def _path_problem(workspace: Workspace) -> str:
    from dsv4_vllm_integration.seams.projection import path_obstacle

    return path_obstacle(workspace, _problem(workspace))


def _megabytes(workspace: Workspace) -> int:
    exchange = workspace.exchange
    return 0 if exchange is None else round(exchange.layout.total_bytes / 2**20)
