# SPDX-License-Identifier: Apache-2.0
"""Asynchronous stores to a CTA of the cluster that tell its mbarrier (PTX ISA 9.4, section 9.7.10.12).

The value is taken when the instruction executes; the CTA's copy engine stores it later, each lane's by
itself, and then lowers the transaction count of the barrier, which is in the CTA that gets the value. The
stores are weak and of the generic proxy; what the barrier is told is a release of the cluster's scope.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dsv4_ptx_emulator.engines.copies import CopyEngine, Target, Transfer, completes
from dsv4_ptx_emulator.errors import MisalignedError
from dsv4_ptx_emulator.isa.bulk import BY_BARRIER, issued, require_same_cta
from dsv4_ptx_emulator.isa.context import width_of
from dsv4_ptx_emulator.isa.registry import Step, instruction
from dsv4_ptx_emulator.isa.shared_operands import lanes_of, shared_address
from dsv4_ptx_emulator.machine.outcome import Outcome
from dsv4_ptx_emulator.ptx.module import Vector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.isa.context import DecodeContext
    from dsv4_ptx_emulator.machine.memory import Memory
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Instruction

COUNTS = {"v2": 2, "v4": 4}
TYPES = ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")


@instruction("st.async", section="9.7.10.12", observable=True)
def store_async(instruction: Instruction, context: DecodeContext) -> Step:
    """Store one element or a vector per lane in a CTA of the cluster, asynchronously; tell its barrier."""
    words = context.modifiers
    context.require("weak", "shared::cluster", BY_BARRIER, *COUNTS, *TYPES)
    if "shared::cluster" not in words or BY_BARRIER not in words:
        context.unsupported("a form without shared::cluster and " + BY_BARRIER)
    if len(instruction.operands) != 3 or words[-1] not in TYPES:
        context.unsupported(f"the form with {len(instruction.operands)} operands")
    bits = width_of(words[-1])
    count = next((COUNTS[word] for word in words if word in COUNTS), 1)
    if bits * count > 128:
        context.unsupported(f"{bits * count // 8} bytes per lane")
    target = shared_address(context, instruction.operands[0], local=False)
    barrier = shared_address(context, instruction.operands[2], local=False)
    held = instruction.operands[1]
    parts = list(held.elements) if isinstance(held, Vector) else [held]
    if len(parts) != count:
        context.unsupported(f"{len(parts)} values")
    values = [context.source(part, bits) for part in parts]
    kind = context.kind()
    told = context.kind(semantics="release", scope="cluster")
    size = bits * count // 8

    def step(warp: Warp) -> Outcome | None:
        targets, barriers = target(warp), barrier(warp)
        columns = np.stack([np.asarray(value(warp)).astype(f"u{bits // 8}") for value in values], axis=1)
        engine = CopyEngine.of(warp.cta)
        for lane in lanes_of(warp):
            address, where = int(targets[lane]), int(barriers[lane])
            if address % size:
                raise MisalignedError(
                    f"{kind.opcode}: address {address:#x} is not a multiple of {size}",
                    line=kind.line,
                    where=warp.describe(),
                )
            warp.shared.locate(address, size, warp, kind)
            require_same_cta(warp, address, where, kind)
            data = np.frombuffer(columns[lane].tobytes(), np.uint8)
            write = partial(_write, warp.shared, address, kind)
            piece = (partial(_taken, data), [Target(write, warp.shared, where, completes(size))])
            transfer = Transfer(told, "st.async", [piece])
            engine.enqueue(transfer)
            issued(warp, lane, "", kind, transfer)
        return None

    return step


def _taken(data: NDArray[np.uint8], engine: CopyEngine) -> NDArray[np.uint8]:
    return data


def _write(
    memory: Memory, address: int, kind: AccessKind, engine: CopyEngine, data: NDArray[np.uint8]
) -> None:
    memory.write_block(address, data, engine, kind)
