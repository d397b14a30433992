# SPDX-License-Identifier: Apache-2.0
"""What a cubin says of its kernel's resources, and its machine code where a disassembler is installed.

A cubin is an ELF file; its section `.nv.info` lists attributes as (format, attribute, size, value), whose
names and numbers NVIDIA's `cuobjdump --dump-elf` prints. Registers and stack are read from there, so that
knowing them takes no tool.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dsv4_symm_mem.errors import ArgumentError

DISASSEMBLER = "nvidia-cuda-nvdisasm"
"""The distribution that brings `nvdisasm`."""
_SIZED = 4
_REGISTERS, _FRAME, _STACK = 0x2F, 0x11, 0x12


@dataclass(frozen=True)
class Resources:
    """Registers of a thread, and bytes of its stack, which is where spilled registers go."""

    registers: int
    stack_bytes: int


def resources_of(cubin: bytes) -> Resources:
    """The most that any function in `cubin` takes.

    Raises:
        ArgumentError: It is no cubin.
    """
    values: dict[int, list[int]] = {_REGISTERS: [], _FRAME: [], _STACK: []}
    for attribute, value in _attributes(_section(cubin, ".nv.info")):
        if attribute in values and len(value) == 8:
            values[attribute].append(struct.unpack("<2I", value)[1])
    if not values[_REGISTERS]:
        raise ArgumentError("cubin", f"{len(cubin)} bytes", "a cubin that says how many registers it takes")
    return Resources(max(values[_REGISTERS]), max([*values[_FRAME], *values[_STACK]], default=0))


def _section(cubin: bytes, wanted: str) -> bytes:
    if cubin[:4] != b"\x7fELF" or len(cubin) < 64:
        raise ArgumentError("cubin", cubin[:4], "an ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        if cubin[start : cubin.index(b"\0", start)].decode() == wanted:
            return cubin[offset : offset + length]
    raise ArgumentError("cubin", f"{count} sections", f"a section {wanted}")


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == _SIZED:
            yield attribute, data[at : at + size]
            at += size


def disassembler() -> Path | None:
    """`nvdisasm`, from its distribution or from PATH; None where it is not installed."""
    try:
        files = metadata.files(DISASSEMBLER) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nvdisasm", "nvdisasm.exe"):
            return Path(str(file.locate()))
    found = shutil.which("nvdisasm")
    return Path(found) if found else None


def disassemble(cubin: bytes, program: Path) -> str:
    """The machine code as text.

    Raises:
        ArgumentError: The disassembler does not understand it; says what it printed.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, "-c", file.name], check=False, capture_output=True, text=True)
    if done.returncode:
        raise ArgumentError("cubin", done.stderr.strip()[:200], f"what {program} understands")
    return done.stdout
