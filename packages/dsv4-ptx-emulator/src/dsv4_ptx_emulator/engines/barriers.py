# SPDX-License-Identifier: Apache-2.0
"""An mbarrier where it lives: read-modify-write of its 64 bits in shared memory, and who is woken by it.

Warps and engines change barriers through `change_barrier` alone, one call per operation, which makes each
operation atomic and gives observers one "atomic" access for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dsv4_ptx_emulator.errors import BarrierMisuseError
from dsv4_ptx_emulator.machine.mbarrier import MBarrier
from dsv4_ptx_emulator.machine.outcome import Wait

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.agent import AsyncAgent
    from dsv4_ptx_emulator.machine.machine import Machine
    from dsv4_ptx_emulator.machine.memory import Memory
    from dsv4_ptx_emulator.machine.observer import AccessKind
    from dsv4_ptx_emulator.machine.warp import Warp


def channel_of(memory: Memory, address: int) -> tuple[str, int, int]:
    """What those wait for who wait for a phase of the barrier at `address` in a cluster's shared memory."""
    return ("mbarrier", id(memory), address)


def change_barrier(
    machine: Machine,
    memory: Memory,
    address: int,
    change: Callable[[MBarrier], Any],
    agent: Warp | AsyncAgent,
    kind: AccessKind,
) -> Any:
    """Apply one operation to the barrier at `address` and wake its waiters if the phase completed.

    Args:
        machine: Whose scheduler to tell.
        memory: The cluster's shared memory.
        address: Of the object, in the cluster's window.
        change: The operation; its result is returned.
        agent: Who does it.
        kind: With which semantics, and for which instruction.

    Raises:
        BarrierMisuseError: There is no mbarrier, or the operation breaks its rules.
        MisalignedError: The address is not a multiple of 8.
        OutOfBoundsError: It is no shared memory of the cluster.
    """
    result: Any = None
    completed = False

    def modify(bits: int) -> int:
        nonlocal result, completed
        barrier = MBarrier.from_bits(bits)
        phase = barrier.phase
        result = change(barrier)
        completed = barrier.phase != phase
        return barrier.to_bits()

    try:
        memory.update(address, 8, modify, agent, kind)
    except BarrierMisuseError as error:
        raise BarrierMisuseError(
            f"{kind.opcode}: mbarrier at {address:#x}: {error}", line=kind.line, where=agent.describe()
        ) from None
    if completed:
        machine.scheduler.wake(channel_of(memory, address))
    return result


class BarrierWait(Wait):
    """Waiting for a phase of an mbarrier; the text tells its state when asked, not when the wait began."""

    __slots__ = ("_address", "_memory", "_parity")
    _address: int
    _memory: Memory
    _parity: int

    def __init__(self, memory: Memory, address: int, parity: int) -> None:
        object.__setattr__(self, "channel", channel_of(memory, address))
        object.__setattr__(self, "_memory", memory)
        object.__setattr__(self, "_address", address)
        object.__setattr__(self, "_parity", parity)

    @property
    def text(self) -> str:
        """Such as "mbarrier 0x440 to complete its phase of parity 1 (1 of 2 arrivals, 64 bytes pending)"."""
        try:
            barrier = MBarrier.from_bits(self._memory.peek(self._address, 8))
        except (KeyError, BarrierMisuseError):
            state = "which is there no more"
        else:
            state = f"{barrier.pending} of {barrier.expected} arrivals, {barrier.transactions} bytes pending"
        return f"mbarrier {self._address:#x} to complete its phase of parity {self._parity} ({state})"
