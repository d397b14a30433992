# SPDX-License-Identifier: Apache-2.0
"""A kernel's body: declarations, scopes, labels, instructions with their operands.

Registers and labels that an inner scope declares get the scope's number behind an `@`, so names are unique in
the kernel. A label may be used before it stands there, and the same name may stand in many scopes (inline
assembly does both), so labels are collected scope by scope before the instructions are read.
"""

from __future__ import annotations

import re
import struct

from dsv4_ptx_emulator.errors import PtxSyntaxError
from dsv4_ptx_emulator.ptx.module import (
    CARRY,
    Address,
    Guard,
    Immediate,
    Instruction,
    Label,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from dsv4_ptx_emulator.ptx.stream import Stream
from dsv4_ptx_emulator.ptx.variable import SPACES, parse_variable

_SPECIAL = re.compile(
    r"%(n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)(\.[xyz])?|%(laneid|n?warpid|n?smid|gridid|cluster_n?ctarank"
    r"|is_explicit_cluster|lanemask_(eq|le|lt|ge|gt)|clock|clock_hi|clock64|pm\d(_64)?|globaltimer(_lo|_hi)?"
    r"|envreg\d+|(total|aggr|dynamic)_smem_size|reserved_smem_\w+|current_graph_exec)"
)
"""All special registers of PTX ISA 10, supported or not; any other name with a % must have been declared."""


class Body:
    """What a body declares and does."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.registers: dict[str, Register] = {CARRY.name: CARRY}
        self.variables: list[Variable] = []


class _Scope:
    def __init__(self, number: int, outer: _Scope | None, labels: dict[int, set[str]]) -> None:
        self.number = number
        self.outer = outer
        self.registers: dict[str, Register] = {}
        self.labels = labels.get(number, set())

    def unique(self, name: str) -> str:
        return f"{name}@{self.number}" if self.number else name

    def register(self, name: str) -> Register | None:
        scope: _Scope | None = self
        while scope is not None:
            found = scope.registers.get(name)
            if found is not None:
                return found
            scope = scope.outer
        return None

    def label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.unique(name)
            scope = scope.outer
        return None


def parse_body(stream: Stream, symbols: set[str]) -> Body:
    """Everything up to the brace that closes the body; the opening one has been read.

    Args:
        stream: At the first token of the body.
        symbols: Names of module variables and of the kernel's parameters.

    Raises:
        PtxSyntaxError: A statement or operand is malformed, or a name is unknown.
    """
    return _Parser(stream, set(symbols)).run()


def _labels_by_scope(stream: Stream) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    stack, count, at = [0], 0, stream.position
    tokens = stream.tokens
    opens: list[bool] = []
    before = ";"
    while tokens[at].kind != "end":
        text = tokens[at].text
        if text == "{":
            # A brace at the beginning of a statement opens a scope, elsewhere a vector.
            statement = before in (";", "{", "}", ":")
            opens.append(statement)
            if statement:
                count += 1
                stack.append(count)
        elif text == "}":
            if not opens:
                break
            if opens.pop():
                stack.pop()
            else:
                text = ")"
        elif text == ":" and tokens[at - 1].kind == "word":
            found.setdefault(stack[-1], set()).add(tokens[at - 1].text)
        before = text
        at += 1
    return found


class _Parser:
    def __init__(self, stream: Stream, symbols: set[str]) -> None:
        self.stream = stream
        self.symbols = symbols
        self.body = Body()
        self.label_names = _labels_by_scope(stream)
        self.scope = _Scope(0, None, self.label_names)
        self.scopes = 0

    def run(self) -> Body:
        stream = self.stream
        while True:
            token = stream.next()
            if token.text == "{":
                self.scopes += 1
                self.scope = _Scope(self.scopes, self.scope, self.label_names)
            elif token.text == "}":
                if self.scope.outer is None:
                    return self.body
                self.scope = self.scope.outer
            elif token.kind == "directive":
                self._directive(token.text, token.line)
            elif token.text == "@":
                negated = stream.take("!")
                guard = Guard(self._register(stream.next().text, token.line), negated)
                self._instruction(stream.next().text, guard, token.line)
            elif token.kind == "word" and stream.take(":"):
                self.body.labels[self.scope.unique(token.text)] = len(self.body.instructions)
            elif token.kind == "word":
                self._instruction(token.text, None, token.line)
            elif token.text != ";":
                raise PtxSyntaxError(f"unexpected {token.text!r} in a body", token.line)

    def _directive(self, text: str, line: int) -> None:
        stream = self.stream
        if text == ".reg":
            self._registers(line)
        elif text in SPACES:
            stream.position -= 1
            variable = parse_variable(stream, stream.next())
            self.symbols.add(variable.name)
            self.body.variables.append(variable)
        elif text == ".pragma":
            stream.skip_to(";")
        elif text == ".loc":
            stream.skip_line(line)
        else:
            raise PtxSyntaxError(f"directive {text} in a body is not supported", line)

    def _registers(self, line: int) -> None:
        stream = self.stream
        type_name = stream.next().text[1:]
        if type_name in ("v2", "v4"):
            raise PtxSyntaxError("vector registers are not supported", line)
        while True:
            name = stream.next().text
            if stream.take("<"):
                for number in range(int(stream.next().text)):
                    self._declare(f"{name}{number}", type_name)
                stream.expect(">")
            else:
                self._declare(name, type_name)
            if stream.take(";"):
                return
            stream.expect(",")

    def _declare(self, name: str, type_name: str) -> None:
        register = Register(self.scope.unique(name), type_name)
        self.scope.registers[name] = register
        self.body.registers[register.name] = register

    def _register(self, name: str, line: int) -> Register:
        register = self.scope.register(name)
        if register is None:
            raise PtxSyntaxError(f"unknown register {name}", line)
        return register

    def _instruction(self, opcode: str, guard: Guard | None, line: int) -> None:
        stream = self.stream
        operands: list[Operand] = []
        if not stream.take(";"):
            operands.append(self._operand(line))
            while stream.take(","):
                operands.append(self._operand(line))
            stream.expect(";")
        self.body.instructions.append(Instruction(opcode, tuple(operands), guard, line))

    def _operand(self, line: int) -> Operand:
        stream = self.stream
        if stream.take("{"):
            return Vector(self._list("}", line))
        if stream.take("("):
            return Vector(self._list(")", line))
        if stream.take("["):
            return self._address(line)
        if stream.take("!"):
            return Not(self._register(stream.next().text, line))
        operand = self._simple(line)
        if stream.take("|"):
            second = self._simple(line)
            if not isinstance(operand, Register | Sink) or not isinstance(second, Register | Sink):
                raise PtxSyntaxError("a pair of destinations must be registers", line)
            return Pair(operand, second)
        return operand

    def _list(self, end: str, line: int) -> tuple[Operand, ...]:
        elements: list[Operand] = []
        while not self.stream.take(end):
            elements.append(self._operand(line))
            self.stream.take(",")
        return tuple(elements)

    def _simple(self, line: int) -> Operand:
        stream = self.stream
        if stream.take("-"):
            value = self._number(line)
            if value.float_bits:
                return Immediate(value.value ^ 1 << value.float_bits - 1, value.float_bits)
            return Immediate(-value.value)
        token = stream.peek()
        if token.kind == "number":
            return self._number(line)
        stream.next()
        if token.kind != "word":
            raise PtxSyntaxError(f"unexpected {token.text!r} as an operand", line)
        name = token.text
        if name == "_":
            return Sink()
        register = self.scope.register(name)
        if register is not None:
            return register
        label = self.scope.label(name)
        if label is not None:
            return Label(label)
        if name in self.symbols:
            return Symbol(name)
        if _SPECIAL.fullmatch(name):
            return Special(name)
        raise PtxSyntaxError(f"unknown name {name}", line)

    def _number(self, line: int) -> Immediate:
        token = self.stream.next()
        if token.kind != "number":
            raise PtxSyntaxError(f"expected a number, found {token.text!r}", line)
        text = token.text
        if text[:2] in ("0f", "0F"):
            return Immediate(int(text[2:], 16), 32)
        if text[:2] in ("0d", "0D"):
            return Immediate(int(text[2:], 16), 64)
        if "." in text:
            # PTX ISA 4.5.2: a decimal floating constant is a double.
            return Immediate(int(struct.unpack("<Q", struct.pack("<d", float(text)))[0]), 64)
        text = text.rstrip("U")
        if len(text) > 1 and text[0] == "0" and text.isdigit():
            return Immediate(int(text, 8))
        return Immediate(int(text, 0))

    def _address(self, line: int) -> Address:
        stream = self.stream
        base = self._simple(line)
        if not isinstance(base, Register | Symbol | Immediate):
            raise PtxSyntaxError(f"{base} cannot be an address", line)
        offset = 0
        while not stream.take("]"):
            if stream.take("+"):
                sign = -1 if stream.take("-") else 1
                offset += sign * self._number(line).value
            elif stream.take("-"):
                offset -= self._number(line).value
            elif stream.take(","):
                coordinates = self._operand(line)
                elements = coordinates.elements if isinstance(coordinates, Vector) else (coordinates,)
                extra: list[Operand] = []
                while stream.take(","):
                    extra.append(self._operand(line))
                stream.expect("]")
                return Address(base, offset, elements, tuple(extra))
            else:
                raise PtxSyntaxError(f"unexpected {stream.peek().text!r} in an address", line)
        return Address(base, offset)
