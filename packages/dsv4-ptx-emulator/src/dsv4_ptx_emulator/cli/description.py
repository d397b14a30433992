# SPDX-License-Identifier: Apache-2.0
"""A launch description: PTX with explicit parameters, in TOML, for kernels without a host function.

    ptx = "kernel.ptx"            # beside this file
    [[buffer]]
    name = "x"
    shape = [64]
    dtype = "float32"             # a NumPy type; default uint8
    rank = 0                      # whose memory; default 0
    shared = false                # whether all ranks may touch it
    fill = "count"                # "zero" (default), "count" or "random"; or load = "x.npy"
    save = "x_after.npy"          # written when all is done
    [[launch]]
    entry = "kernel"
    grid = [2, 1, 1]              # like block and cluster: one to three numbers; default 1
    block = [32]
    cluster = [1]
    shared_bytes = 0
    rank = 0
    stream = 0
    pdl = false
    parameters = ["u64 x", "u32 5", "f32 0.5", "hex 00ff"]   # "u64 <buffer>" is its address

Parameters are laid out as the kernel declares them. Several launches run as their streams and the seed say.
"""

from __future__ import annotations

import struct
import tomllib
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dsv4_ptx_emulator.errors import ArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.ptx.module import Kernel
    from dsv4_ptx_emulator.runtime.system import System

FORMATS = {
    "u8": "<B", "s8": "<b", "u16": "<H", "s16": "<h", "u32": "<I", "s32": "<i", "u64": "<Q", "s64": "<q",
    "f32": "<f", "f64": "<d",
}  # fmt: skip


@dataclass
class Description:
    """A launch description that has been read.

    Attributes:
        table: The TOML table.
        folder: What file names in it are relative to.
        ptx: The PTX text.
    """

    table: dict[str, Any]
    folder: Path
    ptx: str
    buffers: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many ranks it speaks of."""
        return 1 + max(int(each.get("rank", 0)) for each in [*self._buffers, *self._launches])

    @property
    def _buffers(self) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self.table.get("buffer", []))

    @property
    def _launches(self) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self.table.get("launch", []))

    def run(self, system: System, seed: int) -> None:
        """Make the buffers, queue the launches, execute them, save what is to be saved.

        Raises:
            ArgumentError: The description contradicts itself or the PTX.
            EmulatorError: What the emulator found.
        """
        kernels = system.emulator.load(self.ptx).kernels
        chance = np.random.default_rng(seed)
        leases = []
        for each in self._buffers:
            data = _filled(each, self.folder, chance)
            self.buffers[each["name"]] = data
            rank = int(each.get("rank", 0))
            leases.append(system.memory.lease(data, home=rank, shared=bool(each.get("shared", False))))
        for each in self._launches:
            kernel = kernels.get(each["entry"])
            if kernel is None:
                raise ArgumentError("entry", each["entry"], f"one of {', '.join(kernels)}")
            system.emulator.launch(
                self.ptx,
                kernel.name,
                grid=_extent(each, "grid"),
                block=_extent(each, "block"),
                cluster=_extent(each, "cluster") if "cluster" in each else None,
                shared_bytes=int(each.get("shared_bytes", 0)),
                parameters=self._parameter_block(kernel, each.get("parameters", [])),
                rank=int(each.get("rank", 0)),
                stream=int(each.get("stream", 0)),
                dependent=bool(each.get("pdl", False)),
            )
        system.run()
        for lease in leases:
            system.memory.release(lease)
        for each in self._buffers:
            if "save" in each:
                np.save(self.folder / each["save"], self.buffers[each["name"]])

    def _parameter_block(self, kernel: Kernel, given: list[str]) -> bytes:
        if len(given) != len(kernel.parameters):
            raise ArgumentError(
                "parameters", len(given), f"{len(kernel.parameters)}, as {kernel.name} declares"
            )
        block = bytearray(kernel.parameter_bytes)
        for parameter, text in zip(kernel.parameters, given, strict=True):
            value = self._encoded(text)
            if len(value) != parameter.size:
                raise ArgumentError("parameters", text, f"{parameter.size} bytes for {parameter.name}")
            block[parameter.offset : parameter.offset + parameter.size] = value
        return bytes(block)

    def _encoded(self, text: str) -> bytes:
        kind, _, value = text.partition(" ")
        try:
            if kind == "hex":
                return bytes.fromhex(value)
            if value in self.buffers:
                return struct.pack(FORMATS[kind], self.buffers[value].ctypes.data)
            return struct.pack(FORMATS[kind], float(value) if kind.startswith("f") else int(value, 0))
        except (KeyError, ValueError, struct.error):
            kinds = ", ".join([*FORMATS, "hex"])
            raise ArgumentError("parameters", text, f"one of {kinds}, then a number or a buffer") from None


def read_description(path: Path) -> Description:
    """Read a launch description.

    Raises:
        ArgumentError: It is not TOML, or lacks something.
        OSError: A file cannot be read.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError("description", str(path), f"TOML ({error})") from None
    missing = [name for name in ("ptx", "launch") if name not in table]
    missing += ["buffer.name" for each in table.get("buffer", []) if "name" not in each]
    missing += ["launch.entry" for each in table.get("launch", []) if "entry" not in each]
    if missing:
        raise ArgumentError("description", str(path), f"{', '.join(missing)} as well")
    return Description(table, path.parent, (path.parent / table["ptx"]).read_text(encoding="utf-8"))


def _filled(entry: dict[str, Any], folder: Path, chance: np.random.Generator) -> NDArray[Any]:
    if "load" in entry:
        return np.ascontiguousarray(np.load(folder / entry["load"]))
    try:
        dtype = np.dtype(entry.get("dtype", "uint8"))
    except TypeError:
        raise ArgumentError("dtype", entry["dtype"], "a NumPy type") from None
    shape = [int(extent) for extent in entry.get("shape", [1])]
    fill = entry.get("fill", "zero")
    if fill == "zero":
        return np.zeros(shape, dtype)
    if fill == "count":
        return np.arange(prod(shape)).astype(dtype).reshape(shape)
    if fill == "random":
        if dtype.kind == "f":
            return chance.standard_normal(shape).astype(dtype)
        return np.frombuffer(chance.bytes(prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()
    raise ArgumentError("fill", fill, "zero, count or random")


def _extent(entry: dict[str, Any], name: str) -> tuple[int, int, int]:
    given = entry.get(name, [1])
    values = [given] if isinstance(given, int) else list(given)
    if not 1 <= len(values) <= 3:
        raise ArgumentError(name, given, "one to three numbers")
    x, y, z = [int(value) for value in (*values, 1, 1)][:3]
    return x, y, z
