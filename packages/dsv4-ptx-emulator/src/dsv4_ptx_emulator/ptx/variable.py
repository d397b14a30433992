# SPDX-License-Identifier: Apache-2.0
"""Variables in state spaces, at module scope and in a kernel's body (PTX ISA 5.4)."""

from __future__ import annotations

import struct
from math import prod

from dsv4_ptx_emulator.errors import PtxSyntaxError
from dsv4_ptx_emulator.ptx.lexer import Token
from dsv4_ptx_emulator.ptx.module import Variable
from dsv4_ptx_emulator.ptx.stream import Stream

SPACES = frozenset({".shared", ".global", ".const", ".local"})
"""State spaces that a variable may be declared in."""


def type_bytes(name: str) -> int:
    """Bytes of a fundamental type given as ".b32", ".f16x2", ".u64"."""
    digits = name.lstrip(".abcdefghijklmnopqrstuvwxyz")
    return prod(int(part) for part in digits.split("x")) // 8


def parse_variable(stream: Stream, space: Token) -> Variable:
    """The rest of `.shared .align 16 .b8 name[128];` after its space."""
    align = size = 0
    while stream.peek().kind == "directive":
        word = stream.next()
        if word.text == ".align":
            align = int(stream.next().text)
        elif word.text == ".attribute":
            stream.skip_to(")")
        else:
            size = type_bytes(word.text)
    name = stream.next().text
    align = align or size
    element = size
    while stream.take("["):
        if not stream.take("]"):
            size *= int(stream.next().text)
            stream.expect("]")
        else:
            size = 0
    initial = None
    if stream.take("="):
        values = _initial_values(stream, space.line)
        initial = b"".join(value.to_bytes(element, "little") for value in values).ljust(size, b"\0")
    stream.expect(";")
    return Variable(name, space.text[1:], size, align, initial)


def _initial_values(stream: Stream, line: int) -> list[int]:
    if not stream.take("{"):
        return [_integer(stream, line)]
    values: list[int] = []
    while not stream.take("}"):
        values.append(_integer(stream, line))
        stream.take(",")
    return values


def _integer(stream: Stream, line: int) -> int:
    token = stream.next()
    if token.kind != "number":
        raise PtxSyntaxError(f"initial value {token.text!r} is not a number", line)
    if token.text[:2] in ("0f", "0F", "0d", "0D"):
        return int(token.text[2:], 16)
    if "." in token.text:
        return int(struct.unpack("<I", struct.pack("<f", float(token.text)))[0])
    return int(token.text.rstrip("U"), 0)
