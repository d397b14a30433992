# SPDX-License-Identifier: Apache-2.0
"""Where the operands of the tensor core lie, and how to read them (PTX ISA 9.4, section 9.7.18.10).

Rows of D (and of A in tensor memory) in lanes, by shape (section 9.7.18.10.5):

* M = 128 of one CTA and M = 256 of a pair (layouts D and A): row r of a CTA's 128 rows is lane r;
* M = 64 of one CTA (layout F): row r is lane 32·(r / 16) + r % 16, or 16 lanes further, as D's address
  says;
* M = 128 of a pair (layout B): each CTA has 64 rows, those of the left half of the columns in lanes 0 to
  63, of the right half in lanes 64 to 127, at the same columns of tensor memory.

Scale factors, one byte each (section 9.7.18.10.7, scale_vec::1X): of row r of A (column r of B) it is in
column r / 32 behind the operand's first, lane r % 32 of each of the four partitions of 32 lanes, in the
byte that the instruction descriptor names. The four copies must be equal. Of a pair, each CTA has the
factors of its own rows of A and those of all columns of B. Bits 30 and 31 of a factor's address are
ignored; CuTe keeps the byte's number there.

Elements of 4 and 6 bits lie packed, 16 of them in the first 8 or 12 bytes of each 16 (section
9.7.18.10.4.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_ptx_emulator.errors import AsyncMisuseError
from dsv4_ptx_emulator.formats.floats import UE8M0, FloatFormat, decode
from dsv4_ptx_emulator.formats.matrix import descriptor_chunks, elements_from_chunks
from dsv4_ptx_emulator.machine.cta import SHARED_STRIDE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.formats.matrix import MatrixDescriptor
    from dsv4_ptx_emulator.machine.agent import AsyncAgent
    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.observer import AccessKind

PARTITION = 32
"""Lanes that one warp reaches, and that hold one copy of the scale factors."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a CTA's tile and where it lies in tensor memory.

    Attributes:
        row: First row in the CTA's tile.
        rows: How many.
        first: First column in the tile.
        lane: Lane of the first row.
        column: Tensor memory's column of the first column.
        columns: How many.
    """

    row: int
    rows: int
    first: int
    lane: int
    column: int
    columns: int


@cache
def parts_of(rows: int, columns: int, ctas: int, lane: int, column: int) -> tuple[Part, ...] | None:
    """Where each CTA's tile of an M x N matrix lies; None if no layout begins at this lane.

    Args:
        rows: M.
        columns: N, in cells.
        ctas: 1 or 2.
        lane: Of the matrix's address.
        column: Of the matrix's address.
    """
    if rows == 64 and ctas == 1:
        if lane not in (0, 16):
            return None
        return tuple(Part(16 * p, 16, 0, 32 * p + lane, column, columns) for p in range(4))
    if lane:
        return None
    if rows // ctas == 128:
        return (Part(0, 128, 0, 0, column, columns),)
    half = columns // 2
    return (Part(0, 64, 0, 0, column, half), Part(0, 64, half, 64, column, half))


@cache
def _table(fmt: FloatFormat) -> NDArray[np.float64]:
    return decode(fmt, np.arange(1 << fmt.width, dtype=fmt.storage)).astype(np.float64)


def _values(fmt: FloatFormat, codes: NDArray[Any]) -> NDArray[np.float64]:
    if fmt.width <= 8:
        values: NDArray[np.float64] = _table(fmt)[codes]
        return values
    return decode(fmt, codes).astype(np.float64)


def _chunks(
    source: MatrixDescriptor,
    rows: int,
    depth: int,
    row_major: bool,
    size: int,
    cta: Cta,
    agent: AsyncAgent,
    kind: AccessKind,
) -> NDArray[np.uint8]:
    addresses = descriptor_chunks(source, rows, depth, row_major, size)
    if cta.cluster_rank:
        addresses = addresses + cta.cluster_rank * SHARED_STRIDE
    flat = addresses.reshape(-1).view(np.uint64)
    found = cta.cluster.shared.gather(flat, 8, 2, agent, kind)
    return np.ascontiguousarray(found).view(np.uint8).reshape(*addresses.shape, 16)


def rows_from_shared(
    source: MatrixDescriptor, rows: int, row_bytes: int, cta: Cta, agent: AsyncAgent, kind: AccessKind
) -> NDArray[np.uint32]:
    """Rows of bytes as 32-bit cells: uint32 [rows, row_bytes / 4]."""
    chunks = _chunks(source, rows, row_bytes, False, 1, cta, agent, kind)
    return chunks.reshape(rows, row_bytes).view(np.uint32)


def matrix_from_shared(
    source: MatrixDescriptor,
    rows: int,
    depth: int,
    transposed: bool,
    fmt: FloatFormat,
    cta: Cta,
    agent: AsyncAgent,
    kind: AccessKind,
) -> NDArray[np.float64]:
    """A or B of one CTA: float64 [rows, depth].

    Args:
        source: The decoded descriptor.
        rows: M or N, this CTA's share.
        depth: K.
        transposed: Whether chunks run along rows.
        fmt: Type of the elements.
        cta: Whose shared memory.
        agent: Who reads.
        kind: For which instruction.
    """
    size = fmt.storage.itemsize
    chunks = _chunks(source, rows, depth, transposed, size, cta, agent, kind)
    if fmt.width < 8:
        return _values(fmt, unpacked(chunks, fmt.width).reshape(rows, depth))
    return _values(fmt, elements_from_chunks(chunks, rows, depth, transposed, fmt.storage))


def unpacked(chunks: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Codes of 4 or 6 bits out of 16-byte chunks that begin with 16 of them, lowest bits first."""
    if width == 4:
        low = chunks[..., :8]
        return np.stack((low & np.uint8(15), low >> np.uint8(4)), axis=-1).reshape(chunks.shape)
    triples = chunks[..., :12].reshape(*chunks.shape[:-1], 4, 3).astype(np.uint32)
    words = triples[..., 0] | triples[..., 1] << np.uint32(8) | triples[..., 2] << np.uint32(16)
    codes = words[..., None] >> np.array([0, 6, 12, 18], np.uint32) & np.uint32(63)
    narrow: NDArray[np.uint8] = codes.astype(np.uint8)
    return narrow.reshape(chunks.shape)


def matrix_from_cells(
    cells: NDArray[np.uint32], parts: tuple[Part, ...], rows: int, depth: int, fmt: FloatFormat
) -> NDArray[np.float64]:
    """A in tensor memory, elements packed into cells (section 9.7.18.10.4): float64 [rows, depth]."""
    raw = np.empty((rows, parts[0].columns), np.uint32)
    for part in parts:
        raw[part.row : part.row + part.rows] = cells[
            part.lane : part.lane + part.rows, part.column : part.column + part.columns
        ]
    return _values(fmt, raw.view(fmt.storage)[:, :depth])


def product(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """A B^T in pieces that a BLAS computes without starting threads.

    OpenBLAS does from 2^18 multiplications on, and on a busy machine its threads wait for each other for far
    longer than such a product takes.
    """
    rows, columns, depth = len(a), len(b), a.shape[1]
    step = max((1 << 18) // (columns * depth), 1)
    out = np.empty((rows, columns))
    for first in range(0, rows, step):
        np.matmul(a[first : first + step], b.T, out=out[first : first + step])
    return out


def scale_factors(
    cells: NDArray[np.uint32], column: int, count: int, byte: int, agent: AsyncAgent, kind: AccessKind
) -> NDArray[np.float64]:
    """Values of `count` scale factors.

    Raises:
        AsyncMisuseError: The copies in the partitions differ.
    """
    columns = -(-count // PARTITION)
    raw = cells[:, column : column + columns] >> np.uint32(8 * byte) & np.uint32(0xFF)
    # [copy, column, lane]: factor column · 32 + lane of each copy, in order.
    copies = raw.reshape(4, PARTITION, columns).transpose(0, 2, 1).reshape(4, -1)[:, :count]
    if (copies != copies[0]).any():
        copy, which = np.argwhere(copies != copies[0])[0].tolist()
        raise AsyncMisuseError(
            f"{kind.opcode}: scale factor {which} is {int(copies[0, which]):#04x} in lanes 0 to 31, but "
            f"{int(copies[copy, which]):#04x} in partition {copy} of tensor memory",
            line=kind.line,
            where=agent.describe(),
        )
    values: NDArray[np.float64] = _table(UE8M0)[copies[0]]
    return values
