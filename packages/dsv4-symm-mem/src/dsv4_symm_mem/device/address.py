# SPDX-License-Identifier: Apache-2.0
"""Raw 64-bit addresses as kernels pass them around, made into pointers where an instruction needs one.

Every helper of this package takes global addresses as `Int64`. Peer and multicast addresses reach a kernel
as integers (base of the peer's block plus an offset of the layout), and one base per rank in an array cannot
be a typed tensor argument. Tensors were rejected for that reason, and because a flag has no layout.

The pointer is made in the global state space, so that the instruction is `ld.global`, not a generic `ld`
which would first look up the window that the address lies in.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int64
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def global_pointer(
    address: Int64, dtype: Any, alignment: int, *, loc: Any = None, ip: Any = None
) -> cute.Pointer:
    """A pointer in the global state space to byte `address` of own, a peer's or multicast memory.

    `dtype` is a numeric type of CuTe DSL; `address` is a multiple of `alignment` bytes, which nobody checks
    until the access faults. Emits no instruction.
    """
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=alignment, loc=loc, ip=ip)
