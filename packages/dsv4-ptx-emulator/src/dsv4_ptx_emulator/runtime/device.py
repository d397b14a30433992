# SPDX-License-Identifier: Apache-2.0
"""One rank's emulated device and its streams.

Contract: a device answers what compiled host functions ask of it, takes their launches with leases on the
memory that the caller names, and hands both to its system, which executes (see system.py). A stream is a
number: what a host function gets as its stream handle.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dsv4_ptx_emulator.runtime.errors import RuntimeLibraryError
from dsv4_ptx_emulator.runtime.host import HostLaunch
from dsv4_ptx_emulator.runtime.memory import Lease

if TYPE_CHECKING:
    from dsv4_ptx_emulator.runtime.system import System

T = TypeVar("T")

# CUDA runtime API, cudaDeviceAttr.
MAX_THREADS_PER_BLOCK, SHARED_PER_BLOCK, WARP_SIZE, PROCESSORS = 1, 8, 10, 16
CAPABILITY_MAJOR, CAPABILITY_MINOR, SHARED_PER_PROCESSOR, SHARED_OPT_IN = 75, 76, 81, 97


@dataclass
class Queued:
    """A launch with what it may touch."""

    launch: HostLaunch
    rank: int
    memory: tuple[Any, ...]


class Stream:
    """A stream of a device; launches run one after another."""

    def __init__(self, device: Device, number: int) -> None:
        self.device = device
        self.number = number

    @property
    def target(self) -> Hashable:
        """What a host function must have been compiled for to be launched here."""
        return ("dsv4-ptx-emulator", self.device.system.arch)

    def compile(self, build: Callable[[], T]) -> T:
        """`build()`, with the CuTe DSL set to compile for the emulator."""
        with self.device.system.compiling():
            return build()

    def launch(
        self, function: Callable[..., Any], arguments: Sequence[Any] = (), memory: Sequence[Any] = ()
    ) -> None:
        """Call a compiled host function; what it launches is queued here.

        Args:
            function: Compiled inside of `compile` (or `System.compiling`); takes `arguments`, then a stream.
            arguments: As for the function; tensors go in wrapped by `on_device`.
            memory: What its kernels may touch: tensors, arrays, buffers, or pairs (address, bytes).

        Raises:
            EmulatorError: The launch cannot be taken; says why.
        """
        with self.device.taking(memory):
            function(*arguments, ctypes.c_void_p(self.number))

    def synchronize(self) -> None:
        """Execute what was launched, on all ranks."""
        self.device.synchronize()


class Device:
    """One rank's device; see `System.devices`."""

    emulated = True

    def __init__(self, system: System, index: int) -> None:
        self.system = system
        self.index = index
        self._streams = [Stream(self, 0)]
        self._here = threading.local()
        self._shared: list[Lease] = []
        self._told = False

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.system.arch} emulated by dsv4-ptx-emulator"

    @property
    def arch(self) -> int:
        """Compute capability as 10 * major + minor."""
        return int("".join(filter(str.isdigit, self.system.arch)))

    @property
    def multiprocessors(self) -> int:
        """SMs that it claims to have."""
        return self.system.processors

    def stream(self, number: int = 0) -> Stream:
        """Stream `number`, made at first use; 0 is the default stream."""
        while len(self._streams) <= number:
            self._streams.append(Stream(self, len(self._streams)))
        return self._streams[number]

    def current_stream(self) -> Stream:
        """The stream that `using` chose in this thread, else the default stream."""
        chosen: Stream | None = getattr(self._here, "stream", None)
        return chosen or self._streams[0]

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """`current_stream` is `stream` in this thread inside of this context."""
        before = getattr(self._here, "stream", None)
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def synchronize(self) -> None:
        """Execute what was launched, on all ranks.

        Raises:
            EmulatorError: What the emulator found, once on each device.
        """
        failure = self.system.failure
        if failure is not None:
            if not self._told:
                self._told = True
                raise failure
            return
        try:
            self.system.run()
        except Exception:
            self._told = True
            raise

    def share(self, memory: Any) -> None:
        """Let every rank touch `memory`, whose home is here, until `unshare` as often."""
        self._shared.append(self.system.memory.lease(memory, home=self.index, shared=True))

    def unshare(self, memory: Any) -> None:
        """Take back one `share`, if there is one left."""
        for lease in self._shared:
            if lease.extent.owner is memory:
                self._shared.remove(lease)
                self.system.memory.release(lease)
                return

    @contextmanager
    def taking(self, memory: Sequence[Any] = ()) -> Iterator[None]:
        """Launches that this thread makes inside of this context come here, with leases on `memory`."""
        self.system.require_alive()
        before = getattr(self._here, "memory", ())
        self._here.memory = (*before, *memory)
        table = self.system.table
        try:
            with table.receiving(self):
                try:
                    yield
                except RuntimeError as error:
                    table.reraise(error)
                    raise
        finally:
            self._here.memory = before

    def receive(self, launch: HostLaunch) -> None:
        """Queue a launch of this thread (see `host.Receiver`)."""
        if launch.stream >= len(self._streams):
            raise RuntimeLibraryError(f"rank {self.index} has no stream {launch.stream:#x}")
        self.system.enqueue(Queued(launch, self.index, getattr(self._here, "memory", ())))

    def attribute(self, attribute: int) -> int:
        """A `cudaDeviceAttr` (see `host.Receiver`)."""
        limits = self.system.limits
        known = {
            MAX_THREADS_PER_BLOCK: limits.threads_per_block,
            SHARED_PER_BLOCK: 48 * 1024,
            WARP_SIZE: 32,
            PROCESSORS: self.multiprocessors,
            CAPABILITY_MAJOR: self.arch // 10,
            CAPABILITY_MINOR: self.arch % 10,
            SHARED_PER_PROCESSOR: limits.shared_per_processor,
            SHARED_OPT_IN: limits.shared_per_block,
        }
        if attribute not in known:
            raise RuntimeLibraryError(f"device attribute {attribute} has no emulated value")
        return known[attribute]
