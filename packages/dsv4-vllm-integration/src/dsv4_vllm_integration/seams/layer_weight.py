# SPDX-License-Identifier: Apache-2.0
"""A layer's weight for `gemm_rs`, kept in step with what vLLM does to the layer.

vLLM first fills `weight` [N, K] and `weight_scale` [N, K/32] from the checkpoint, then lets the layer's
kernel lay them out anew (`process_weights_after_loading`), once when the model is loaded and again at every
reload. Two cases:

* The kernel's layout is one that `gemm_rs` reads: BF16 [N, K]; FlashInfer's two MXFP8 layouts (E4M3 [N, K]
  or its transposed view, scales swizzled 128x4). The layer's own tensors are used, nothing is copied. A
  reload writes into the same addresses, so captured graphs follow it.
* Any other kernel repacks (Marlin, the choice on Hopper: W8A16). Before it does, the weight is dequantised
  into a BF16 copy, exact for the scales that `prepare_weight` admits; activations then stay BF16 as Marlin's
  do. A reload runs the same code and writes into the same copy.

Rejected: unpacking Marlin's layout (undocumented, and it has lost nothing that we would gain by waiting);
checking `_version` at each call (vLLM's loaders write through `.data`, which is not counted; the hook sees
every load).

Limit: a kernel-format weight update that bypasses `process_weights_after_loading` goes unseen by a copy.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from dsv4_gemm_rs import Activation, PreparedWeight, WeightKind, prepare_weight
from dsv4_symm_mem import ArgumentError

FLASHINFER = frozenset({"FlashInferCutedslMxfp8LinearKernel", "FlashInferCutlassMxfp8LinearKernel"})
"""vLLM's kernels whose layout is read in place, by class name: importing them costs a FlashInfer import."""


class Origin(enum.StrEnum):
    """Where the operand comes from."""

    LAYER_BF16 = "the layer's BF16 weight"
    LAYER_MXFP8 = "the layer's MXFP8 weight in FlashInfer's layout"
    COPY = "a BF16 copy made before the layer's kernel repacks"


def kernel_name(linear: Any) -> str:
    """Class name of the kernel that vLLM chose for a quantised layer; empty if there is none."""
    method = getattr(linear, "scheme", None) or getattr(linear, "quant_method", None)
    kernel = getattr(method, "kernel", None)
    return "" if kernel is None else type(kernel).__name__


def inspect_layer(linear: Any) -> tuple[Origin, int, int] | str:
    """Origin, N and K of a row-parallel layer before its weights are loaded, or why it cannot be served."""
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return "its weight is no matrix"
    if getattr(linear, "bias", None) is not None:
        return "it has a bias"
    if getattr(linear, "quant_method", None) is None:
        return "it has no quant_method, whose process_weights_after_loading is to be followed"
    n, k = weight.shape
    if weight.dtype == torch.bfloat16:
        return Origin.LAYER_BF16, n, k
    if weight.dtype != torch.float8_e4m3fn:
        return f"its weight is {weight.dtype}"
    scale = getattr(linear, "weight_scale", None)
    if not isinstance(scale, torch.Tensor) or scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return "its scales are not E8M0"
    if tuple(scale.shape) != (n, k // 32):
        return f"its scales are {tuple(scale.shape)}, expected [N, K/32] = {(n, k // 32)}"
    origin = Origin.LAYER_MXFP8 if kernel_name(linear) in FLASHINFER else Origin.COPY
    return origin, n, k


class LayerWeight:
    """One layer's operand.

    Attributes:
        origin: Where it comes from.
        n: Output features.
        k: Input features of this rank.
        problem: Why it cannot be used; empty if nothing is wrong.
        changed: Whether the layer was loaded since `current` last looked.
    """

    def __init__(self, origin: Origin, n: int, k: int) -> None:
        self.origin = origin
        self.n = n
        self.k = k
        self.problem = ""
        self.changed = True
        self._copy: torch.Tensor | None = None
        self._prepared: PreparedWeight | None = None
        self._addresses: tuple[int, ...] = ()

    @property
    def kind(self) -> WeightKind:
        """Operand type that `gemm_rs` sees."""
        return WeightKind.MXFP8 if self.origin is Origin.LAYER_MXFP8 else WeightKind.BF16

    @property
    def copied_bytes(self) -> int:
        """Memory that the copy takes."""
        return 0 if self._copy is None else self._copy.numel() * self._copy.element_size()

    def before_processing(self, linear: Any) -> None:
        """Take what the layer's kernel is about to repack. Never raises."""
        self.changed = True
        if self.origin is not Origin.COPY:
            return
        try:
            dense = prepare_weight(
                linear.weight.detach(), linear.weight_scale.detach(), activation=Activation.BF16
            ).bf16()
            if self._copy is None:
                self._copy = dense
            else:
                self._copy.copy_(dense)
            self.problem = ""
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def current(self, linear: Any) -> PreparedWeight:
        """The operand as the layer's weight is now. Local; may wait for the GPU after a load.

        Raises:
            ArgumentError: The layer's tensors are not as expected, or could not be taken.
        """
        if self.problem:
            raise ArgumentError("weight", self.problem, f"{self.origin.value}")
        weight, scale = self._operands(linear)
        addresses = (weight.data_ptr(), 0 if scale is None else scale.data_ptr())
        if self._prepared is None or addresses != self._addresses:
            self._prepared = prepare_weight(weight, scale)
            self._addresses = addresses
        elif self.changed:
            self._prepared.refresh()
        self.changed = False
        return self._prepared

    @property
    def prepared(self) -> PreparedWeight:
        """What `current` gave last.

        Raises:
            ArgumentError: It never did.
        """
        if self._prepared is None:
            raise ArgumentError("weight", None, "a weight that was prepared")
        return self._prepared

    def moved(self, linear: Any) -> bool:
        """Whether the layer's tensors are elsewhere than when `current` last looked."""
        if self.origin is Origin.COPY:
            return False
        scale = linear.weight_scale if self.origin is Origin.LAYER_MXFP8 else None
        return self._addresses != (linear.weight.data_ptr(), 0 if scale is None else scale.data_ptr())

    def _operands(self, linear: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.origin is Origin.COPY:
            if self._copy is None:
                raise ArgumentError("weight", None, "a layer whose weights were loaded after it was bound")
            return self._copy, None
        # Through `.data`: in-place loads by vLLM are followed by the hook, not by version counters.
        weight = linear.weight.data
        if self.origin is Origin.LAYER_BF16:
            return weight, None
        if tuple(weight.shape) == (self.k, self.n) and weight.t().is_contiguous():
            weight = weight.t()
        return weight, linear.weight_scale.data
