# SPDX-License-Identifier: Apache-2.0
"""Register-only instructions as Python expressions, fused per straight-line run.

A run of such instructions becomes one generated Python function on NumPy arrays of 32 lanes. The
registers live in local variables meanwhile; those that nothing outside of the run reads never reach the
warp. An expression asks for a source in the view that it needs ("u" unsigned, "s" signed, "f" float) and
says in which view its result comes; conversions between views are emitted where they are needed and only
once per value.

Every run has two functions: one for a warp with all 32 lanes, and one that merges results under a mask. Both
are compiled when they are first needed.

Rejected: one closure per instruction (a call, two list accesses and a mask test each, about as much as
the arithmetic itself); a scalar path for values that are the same in all lanes (it wants a divergence
analysis, and the array path is fast enough).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsv4_ptx_emulator.isa import arithmetic
from dsv4_ptx_emulator.isa.context import DTYPES, DecodeContext, width_of
from dsv4_ptx_emulator.isa.registry import Entry, Step, add_entry
from dsv4_ptx_emulator.isa.special import special_register
from dsv4_ptx_emulator.machine.warp import LANES
from dsv4_ptx_emulator.ptx.module import (
    Guard,
    Immediate,
    Instruction,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

Expression = Callable[["Emitter"], None]

_EXPRESSIONS: dict[str, Expression] = {}

_VIEWS = {"u": "u", "s": "i", "f": "f"}


def expression(*prefixes: str, section: str) -> Callable[[Expression], Expression]:
    """Register the decorated function as the emitter of opcodes that begin with one of `prefixes`."""

    def register(function: Expression) -> Expression:
        summary = (function.__doc__ or "").strip().split("\n", 1)[0]
        for prefix in prefixes:
            add_entry(Entry(prefix, section, None, False, summary))
            _EXPRESSIONS[prefix] = function
        return function

    return register


class Emitter:
    """Generates the function of one run.

    Attributes:
        context: The decoder's context, set to the instruction at hand.
        modifiers: Words behind the registered prefix.
    """

    def __init__(self, context: DecodeContext, local: frozenset[str], masked: bool) -> None:
        self.context = context
        self.modifiers: tuple[str, ...] = ()
        self._local = local
        self._masked = masked
        self._lines: list[str] = []
        self._names: dict[str, dict[str, str]] = {}
        self._dirty: dict[str, None] = {}
        self._bound: dict[str, Any] = {}
        self._constants: dict[tuple[Any, str], str] = {}
        self._count = 0
        self._guard: str | None = None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Operands of the instruction at hand."""
        return self.context.instruction.operands

    def take(self, count: int) -> tuple[Operand, ...]:
        """All operands, which must be `count` many.

        Raises:
            UnsupportedInstruction: They are not.
        """
        if len(self.operands) != count:
            self.context.unsupported(f"the form with {len(self.operands)} operands")
        return self.operands

    def type(self, *allowed: str) -> tuple[str, int]:
        """The last modifier as (letter or whole name, bits): "s32" is ("s", 32), "pred" ("pred", 1).

        Raises:
            UnsupportedInstruction: It is not among `allowed`.
        """
        name = self.modifiers[-1] if self.modifiers else ""
        if name not in allowed:
            self.context.unsupported(f"type .{name}")
        if name == "pred":
            return "pred", 1
        return name.rstrip("0123456789"), width_of(name)

    def flags(self, *allowed: str) -> frozenset[str]:
        """All modifiers but the last (the type), each of which must be allowed.

        Raises:
            UnsupportedInstruction: One is not.
        """
        for word in self.modifiers[:-1]:
            if word not in allowed:
                self.context.unsupported(f"modifier .{word}")
        return frozenset(self.modifiers[:-1])

    def get(self, operand: Operand, bits: int, view: str = "u") -> str:
        """A Python expression for a source operand; `bits` 1 for a predicate."""
        if isinstance(operand, Register):
            return self._register(operand, bits, view)
        if isinstance(operand, Not):
            return f"(~{self._register(operand.register, 1, 'u')})"
        if isinstance(operand, Immediate):
            return self._immediate(operand, bits, view)
        if isinstance(operand, Special):
            name = self.bind(special_register(operand.name, self.context))
            if bits == 1:
                return f"({name}(w) != 0)"
            expression = f"{name}(w).astype(u{bits})"
            return expression if view == "u" else f"{expression}.view({_VIEWS[view]}{bits})"
        if isinstance(operand, Symbol):
            name = self.bind(self.context.source(operand, bits))
            return f"{name}(w)" if view == "u" else f"{name}(w).view({_VIEWS[view]}{bits})"
        self.context.unsupported(f"operand {operand}")

    def put(
        self, operand: Operand, bits: int, expression: str, view: str = "u", *, signed: bool = False
    ) -> None:
        """Let a destination operand be `expression`, a fresh array in the given view.

        `signed` says how to extend it into a wider register.
        """
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register):
            self.context.unsupported(f"destination {operand}")
        have = width_of(operand.type)
        if have != bits:
            if have < bits or bits == 1:
                self.context.unsupported(f"a destination of type .{operand.type}")
            letter = "i" if signed else "u"
            expression = f"({expression}).view({letter}{bits}).astype({letter}{have}).view(u{have})"
            bits, view = have, "u"
        mask = self._mask(operand.name)
        if mask is not None:
            old = self._register(operand, bits, view)
            expression = f"where({mask}, {expression}, {old})"
        name = self.let(expression)
        self._names[operand.name] = {view: name}
        self._dirty[operand.name] = None

    def let(self, expression: str) -> str:
        """Name an intermediate value."""
        self._count += 1
        name = f"v{self._count}"
        self._lines.append(f"{name} = {expression}")
        return name

    def bind(self, thing: Any) -> str:
        """A name for a Python object in the generated code."""
        name = f"b{len(self._bound)}"
        self._bound[name] = thing
        return name

    def constant(self, value: int, bits: int, view: str = "u") -> str:
        """A name for 32 times the same value."""
        key = (value & ((1 << bits) - 1), f"{view}{bits}")
        name = self._constants.get(key)
        if name is None:
            array = np.full(LANES, key[0], DTYPES[bits]).view(np.dtype(f"{_VIEWS[view]}{bits // 8}"))
            array.flags.writeable = False
            name = self._constants[key] = self.bind(array)
        return name

    def add(self, instruction: Instruction, prefix: str) -> None:
        """Emit one instruction."""
        self.context.instruction = instruction
        self.modifiers = self.context.modifiers = instruction.words()[prefix.count(".") + 1 :]
        self._guard = self._guard_mask(instruction.guard) if instruction.guard else None
        _EXPRESSIONS[prefix](self)

    def finish(self, masked: Step | None) -> Step:
        """The generated function; `masked` runs instead where lanes are missing."""
        for name in self._dirty:
            if name not in self._local:
                register = self.context.kernel.registers[name]
                value = self._register(register, width_of(register.type), "u")
                self._lines.append(f"R[{self.context.numbers[name]}] = {value}")
        head = ["R = w.registers", "C = w.constants"]
        if masked is not None:
            head = ["if not w.full: return masked(w)", *head]
        else:
            head.append("m = w.active")
        body = "".join(f"    {line}\n" for line in [*head, *self._lines])
        scope = {**arithmetic.NAMES, **self._bound, "masked": masked}
        exec(compile(f"def run(w):\n{body}", "<run>", "exec"), scope)
        run: Step = scope["run"]
        return run

    def _guard_mask(self, guard: Guard) -> str:
        predicate = self._register(guard.register, 1, "u")
        if guard.negated:
            predicate = f"~{predicate}"
        return self.let(f"m & {predicate}" if self._masked else predicate)

    def _mask(self, name: str) -> str | None:
        if self._guard is not None:
            return self._guard
        if self._masked and name not in self._local:
            return "m"
        return None

    def _register(self, operand: Register, bits: int, view: str) -> str:
        have = width_of(operand.type)
        if (have == 1) != (bits == 1):
            self.context.unsupported(f"a register of type .{operand.type} here")
        names = self._names.get(operand.name)
        if names is None:
            name = self.let(f"R[{self.context.numbers[operand.name]}]")
            names = self._names[operand.name] = {"u": name}
        if have == 1:
            return names["u"]
        if have != bits:
            base = self._in_view(names, have, "u")
            narrow = self.let(f"{base}.astype(u{bits})")
            return narrow if view == "u" else f"{narrow}.view({_VIEWS[view]}{bits})"
        return self._in_view(names, bits, view)

    def _in_view(self, names: dict[str, str], bits: int, view: str) -> str:
        if view not in names:
            source = next(iter(names.values()))
            names[view] = self.let(f"{source}.view({_VIEWS[view]}{bits})")
        return names[view]

    def _immediate(self, operand: Immediate, bits: int, view: str) -> str:
        if bits == 1:
            return self.bind(np.full(LANES, operand.value != 0))
        value = operand.value
        if operand.float_bits and operand.float_bits != bits:
            # A double constant for an f32 operand is converted (PTX ISA 4.5.2).
            number = np.array([value], np.uint64 if operand.float_bits == 64 else np.uint32)
            number = number.view(np.float64 if operand.float_bits == 64 else np.float32)
            value = int(number.astype(f"f{bits // 8}").view(f"u{bits // 8}")[0])
        return self.constant(value, bits, view)


def registers_of(operand: Operand | None) -> Sequence[str]:
    """Names of all registers in an operand."""
    if isinstance(operand, Register):
        return (operand.name,)
    if isinstance(operand, Not):
        return (operand.register.name,)
    if isinstance(operand, Pair):
        return [name for part in (operand.first, operand.second) for name in registers_of(part)]
    if isinstance(operand, Vector):
        return [name for element in operand.elements for name in registers_of(element)]
    base = getattr(operand, "base", None)
    if base is not None:
        parts = (base, *getattr(operand, "coordinates", ()))
        return [name for part in parts for name in registers_of(part)]
    return ()
