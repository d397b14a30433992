# SPDX-License-Identifier: Apache-2.0
"""Operands that the asynchronous instructions have in common: shared addresses, memory of any space."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsv4_ptx_emulator.errors import OutOfBoundsError
from dsv4_ptx_emulator.isa.context import PARAM_WINDOW, SHARED_WINDOW
from dsv4_ptx_emulator.machine.cta import SHARED_STRIDE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.isa.context import DecodeContext, Source
    from dsv4_ptx_emulator.machine.memory import Memory
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Operand

_CTA_SHIFT = np.uint64(SHARED_STRIDE.bit_length() - 1)
_GENERIC = np.uint64(SHARED_WINDOW)


def shared_address(context: DecodeContext, operand: Operand, *, local: bool, generic: bool = False) -> Source:
    """Addresses of an operand in the cluster's shared window, uint64[32].

    Args:
        context: Of the instruction.
        operand: `[base+offset]`.
        local: Whether the address must be in the executing CTA's own window.
        generic: Whether the operand is a generic address (the instruction names no space).

    Raises:
        OutOfBoundsError: When executed, by the returned function: an active lane's address is not shared
            memory, or another CTA's where it must be the own.
    """
    read = context.address(operand)
    line, opcode = context.instruction.line, context.instruction.opcode

    def address(warp: Warp) -> NDArray[np.uint64]:
        addresses = read(warp)
        if generic:
            # Addresses outside of the window become huge and are found to be nobody's memory.
            addresses = addresses - _GENERIC
        if local:
            wrong = (addresses >> _CTA_SHIFT) != warp.cta.cluster_rank
            if wrong.any() and (wrong & warp.active).any():
                bad = int(addresses[int((wrong & warp.active).argmax())])
                raise OutOfBoundsError(
                    f"{opcode}: {bad:#x} is not in the shared memory of the executing CTA",
                    line=line,
                    where=warp.describe(),
                )
        return addresses

    return address


def lanes_of(warp: Warp) -> list[int]:
    """Active lanes in order."""
    lanes: list[int] = np.flatnonzero(warp.active).tolist()
    return lanes


def generic_memory(warp: Warp, address: int) -> tuple[Memory, int]:
    """The space of a generic address, and the address there (PTX ISA 9.4, section 5.1 and `cvta`)."""
    if SHARED_WINDOW <= address < 2 * SHARED_WINDOW:
        return warp.shared, address - SHARED_WINDOW
    if PARAM_WINDOW <= address < PARAM_WINDOW + SHARED_WINDOW:
        return warp.cta.launch.parameters, address - PARAM_WINDOW
    return warp.machine.global_memory, address
