# SPDX-License-Identifier: Apache-2.0
"""The emulator's front: load PTX, register host memory, launch, run.

    emulator = Emulator("sm_90a", ranks=2, seed=7)
    emulator.register(buffer.ctypes.data, buffer.nbytes, "a", rank=0)
    emulator.launch(text, "kernel", grid=(4, 1, 1), block=(128, 1, 1), parameters=struct.pack("<Q", address))
    emulator.run()

Launches only queue; `run` executes everything that is queued on all ranks and streams, interleaved at
random from the seed. The same seed, memory addresses and launches give the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import numpy as np

from dsv4_ptx_emulator.checkers import standard_checkers
from dsv4_ptx_emulator.checkers.memory_model.model import MemoryModel
from dsv4_ptx_emulator.errors import ArgumentError
from dsv4_ptx_emulator.isa.program import Program
from dsv4_ptx_emulator.machine.launch import Launch
from dsv4_ptx_emulator.machine.machine import Machine
from dsv4_ptx_emulator.machine.observer import Observer
from dsv4_ptx_emulator.machine.region import Region
from dsv4_ptx_emulator.machine.scheduler import Uneven
from dsv4_ptx_emulator.ptx.module import Kernel, Module, Variable
from dsv4_ptx_emulator.ptx.parser import parse

MAX_STEPS = 500_000_000
KEPT = 16
"""Texts and decoded kernels that later emulators of the process need not parse and decode again."""

MEMORY_MODEL = "memory-model"
"""Value of `checks` that adds the checker of the memory consistency model."""

Extent = tuple[int, int, int]


class Emulator:
    """One emulated machine.

    Args:
        arch: "sm_90a", "sm_100a" and the like.
        ranks: GPUs.
        seed: Decides every interleaving.
        max_steps: Instructions after which `run` gives up.
        checks: Whether to attach the standard checkers; "memory-model" attaches that of the memory
            consistency model as well (checkers/memory_model), which takes about as long again as the run.
        slow_engines: Whether copies and matrix operations may be long under way, as the seed says.
        uneven: Who runs apart, as the seed says: some CTAs, or one warp of each, rest until no other can go
            on.
        rewrite: Changes each PTX text before it is parsed (mutation testing).

    Attributes:
        machine: The machine, for observers and engines.

    Raises:
        ArgumentError: The arch is unknown or `ranks` is not positive.
    """

    def __init__(
        self,
        arch: str = "sm_90a",
        *,
        ranks: int = 1,
        seed: int = 0,
        max_steps: int = MAX_STEPS,
        checks: bool | str = True,
        slow_engines: bool = False,
        uneven: Uneven = Uneven.NOBODY,
        rewrite: Callable[[str], str] | None = None,
    ) -> None:
        if ranks < 1:
            raise ArgumentError("ranks", ranks, "at least 1")
        self.machine = Machine(arch, ranks, seed, max_steps)
        self.machine.scheduler.slow_engines = slow_engines
        self.machine.scheduler.uneven = uneven
        self._rewrite = rewrite
        self._modules: dict[str, Module] = {}
        self._programs: dict[tuple[str, str, int], Program] = {}
        self._storage: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        self._globals: dict[tuple[str, int], dict[str, int]] = {}
        if checks not in (False, True, MEMORY_MODEL):
            raise ArgumentError("checks", checks, f"False, True or {MEMORY_MODEL!r}")
        if checks:
            for checker in standard_checkers():
                self.machine.attach(checker)
        if checks == MEMORY_MODEL:
            self.machine.attach(MemoryModel())

    @property
    def steps(self) -> int:
        """Warp instructions executed so far (and steps of asynchronous agents)."""
        return self.machine.scheduler.steps

    def attach(self, observer: Observer) -> None:
        """Attach a counter, trace or checker."""
        self.machine.attach(observer)

    def register(
        self, address: int, size: int, name: str = "", *, rank: int = 0, visible: Iterable[int] | None = None
    ) -> None:
        """Make host bytes [address, address + size) global memory; the caller keeps them alive.

        Args:
            address: Host address, and the address that kernels use.
            size: Bytes.
            name: For reports.
            rank: Home: accesses by other ranks count as link traffic.
            visible: Ranks that may touch it; None for all.

        Raises:
            ValueError: It overlaps what is registered.
            ArgumentError: The rank does not exist.
        """
        if not 0 <= rank < self.machine.ranks:
            raise ArgumentError("rank", rank, f"0 to {self.machine.ranks - 1}")
        seen = None if visible is None else frozenset(visible)
        label = name or f"{size} bytes at {address:#x}"
        self.machine.global_memory.add(Region.of_host(address, size, label, home=rank, visible=seen))

    def unregister(self, address: int) -> None:
        """Undo the `register` at this address.

        Raises:
            KeyError: Nothing is registered there.
        """
        self.machine.global_memory.remove(address)

    def map_multicast(self, address: int, size: int, members: Mapping[int, int], name: str = "") -> None:
        """Make [address, address + size) multicast addresses of the same bytes on several ranks.

        Args:
            address: First address; nothing may be registered there. Reserve it so that no host memory ever is
                (`runtime.multicast` does).
            size: Bytes.
            members: By rank, the address of its copy, in memory registered as usual.
            name: For reports.

        Raises:
            ArgumentError: A rank does not exist, or an address or the size is unusable.
            ValueError: The range overlaps what is registered.
        """
        for rank in members:
            if not 0 <= rank < self.machine.ranks:
                raise ArgumentError("rank", rank, f"0 to {self.machine.ranks - 1}")
        self.machine.multicast.add(address, size, members, name)

    def unmap_multicast(self, address: int) -> None:
        """Undo the `map_multicast` at this address.

        Raises:
            KeyError: Nothing is mapped there.
        """
        self.machine.multicast.remove(address)

    @property
    def texts(self) -> tuple[str, ...]:
        """The PTX texts that were loaded, before any rewriting."""
        return tuple(self._modules)

    def load(self, text: str) -> Module:
        """Parse a PTX text; the same text is parsed once, in this process if it is among the latest.

        Raises:
            PtxSyntaxError: It is not PTX.
        """
        module = self._modules.get(text)
        if module is None:
            module = self._modules[text] = _parsed(self._executed(text))
        return module

    def program(self, text: str, entry: str, rank: int = 0) -> Program:
        """The decoded kernel `entry` of a text, for a rank.

        Raises:
            ArgumentError: There is no such kernel.
            UnsupportedInstruction: It uses something that is not implemented.
        """
        key = (text, entry, rank)
        found = self._programs.get(key)
        if found is not None:
            return found
        module = self.load(text)
        if entry not in module.kernels:
            raise ArgumentError("entry", entry, f"one of {', '.join(module.kernels)}")
        kernel = module.kernels[entry]
        own = self._globals_of(text, module, rank)
        if not own and rank:
            # Without global variables the decoded kernel is the same on every rank.
            found = self._programs[key] = self.program(text, entry, 0)
            return found
        if own:
            found = _decoded(module, kernel, self.machine.arch, own)
        else:
            found = _shared_program(self._executed(text), entry, self.machine.arch)
        self._programs[key] = found
        return found

    def _executed(self, text: str) -> str:
        return self._rewrite(text) if self._rewrite else text

    def launch(
        self,
        text: str,
        entry: str,
        *,
        grid: Extent,
        block: Extent,
        cluster: Extent | None = None,
        shared_bytes: int = 0,
        parameters: bytes = b"",
        rank: int = 0,
        stream: int = 0,
        dependent: bool = False,
    ) -> Launch:
        """Queue a launch.

        Args:
            text: PTX of the module.
            entry: Kernel.
            grid: CTAs along x, y, z.
            block: Threads of a CTA.
            cluster: CTAs of a cluster, or None.
            shared_bytes: Dynamic shared memory.
            parameters: The parameter block, laid out as the kernel's parameters are.
            rank: Where.
            stream: Launches of a rank's stream run in order.
            dependent: Programmatic dependent launch: may begin when the launch before allows it.

        Raises:
            ArgumentError: No such kernel or rank, or a parameter block of another size.
            ResourceLimitError: The launch asks for more than the architecture has.
            UnsupportedInstruction: The kernel uses something that is not implemented.
        """
        if not 0 <= rank < self.machine.ranks:
            raise ArgumentError("rank", rank, f"0 to {self.machine.ranks - 1}")
        program = self.program(text, entry, rank)
        kernel = program.kernel
        if len(parameters) < kernel.parameter_bytes:
            raise ArgumentError("parameters", len(parameters), f"{kernel.parameter_bytes} bytes")
        machine = self.machine
        launch = Launch(
            machine,
            machine.next_number(),
            rank,
            kernel,
            program,
            grid,
            block,
            cluster,
            shared_bytes,
            parameters,
            stream,
            dependent,
        )
        machine.enqueue(launch)
        return launch

    def run(self) -> None:
        """Execute everything that is queued.

        Raises:
            ProgramError: What a program did wrong; `DeadlockError` if nobody can go on.
        """
        with np.errstate(all="ignore"):
            self.machine.scheduler.run()

    def _globals_of(self, text: str, module: Module, rank: int) -> dict[str, int]:
        key = (text, rank)
        if key not in self._globals:
            addresses: dict[str, int] = {}
            for variable in module.variables:
                if variable.space not in ("global", "const"):
                    continue
                storage = np.zeros(variable.size + 256, np.uint8)
                self._storage.append(storage)
                address = -(-storage.ctypes.data // 256) * 256
                start = address - storage.ctypes.data
                if variable.initial:
                    storage[start : start + variable.size] = np.frombuffer(variable.initial, np.uint8)
                self.register(address, variable.size, variable.name, rank=rank)
                addresses[variable.name] = address
            self._globals[key] = addresses
        return self._globals[key]


_parsed = lru_cache(maxsize=KEPT)(parse)


@lru_cache(maxsize=KEPT)
def _shared_program(text: str, entry: str, arch: str) -> Program:
    """A decoded kernel without global variables, which any machine may execute."""
    module = _parsed(text)
    return _decoded(module, module.kernels[entry], arch, {})


def _decoded(module: Module, kernel: Kernel, arch: str, own: Mapping[str, int]) -> Program:
    symbols, static, local = _symbols(module, kernel)
    symbols.update({name: ("global", address) for name, address in own.items()})
    return Program(kernel, arch, symbols, static, local)


def _symbols(module: Module, kernel: Kernel) -> tuple[dict[str, tuple[str, int]], int, int]:
    """Symbols that are offsets, and the bytes of shared and of local variables.

    Static shared variables come first, dynamic shared memory behind them.
    """
    symbols: dict[str, tuple[str, int]] = {p.name: ("param", p.offset) for p in kernel.parameters}
    ends = {"shared": 0, "local": 0}
    dynamic: list[Variable] = []
    for variable in (*module.variables, *kernel.variables):
        if variable.space not in ends:
            continue
        if variable.space == "shared" and not variable.size:
            dynamic.append(variable)
            continue
        start = -(-ends[variable.space] // variable.align) * variable.align
        symbols[variable.name] = (variable.space, start)
        ends[variable.space] = start + variable.size
    shared = ends["shared"]
    for variable in dynamic:
        shared = max(shared, -(-ends["shared"] // variable.align) * variable.align) if ends["shared"] else 0
        symbols[variable.name] = ("shared", shared)
    return symbols, shared, -(-ends["local"] // 32) * 32
