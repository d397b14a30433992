# SPDX-License-Identifier: Apache-2.0
"""The numbers of a tile order in shared memory, for warps that have no registers for them.

Contract: `keep` writes them, as one thread before its CTA meets; `recall` reads them anew each time. A math
thread whose accumulators fill its registers would otherwise have them spilled.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32
from cutlass.cutlass_dsl import dsl_user_op
from dsv4_symm_mem.device.order import TileOrder

ORDER_FIELDS = (
    "m",
    "rank",
    "group_rows",
    "lag",
    "shard",
    "last_owner",
    "full",
    "last",
    "own_rows",
    "own",
    "covered_rows",
    "columns",
    "peers_full",
    "last_is_peer",
    "after",
    "first",
    "ahead",
    "positions",
)
"""Numbers of a `TileOrder`; its other attributes are constants."""


@dsl_user_op
def _read_again(address: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Read a word of shared memory, each time that this is executed (PTX ISA, "ld.volatile")."""
    word: Int32 = cute.arch.inline_ptx(
        "ld.volatile.shared.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )
    return word


@cute.jit
def keep(order: Constexpr[TileOrder], memory: cute.Pointer) -> None:
    """Write the order's numbers to `memory`, `len(ORDER_FIELDS)` words of shared memory."""
    for i in cutlass.range_constexpr(len(ORDER_FIELDS)):
        cute.arch.store(memory + i, Int32(getattr(order, ORDER_FIELDS[i])))


def recall(order: TileOrder, memory: Int32) -> TileOrder:
    """The same order, its numbers read from the shared memory at `memory`."""
    read = copy(order)
    for i, name in enumerate(ORDER_FIELDS):
        setattr(read, name, _read_again(memory + 4 * i))
    return read
