# SPDX-License-Identifier: Apache-2.0
"""A warp: 32 lanes, their registers, and where each of them is.

Registers are NumPy arrays of 32 that nobody changes in place: a write replaces the array in `registers`
(merged with the old one where some lanes are inactive). `.b8`/`.b16`/`.b32`/`.b64` registers are
uint8/16/32/64 whatever their declared type, predicates are bool.

Lanes that are at the same instruction form a group. The group that runs has its state in the warp itself
(`pc`, `active`, `full`); the others wait in `others`. The lowest pc runs first, and groups that meet
merge: the compiler lays out code so that this reconverges at the end of an if or a loop. A group that
blocks lets the others of its warp go on (independent thread scheduling). Rejected: a stack of
reconvergence points; it deadlocks when a lane waits for another of its own warp, which the ISA allows.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.isa.program import Program
    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.machine import Machine
    from dsv4_ptx_emulator.machine.outcome import Wait

LANES = 32
ALL = 0xFFFF_FFFF
EVERY = np.ones(LANES, np.bool_)
EVERY.flags.writeable = False
LANE_IDS = np.arange(LANES, dtype=np.uint32)
LANE_IDS.flags.writeable = False


@functools.lru_cache(maxsize=1024)
def mask_of(bits: int) -> NDArray[np.bool_]:
    """Lanes named by the bits of `bits`, shape (32,); shared, not to be changed."""
    mask: NDArray[np.bool_] = (np.uint32(bits) >> LANE_IDS & np.uint32(1)).astype(np.bool_)
    mask.flags.writeable = False
    return mask


def bits_of(mask: NDArray[np.bool_]) -> int:
    """The inverse of `mask_of`."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


class Group:
    """Lanes of a warp that are together but not running."""

    __slots__ = ("bits", "converging", "pc", "wait")

    def __init__(self, pc: int, bits: int) -> None:
        self.pc = pc
        self.bits = bits
        self.wait: Wait | None = None
        self.converging = False


class Warp:
    """One warp of a CTA.

    Attributes:
        machine: The machine.
        cta: Its CTA.
        index: Warp number in the CTA.
        rank: Rank it runs on.
        registers: By register number, see the module's docstring.
        pc: Index of the running group's next step.
        active: Lanes of the running group, bool[32]; do not change in place.
        active_bits: The same as an integer.
        full: Whether all 32 lanes are active.
        live_bits: Lanes that have not exited.
        born_bits: Lanes that there were at first: all, but in the last warp of an odd block.
        others: Groups that wait for their turn.
        wait: What the running group waits for, if the warp is blocked.
        shared: Shared memory of its cluster.
        constants: Kernel parameters by (offset, bits), 32 times the same value.
        thread_ids: tid.x, tid.y, tid.z of each lane.
        polls: By pc and lanes of a load stronger than weak: addresses and bytes it read, since the last news.
        stale: Loads without news since then.
        patience: Of a diverged warp: steps until other lanes get a turn (above 0), or that they still
            have (below).
        polling: The warp does nothing but poll.
        scratch: For instruction groups that keep state per warp, by a name of their own.
        acting: The lane that an access is for, in instructions that access for one lane after the other;
            else -1.
        executed: Instructions executed so far.
    """

    __slots__ = (
        "acting",
        "active",
        "active_bits",
        "born_bits",
        "constants",
        "cta",
        "executed",
        "full",
        "index",
        "live_bits",
        "machine",
        "others",
        "parked",
        "patience",
        "pc",
        "polling",
        "polls",
        "program",
        "rank",
        "registers",
        "scratch",
        "shared",
        "stale",
        "thread_ids",
        "wait",
    )

    def __init__(self, machine: Machine, cta: Cta, index: int, threads: int, program: Program) -> None:
        self.machine: Machine = machine
        self.cta: Cta = cta
        self.index = index
        self.rank = cta.rank
        self.program = program
        self.shared = cta.cluster.shared
        self.constants = cta.launch.constants
        self.registers: list[NDArray[Any]] = list(program.initial_registers)
        self.pc = 0
        self.live_bits = ALL if threads >= LANES else (1 << threads) - 1
        self.born_bits = self.live_bits
        self.active_bits = self.live_bits
        self.active = mask_of(self.live_bits)
        self.full = self.live_bits == ALL
        self.others: list[Group] = []
        self.wait: Wait | None = None
        self.parked = False
        self.patience = 0
        self.polls: dict[tuple[int, int], tuple[NDArray[np.uint64], bytes]] = {}
        self.stale = 0
        self.polling = False
        self.scratch: dict[str, Any] = {}
        self.acting = -1
        self.executed = 0
        x, y, _ = cta.launch.block
        flat = np.arange(index * LANES, (index + 1) * LANES, dtype=np.uint32)
        self.thread_ids: tuple[NDArray[np.uint32], ...] = (
            flat % np.uint32(x),
            flat // np.uint32(x) % np.uint32(y),
            flat // np.uint32(x * y),
        )

    @property
    def first_lane(self) -> int:
        """Lowest active lane."""
        return (self.active_bits & -self.active_bits).bit_length() - 1

    @property
    def line(self) -> int:
        """Line of the PTX that the running group is at."""
        return self.program.line_of(self.pc)

    def set_active(self, bits: int) -> None:
        """Make the lanes in `bits` the active ones (guards and branches; not for handlers)."""
        self.active_bits = bits
        self.full = bits == ALL
        self.active = EVERY if self.full else mask_of(bits)

    @property
    def converged(self) -> bool:
        """Whether all lanes that have not exited are active."""
        return self.active_bits == self.live_bits

    def describe(self) -> str:
        """Such as "rank 1, CTA (3, 0, 0), warp 8"."""
        return f"rank {self.rank}, CTA {self.cta.index}, warp {self.index}"

    def waits(self) -> list[str]:
        """For the deadlock report: one line per group of lanes."""
        if self.polling and self.parked:
            return [f"{self.describe()}, {'; '.join(self._polled(*key) for key in self.polls)}"]
        found = [self._waiting(self.pc, self.active_bits, self.wait, False)] if self.live_bits else []
        found += [self._waiting(group.pc, group.bits, group.wait, group.converging) for group in self.others]
        return found

    def _polled(self, pc: int, lanes: int) -> str:
        addresses, raw = self.polls[pc, lanes]
        size = len(raw) // len(addresses)
        first = int.from_bytes(raw[:size], "little")
        where = f"{self.program.opcode_of(pc)} polls {int(addresses[0]):#x} (now {first:#x})"
        return f"line {self.program.line_of(pc)}: {where}"

    def _waiting(self, pc: int, bits: int, wait: Wait | None, converging: bool) -> str:
        lanes = "" if bits == self.live_bits else f" lanes {bits:#010x}"
        what = wait.text if wait else "the rest of its warp" if converging else "its turn"
        opcode = self.program.opcode_of(pc)
        return f"{self.describe()}{lanes}, line {self.program.line_of(pc)}: {opcode} waits for {what}"
