# SPDX-License-Identifier: Apache-2.0
"""A kernel, decoded: a list of steps that the scheduler walks through.

Register-only instructions between two labels become one step (isa/emit.py), every other instruction is a
step. A fused step is compiled when it is first executed, so roles that a test never plays cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.errors import DivergenceError
from dsv4_ptx_emulator.isa import load_all
from dsv4_ptx_emulator.isa.context import DTYPES, DecodeContext, width_of
from dsv4_ptx_emulator.isa.control import branch, leave
from dsv4_ptx_emulator.isa.emit import Emitter, registers_of
from dsv4_ptx_emulator.isa.registry import Entry, Step, find
from dsv4_ptx_emulator.machine.outcome import CONVERGE, EXIT, Outcome
from dsv4_ptx_emulator.machine.warp import LANES, bits_of
from dsv4_ptx_emulator.ptx.module import Guard, Instruction, Kernel, Label, Operand, Register

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.warp import Warp

LONGEST_RUN = 160
"""Instructions that are fused at most: a longer run is as fast, and takes long to compile."""


class Program:
    """A decoded kernel.

    Attributes:
        kernel: What was decoded.
        steps: By pc.
        stops: Whether a turn may end behind the step.
        weights: Instructions that the step stands for.
        initial_registers: What a new warp's registers are: zeros.
        static_shared: Bytes of shared variables.
        local_bytes: Bytes of local variables of a lane.
    """

    def __init__(
        self,
        kernel: Kernel,
        arch: str,
        symbols: Mapping[str, tuple[str, int]],
        static_shared: int,
        local_bytes: int,
    ) -> None:
        load_all()
        self.kernel = kernel
        self.static_shared = static_shared
        self.local_bytes = local_bytes
        self.steps: list[Step] = []
        self.stops: list[bool] = []
        self.weights: list[int] = []
        self._first: list[int] = []
        zeros: dict[int, NDArray[Any]] = {
            bits: np.zeros(LANES, np.bool_ if bits == 1 else DTYPES[bits]) for bits in (1, 8, 16, 32, 64)
        }
        self.initial_registers = [zeros[_register_bits(register)] for register in kernel.registers.values()]
        self._context = DecodeContext(kernel, arch, symbols)
        self._decode()

    def line_of(self, pc: int) -> int:
        """Line of a step's first instruction."""
        instruction = self._instruction(pc)
        return instruction.line if instruction else 0

    def opcode_of(self, pc: int) -> str:
        """Opcode of a step's first instruction."""
        instruction = self._instruction(pc)
        return instruction.opcode if instruction else "exit"

    def _instruction(self, pc: int) -> Instruction | None:
        first = self._first[pc] if pc < len(self._first) else len(self.kernel.instructions)
        return self.kernel.instructions[first] if first < len(self.kernel.instructions) else None

    def _decode(self) -> None:
        instructions = self.kernel.instructions
        entries = [_entry(instruction) for instruction in instructions]
        leaders = set(self.kernel.labels.values())
        runs: list[tuple[int, int]] = []
        at = 0
        while at < len(instructions):
            end = at + 1
            if _fusible(entries[at]):
                while (
                    end < len(instructions)
                    and end not in leaders
                    and end - at < LONGEST_RUN
                    and _fusible(entries[end])
                ):
                    end += 1
            runs.append((at, end))
            at = end
        self._first = [start for start, _ in runs]
        place = {start: pc for pc, (start, _) in enumerate(runs)}
        place[len(instructions)] = len(runs)
        targets = {name: place[index] for name, index in self.kernel.labels.items()}
        local = _local_registers(instructions, runs, entries)
        for pc, (start, end) in enumerate(runs):
            entry = entries[start]
            instruction = instructions[start]
            self._context.pc = pc
            self._context.instruction = instruction
            stops = False
            if entry is None:
                step = self._control(instruction, targets)
            elif entry.handler is None:
                parts = [(instructions[index], _prefix(entries[index])) for index in range(start, end)]
                step = self._fuse(pc, parts, local[pc])
            else:
                step, stops = self._single(instruction, entry), entry.observable
            self.steps.append(step)
            self.stops.append(stops)
            self.weights.append(end - start)
        self.steps.append(lambda warp: EXIT)
        self.stops.append(False)
        self.weights.append(0)

    def _control(self, instruction: Instruction, targets: Mapping[str, int]) -> Step:
        words = instruction.words()
        if words[0] == "bra":
            target = instruction.operands[0] if instruction.operands else None
            if words[1:] not in ((), ("uni",)) or not isinstance(target, Label):
                self._context.unsupported("this form")
            return branch(self._context, targets[target.name], instruction.guard)
        if words[1:] not in ((), ("uni",)):
            self._context.unsupported(f"modifier .{words[1]}")
        return leave(self._context, instruction.guard)

    def _single(self, instruction: Instruction, entry: Entry) -> Step:
        context = self._context
        context.modifiers = instruction.words()[entry.prefix.count(".") + 1 :]
        assert entry.handler is not None
        step = entry.handler(instruction, context)
        context.instruction = instruction
        if "aligned" in instruction.words():
            step = _converging(step, instruction)
        if instruction.guard is not None:
            step = _guarded(step, context, instruction.guard)
        return step

    def _fuse(self, pc: int, parts: Sequence[tuple[Instruction, str]], local: frozenset[str]) -> Step:
        # Emitted now, so that what is not supported is refused when the module is loaded; compiled later.
        emitters = []
        for masked in (False, True):
            emitter = Emitter(self._context, local, masked)
            for instruction, prefix in parts:
                emitter.add(instruction, prefix)
            emitters.append(emitter)
        full, partial = emitters
        compiled: list[Step] = []

        def masked_run(warp: Warp) -> Outcome | None:
            if not compiled:
                compiled.append(partial.finish(None))
            return compiled[0](warp)

        def first_time(warp: Warp) -> Outcome | None:
            step = full.finish(masked_run)
            self.steps[pc] = step
            return step(warp)

        return first_time


def _register_bits(register: Register) -> int:
    return width_of(register.type)


def _entry(instruction: Instruction) -> Entry | None:
    """The registry's entry; None for branches and exits."""
    if instruction.words()[0] in ("bra", "exit", "ret"):
        return None
    return find(instruction.opcode, instruction.line)


def _prefix(entry: Entry | None) -> str:
    return entry.prefix if entry else ""


def _fusible(entry: Entry | None) -> bool:
    return entry is not None and entry.handler is None


def _converging(step: Step, instruction: Instruction) -> Step:
    """`.aligned`: every thread of the warp must execute it, so none may have exited."""

    def run(warp: Warp) -> Outcome | None:
        if warp.active_bits != warp.born_bits:
            if warp.live_bits == warp.born_bits:
                return CONVERGE
            raise DivergenceError(
                f"{instruction.opcode} needs the whole warp, but lanes "
                f"{warp.born_bits & ~warp.live_bits:#010x} have exited",
                line=instruction.line,
                where=warp.describe(),
            )
        return step(warp)

    return run


def _guarded(step: Step, context: DecodeContext, guard: Guard) -> Step:
    number = context.register_number(guard.register)
    negated = guard.negated

    def run(warp: Warp) -> Outcome | None:
        bits = bits_of(warp.registers[number])
        before = warp.active_bits
        bits = before & (~bits if negated else bits)
        if not bits:
            return None
        if bits == before:
            return step(warp)
        warp.set_active(bits)
        try:
            return step(warp)
        finally:
            warp.set_active(before)

    return run


def _local_registers(
    instructions: Sequence[Instruction], runs: Sequence[tuple[int, int]], entries: Sequence[Entry | None]
) -> list[frozenset[str]]:
    """Per step, the registers that live only inside of it: written there first and read nowhere else."""
    homes: dict[str, int] = {}
    shared: set[str] = set()
    for pc, (start, end) in enumerate(runs):
        fused = _fusible(entries[start])
        written: set[str] = set()
        for instruction in instructions[start:end]:
            target, *sources = instruction.operands or (None,)
            names = [name for operand in sources for name in registers_of(operand)]
            if instruction.guard is not None:
                names.append(instruction.guard.register.name)
                names += registers_of(target)
            for name in names:
                if not fused or name not in written or homes.get(name) != pc:
                    shared.add(name)
            for name in _targets(target):
                if not fused or homes.setdefault(name, pc) != pc:
                    shared.add(name)
                written.add(name)
    result: list[set[str]] = [set() for _ in runs]
    for name, pc in homes.items():
        if name not in shared:
            result[pc].add(name)
    return [frozenset(names) for names in result]


def _targets(operand: Operand | None) -> Sequence[str]:
    return registers_of(operand)
