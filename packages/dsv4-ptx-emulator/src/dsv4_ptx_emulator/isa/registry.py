# SPDX-License-Identifier: Apache-2.0
"""The table of instructions: one decorator, one entry per (prefix of an) opcode.

    @instruction("mbarrier.try_wait", section="9.7.15.16.19", observable=True)
    def try_wait(instruction: Instruction, context: DecodeContext) -> Step: ...

A handler runs once per instruction of a module, checks every modifier (`context.unsupported` for one that
it does not implement) and returns the closure that executes it: `step(warp) -> Outcome | None`, for the
lanes of `warp.active` (NumPy bool[32]; never empty). The opcode is matched by its longest registered
prefix of whole dotted words; `instruction.modifiers` are the words after that prefix. Predicates (`@p`)
are applied around the step by the decoder: a handler never looks at the guard.

Register-only arithmetic does not use steps but expressions (isa/emit.py), which the decoder fuses into one
function per straight-line run.

`.aligned` opcodes run only with all lanes of the warp; the decoder sees to it.

`observable` marks what another agent could notice or influence: the scheduler may switch agents only there.
Mark everything that reads or writes shared or global memory, or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv4_ptx_emulator.errors import UnsupportedInstruction
from dsv4_ptx_emulator.machine.outcome import Outcome

if TYPE_CHECKING:
    from dsv4_ptx_emulator.isa.context import DecodeContext
    from dsv4_ptx_emulator.machine.warp import Warp
    from dsv4_ptx_emulator.ptx.module import Instruction

Step = Callable[["Warp"], Outcome | None]
Handler = Callable[["Instruction", "DecodeContext"], Step]


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered instruction.

    Attributes:
        prefix: Leading words of the opcode, such as "mbarrier.try_wait".
        section: Section of the PTX ISA text (9.4) that the implementation follows.
        handler: Decodes one instruction into a step; None for an expression (see isa/emit.py).
        observable: Whether another agent could notice it.
        summary: First line of the handler's docstring, for the generated documentation.
    """

    prefix: str
    section: str
    handler: Handler | None
    observable: bool
    summary: str


_ENTRIES: dict[str, Entry] = {}


def instruction(*prefixes: str, section: str, observable: bool = False) -> Callable[[Handler], Handler]:
    """Register the decorated handler for opcodes that begin with one of `prefixes`."""

    def register(handler: Handler) -> Handler:
        for prefix in prefixes:
            add_entry(Entry(prefix, section, handler, observable, _first_line(handler)))
        return handler

    return register


def add_entry(entry: Entry) -> None:
    """Add an entry; used by `instruction` and by the expression table.

    Raises:
        ValueError: The prefix is registered already.
    """
    if entry.prefix in _ENTRIES:
        raise ValueError(f"{entry.prefix} is registered twice")
    _ENTRIES[entry.prefix] = entry


def find(opcode: str, line: int) -> Entry:
    """The entry with the longest prefix of `opcode`'s words.

    Raises:
        UnsupportedInstruction: No registered prefix matches.
    """
    words = opcode.split(".")
    for count in range(len(words), 0, -1):
        entry = _ENTRIES.get(".".join(words[:count]))
        if entry is not None:
            return entry
    raise UnsupportedInstruction(opcode, "the instruction", line)


def entries() -> Iterator[Entry]:
    """All entries in alphabetical order of their prefixes."""
    return iter(sorted(_ENTRIES.values(), key=lambda entry: entry.prefix))


def _first_line(handler: Handler) -> str:
    return (handler.__doc__ or "").strip().split("\n", 1)[0]
