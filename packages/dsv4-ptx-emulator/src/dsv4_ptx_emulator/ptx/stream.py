# SPDX-License-Identifier: Apache-2.0
"""A cursor over tokens."""

from __future__ import annotations

from dsv4_ptx_emulator.errors import PtxSyntaxError
from dsv4_ptx_emulator.ptx.lexer import Token


class Stream:
    """Tokens, the last of kind "end", and a position among them."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.position = 0

    def peek(self, ahead: int = 0) -> Token:
        """The token `ahead` of the next one, or the last."""
        return self.tokens[min(self.position + ahead, len(self.tokens) - 1)]

    def at_end(self) -> bool:
        """Whether nothing is left."""
        return self.peek().kind == "end"

    def next(self) -> Token:
        """Take one token.

        Raises:
            PtxSyntaxError: Nothing is left.
        """
        token = self.peek()
        if token.kind == "end":
            raise PtxSyntaxError("the text ends in the middle of something", token.line)
        self.position += 1
        return token

    def take(self, text: str) -> bool:
        """Take the next token if it is `text`."""
        if self.peek().text != text:
            return False
        self.position += 1
        return True

    def expect(self, text: str) -> Token:
        """Take the next token, which must be `text`.

        Raises:
            PtxSyntaxError: It is not.
        """
        token = self.peek()
        if token.text != text:
            raise PtxSyntaxError(f"expected {text!r}, found {token.text!r}", token.line)
        self.position += 1
        return token

    def skip_to(self, text: str) -> None:
        """Take everything up to and including the next `text`."""
        while self.next().text != text:
            pass

    def skip_line(self, line: int) -> None:
        """Take what is left of a line."""
        while not self.at_end() and self.peek().line == line:
            self.position += 1
