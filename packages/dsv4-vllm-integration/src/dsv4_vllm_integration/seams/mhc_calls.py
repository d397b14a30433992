# SPDX-License-Identifier: Apache-2.0
"""vLLM's hyper-connection functions expressed in `dsv4_mhc`'s.

Contract: each function here takes the parameters of the vLLM function of the same name and returns what that
returns, or None where the call is one that it does not serve; it then has launched nothing. Served are the
calls that V4 and V4.1 make at their seams; not served are the first layer's broadcast embedding (a smaller
projection of its own), V4's head (once a step), inputs without a norm, and eps that differ between pre and
Sinkhorn.

The projection's weights are packed once a tensor and kept while the tensor lives; `Packed.refresh` repeats
that in place after weights were loaded, so captured graphs follow.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import dsv4_mhc
import torch
from torch.utils.weak import WeakTensorKeyDictionary

STREAMS = 4


@dataclass
class _Entry:
    packed: torch.Tensor
    stale: bool = False


class Packed:
    """Packed projection weights by the parameter that they were made from."""

    def __init__(self) -> None:
        # By identity: tensors compare elementwise.
        self._entries: MutableMapping[torch.Tensor, _Entry] = WeakTensorKeyDictionary()

    def of(self, fn: torch.Tensor, capturing: bool) -> torch.Tensor | None:
        """The packed form of `fn`; None where it would have to be made during a graph capture."""
        entry = self._entries.get(fn)
        if entry is not None and not entry.stale:
            return entry.packed
        if capturing:
            return None
        fresh = dsv4_mhc.pack_weight(fn.detach())
        if entry is None:
            entry = self._entries[fn] = _Entry(fresh)
        else:
            entry.packed.copy_(fresh)
            entry.stale = False
        return entry.packed

    def refresh(self) -> None:
        """Pack again what was packed, and once more at its next use outside a capture.

        Loaders may still be copying when they report to be done; the second time catches that.
        """
        for fn, entry in list(self._entries.items()):
            entry.packed.copy_(dsv4_mhc.pack_weight(fn.detach()))
            entry.stale = True


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _site(
    packed: Packed,
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    norm_weight: torch.Tensor | None,
) -> torch.Tensor | None:
    """The packed weight of a seam that can be served, else None."""
    streams, hidden = residual.shape[-2:]
    if (
        streams != STREAMS
        or fn.shape != (24, STREAMS * hidden)
        or hc_pre_eps != hc_sinkhorn_eps
        or norm_weight is None
        or norm_weight.dtype != torch.bfloat16
        or not norm_weight.is_contiguous()
        or not residual.is_contiguous()
    ):
        return None
    return packed.of(fn, _capturing())


def _carried(pre_mix: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    return dsv4_mhc.first_pre(residual.shape[0], residual.device) if pre_mix is None else pre_mix


def mhc_pre_delayed_tilelang(
    packed: Packed,
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Any:
    """V4.1 where a residual is finished: post [T, 4, 1], comb [T, 4, 4], input [T, H], next pre [T, 4]."""
    if x is not None:
        return None
    weight = _site(packed, residual, fn, hc_pre_eps, hc_sinkhorn_eps, norm_weight)
    if weight is None:
        return None
    found = dsv4_mhc.pre(
        residual,
        weight,
        hc_scale,
        hc_base,
        carried=_carried(pre_mix, residual),
        norm_weight=norm_weight,
        rms_eps=rms_eps,
        hc_eps=hc_pre_eps,
        norm_eps=norm_eps,
        iterations=sinkhorn_repeat,
        multiplier=hc_post_mult_value,
    )
    return found.post.unsqueeze(-1), found.comb, found.y, found.pre


def mhc_fused_post_pre_delayed_tilelang(
    packed: Packed,
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    capture_aux: bool = False,
) -> Any:
    """V4.1 between sublayers: the streams, post, comb, input, next pre, and the streams' mean or [0, H]."""
    weight = _site(packed, residual, fn, hc_pre_eps, hc_sinkhorn_eps, norm_weight)
    if weight is None:
        return None
    found = dsv4_mhc.seam(
        residual,
        x,
        post_layer_mix.reshape(residual.shape[0], STREAMS),
        comb_res_mix,
        weight,
        hc_scale,
        hc_base,
        carried=_carried(pre_mix, residual),
        norm_weight=norm_weight,
        rms_eps=rms_eps,
        hc_eps=hc_pre_eps,
        norm_eps=norm_eps,
        iterations=sinkhorn_repeat,
        multiplier=hc_post_mult_value,
    )
    assert found.residual is not None  # a seam with an output always has it
    # A launch of its own: the seam's variant with a mean is not among those that a warm-up loads.
    aux = dsv4_mhc.stream_mean(found.residual) if capture_aux else x.new_empty(0, x.shape[1])
    return found.residual, found.post.unsqueeze(-1), found.comb, found.y, found.pre, aux


def mhc_pre_tilelang(
    packed: Packed,
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Any:
    """V4 where a residual is finished: post [..., 4, 1], comb [..., 4, 4], input [..., H]."""
    weight = _site(packed, residual, fn, hc_pre_eps, hc_sinkhorn_eps, norm_weight)
    if weight is None:
        return None
    outer = residual.shape[:-2]
    found = dsv4_mhc.pre(
        residual.view(-1, *residual.shape[-2:]),
        weight,
        hc_scale,
        hc_base,
        norm_weight=norm_weight,
        rms_eps=rms_eps,
        hc_eps=hc_pre_eps,
        norm_eps=norm_eps,
        iterations=sinkhorn_repeat,
        multiplier=hc_post_mult_value,
        exact_statistic=True,
    )
    assert found.y is not None  # BF16 input is asked for
    return (
        found.post.view(*outer, STREAMS, 1),
        found.comb.view(*outer, STREAMS, STREAMS),
        found.y.view(*outer, residual.shape[-1]),
    )


def mhc_fused_post_pre_tilelang(
    packed: Packed,
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Any:
    """V4 between sublayers: the streams, post, comb, input."""
    weight = _site(packed, residual, fn, hc_pre_eps, hc_sinkhorn_eps, norm_weight)
    if weight is None:
        return None
    outer, hidden = residual.shape[:-2], residual.shape[-1]
    found = dsv4_mhc.seam(
        residual.view(-1, STREAMS, hidden),
        x.view(-1, hidden),
        post_layer_mix.reshape(-1, STREAMS),
        comb_res_mix.reshape(-1, STREAMS, STREAMS),
        weight,
        hc_scale,
        hc_base,
        norm_weight=norm_weight,
        rms_eps=rms_eps,
        hc_eps=hc_pre_eps,
        norm_eps=norm_eps,
        iterations=sinkhorn_repeat,
        multiplier=hc_post_mult_value,
        exact_statistic=True,
    )
    assert found.residual is not None  # a seam with an output always has it
    assert found.y is not None  # BF16 input is asked for
    return (
        found.residual.view(*outer, STREAMS, hidden),
        found.post.view(*outer, STREAMS, 1),
        found.comb.view(*outer, STREAMS, STREAMS),
        found.y.view(*outer, hidden),
    )


def mhc_post_tilelang(
    packed: Packed,
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> Any:
    """The streams after a sublayer."""
    if residual.dim() != 3 or residual.shape[1] != STREAMS or not residual.is_contiguous():
        return None
    return dsv4_mhc.post(residual, x, post_layer_mix.reshape(-1, STREAMS), comb_res_mix)


def hc_collapse_triton(packed: Packed, x: torch.Tensor, pre_mix: torch.Tensor) -> Any:
    """The streams weighted by the carried pre, [T, H]."""
    if x.dim() != 3 or x.shape[1] != STREAMS or not x.is_contiguous() or not pre_mix.is_contiguous():
        return None
    return dsv4_mhc.collapse(x, pre_mix)


CALLS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        mhc_pre_delayed_tilelang,
        mhc_fused_post_pre_delayed_tilelang,
        mhc_pre_tilelang,
        mhc_fused_post_pre_tilelang,
        mhc_post_tilelang,
        hc_collapse_triton,
    )
}
"""By the name of vLLM's function."""
