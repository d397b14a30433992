# SPDX-License-Identifier: Apache-2.0
"""A projection's weight, checked once and tied to the tensors it came from.

Contract: `prepare_weight` copies nothing that it can refer to. Whatever is derived (a swizzled scale, a
BF16 copy) remembers its source's storage and version counter; a source that was reloaded, refitted in
place or moved since then is noticed at the next use and refused with `StaleWeightError`, never silently
stale. Preparing again is cheap where nothing is derived.

Limit: torch counts in-place writes per tensor, and not those through `.data`, in inference mode, by a raw
pointer or from another process. A loader that writes that way must be followed by `refresh()`.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from dataclasses import dataclass

import torch
from dsv4_symm_mem.errors import ArgumentError, StaleWeightError

from dsv4_gemm_rs.quantize import dequantize_mxfp8, swizzle_scales, swizzled_scale_numel, unswizzle_scales

MXFP8_K_MULTIPLE = 128
BF16_K_MULTIPLE = 64
N_MULTIPLE = 64
BLOCK = 32


class WeightKind(enum.StrEnum):
    """Operand type of a projection."""

    MXFP8 = "mxfp8"
    BF16 = "bf16"


class Activation(enum.StrEnum):
    """What happens to BF16 activations before they meet an MXFP8 weight."""

    MXFP8 = "mxfp8"
    """Quantised to MXFP8: the same operands on every architecture. The default."""
    BF16 = "bf16"
    """Left as they are: more accurate, and comparable to the default only within quantisation error."""


@dataclass(frozen=True)
class _Source:
    tensor: torch.Tensor
    pointer: int
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Source:
        # A tensor made in inference mode has no version counter; its storage is all that can be compared.
        version = -1 if tensor.is_inference() else tensor._version
        return cls(tensor, tensor.data_ptr(), version)

    def changed(self) -> str | None:
        now = _Source.of(self.tensor)
        if now.pointer != self.pointer:
            return f"its storage moved from {self.pointer:#x} to {now.pointer:#x}"
        if now.version != self.version:
            return f"it was written in place (version {self.version}, now {now.version})"
        return None


_handles = itertools.count(1)
_prepared: weakref.WeakValueDictionary[str, PreparedWeight] = weakref.WeakValueDictionary()


class PreparedWeight:
    """A weight [N, K] ready for `gemm_rs`; made by `prepare_weight`.

    Attributes:
        kind: Operand type.
        activation: What happens to BF16 activations.
        data: E4M3 or BF16 [N, K], contiguous.
        scale: E8M0 bytes in the swizzled 128x4 layout (uint8, 1-D), or None for BF16.
        handle: Name by which torch operators refer to this object.
    """

    def __init__(
        self,
        kind: WeightKind,
        activation: Activation,
        data: torch.Tensor,
        scale: torch.Tensor | None,
        source_scale: torch.Tensor | None,
    ) -> None:
        self.kind = kind
        self.activation = activation
        self.data = data
        self.scale = scale
        self._scale_source = source_scale
        self._sources: tuple[_Source, ...] = ()
        self._bf16: torch.Tensor | None = None
        self._remember()
        self.handle = f"weight-{next(_handles)}"
        _prepared[self.handle] = self

    @property
    def n(self) -> int:
        """Output features N."""
        return self.data.shape[0]

    @property
    def k(self) -> int:
        """Input features of this rank, K."""
        return self.data.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the weight lives."""
        return self.data.device

    def check(self) -> None:
        """Check that the sources are as they were when the weight was prepared.

        Raises:
            StaleWeightError: A source moved or was written; says which and how.
        """
        for name, source in zip(("weight", "scale"), self._sources, strict=False):
            why = source.changed()
            if why is not None:
                raise StaleWeightError(
                    f"{name}: {why} after prepare_weight; call refresh() or prepare it again"
                )

    def refresh(self) -> None:
        """Take the sources as they are now: derive again what was derived. Addresses of derived tensors stay.

        Captured CUDA graphs keep reading the same addresses, so they see the new values. A source that moved
        cannot be refreshed under captured graphs; prepare the weight again and capture again.
        """
        if self.scale is not None and self._scale_source is not None:
            _check_scale_values(self._scale_source)
            derived = _swizzled(self._scale_source, self.n, self.k)
            if derived.data_ptr() != self.scale.data_ptr():
                self.scale.copy_(derived)
        if self._bf16 is not None:
            self._bf16.copy_(self._dequantized())
        self._remember()

    def bf16(self) -> torch.Tensor:
        """The weight as BF16 [N, K], exact where BF16 can hold it; made at first use and kept.

        An E4M3 value times a power of two has 4 significant bits, so BF16 holds it exactly unless the product
        leaves BF16's exponent range. `prepare_weight` makes it at once on GPUs without block-scaled MMA.

        Raises:
            ArgumentError: A block's scale lies where BF16 cannot hold its values exactly.
            StaleWeightError: As `check`.
        """
        self.check()
        if self.kind is WeightKind.BF16:
            return self.data
        if self._bf16 is None:
            self._bf16 = self._dequantized()
        return self._bf16

    def _dequantized(self) -> torch.Tensor:
        exact = dequantize_mxfp8(self.data, self._scale_rows())
        rounded = exact.to(torch.bfloat16)
        wrong = ((rounded.float() != exact) | exact.isinf()) & ~exact.isnan()
        if bool(wrong.any()):
            row, column = (int(i) for i in wrong.nonzero()[0])
            raise ArgumentError(
                "scale",
                int(self._scale_rows()[row, column // BLOCK]),
                f"a scale whose block BF16 holds exactly (3 to 246), at row {row}, block {column // BLOCK}",
            )
        return rounded

    def _scale_rows(self) -> torch.Tensor:
        if self.scale is None:
            raise ArgumentError("weight", self.kind.value, "an MXFP8 weight")
        return unswizzle_scales(self.scale, self.n, self.k)

    def _remember(self) -> None:
        tensors = [self.data] if self._scale_source is None else [self.data, self._scale_source]
        self._sources = tuple(_Source.of(tensor) for tensor in tensors)


def weight_of(handle: str) -> PreparedWeight:
    """The prepared weight that `handle` refers to.

    Raises:
        ArgumentError: It no longer exists.
    """
    weight = _prepared.get(handle)
    if weight is None:
        raise ArgumentError("prepared", handle, "the handle of a PreparedWeight that still exists")
    return weight


def prepare_weight(
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    activation: Activation | str = Activation.MXFP8,
) -> PreparedWeight:
    """Check a weight and put its scale factors into the layout that the kernels read.

    Args:
        weight: E4M3 or BF16 [N, K], contiguous; N a multiple of 64, K of 128 for MXFP8 and 64 for BF16.
        scale: E8M0 (uint8 or float8_e8m0fnu) for MXFP8: row-major [N, K/32], swizzled 128x4 (1-D, as
            FlashInfer and vLLM keep it), or per 32 x 32 block [N/32, K/32] as DeepSeek-V4.1 checkpoints do.
        activation: What happens to BF16 activations; see `Activation`.

    Raises:
        ArgumentError: Wrong dtype, shape, stride, device, multiple or scale; a NaN scale (byte 255); on a GPU
            without block-scaled MMA, a block that BF16 cannot hold exactly.
    """
    try:
        activation = Activation(activation)
    except ValueError:
        raise ArgumentError("activation", activation, f"one of {[a.value for a in Activation]}") from None
    if not isinstance(weight, torch.Tensor) or weight.dtype not in (torch.float8_e4m3fn, torch.bfloat16):
        raise ArgumentError("weight", getattr(weight, "dtype", type(weight)), "float8_e4m3fn or bfloat16")
    kind = WeightKind.BF16 if weight.dtype == torch.bfloat16 else WeightKind.MXFP8
    multiple = BF16_K_MULTIPLE if kind is WeightKind.BF16 else MXFP8_K_MULTIPLE
    if weight.dim() != 2 or weight.shape[1] == 0 or weight.shape[1] % multiple:
        raise ArgumentError("weight", tuple(weight.shape), f"[N, K] with K a positive multiple of {multiple}")
    n, k = weight.shape
    if n == 0 or n % N_MULTIPLE:
        raise ArgumentError(
            "weight", tuple(weight.shape), f"[N, K] with N a positive multiple of {N_MULTIPLE}"
        )
    if not weight.is_contiguous():
        raise ArgumentError("weight", weight.stride(), f"contiguous rows, strides {(k, 1)}")
    if weight.data_ptr() % 16:
        raise ArgumentError("weight", f"address {weight.data_ptr():#x}", "a 16-byte aligned address")
    if kind is WeightKind.BF16:
        if scale is not None:
            raise ArgumentError("scale", tuple(scale.shape), "None for a BF16 weight")
        return PreparedWeight(kind, activation, weight, None, None)
    if scale is None:
        raise ArgumentError("scale", None, "E8M0 scale factors for an MXFP8 weight")
    if not isinstance(scale, torch.Tensor):
        raise ArgumentError("scale", type(scale).__name__, "a tensor")
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ArgumentError("scale", scale.dtype, "uint8 or float8_e8m0fnu")
    if scale.device != weight.device:
        raise ArgumentError("scale", str(scale.device), f"{weight.device}, the weight's device")
    _check_scale_values(scale)
    prepared = PreparedWeight(kind, activation, weight, _swizzled(scale, n, k), scale)
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device)[0] < 10:
        # Every path multiplies BF16 there. A block that it cannot hold is refused now, while no peer waits.
        prepared.bf16()
    return prepared


def _check_scale_values(scale: torch.Tensor) -> None:
    if scale.device.type != "meta" and bool((scale.view(torch.uint8) == 255).any()):
        where = [int(i) for i in (scale.view(torch.uint8) == 255).nonzero()[0]]
        raise ArgumentError(
            "scale", f"NaN (byte 255) at {where}", "finite E8M0 scale factors, bytes 0 to 254"
        )


def _swizzled(scale: torch.Tensor, n: int, k: int) -> torch.Tensor:
    plain = scale.view(torch.uint8)
    if plain.dim() == 1 and plain.numel() == swizzled_scale_numel(n, k) and plain.is_contiguous():
        if plain.data_ptr() % 16:
            raise ArgumentError("scale", f"address {plain.data_ptr():#x}", "a 16-byte aligned address")
        return plain
    if tuple(plain.shape) == (n, k // BLOCK):
        return swizzle_scales(plain)
    if tuple(plain.shape) == (n // BLOCK, k // BLOCK) and n % BLOCK == 0:
        return swizzle_scales(plain.repeat_interleave(BLOCK, dim=0))
    raise ArgumentError(
        "scale",
        tuple(scale.shape),
        f"[{n}, {k // BLOCK}] row-major, [{n // BLOCK}, {k // BLOCK}] per 32 x 32 block, "
        f"or [{swizzled_scale_numel(n, k)}] contiguous, swizzled 128x4",
    )
