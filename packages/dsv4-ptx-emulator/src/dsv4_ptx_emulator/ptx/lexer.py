# SPDX-License-Identifier: Apache-2.0
"""PTX text to tokens (PTX ISA 4). An opcode with all of its modifiers is one token, and so is `%tid.x`."""

from __future__ import annotations

import re
from typing import NamedTuple

from dsv4_ptx_emulator.errors import PtxSyntaxError

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r]+|//[^\n]*)
  | (?P<comment>/\*.*?\*/)
  | (?P<newline>\n)
  | (?P<string>"[^"\n]*")
  | (?P<number>0[fF][0-9a-fA-F]{8}(?![0-9a-fA-F])|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
      |[0-9]+\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+U?)
  | (?P<word>[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*)
  | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<mark>[{}()\[\],;:@!|+\-<>=])
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """One token.

    Attributes:
        kind: "word", "directive", "number", "string", "mark" or "end".
        text: As written.
        line: Counted from 1.
    """

    kind: str
    text: str
    line: int


def tokens(text: str) -> list[Token]:
    """All tokens of a text, then one of kind "end".

    Raises:
        PtxSyntaxError: A character belongs to no token.
    """
    found: list[Token] = []
    line, at = 1, 0
    match = _TOKEN.match
    while at < len(text):
        hit = match(text, at)
        if hit is None:
            raise PtxSyntaxError(f"unexpected {text[at : at + 20]!r}", line)
        kind = str(hit.lastgroup)
        at = hit.end()
        if kind == "newline":
            line += 1
        elif kind == "comment":
            line += hit.group().count("\n")
        elif kind != "space":
            found.append(Token(kind, hit.group(), line))
    found.append(Token("end", "", line))
    return found
