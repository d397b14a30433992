# SPDX-License-Identifier: Apache-2.0
"""`wo_b` with the collective that follows it, fused where it can be: what both endings share.

Contract: `apply` is what vLLM computes with its layer and a collective, as BF16; which rows of the sum over
ranks that are is up to the ending (`endings.py`). Where the fused kernel cannot serve a call, the same is
computed by vLLM's own functions. The object has the methods of vLLM's `GemmRsAr`, which layers hold. All
ranks take the same way: shapes and thresholds are equal, and whatever could fail on one rank alone (preparing
a weight, loading a kernel) is settled by a collective at a layer's first call, which vLLM makes eagerly when
it profiles memory, and again after a reload. Nothing is settled, compiled or prepared while a CUDA graph is
being captured; a layer that is not settled then runs unfused in that graph.

An `ExchangeError` is the one error that passes through: a peer died or hangs and this call's output is NaN,
so going on unfused would serve garbage. Any other error gives the layer back to vLLM and is logged once.
"""

from __future__ import annotations

import abc
import logging
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from dsv4_gemm_rs import PreparedWeight, WeightKind, Workspace
from dsv4_gemm_rs.dispatch import Path, Problem
from dsv4_symm_mem import ExchangeError

from dsv4_vllm_integration.seams.group import TensorParallelGroup, first_problem
from dsv4_vllm_integration.seams.layer_weight import LayerWeight, Origin, inspect_layer
from dsv4_vllm_integration.states import logger
from dsv4_vllm_integration.switches import Feature


def path_obstacle(workspace: Workspace, problem: Problem) -> str:
    """Why calls of this shape would not be fused; empty if they are, or if a path was asked for by name."""
    decision = workspace.decide(problem)
    if decision.path is Path.FUSED or workspace.requested is not None:
        return ""
    return str(decision)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclass
class Layer:
    """What is known of one bound layer.

    Attributes:
        weight: Its operand.
        settled: Whether the ranks have agreed on it since it was last loaded.
        fused: What they agreed on.
    """

    weight: LayerWeight
    settled: bool = False
    fused: bool = False


class FusedProjection(abc.ABC):
    """`wo_b` with its collective, on one workspace for all layers of a process.

    Args:
        group: The tensor-parallel group.
        workspace: Its workspace.
        min_tokens: Smallest batch that is fused.
    """

    feature: ClassVar[Feature]
    """Whose log lines these are."""

    def __init__(self, group: TensorParallelGroup, workspace: Workspace, min_tokens: int) -> None:
        self.group = group
        self.workspace = workspace
        self.min_tokens = min_tokens
        self._layers: weakref.WeakKeyDictionary[Any, Layer] = weakref.WeakKeyDictionary()
        self._warm: set[tuple[WeightKind, int, int]] = set()
        self._said: set[str] = set()
        self._declined = ""

    # What an ending says ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def _fused(self, x: Any, prepared: PreparedWeight) -> torch.Tensor:
        """The result by our kernel; `x` as `gemm_rs` takes it."""

    @abc.abstractmethod
    def _unfused(self, linear: Any, given: Any) -> torch.Tensor:
        """The result by vLLM's own functions; `given` as vLLM hands it over."""

    def _ending_obstacle(self, linear: Any) -> str:
        """Why `linear` does not end as this class does; empty if it does."""
        return ""

    # What vLLM calls -------------------------------------------------------------------------------------

    def can_run(self, linear: Any) -> bool:
        """Whether `linear` is served, decided from shapes and types alone; follows its weights from now on.

        Called before weights are loaded. Equal on all ranks, since their layers are.
        """
        try:
            self._declined = self._obstacle(linear)
            if not self._declined:
                self._follow(linear)
        except Exception as error:
            self._declined = f"{type(error).__name__}: {error}"
        return not self._declined

    def warn_incompatible_projection(self) -> None:
        """Say why the layer asked about last stays with vLLM."""
        self._say(f"a projection stays with vLLM: {self._declined}")

    def should_run(self, x: torch.Tensor) -> bool:
        """Whether a batch is large enough for the fused kernel, and fits the workspace."""
        return self.min_tokens <= x.shape[0] <= self.workspace.max_tokens

    def apply(self, x: torch.Tensor, linear: Any) -> torch.Tensor:
        """The projection summed over ranks: this rank's rows, or all of them.

        Args:
            x: BF16 [M, K].
            linear: A layer that `can_run` accepted.

        Raises:
            ExchangeError: A peer died or is late; the workspace is unusable.
        """
        return self._run(linear, x, x)

    # What our own hooks call -----------------------------------------------------------------------------

    def follows(self, linear: Any) -> bool:
        """Whether `can_run` accepted `linear`."""
        return linear in self._layers

    def takes_quantized(self, linear: Any) -> bool:
        """Whether `apply_quantized` would hand MXFP8 activations for `linear` to the kernel as they are."""
        layer = self._layers.get(linear)
        return layer is not None and layer.weight.origin is Origin.LAYER_MXFP8

    def apply_quantized(self, z: Any, linear: Any) -> torch.Tensor:
        """As `apply` for vLLM's `QuantizedActivation`: E4M3 [M, K] and E8M0 scales swizzled 128x4."""
        return self._run(linear, (z.data, z.scale.reshape(-1).view(torch.uint8)), z)

    def warm_up(self) -> int:
        """Settle every layer that no call has settled yet; collective. Returns the kinds of calls made ready.

        vLLM calls this before it captures graphs.
        """
        for linear, layer in list(self._layers.items()):
            try:
                self._ready(layer, linear)
            except Exception as error:
                self._give_back(layer, error)
        copied = sum(layer.weight.copied_bytes for layer in self._layers.values())
        if copied:
            self._say(f"BF16 copies of weights take {copied / 2**20:.0f} MiB", logging.INFO)
        return len(self._warm)

    # ------------------------------------------------------------------------------------------------------

    def _obstacle(self, linear: Any) -> str:
        found = self._ending_obstacle(linear) or inspect_layer(linear)
        if isinstance(found, str):
            return found
        origin, n, k = found
        weight = LayerWeight(origin, n, k)
        if n > self.workspace.n:
            return f"N = {n}, the workspace has {self.workspace.n}"
        multiple = 128 if weight.kind is WeightKind.MXFP8 else 64
        if n % 64 or k % multiple:
            return f"[{n}, {k}] is no multiple of [64, {multiple}]"
        return path_obstacle(self.workspace, Problem(self.workspace.max_tokens, n, k, weight.kind))

    def _follow(self, linear: Any) -> None:
        if linear in self._layers:
            return
        found = inspect_layer(linear)
        assert not isinstance(found, str)  # `_obstacle` has returned the reason
        self._layers[linear] = Layer(LayerWeight(*found))
        method = linear.quant_method
        if getattr(method, "_dsv4_follower", None) is self:
            return
        original = method.process_weights_after_loading

        def process_weights_after_loading(layer: Any, *arguments: Any, **options: Any) -> Any:
            known = self._layers.get(layer)
            if known is not None:
                known.weight.before_processing(layer)
                known.settled = False
            return original(layer, *arguments, **options)

        method.process_weights_after_loading = process_weights_after_loading
        method._dsv4_follower = self

    def _run(self, linear: Any, x: Any, given: Any) -> torch.Tensor:
        layer = self._layers.get(linear)
        if layer is not None:
            try:
                prepared = self._ready(layer, linear)
                if prepared is not None:
                    return self._fused(x, prepared)
            except ExchangeError:
                raise
            except Exception as error:
                self._give_back(layer, error)
        return self._unfused(linear, given)

    def _ready(self, layer: Layer, linear: Any) -> PreparedWeight | None:
        """The layer's operand if the ranks have agreed to fuse it; settles that first where it can."""
        if layer.settled and not layer.fused:
            return None
        if layer.settled and not layer.weight.moved(linear):
            return layer.weight.prepared
        if _capturing():
            return None
        problem = ""
        try:
            layer.weight.current(linear)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problem = first_problem(self.group, problem)
        layer.settled = True
        layer.fused = not problem
        if problem:
            self._say(f"a projection goes back to vLLM: {problem}")
            return None
        prepared = layer.weight.prepared
        key = (prepared.kind, prepared.n, prepared.k)
        if key not in self._warm:
            # Raises alike on all ranks.
            self.workspace.warm_up(prepared)
            self._warm.add(key)
        return prepared

    def _give_back(self, layer: Layer, error: Exception) -> None:
        layer.settled = True
        layer.fused = False
        self._say(f"a projection goes back to vLLM: {type(error).__name__}: {error}")

    def _say(self, text: str, level: int = logging.WARNING) -> None:
        if text not in self._said and self.group.rank == 0:
            logger.log(level, "dsv4 %s: %s", self.feature.value, text)
        self._said.add(text)
