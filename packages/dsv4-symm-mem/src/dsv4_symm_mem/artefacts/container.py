# SPDX-License-Identifier: Apache-2.0
"""One artefact as one file: an object file with what belongs to it behind.

Contract: `pack` and `unpack` are inverse, and `unpack` refuses whatever is not, to the last bit, what `pack`
made. Layout: the ELF object; the kernel's PTX, deflated; facts as JSON; a footer with the two sizes, the
SHA-256 of all before and a magic number. ELF finds everything from its first bytes, so linkers, loaders and
`objdump` take the file as the object that it begins with, and a rename replaces all of it at once.

The PTX is there for who wants to read or emulate what a server runs, which a cubin alone does not allow; it
is a sixth of the file. Where the cubin lies in the object is among the facts.

Rejected: a folder for each artefact (not replaced in one step); pickles (they run code when read).
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAGIC = b"dsv4art1"
_SIZES = struct.Struct("<QQ")
_FOOTER = _SIZES.size + hashlib.sha256().digest_size + len(MAGIC)


class DamagedError(ValueError):
    """A file is no artefact, or not all of one; the text says how that shows."""


@dataclass(frozen=True)
class Artefact:
    """A compiled kernel.

    Attributes:
        object: ELF object file with the host function and, in its data, the cubin.
        ptx: PTX of the kernel.
        facts: What it was made from, see `ArtefactKey`, and `cubin`: offset and size in `object`.
    """

    object: bytes
    ptx: str
    facts: Mapping[str, Any]

    @property
    def cubin(self) -> bytes:
        """The machine code."""
        offset, size = self.facts["cubin"]
        return self.object[offset : offset + size]


def pack(artefact: Artefact) -> bytes:
    """The bytes of an artefact's file."""
    text = zlib.compress(artefact.ptx.encode())
    facts = json.dumps(artefact.facts, sort_keys=True).encode()
    body = artefact.object + text + facts + _SIZES.pack(len(text), len(facts))
    return body + hashlib.sha256(body).digest() + MAGIC


def unpack(content: bytes) -> Artefact:
    """The artefact in a file's bytes.

    Raises:
        DamagedError: `pack` did not write these bytes.
    """
    if len(content) < _FOOTER or not content.endswith(MAGIC):
        raise DamagedError("it does not end like an artefact")
    body = content[: -len(MAGIC) - 32]
    if hashlib.sha256(body).digest() != content[len(body) : -len(MAGIC)]:
        raise DamagedError("its checksum is wrong")
    end = len(body) - _SIZES.size
    text_bytes, fact_bytes = _SIZES.unpack_from(body, end)
    facts = end - fact_bytes
    text = facts - text_bytes
    if text < 0:
        raise DamagedError("its sizes are wrong")
    return Artefact(body[:text], zlib.decompress(body[text:facts]).decode(), json.loads(body[facts:end]))
