# SPDX-License-Identifier: Apache-2.0
"""What a PTX text says, as data: a module, its kernels, their instructions and operands.

Names of registers and labels are unique in a kernel: the parser renames what an inner scope `{ }` declares
(inline assembly does that all the time), so nothing later needs to know about scopes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Register:
    """A declared register, such as `%r12`, or a scoped `P1` renamed to `P1@3`."""

    name: str
    type: str
    """Declared type without the dot: "pred", "b16", "b32", "b64", "f32", "b128"..."""


CARRY = Register("%cc.cf", "pred")
"""The carry flag (PTX ISA 9.7.2); part of every kernel's registers."""


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, such as `%tid.x` (PTX ISA 10)."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant. `value` is the integer, or the bits of a floating constant of `bits` width (0: integer)."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable's or parameter's name, or a function's; its value is an address."""

    name: str


@dataclass(frozen=True, slots=True)
class Label:
    """Where a branch goes; the index of the instruction is in `Kernel.labels`."""

    name: str


@dataclass(frozen=True, slots=True)
class Not:
    """A negated predicate operand, `!%p1`."""

    register: Register


@dataclass(frozen=True, slots=True)
class Sink:
    """The bit bucket `_`."""


@dataclass(frozen=True, slots=True)
class Address:
    """`[base+offset]`. `coordinates` is what follows in a tensor address `[base, {c0, c1}]`, else empty."""

    base: Register | Symbol | Immediate
    offset: int
    coordinates: tuple[Operand, ...] = ()
    extra: tuple[Operand, ...] = ()
    """Whatever follows the coordinates inside the brackets (im2col offsets); no supported form has it."""


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, c}`."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two destinations, `%r1|%p2`."""

    first: Register | Sink
    second: Register | Sink


Operand = Register | Special | Immediate | Symbol | Label | Not | Sink | Address | Vector | Pair


@dataclass(frozen=True, slots=True)
class Guard:
    """`@p` or `@!p`."""

    register: Register
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: As written with all modifiers, `ld.acquire.sys.global.b64`.
        operands: In order of the text.
        guard: Its predicate, if any.
        line: Line in the text, counted from 1.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int

    def words(self) -> tuple[str, ...]:
        """The opcode's dotted words."""
        return tuple(self.opcode.split("."))


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in a state space.

    Attributes:
        space: "shared", "global", "const" or "local".
        size: Bytes; 0 for `.extern .shared` without a size (dynamic shared memory).
        align: Bytes.
        initial: Initial bytes, or None.
    """

    name: str
    space: str
    size: int
    align: int
    initial: bytes | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter at `offset` of the parameter bytes."""

    name: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """An `.entry`.

    Attributes:
        name: Its symbol.
        parameters: In order; `parameter_bytes` is where the last one ends.
        directives: Such as {"reqntid": (384, 1, 1)}, {"maxntid": ...}, {"explicitcluster": ()},
            {"reqnctapercluster": (2,)}, {"maxnreg": (168,)}.
        instructions: In order of the text.
        labels: Index of the instruction that a label stands before (may be one past the last).
        registers: By unique name.
        variables: Declared inside of the body.
    """

    name: str
    parameters: tuple[Parameter, ...]
    directives: Mapping[str, tuple[int, ...]]
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    registers: Mapping[str, Register]
    variables: tuple[Variable, ...] = ()

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter block."""
        last = self.parameters[-1] if self.parameters else None
        return last.offset + last.size if last else 0


@dataclass(frozen=True, slots=True)
class Module:
    """A PTX text.

    Attributes:
        version: (9, 4) for `.version 9.4`.
        target: "sm_90a".
        variables: At module scope.
        kernels: By name.
    """

    version: tuple[int, int]
    target: str
    variables: tuple[Variable, ...]
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
