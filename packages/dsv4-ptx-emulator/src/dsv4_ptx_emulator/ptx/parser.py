# SPDX-License-Identifier: Apache-2.0
"""PTX text to a `Module` (PTX ISA 4 to 5 and 11).

Reads what compilers emit for kernels: module directives, variables in the shared, global and const
spaces, entries with parameters and performance-tuning directives, scopes, labels, guards. Debug sections
and `.pragma` are skipped; functions with bodies are refused, since no kernel compiler that we run leaves
any behind.
"""

from __future__ import annotations

from dsv4_ptx_emulator.errors import PtxSyntaxError
from dsv4_ptx_emulator.ptx.body import parse_body
from dsv4_ptx_emulator.ptx.lexer import Token, tokens
from dsv4_ptx_emulator.ptx.module import Kernel, Module, Parameter, Variable
from dsv4_ptx_emulator.ptx.stream import Stream
from dsv4_ptx_emulator.ptx.variable import SPACES, parse_variable, type_bytes

_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_PERFORMANCE = {
    ".reqntid",
    ".maxntid",
    ".minnctapersm",
    ".maxnctapersm",
    ".maxnreg",
    ".explicitcluster",
    ".reqnctapercluster",
    ".maxclusterrank",
    ".blocksareclusters",
    ".noreturn",
}


def parse(text: str) -> Module:
    """Parse a whole text.

    Raises:
        PtxSyntaxError: It is not PTX as this parser knows it.
    """
    stream = Stream(tokens(text))
    version, target = (0, 0), ""
    variables: list[Variable] = []
    kernels: dict[str, Kernel] = {}
    while not stream.at_end():
        token = stream.next()
        if token.text == ".version":
            major, _, minor = stream.next().text.partition(".")
            version = (int(major), int(minor))
        elif token.text == ".target":
            target = stream.next().text
            while stream.take(","):
                stream.next()
        elif token.text == ".address_size":
            if stream.next().text != "64":
                raise PtxSyntaxError("only 64-bit addresses are supported", token.line)
        elif token.text in _LINKAGE:
            continue
        elif token.text in SPACES:
            variables.append(parse_variable(stream, token))
        elif token.text == ".entry":
            kernel = _parse_entry(stream, tuple(variables))
            kernels[kernel.name] = kernel
        elif token.text == ".func":
            _skip_declaration(stream, token)
        elif token.text == ".section":
            while stream.next().text != "{":
                pass
            _skip_braces(stream)
        elif token.text in (".file", ".loc"):
            stream.skip_line(token.line)
        elif token.text == ".pragma":
            stream.skip_to(";")
        else:
            raise PtxSyntaxError(f"unexpected {token.text!r} at module scope", token.line)
    return Module(version, target, tuple(variables), kernels)


def _parse_entry(stream: Stream, variables: tuple[Variable, ...]) -> Kernel:
    name = stream.next().text
    parameters: list[Parameter] = []
    offset = 0
    if stream.take("("):
        while not stream.take(")"):
            parameter = _parse_parameter(stream, offset)
            parameters.append(parameter)
            offset = parameter.offset + parameter.size
            stream.take(",")
    directives: dict[str, tuple[int, ...]] = {}
    while not stream.take("{"):
        token = stream.next()
        if token.text == ".pragma":
            stream.skip_to(";")
            continue
        if token.text not in _PERFORMANCE:
            raise PtxSyntaxError(f"unexpected {token.text!r} in front of a kernel's body", token.line)
        numbers: list[int] = []
        while stream.peek().kind == "number":
            numbers.append(int(stream.next().text))
            stream.take(",")
        directives[token.text[1:]] = tuple(numbers)
    body = parse_body(stream, {variable.name for variable in variables} | {p.name for p in parameters})
    return Kernel(
        name,
        tuple(parameters),
        directives,
        tuple(body.instructions),
        body.labels,
        body.registers,
        tuple(body.variables),
    )


def _parse_parameter(stream: Stream, offset: int) -> Parameter:
    line = stream.expect(".param").line
    align = size = 0
    while stream.peek().kind == "directive":
        word = stream.next().text
        if word == ".align":
            # With .ptr the alignment is that of what the pointer points to.
            wanted = int(stream.next().text)
            align = align or wanted
        elif word == ".ptr":
            align = size
        elif word not in SPACES and word != ".param":
            size = type_bytes(word)
    name = stream.next().text
    align = align or size
    if stream.take("["):
        size *= int(stream.next().text)
        stream.expect("]")
    if not size:
        raise PtxSyntaxError(f"parameter {name} has no size", line)
    return Parameter(name, size, align, -(-offset // align) * align)


def _skip_declaration(stream: Stream, token: Token) -> None:
    while (text := stream.next().text) != ";":
        if text == "{" or stream.at_end():
            raise PtxSyntaxError("functions with bodies are not supported", token.line)


def _skip_braces(stream: Stream) -> None:
    depth = 1
    while depth:
        text = stream.next().text
        depth += (text == "{") - (text == "}")
