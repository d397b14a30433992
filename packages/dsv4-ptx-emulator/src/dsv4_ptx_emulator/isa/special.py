# SPDX-License-Identifier: Apache-2.0
"""Special registers (PTX ISA 10): each a function from a warp to 32 values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.machine.warp import LANE_IDS, LANES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.isa.context import DecodeContext
    from dsv4_ptx_emulator.machine.warp import Warp

Read = Callable[["Warp"], "NDArray[Any]"]
_AXES = {"x": 0, "y": 1, "z": 2}


def _same(read: Callable[[Warp], int]) -> Read:
    """The same value in all lanes."""
    return lambda warp: np.full(LANES, read(warp), np.uint64)


def _grid_in_clusters(warp: Warp, axis: int) -> int:
    return warp.cta.launch.grid[axis] // warp.cta.launch.cluster[axis]


def _inner(warp: Warp, axis: int) -> int:
    return warp.cta.index[axis] % warp.cta.launch.cluster[axis]


_BY_AXIS: dict[str, Callable[[int], Read]] = {
    "%tid": lambda axis: lambda warp: warp.thread_ids[axis],
    "%ntid": lambda axis: _same(lambda warp: warp.cta.launch.block[axis]),
    "%ctaid": lambda axis: _same(lambda warp: warp.cta.index[axis]),
    "%nctaid": lambda axis: _same(lambda warp: warp.cta.launch.grid[axis]),
    "%clusterid": lambda axis: _same(lambda warp: warp.cta.cluster.index[axis]),
    "%nclusterid": lambda axis: _same(lambda warp: _grid_in_clusters(warp, axis)),
    "%cluster_ctaid": lambda axis: _same(lambda warp: _inner(warp, axis)),
    "%cluster_nctaid": lambda axis: _same(lambda warp: warp.cta.launch.cluster[axis]),
}

_LANE_MASKS: dict[str, Callable[[int], int]] = {
    "%lanemask_eq": lambda lane: 1 << lane,
    "%lanemask_le": lambda lane: (2 << lane) - 1,
    "%lanemask_lt": lambda lane: (1 << lane) - 1,
    "%lanemask_ge": lambda lane: 0xFFFF_FFFF & ~((1 << lane) - 1),
    "%lanemask_gt": lambda lane: 0xFFFF_FFFF & ~((2 << lane) - 1),
}

_PLAIN: dict[str, Read] = {
    "%laneid": lambda warp: LANE_IDS,
    "%warpid": _same(lambda warp: warp.index),
    "%nwarpid": _same(lambda warp: len(warp.cta.warps)),
    "%smid": _same(lambda warp: warp.cta.slot),
    "%nsmid": _same(lambda warp: warp.machine.limits.processors),
    "%gridid": _same(lambda warp: warp.cta.launch.number),
    "%cluster_ctarank": _same(lambda warp: warp.cta.cluster_rank),
    "%cluster_nctarank": _same(lambda warp: len(warp.cta.cluster.ctas)),
    "%is_explicit_cluster": _same(lambda warp: int(warp.cta.launch.explicit_cluster)),
    "%clock": _same(lambda warp: warp.machine.scheduler.clock() & 0xFFFF_FFFF),
    "%clock_hi": _same(lambda warp: warp.machine.scheduler.clock() >> 32),
    "%clock64": _same(lambda warp: warp.machine.scheduler.clock()),
    "%globaltimer": _same(lambda warp: warp.machine.scheduler.clock()),
    "%globaltimer_lo": _same(lambda warp: warp.machine.scheduler.clock() & 0xFFFF_FFFF),
    "%globaltimer_hi": _same(lambda warp: warp.machine.scheduler.clock() >> 32),
    "%dynamic_smem_size": _same(lambda warp: warp.cta.launch.dynamic_bytes),
    "%total_smem_size": _same(lambda warp: warp.cta.launch.shared_bytes),
}


def special_register(name: str, context: DecodeContext) -> Read:
    """The values of a special register in a warp's lanes; unsigned, of any width.

    Raises:
        UnsupportedInstruction: There is none of this name here.
    """
    head, _, axis = name.partition(".")
    if axis in _AXES and head in _BY_AXIS:
        return _BY_AXIS[head](_AXES[axis])
    if name in _LANE_MASKS:
        mask = _LANE_MASKS[name]
        values = np.array([mask(lane) for lane in range(LANES)], np.uint32)
        return lambda warp: values
    if name in _PLAIN:
        return _PLAIN[name]
    context.unsupported(f"the special register {name}")


def names() -> tuple[str, ...]:
    """All supported special registers, for the documentation."""
    axes = [f"{head}.{{x, y, z}}" for head in _BY_AXIS]
    return tuple(sorted([*axes, *_LANE_MASKS, *_PLAIN]))
