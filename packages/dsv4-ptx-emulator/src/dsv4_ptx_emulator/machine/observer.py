# SPDX-License-Identifier: Apache-2.0
"""Where checkers, counters and traces attach: everything that happens, told after it happened.

Subclass `Observer` and override what you need; `Machine.attach` looks at which methods are overridden, so a
hook that nobody overrides costs nothing. Observers see, and may raise, but never change the machine. The
semantics contain no checks beyond what addresses mean (bounds, alignment); all others are observers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.agent import AsyncAgent
    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.launch import Launch
    from dsv4_ptx_emulator.machine.outcome import Wait
    from dsv4_ptx_emulator.machine.tensor_memory import TensorEvent
    from dsv4_ptx_emulator.machine.warp import Warp


@dataclass(frozen=True, slots=True)
class AccessKind:
    """What is known of an access when its instruction is decoded; made once, passed by reference.

    Attributes:
        proxy: "generic", "async" (TMA, bulk copies, wgmma/tcgen05 operands) or "tensormap".
        semantics: "weak", "relaxed", "acquire", "release", "acq_rel", "volatile" or "mmio".
        scope: "cta", "cluster", "gpu" or "sys"; "" for weak accesses.
        line: Line of the PTX.
        opcode: The instruction as written.
    """

    proxy: str = "generic"
    semantics: str = "weak"
    scope: str = ""
    line: int = 0
    opcode: str = ""


@dataclass(slots=True)
class Access:
    """One executed access; not to be changed, though not frozen: that takes four times as long to make.

    Attributes:
        action: "read", "write" or "atomic" (a read-modify-write).
        space: "global", "shared", "local" or "param".
        agent: The `Warp` or `AsyncAgent` that did it.
        rank: The agent's rank.
        home: Rank where the bytes live (for global memory; otherwise `rank`).
        owner: The `Cta` whose shared memory it is; None for global memory.
        addresses: uint64, one per lane or block that took part; byte addresses in `space`.
        size: Bytes at each address.
        kind: The static part.
        part: Which of the addresses of an instruction these are, bool per address, where it touches several
            regions; None for all of them.
    """

    action: str
    space: str
    agent: Warp | AsyncAgent
    rank: int
    home: int
    owner: Cta | None
    addresses: NDArray[Any]
    size: int
    kind: AccessKind
    part: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """What a warp did with asynchronous operations; the operations' own accesses come as `Access`.

    Attributes:
        action: "issue" (an operation was handed to an engine), "commit" (a group was closed) or "wait" (a
            wait for groups has passed).
        warp: Who.
        lanes: Which of its lanes, as bits.
        family: Which groups: "bulk", "cp.async" or "wgmma"; "" for an operation that is in no group.
        line: Line of the PTX.
        operation: What was issued; while an engine works on it, it is in the engine's `acting`.
        allowed: Of a wait, how many of the latest groups may be incomplete; below 0: nothing may be, not
            even what is in no group yet.
        reads: Of a wait, whether it is for the sources to be read only.
    """

    action: str
    warp: Warp
    lanes: int
    family: str
    line: int
    operation: Any = None
    allowed: int = 0
    reads: bool = False


class Observer:
    """Base of all observers; every hook does nothing."""

    def on_launch_begin(self, launch: Launch) -> None:
        """All CTAs that fit are about to start."""

    def on_launch_end(self, launch: Launch) -> None:
        """The last warp has exited."""

    def on_cta_begin(self, cta: Cta) -> None:
        """A CTA became resident; its shared memory is uninitialised."""

    def on_cta_end(self, cta: Cta) -> None:
        """A CTA's last warp has exited; its shared memory can still be read."""

    def on_access(self, access: Access) -> None:
        """A memory access was executed."""

    def on_fence(self, warp: Warp, name: str, line: int) -> None:
        """A fence was executed by the warp's active lanes; `name` is the opcode as written."""

    def on_sync(self, warp: Warp, name: str, channel: Any, line: int) -> None:
        """The warp arrived at or passed a barrier: `name` is "bar.arrive", "bar.pass", an mbarrier opcode."""

    def on_event(self, agent: Warp | AsyncAgent, name: str, detail: dict[str, Any]) -> None:
        """Anything with a name that a counter or trace may want: "mma", "tma.load", "poll", "flag"..."""

    def on_async(self, event: AsyncEvent) -> None:
        """A warp issued an asynchronous operation, closed a group, or has waited for groups."""

    def on_tensor(self, event: TensorEvent) -> None:
        """Tensor memory was allocated, accessed, or is about to be by an operation that was issued."""

    def on_block(self, warp: Warp, wait: Wait, line: int) -> None:
        """The warp began to wait."""

    def on_quantum(self, agent: Warp | AsyncAgent, first_step: int, steps: int) -> None:
        """The scheduler let the agent run; `first_step` and `steps` in executed instructions of the run."""
