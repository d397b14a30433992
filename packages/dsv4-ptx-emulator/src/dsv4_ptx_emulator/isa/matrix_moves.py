# SPDX-License-Identifier: Apache-2.0
"""ldmatrix and stmatrix: 8 x 8 matrices of 16-bit elements between shared memory and a warp's registers.

PTX ISA 9.4, sections 9.7.16.5.15 and 9.7.16.5.16. Lanes 8i to 8i + 7 give the addresses of matrix i's rows,
16 bytes each; lane l holds the elements 2·(l % 4) and the next of row l / 4, or of column l / 4 with
`.trans`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.isa.shared_operands import shared_address
from dsv4_ptx_emulator.machine.warp import LANES

if TYPE_CHECKING:
    from dsv4_ptx_emulator.isa.context import DecodeContext
    from dsv4_ptx_emulator.machine.outcome import Outcome
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Instruction

SPACES = ("shared", "shared::cta")


def _form(context: DecodeContext) -> tuple[int, bool]:
    words = context.modifiers
    context.require("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", *SPACES, "b16")
    if words[:3] != ("sync", "aligned", "m8n8") or words[3] not in ("x1", "x2", "x4"):
        context.unsupported("a form other than sync.aligned.m8n8.x1, .x2 or .x4")
    return int(words[3][1]), "trans" in words


def _is_generic(context: DecodeContext) -> bool:
    return not any(word in SPACES for word in context.modifiers)


@instruction("ldmatrix", section="9.7.16.5.15", observable=True)
def ldmatrix(instruction: Instruction, context: DecodeContext) -> Step:
    """Load 8 x 8 matrices of 16-bit elements from shared memory into a warp's registers."""
    count, transposed = _form(context)
    writes = context.destinations(context.operand(0), 32)
    address = shared_address(context, context.operand(1), local=False, generic=_is_generic(context))
    kind = context.kind()
    if len(writes) != count:
        context.unsupported(f"{len(writes)} registers for {count} matrices")

    def step(warp: Warp) -> Outcome | None:
        rows = warp.shared.gather(address(warp)[: 8 * count], 8, 2, warp, kind)
        matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(count, 8, 8)
        if transposed:
            matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
        for write, matrix in zip(writes, matrices.view(np.uint32).reshape(count, LANES), strict=True):
            write(warp, matrix)
        return None

    return step


@instruction("stmatrix", section="9.7.16.5.16", observable=True)
def stmatrix(instruction: Instruction, context: DecodeContext) -> Step:
    """Store 8 x 8 matrices of 16-bit elements from a warp's registers into shared memory."""
    count, transposed = _form(context)
    address = shared_address(context, context.operand(0), local=False, generic=_is_generic(context))
    reads = context.sources(context.operand(1), 32)
    kind = context.kind()
    if len(reads) != count:
        context.unsupported(f"{len(reads)} registers for {count} matrices")

    def step(warp: Warp) -> Outcome | None:
        matrices = np.stack([read(warp) for read in reads]).view(np.uint16).reshape(count, 8, 8)
        if transposed:
            matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
        rows = matrices.view(np.uint64).reshape(8 * count, 2)
        warp.shared.scatter(address(warp)[: 8 * count], rows, warp, kind)
        return None

    return step
