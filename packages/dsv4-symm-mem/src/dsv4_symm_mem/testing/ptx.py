# SPDX-License-Identifier: Apache-2.0
"""Compile a kernel for an architecture that need not be present, and read the PTX that comes out.

CuTe DSL compiles down to PTX and a cubin without a GPU, its own `ptxas` included, so an instruction that the
architecture lacks or a malformed operand fails here and not on the first machine that has the GPU. The
architecture goes in as a compile option, not as `CUTE_DSL_ARCH`: the DSL reads that variable once, and a
process per architecture would pay for one import of the DSL each (a second) where a kernel takes a tenth of
that.

Trap: the DSL writes PTX to a directory that must exist; where it does not, nothing is written and no error
raised, and the artifact of the compiled function is a path instead of a text.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"^\s*\$?\w+:\s*", re.MULTILINE)
_SPACE = re.compile(r"\s+")


def compile_ptx(function: Callable[..., Any], arch: str, args: Sequence[Any] = (), options: str = "") -> str:
    """Compile a host function and the kernel that it launches; returns the PTX text.

    Args:
        function: A `@cute.jit` function that launches at least one kernel.
        arch: Target, such as "sm_90a" or "sm_100a".
        args: What `function` is called with: numbers of the DSL for scalars, `cute.runtime.make_fake_tensor`
            and `make_fake_stream` for what would be on a device, plain Python values for `Constexpr`
            parameters.
        options: Further options of `cute.compile`, as one string.

    Returns:
        The PTX of all kernels of the call, as the DSL's compiler printed it.

    Raises:
        RuntimeError: The compiler left no PTX.
        Exception: Whatever the DSL raises on code that it or its assembler refuses.
    """
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory(prefix="dsv4-ptx-") as directory:
        flags = f"--gpu-arch {arch} --keep-ptx --dump-dir {shlex.quote(directory)} {options}"
        cute.compile(function, *args, options=flags.strip())
        texts = [path.read_text() for path in sorted(Path(directory).glob("*.ptx"))]
    if not texts:
        raise RuntimeError(f"compiling {function!r} for {arch} left no PTX; does it launch a kernel?")
    return "\n".join(texts)


def instructions(ptx: str) -> list[str]:
    """The statements of a PTX text in order, without comments, labels, directives and superfluous space.

    Such as `"ld.global.b32 %r1, [%rd2]"`; a predicate stays in front.
    """
    body = _LABEL.sub("", _COMMENT.sub("", ptx))
    statements: list[str] = []
    for part in re.split(r"[;\n]|(?<=\s)[{}](?=\s)", body):
        statement = _SPACE.sub(" ", part).strip()
        if statement and statement[0] not in ".(){}":
            statements.append(statement)
    return statements


def opcodes(ptx: str) -> list[str]:
    """The opcode of each statement with its modifiers, no predicate, as `"ld.acquire.sys.global.b64"`."""
    return [re.sub(r"^@!?%\w+ ", "", statement).split(" ", 1)[0] for statement in instructions(ptx)]


def positions_in_order(sequence: Sequence[str], *wanted: str) -> list[int]:
    """Where the `wanted` occur in `sequence`, each after the one before.

    Raises:
        AssertionError: One of them is missing after its predecessor; names it and shows the sequence.
    """
    found: list[int] = []
    start = 0
    for item in wanted:
        try:
            position = sequence.index(item, start)
        except ValueError:
            listing = "\n  ".join(sequence)
            raise AssertionError(f"no {item!r} from position {start} on in\n  {listing}") from None
        found.append(position)
        start = position + 1
    return found
