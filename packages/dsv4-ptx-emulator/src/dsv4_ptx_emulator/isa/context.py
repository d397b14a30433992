# SPDX-License-Identifier: Apache-2.0
"""What a handler may ask while it decodes: operands as functions of a warp.

`context.source(operand, 32)(warp)` is the operand's value in all 32 lanes, an array that must not be
changed in place; `context.destination(operand, 32)(warp, values)` writes it for the active lanes. A
register wider than asked is truncated when read, and extended when written (PTX ISA 9.4.1, operand size
exceeding instruction-type size).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from dsv4_ptx_emulator.errors import UnsupportedInstruction
from dsv4_ptx_emulator.isa.special import special_register
from dsv4_ptx_emulator.machine.observer import AccessKind
from dsv4_ptx_emulator.machine.warp import LANES
from dsv4_ptx_emulator.ptx.module import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.warp import Warp

Source = Callable[["Warp"], "NDArray[Any]"]
Destination = Callable[["Warp", "NDArray[Any]"], None]

DTYPES: Mapping[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: Mapping[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}

SHARED_WINDOW = 1 << 56
"""Where shared memory lies in the generic address space; no host address has this bit."""

LOCAL_WINDOW = 2 << 56
PARAM_WINDOW = 3 << 56


def width_of(type_name: str) -> int:
    """Bits of a type such as "b32", "s64", "f16x2", "pred" (1)."""
    if type_name == "pred":
        return 1
    digits = type_name.lstrip("abcdefghijklmnopqrstuvwxyz")
    if "x" in digits:
        width, count = digits.split("x")
        return int(width) * int(count)
    return int(digits)


class DecodeContext:
    """Operands and symbols of one kernel while it is being decoded.

    Attributes:
        kernel: The kernel.
        arch: Such as "sm_90a".
        instruction: The instruction at hand.
        modifiers: Its words behind the registered prefix.
        pc: Number of its step.
        symbols: What a symbol's value is: (space, address or offset). "shared" offsets are from the CTA's
            base.
    """

    def __init__(self, kernel: Kernel, arch: str, symbols: Mapping[str, tuple[str, int]]) -> None:
        self.kernel = kernel
        self.arch = arch
        self.symbols = symbols
        self.numbers = {name: number for number, name in enumerate(kernel.registers)}
        self.instruction: Instruction
        self.modifiers: tuple[str, ...] = ()
        self.pc = 0

    def unsupported(self, detail: str) -> NoReturn:
        """Refuse the instruction at hand.

        Raises:
            UnsupportedInstruction: Always.
        """
        raise UnsupportedInstruction(self.instruction.opcode, detail, self.instruction.line)

    def require(self, *allowed: str) -> None:
        """Refuse every modifier that is not among `allowed`.

        Raises:
            UnsupportedInstruction: There is one; it is named.
        """
        for word in self.modifiers:
            if word not in allowed:
                self.unsupported(f"modifier .{word}")

    def kind(self, *, proxy: str = "generic", semantics: str = "weak", scope: str = "") -> AccessKind:
        """An `AccessKind` with the instruction's line and opcode."""
        return AccessKind(proxy, semantics, scope, self.instruction.line, self.instruction.opcode)

    def operand(self, index: int) -> Operand:
        """The operand at `index`.

        Raises:
            UnsupportedInstruction: There are fewer.
        """
        operands = self.instruction.operands
        if index >= len(operands):
            self.unsupported(f"the form with {len(operands)} operands")
        return operands[index]

    def register_number(self, operand: Operand) -> int:
        """Index into `Warp.registers`.

        Raises:
            UnsupportedInstruction: It is not a register.
        """
        if not isinstance(operand, Register):
            self.unsupported(f"operand {operand}")
        return self.numbers[operand.name]

    def source(self, operand: Operand, bits: int) -> Source:
        """The operand as unsigned integers of `bits` bits, shape (32,); `bits` 1 for a predicate (bool)."""
        if isinstance(operand, Register):
            number = self.numbers[operand.name]
            have = width_of(operand.type)
            if have == bits:
                return lambda warp: warp.registers[number]
            if have == 1 or bits == 1:
                self.unsupported(f"a register of type .{operand.type} here")
            dtype = DTYPES[bits]
            return lambda warp: warp.registers[number].astype(dtype)
        if isinstance(operand, Not):
            number = self.numbers[operand.register.name]
            return lambda warp: ~warp.registers[number]
        if isinstance(operand, Immediate):
            return self._constant(operand, bits)
        if isinstance(operand, Special):
            read = special_register(operand.name, self)
            dtype = DTYPES[bits]
            return lambda warp: read(warp).astype(dtype)
        if isinstance(operand, Symbol):
            return self._symbol(operand, bits)
        self.unsupported(f"operand {operand}")

    def sources(self, operand: Operand, bits: int) -> list[Source]:
        """One source per element of a vector operand; of a scalar, a list of one."""
        if isinstance(operand, Vector):
            return [self.source(element, bits) for element in operand.elements]
        return [self.source(operand, bits)]

    def uniform(self, operand: Operand, bits: int) -> Callable[[Warp], int]:
        """The operand's value in the first active lane, as a Python int."""
        if isinstance(operand, Immediate):
            value = operand.value & ((1 << bits) - 1)
            return lambda warp: value
        read = self.source(operand, bits)
        return lambda warp: int(read(warp)[warp.first_lane])

    def destination(self, operand: Operand, bits: int, *, signed: bool = False) -> Destination:
        """Write unsigned values of `bits` bits, shape (32,), into the operand's active lanes.

        `signed` says how to extend into a wider register. The values become the register's array: pass a
        fresh one.
        """
        if isinstance(operand, Sink):
            return lambda warp, values: None
        number = self.register_number(operand)
        assert isinstance(operand, Register)
        have = width_of(operand.type)
        if have == bits:
            return _writer(number)
        if have < bits or bits == 1:
            self.unsupported(f"a destination of type .{operand.type}")
        write = _writer(number)
        narrow = SIGNED[bits] if signed else DTYPES[bits]
        wide = SIGNED[have] if signed else DTYPES[have]
        final = DTYPES[have]
        return lambda warp, values: write(warp, values.view(narrow).astype(wide).view(final))

    def destinations(self, operand: Operand, bits: int, *, signed: bool = False) -> list[Destination]:
        """One destination per element of a vector operand; of a scalar, a list of one."""
        elements = operand.elements if isinstance(operand, Vector) else (operand,)
        return [self.destination(element, bits, signed=signed) for element in elements]

    def pair(self, operand: Operand, first_bits: int) -> tuple[Destination, Destination]:
        """The two destinations of `r|p`; without `|p` the second is a sink."""
        if isinstance(operand, Pair):
            return self.destination(operand.first, first_bits), self.destination(operand.second, 1)
        return self.destination(operand, first_bits), self.destination(Sink(), 1)

    def address(self, operand: Operand) -> Source:
        """The byte address of `[base+offset]` in the space that the instruction names, uint64[32].

        32-bit bases are zero-extended after the offset was added; shared addresses are those of the cluster's
        window.
        """
        if not isinstance(operand, Address):
            self.unsupported(f"operand {operand} where an address is expected")
        offset = operand.offset
        base = operand.base
        if isinstance(base, Register):
            number = self.numbers[base.name]
            if width_of(base.type) == 64:
                if offset == 0:
                    return lambda warp: warp.registers[number]
                step = np.uint64(offset & (1 << 64) - 1)
                return lambda warp: warp.registers[number] + step
            small = np.uint32(offset & (1 << 32) - 1)
            return lambda warp: (warp.registers[number] + small).astype(np.uint64)
        read = self.source(base, 64)
        step = np.uint64(offset & (1 << 64) - 1)
        return lambda warp: read(warp) + step

    def _constant(self, operand: Immediate, bits: int) -> Source:
        if bits == 1:
            value = np.full(LANES, operand.value != 0)
        else:
            value = np.full(LANES, operand.value & ((1 << bits) - 1), DTYPES[bits])
        value.flags.writeable = False
        return lambda warp: value

    def _symbol(self, operand: Symbol, bits: int) -> Source:
        dtype = DTYPES[bits]
        space, at = self.symbol(operand.name)
        if space == "shared":
            return lambda warp: np.full(LANES, warp.cta.shared_base + at, dtype)
        value = np.full(LANES, at, dtype)
        return lambda warp: value

    def symbol(self, name: str) -> tuple[str, int]:
        """The space of a variable or parameter and its address there.

        Raises:
            UnsupportedInstruction: There is no such variable.
        """
        if name not in self.symbols:
            self.unsupported(f"the symbol {name}")
        return self.symbols[name]


def _writer(number: int) -> Destination:
    def write(warp: Warp, values: NDArray[Any]) -> None:
        if not warp.full:
            values = np.where(warp.active, values, warp.registers[number])
        warp.registers[number] = values

    return write
