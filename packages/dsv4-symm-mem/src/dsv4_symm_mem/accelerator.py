# SPDX-License-Identifier: Apache-2.0
"""Where one rank's compiled kernels run: its CUDA device, or something that executes them on host memory.

Contract: what the packages ask of a device beyond memory (its architecture, its SMs, where a launch goes, how
to wait for it) goes through one `Accelerator` per rank. CUDA is the one that is always there. Another comes
with an `Emulation` of a whole group, which a program creates and hands to `VirtualGroup`; nothing here knows
any. Emulators announce themselves by the entry point group `EMULATORS`, so a command can offer them where
they happen to be installed.

Rejected: a torch device type for emulated memory (every operator would need a registration, where host
tensors just work); choosing by a global switch (one process tests on a GPU and in an emulator).

Launches on an emulated stream are queued and executed when somebody synchronises, so a result must not be
read before that, exactly as on a GPU. All ranks' launches then take part: a program whose ranks are threads
lets them meet before they synchronise, else a kernel spins for a peer that has not launched yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from dsv4_symm_mem.communicator import Communicator

T = TypeVar("T")

EMULATORS = "dsv4.emulators"
"""Entry point group: callables that make an `Emulation` of a number of ranks."""


class LaunchStream(Protocol):
    """A stream of an emulated device."""

    @property
    def target(self) -> Hashable:
        """What a kernel must have been compiled for to be launched here."""
        ...

    def compile(self, build: Callable[[], T]) -> T:
        """`build()`, with the DSL set to compile for `target`."""
        ...

    def launch(
        self, function: Callable[..., Any], arguments: Sequence[int], memory: Sequence[torch.Tensor]
    ) -> None:
        """Enqueue a compiled host function.

        Args:
            function: Made by `compile`; takes `arguments` and a stream.
            arguments: Addresses and sizes.
            memory: Tensors that the addresses point into, beside shared memory: the kernel may touch these
                bytes and no others, and they are kept until it has run.
        """
        ...

    def synchronize(self) -> None:
        """Execute what was launched, on all ranks."""
        ...


Stream = torch.cuda.Stream | LaunchStream


class Accelerator(Protocol):
    """One rank's device as launches see it."""

    @property
    def name(self) -> str:
        """For people, such as "cuda:0" or "sm_90 emulated by dsv4-ptx-emulator"."""
        ...

    @property
    def arch(self) -> int:
        """Compute capability as 10 * major + minor."""
        ...

    @property
    def multiprocessors(self) -> int:
        """SMs that kernels may fill."""
        ...

    @property
    def emulated(self) -> bool:
        """Whether kernels are executed on host memory, so that time means nothing."""
        ...

    def current_stream(self) -> Stream:
        """Where a launch goes now."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        ...

    def share(self, memory: torch.Tensor) -> None:
        """Let the kernels of every rank touch this rank's symmetric `memory`, until `unshare`."""
        ...

    def unshare(self, memory: torch.Tensor) -> None:
        """Take back `share`."""
        ...


class MulticastRange(Protocol):
    """Multicast addresses of the same bytes on several ranks."""

    @property
    def address(self) -> int:
        """The first of them."""
        ...

    def close(self) -> None:
        """Unmap them; idempotent."""
        ...


class Emulation(Protocol):
    """Devices for a group of virtual ranks, and what they did."""

    @property
    def accelerators(self) -> Sequence[Accelerator]:
        """One device for each rank."""
        ...

    def obstacle(self) -> str:
        """What keeps kernels from being launched here, such as a missing compiler; empty if nothing does."""
        ...

    def map_multicast(self, memory: Sequence[torch.Tensor]) -> MulticastRange:
        """Map `memory`, a tensor of each rank and all of one size, to multicast addresses."""
        ...

    def link_bytes(self) -> Mapping[tuple[int, int], int]:
        """Bytes moved over each link (source rank, destination rank) by all launches so far."""
        ...

    def summary(self) -> str:
        """A table of what the launches did."""
        ...

    def write_trace(self, path: Path) -> None:
        """Write the schedule as a Chrome trace."""
        ...


class CudaAccelerator:
    """A CUDA device."""

    emulated = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Torch's name for the device."""
        return str(self.device)

    @property
    def arch(self) -> int:
        """Compute capability as 10 * major + minor."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor

    @property
    def multiprocessors(self) -> int:
        """SMs of the device."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def current_stream(self) -> Stream:
        """Torch's current stream on the device."""
        return torch.cuda.current_stream(self.device)

    def synchronize(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize(self.device)

    def share(self, memory: torch.Tensor) -> None:
        """Nothing to do: how peers map memory is the back end's business."""

    def unshare(self, memory: torch.Tensor) -> None:
        """Nothing to do."""


def accelerator_of(communicator: Communicator) -> Accelerator | None:
    """The device that a rank's kernels run on; None for a CPU without an emulator."""
    given: Accelerator | None = getattr(communicator, "accelerator", None)
    if given is not None:
        return given
    return CudaAccelerator(communicator.device) if communicator.device.type == "cuda" else None


def installed_emulators() -> dict[str, EntryPoint]:
    """Emulators of installed packages by name.

    An entry point loads a callable of the number of ranks, and of keywords of its own, that makes an
    `Emulation`.
    """
    return {entry.name: entry for entry in entry_points(group=EMULATORS)}
