# SPDX-License-Identifier: Apache-2.0
"""A box of a tensor and its image in shared memory: which bytes a tensor copy reads and writes.

The image consists of rows of the box's inner size, dimension 1 fastest. Without swizzle rows follow each
other at once; with swizzle they are as far apart as the swizzle's row is wide, also where the box is narrower
(seen on an H200, where a barrier counts the box's bytes all the same). The swizzle then moves 16-byte chunks
by their shared-memory address (PTX ISA 9.4, sections 5.5.3 to 5.5.7). Elements outside of the tensor arrive
as the fill value and are not stored. A loaded box may begin outside of the tensor; a stored one must not
begin at a negative coordinate, and the innermost coordinate must be a multiple of 16 bytes in either
direction: an H200 ends the kernel with an illegal instruction otherwise.

All is index arithmetic on whole pieces: one gather and one scatter in the widest unit (16 bytes down to an
element's) that the sizes allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dsv4_ptx_emulator.formats.swizzle import Swizzle
from dsv4_ptx_emulator.formats.tensor_map import TensorMap

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.agent import AsyncAgent
    from dsv4_ptx_emulator.machine.memory import Memory
    from dsv4_ptx_emulator.machine.observer import AccessKind

    Combine = Callable[[npt.NDArray[Any], npt.NDArray[Any]], npt.NDArray[Any]]

_NAN = b"\xf7\x7f"
"""What out-of-bounds bytes are with NaN fill, whatever the element's size; as an H200 does it."""


@lru_cache(maxsize=256)
def _row_offsets(box: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Offsets of a box's rows in dimensions 1 and up: int64 [rows, rank - 1], dimension 1 fastest."""
    outer = box[1:]
    flat = np.arange(prod(outer), dtype=np.int64)
    columns = []
    for size in outer:
        columns.append(flat % size)
        flat = flat // size
    rows = np.stack(columns, axis=1) if columns else np.zeros((1, 0), np.int64)
    rows.setflags(write=False)
    return rows


@lru_cache(maxsize=512)
def _chunks(start: int, rows: int, row_bytes: int, pitch: int, bits: int) -> npt.NDArray[np.uint64]:
    """Addresses of the image's 16-byte chunks: uint64 [rows, row_bytes / 16]."""
    row, chunk = np.arange(rows, dtype=np.int64)[:, None], np.arange(row_bytes // 16, dtype=np.int64)[None, :]
    linear = start + row * pitch + chunk * 16
    addresses = Swizzle(bits).apply(linear).astype(np.uint64)
    addresses.setflags(write=False)
    return addresses


@dataclass(frozen=True, slots=True)
class Box:
    """One tensor copy's box.

    Attributes:
        tensor: The tensor map.
        coordinates: Of the box's first element, innermost first.
        start: Address of the image in the cluster's shared window.
    """

    tensor: TensorMap
    coordinates: tuple[int, ...]
    start: int

    @property
    def rows(self) -> int:
        """Rows of the image."""
        return prod(self.tensor.box[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.tensor.box[0] * self.tensor.element_bytes

    @property
    def pitch(self) -> int:
        """Bytes from row to row of the image."""
        pattern = self.tensor.swizzle
        return pattern.row_bytes if pattern.bits else self.row_bytes

    @property
    def image_bytes(self) -> int:
        """Bytes from the image's first to its last."""
        return (self.rows - 1) * self.pitch + self.row_bytes

    def load(
        self, low: int, high: int, memory: Memory, agent: AsyncAgent, kind: AccessKind
    ) -> npt.NDArray[np.uint64]:
        """Read rows `low` to `high` of the box from the tensor.

        Returns:
            uint64 `[chunks, 2]`, in the order that `deposit` takes.

        Raises:
            OutOfBoundsError: The tensor map describes memory that is not there.
        """
        inside, addresses, first, width = self._elements(low, high)
        shape = (high - low, self.row_bytes)
        if inside.all() and addresses.shape[1] * width == self.row_bytes:
            data = memory.gather(addresses.reshape(-1), min(width, 8), max(width // 8, 1), agent, kind)
            return np.ascontiguousarray(data).view(np.uint64).reshape(-1, 2)
        image = np.zeros(shape, np.uint8)
        if self.tensor.nan_fill:
            image[:] = np.frombuffer(_NAN * (self.row_bytes // 2), np.uint8)
        if addresses.size:
            data = memory.gather(addresses.reshape(-1), min(width, 8), max(width // 8, 1), agent, kind)
            found = np.ascontiguousarray(data).view(np.uint8).reshape(len(addresses), -1)
            image[inside, first : first + found.shape[1]] = found
        return image.view(np.uint64).reshape(-1, 2)

    def deposit(
        self,
        low: int,
        high: int,
        data: npt.NDArray[np.uint64],
        memory: Memory,
        agent: AsyncAgent,
        kind: AccessKind,
        window: int = 0,
    ) -> None:
        """Write rows `low` to `high` of the image, `window` bytes further (in another CTA of the cluster)."""
        addresses = self._chunks(window)
        memory.scatter(addresses[low:high].reshape(-1), data, agent, kind)

    def collect(
        self, low: int, high: int, memory: Memory, agent: AsyncAgent, kind: AccessKind
    ) -> npt.NDArray[np.uint64]:
        """Read rows `low` to `high` of the image: uint64 `[chunks, 2]`."""
        addresses = self._chunks()
        return memory.gather(addresses[low:high].reshape(-1), 8, 2, agent, kind)

    def store(
        self,
        low: int,
        high: int,
        data: npt.NDArray[np.uint64],
        memory: Memory,
        agent: AsyncAgent,
        kind: AccessKind,
        combine: Combine | None = None,
    ) -> None:
        """Write rows `low` to `high` to the tensor, or combine them with what is there.

        Args:
            low: First row.
            high: One past the last.
            data: What `collect` returned.
            memory: Global memory.
            agent: Who does it.
            kind: For which instruction.
            combine: For a reduction: old and new elements, uint8 `[elements, bytes]` each, to what is
                written.
        """
        inside, addresses, first, width = self._elements(low, high)
        if not addresses.size:
            return
        columns = addresses.shape[1] * width
        image = np.ascontiguousarray(data).view(np.uint8).reshape(high - low, self.row_bytes)
        part = np.ascontiguousarray(image[inside, first : first + columns])
        flat = addresses.reshape(-1)
        if combine is not None:
            size = self.tensor.element_bytes
            old = memory.gather(flat, min(width, 8), max(width // 8, 1), agent, kind)
            old = np.ascontiguousarray(old).view(np.uint8).reshape(-1, size)
            part = combine(old, part.reshape(-1, size))
        values = np.ascontiguousarray(part).reshape(-1).view(f"u{min(width, 8)}")
        memory.scatter(flat, values.reshape(-1, 2) if width == 16 else values, agent, kind)

    def _chunks(self, window: int = 0) -> npt.NDArray[np.uint64]:
        return _chunks(self.start + window, self.rows, self.row_bytes, self.pitch, self.tensor.swizzle.bits)

    def _elements(
        self, low: int, high: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint64], int, int]:
        """Which rows are in the tensor; addresses of what is; its first byte in a row; bytes per address."""
        tensor = self.tensor
        places = _row_offsets(tensor.box)[low:high] + np.array(self.coordinates[1:], np.int64)
        sizes = np.array(tensor.sizes[1:], np.int64)
        inside: npt.NDArray[np.bool_] = np.all((places >= 0) & (places < sizes), axis=1)
        start = self.coordinates[0]
        first = max(0, -start)
        last = max(first, min(tensor.box[0], tensor.sizes[0] - start))
        size = tensor.element_bytes
        base = tensor.address + (start + first) * size
        length = (last - first) * size
        width = 16
        while (base | length) % width:
            width //= 2
        rows = places[inside] @ np.array(tensor.strides[1:], np.int64)
        steps = np.arange(length // width, dtype=np.int64) * width
        addresses = (base + rows[:, None] + steps[None, :]).astype(np.uint64)
        return inside, addresses, first * size, width
