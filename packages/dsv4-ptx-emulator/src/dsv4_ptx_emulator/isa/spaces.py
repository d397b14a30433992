# SPDX-License-Identifier: Apache-2.0
"""From an instruction's words and address operand to a `Memory` and addresses in it (PTX ISA 5, 8, 9.7.10).

What loads, stores, atomics and prefetches share: which words say semantics, scope, space and caching; how a
generic address finds its space; where local memory is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.errors import OutOfBoundsError
from dsv4_ptx_emulator.isa.context import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, DecodeContext
from dsv4_ptx_emulator.machine.memory import Memory
from dsv4_ptx_emulator.machine.region import Region
from dsv4_ptx_emulator.machine.warp import LANE_IDS, LANES
from dsv4_ptx_emulator.ptx.module import Operand

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.warp import Warp

SEMANTICS = ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
SCOPES = ("cta", "cluster", "gpu", "sys")
SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const")
CACHING = frozenset(
    {"ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc"}
    | {
        f"L1::{word}"
        for word in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
    }
    | {
        f"L2::{word}"
        for word in ("evict_normal", "evict_first", "evict_last", "cache_hint", "64B", "128B", "256B")
    }
)

Locate = Callable[["Warp"], "tuple[Memory, NDArray[np.uint64]]"]
"""Memory and the 32 lanes' addresses in it, of which only the active lanes' mean anything."""


@dataclass(frozen=True, slots=True)
class Words:
    """An opcode's words by what they say; `rest` is what none of the common classes knows, in order."""

    semantics: str
    scope: str
    space: str
    caching: frozenset[str]
    rest: tuple[str, ...]


def split(words: Iterable[str]) -> Words:
    """Sort an opcode's modifiers."""
    semantics = scope = space = ""
    caching, rest = set(), []
    for word in words:
        if word in SEMANTICS:
            semantics = word
        elif word in SCOPES:
            scope = word
        elif word in SPACES:
            space = word
        elif word in CACHING:
            caching.add(word)
        else:
            rest.append(word)
    return Words(semantics, scope, space, frozenset(caching), tuple(rest))


def locate(context: DecodeContext, operand: Operand, space: str) -> Locate:
    """How to find the memory and the addresses of `[operand]` in a space ("" for generic).

    Raises:
        UnsupportedInstruction: The space is not supported for this.
    """
    read = context.address(operand)
    name = space.split("::")[0]
    if name in ("global", "const"):
        return lambda warp: (warp.machine.global_memory, read(warp))
    if name == "shared":
        return lambda warp: (warp.shared, read(warp))
    if name == "param":
        return lambda warp: (warp.cta.launch.parameters, read(warp))
    if name == "local":
        return lambda warp: (local_memory(warp), read(warp) + _lane_offsets(warp))
    line = context.instruction.line

    def generic(warp: Warp) -> tuple[Memory, NDArray[np.uint64]]:
        addresses = read(warp)
        window = int(addresses[warp.first_lane]) >> 56
        if not window:
            return warp.machine.global_memory, addresses
        used = addresses if warp.full else addresses[warp.active]
        if ((used >> np.uint64(56)) != window).any():
            raise OutOfBoundsError(
                "a generic access with lanes in different spaces", line=line, where=warp.describe()
            )
        inner = addresses & np.uint64((1 << 56) - 1)
        if window == SHARED_WINDOW >> 56:
            return warp.shared, inner
        if window == LOCAL_WINDOW >> 56:
            return local_memory(warp), inner + _lane_offsets(warp)
        if window == PARAM_WINDOW >> 56:
            return warp.cta.launch.parameters, inner
        return warp.machine.global_memory, addresses

    return generic


def local_memory(warp: Warp) -> Memory:
    """The warp's local memory: 32 copies of the kernel's local variables, lane after lane."""
    memory: Memory | None = warp.scratch.get("local")
    if memory is None:
        memory = Memory("local")
        size = max(warp.program.local_bytes, 32) * LANES
        memory.add(Region(0, np.zeros(size, np.uint8), "local memory", home=warp.rank))
        warp.scratch["local"] = memory
    return memory


def _lane_offsets(warp: Warp) -> NDArray[Any]:
    return LANE_IDS.astype(np.uint64) * np.uint64(max(warp.program.local_bytes, 32))
