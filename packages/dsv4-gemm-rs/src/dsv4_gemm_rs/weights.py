# SPDX-License-Identifier: Apache-2.0
"""A projection's weight, checked once and tied to the tensors it came from.

Contract: `prepare_weight` copies nothing that it can refer to. Whatever is derived (a swizzled scale, a
BF16 copy, a packed form) remembers its source's storage and version counter; a source that was reloaded,
refitted in place or moved since then is noticed at the next use and refused with `StaleWeightError`, never
silently stale. Preparing again is cheap where nothing is derived.

Memory, bytes per element of an MXFP8 weight where the tensor cores take no block scales, beside the caller's
1 for the data and 1/32 for row-major scales:

    keep="bf16"    2 for the BF16 copy, 1/32 for swizzled scales
    keep="fp8"     1 + 1/16 for the packed form, 1/32 for swizzled scales

Both refer to the caller's tensors, to notice that they changed. `release_source` lets go of them, and of
the swizzled scales: a caller who drops his own then has 1 + 1/16 in all, where BF16 takes 3 + 1/16. `keep` is
the weight's choice, not the workspace's: it decides what is made when a weight is loaded, and a model may
keep one projection otherwise than another. All ranks of a call keep theirs alike.

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

from dsv4_gemm_rs.packing import PackedWeight, pack, unpack
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


class Keep(enum.StrEnum):
    """In which form an MXFP8 weight is kept for tensor cores that take no block scales."""

    BF16 = "bf16"
    """As a BF16 copy: the fastest kernel. The default."""
    FP8 = "fp8"
    """Packed, and converted in registers: about half the bytes. The same values, see `packing`."""


EXACT_SCALES = range(3, 247)
"""Scale bytes whose blocks BF16 holds exactly, whatever the elements."""


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
        packed: The packed form, for `Keep.FP8`; else None.
        handle: Name by which torch operators refer to this object.
    """

    def __init__(
        self,
        kind: WeightKind,
        activation: Activation,
        data: torch.Tensor,
        scale: torch.Tensor | None,
        source_scale: torch.Tensor | None,
        keep: Keep = Keep.BF16,
    ) -> None:
        self.kind = kind
        self.activation = activation
        self.packed: PackedWeight | None = None
        self._shape, self._device = (data.shape[0], data.shape[1]), data.device
        self._data: torch.Tensor | None = data
        self._scale = scale
        self._scale_source = source_scale
        self._sources: tuple[_Source, ...] = ()
        self._bf16: torch.Tensor | None = None
        if keep is Keep.FP8:
            self.packed = self._pack()
        self._remember()
        self.handle = f"weight-{next(_handles)}"
        _prepared[self.handle] = self

    @property
    def n(self) -> int:
        """Output features N."""
        return self._shape[0]

    @property
    def k(self) -> int:
        """Input features of this rank, K."""
        return self._shape[1]

    @property
    def device(self) -> torch.device:
        """Where the weight lives."""
        return self._device

    @property
    def data(self) -> torch.Tensor:
        """E4M3 or BF16 [N, K], contiguous; made anew from the packed form once the source is released."""
        return self._data if self._data is not None else self._unpacked()[0]

    @property
    def scale(self) -> torch.Tensor | None:
        """E8M0 bytes in the swizzled 128x4 layout (uint8, 1-D), None for BF16; made anew as `data` is."""
        return self._scale if self._data is not None else swizzle_scales(self._unpacked()[1])

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a product reads, as operators declare it: data and scale, or the packed form."""
        return (self.data, self.scale) if self.packed is None else (self.packed.blocks, None)

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

        Raises:
            ArgumentError: The source was released; what it holds now is refused, as by `prepare_weight`; the
                scales of a packed weight go beyond 134 and did not before, which captured launches cannot
                follow.
        """
        if self._data is None:
            raise ArgumentError("weight", "released", "a weight that still refers to its source")
        if self._scale is not None and self._scale_source is not None:
            _check_scale_values(self._scale_source)
            derived = _swizzled(self._scale_source, self.n, self.k)
            if derived.data_ptr() != self._scale.data_ptr():
                self._scale.copy_(derived)
        if self._bf16 is not None:
            self._bf16.copy_(self._dequantized())
        if self.packed is not None:
            again = self._pack(self.packed.split)
            if again.split != self.packed.split:
                raise ArgumentError("scale", "bytes beyond 134", "a weight that is prepared again")
            self.packed.blocks.copy_(again.blocks)
        self._remember()

    def release_source(self) -> None:
        """Let go of the tensors that a packed weight was made from; changes of theirs are no longer noticed.

        Raises:
            ArgumentError: The weight is not packed.
            StaleWeightError: As `check`.
        """
        if self.packed is None:
            raise ArgumentError("keep", "bf16", "a weight prepared with keep='fp8'")
        self.check()
        self._data = self._scale = self._scale_source = None
        self._sources = ()

    def bf16(self) -> torch.Tensor:
        """The weight as BF16 [N, K], exact where BF16 can hold it; made at first use and kept.

        An E4M3 value times a power of two has 4 significant bits, so BF16 holds it exactly unless the product
        leaves BF16's exponent range. `prepare_weight` makes it at once on GPUs without block-scaled MMA. Of a
        packed weight it is made anew each time.

        Raises:
            ArgumentError: A block's scale lies where BF16 cannot hold its values exactly.
            StaleWeightError: As `check`.
        """
        self.check()
        if self.kind is WeightKind.BF16:
            return self.data
        if self.packed is not None:
            return self._dequantized()
        if self._bf16 is None:
            self._bf16 = self._dequantized()
        return self._bf16

    def _dequantized(self) -> torch.Tensor:
        data, scale = self.data, self._scale_rows()
        _require_exact(data, scale)
        return dequantize_mxfp8(data, scale).to(torch.bfloat16)

    def _pack(self, split: bool = False) -> PackedWeight:
        data, scale = self.data, self._scale_rows()
        _require_exact(data, scale)
        return pack(data, scale, split)

    def _unpacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.packed is None:
            raise ArgumentError("weight", "released", "a weight that still refers to its source")
        return unpack(self.packed)

    def _scale_rows(self) -> torch.Tensor:
        if self.scale is None:
            raise ArgumentError("weight", self.kind.value, "an MXFP8 weight")
        return unswizzle_scales(self.scale, self.n, self.k)

    def _remember(self) -> None:
        tensors = (self._data, self._scale_source)
        self._sources = tuple(_Source.of(tensor) for tensor in tensors if tensor is not None)


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
    keep: Keep | str = Keep.BF16,
) -> PreparedWeight:
    """Check a weight and put its scale factors into the layout that the kernels read.

    Args:
        weight: E4M3 or BF16 [N, K], contiguous; N a multiple of 64, K of 128 for MXFP8 and 64 for BF16.
        scale: E8M0 (uint8 or float8_e8m0fnu) for MXFP8: row-major [N, K/32], swizzled 128x4 (1-D, as
            FlashInfer and vLLM keep it), or per 32 x 32 block [N/32, K/32] as DeepSeek-V4.1 checkpoints do.
        activation: What happens to BF16 activations; see `Activation`.
        keep: What an MXFP8 weight is kept as where tensor cores take no block scales; see `Keep`, and the
            module for the memory that each takes. Elsewhere it is kept as it is given.

    Raises:
        ArgumentError: Wrong dtype, shape, stride, device, multiple or scale; a NaN scale (byte 255); on a GPU
            without block-scaled MMA or to be packed, a block that BF16 cannot hold exactly.
    """
    try:
        activation = Activation(activation)
    except ValueError:
        raise ArgumentError("activation", activation, f"one of {[a.value for a in Activation]}") from None
    try:
        keep = Keep(keep)
    except ValueError:
        raise ArgumentError("keep", keep, f"one of {[k.value for k in Keep]}") from None
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
        if keep is Keep.FP8:
            raise ArgumentError("keep", keep.value, "an MXFP8 weight to keep in FP8")
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
    on_gpu = weight.device.type == "cuda"
    scaled = on_gpu and torch.cuda.get_device_capability(weight.device)[0] >= 10
    form = Keep.BF16 if scaled else keep
    prepared = PreparedWeight(kind, activation, weight, _swizzled(scale, n, k), scale, form)
    if on_gpu and not scaled and form is Keep.BF16:
        # Every path multiplies BF16 there. A block that it cannot hold is refused now, while no peer waits.
        prepared.bf16()
    return prepared


def _check_scale_values(scale: torch.Tensor) -> None:
    if scale.device.type != "meta" and bool((scale.view(torch.uint8) == 255).any()):
        where = [int(i) for i in (scale.view(torch.uint8) == 255).nonzero()[0]]
        raise ArgumentError(
            "scale", f"NaN (byte 255) at {where}", "finite E8M0 scale factors, bytes 0 to 254"
        )


def _require_exact(data: torch.Tensor, scale: torch.Tensor) -> None:
    """Refuse blocks that BF16 cannot hold: data [N, K], scale bytes [N, K/32]."""
    odd = (scale < EXACT_SCALES.start) | (scale >= EXACT_SCALES.stop)
    if not bool(odd.any()):
        return
    where = odd.nonzero()
    blocks = data.view(torch.uint8).view(*scale.shape, BLOCK)[odd].view(torch.float8_e4m3fn)
    exact = dequantize_mxfp8(blocks, scale[odd].unsqueeze(1), torch.float64)
    wrong = (exact.to(torch.bfloat16).double() != exact) & ~exact.isnan()
    if bool(wrong.any()):
        row, block = (int(i) for i in where[wrong.any(dim=1).nonzero()[0, 0]])
        raise ArgumentError(
            "scale",
            int(scale[row, block]),
            f"a scale whose block BF16 holds exactly (3 to 246), at row {row}, block {block}",
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
