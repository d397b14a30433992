# SPDX-License-Identifier: Apache-2.0
"""Everything the emulator reports, one class per kind of finding.

A finding says where (rank, CTA, warp, lanes, line of the PTX) and what; `line` is kept as an attribute so
that tests and reports need not parse the text. Two families: what the emulator cannot do
(`PtxSyntaxError`, `UnsupportedInstruction`) and what the program did wrong (`ProgramError`). Both stop
the run: a program that has gone wrong once says nothing dependable afterwards.

Rejected: warnings. A finding that may be ignored is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence


class EmulatorError(Exception):
    """Base of every error that the emulator raises on purpose."""


class ArgumentError(EmulatorError, ValueError):
    """A caller's argument is unusable.

    Attributes:
        argument: Name of the parameter.
        value: The offending value.
        expected: What would have been accepted.
    """

    def __init__(self, argument: str, value: object, expected: str) -> None:
        self.argument = argument
        self.value = value
        self.expected = expected
        super().__init__(f"{argument}: got {value!r}, expected {expected}")


class PtxSyntaxError(EmulatorError, ValueError):
    """The text is not PTX as this parser knows it.

    Attributes:
        line: Line in the text, counted from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        self.line = line
        super().__init__(f"line {line}: {message}")


class UnsupportedInstruction(EmulatorError, NotImplementedError):  # noqa: N818 - named for what it reports
    """An instruction, modifier or operand form that is not implemented; never executed as a no-op.

    Attributes:
        opcode: The instruction with all of its modifiers, as written.
        detail: What about it is not supported: a modifier, a type, an operand.
        line: Line in the PTX text, counted from 1.
    """

    def __init__(self, opcode: str, detail: str, line: int) -> None:
        self.opcode = opcode
        self.detail = detail
        self.line = line
        super().__init__(f"line {line}: {opcode}: {detail} is not supported")


class ProgramError(EmulatorError, RuntimeError):
    """The emulated program did something wrong.

    Attributes:
        line: Line of the PTX at fault; 0 where no single one is.
        where: Who did it, such as "rank 1, CTA (3, 0, 0), warp 8".
    """

    def __init__(self, message: str, *, line: int = 0, where: str = "") -> None:
        self.line = line
        self.where = where
        place = f"{where}, line {line}: " if where and line else f"line {line}: " if line else ""
        super().__init__(place + message)


class MemoryAccessError(ProgramError):
    """A memory access that the machine would refuse or whose result is undefined."""


class OutOfBoundsError(MemoryAccessError):
    """An address outside of what its space holds."""


class MisalignedError(MemoryAccessError):
    """An address that is not a multiple of the access's size."""


class UninitialisedError(MemoryAccessError):
    """A read of shared (or tensor) memory that nothing has written since the CTA began."""


class BarrierMisuseError(ProgramError):
    """A barrier or an mbarrier used against its rules: counts, phases, initialisation, transaction range."""


class DivergenceError(ProgramError):
    """An instruction that needs all its lanes together was executed, or can only ever be, by some of them."""


class AsyncMisuseError(ProgramError):
    """Operands of an asynchronous operation break its rules (descriptor, tensor map, size, group order)."""


class MemoryModelError(ProgramError):
    """Two accesses whose order the ISA's memory consistency model does not guarantee.

    Attributes:
        rule: Which rule, see checkers/memory_model/findings.py.
        first_line: Line of the earlier access; `line` is that of the later one.
    """

    def __init__(self, message: str, *, rule: str, first_line: int, line: int, where: str) -> None:
        self.rule = rule
        self.first_line = first_line
        super().__init__(message, line=line, where=where)


class ResourceLimitError(ProgramError):
    """A launch asks for more than the architecture has."""


class TrapError(ProgramError):
    """The program executed `trap` (or `brkpt`)."""


class StepLimitError(ProgramError):
    """The run executed as many steps as it may; the text shows what every agent was doing."""


class DeadlockError(ProgramError):
    """Nobody can go on.

    Attributes:
        waiting: One line for each agent that waits: who, at which line, for what.
    """

    def __init__(self, message: str, waiting: Sequence[str]) -> None:
        self.waiting = tuple(waiting)
        super().__init__("\n  ".join([message, *self.waiting]))
