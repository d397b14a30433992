# SPDX-License-Identifier: Apache-2.0
"""Instructions and loops of a kernel's text, PTX or machine code.

Contract: a loop is what lies between the target of a backward branch and that branch. Code that the assembler
has moved elsewhere (the second and later tries of a wait, as a rule) is not in it, so a count is that of a
turn in which nothing has to be waited for.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_SASS_LABEL = re.compile(r"^(\.L\w*):", re.MULTILINE)
_SASS_TARGET = re.compile(r"\((\.L\w*)\)")
_PTX_LABEL = re.compile(r"^\s*(\$?\w+):\s*$")
_PTX_STATEMENT = re.compile(r"^(?:@!?%?\w+\s+)?([a-z][\w.:]*)\s*(.*)$")


@dataclass(frozen=True)
class Listing:
    """A kernel's instructions in order.

    Attributes:
        opcodes: With their modifiers.
        loops: Positions of each loop's instructions, shortest first.
    """

    opcodes: tuple[str, ...]
    loops: tuple[range, ...]

    def loop_around(self, pattern: str) -> Counter[str] | None:
        """Opcodes of the shortest loop with an instruction that `pattern` matches from its start, or None."""
        for loop in self.loops:
            codes = self.opcodes[loop.start : loop.stop]
            if any(re.match(pattern, code) for code in codes):
                return Counter(codes)
        return None

    def matching(self, pattern: str) -> Counter[str]:
        """The opcodes that `pattern` matches from their start, with their number."""
        return Counter(code for code in self.opcodes if re.match(pattern, code))


def listing_of_sass(text: str) -> Listing:
    """The listing of one kernel as `nvdisasm -c` prints it."""
    codes: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := _SASS_LABEL.match(line):
            labels[label[1]] = len(codes)
        elif found := _SASS.search(line):
            if found[1].startswith("BRA") and (target := _SASS_TARGET.search(found[2])):
                branches.append((len(codes), target[1]))
            codes.append(found[1])
    return _listing(codes, labels, branches)


def listing_of_ptx(text: str) -> Listing:
    """The listing of one kernel's PTX; directives and braces are no instructions."""
    codes: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    body = re.sub(r"//[^\n]*", "", text)
    for part in re.split(r"[;\n{]|}(?=\s)", body):
        if label := _PTX_LABEL.match(part):
            labels[label[1]] = len(codes)
        elif found := _PTX_STATEMENT.match(part.strip()):
            if found[1].split(".")[0] == "bra":
                branches.append((len(codes), found[2].strip()))
            codes.append(found[1])
    return _listing(codes, labels, branches)


def _listing(codes: list[str], labels: dict[str, int], branches: list[tuple[int, str]]) -> Listing:
    loops = [
        range(labels[target], branch + 1)
        for branch, target in branches
        if target in labels and labels[target] <= branch
    ]
    return Listing(tuple(codes), tuple(sorted(loops, key=len)))
