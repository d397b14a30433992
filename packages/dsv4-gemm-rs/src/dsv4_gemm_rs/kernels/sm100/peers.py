# SPDX-License-Identifier: Apache-2.0
"""Peers' partials of own tiles on their way from slots to the epilogue: a ring of pieces in shared memory.

Contract: a piece is 128 rows by 32 columns, contiguous in a slot (`protocol.slots`). For each own tile the
loading warp waits until every peer has raised the tile's flag, then loads, by 32 columns and then by source
in rank order, what the epilogue adds in that order. On an abort it stops waiting and hands out pieces without
loading them, so that it and the epilogue never disagree on how many there are.

Pieces arrive in the 64-byte swizzle, because an epilogue thread has a row of the tile: eight lanes reading 16
bytes each, 64 bytes apart, would meet in two groups of banks. 16-byte unit u of row r lies at unit
u ^ (r / 2 % 4). Hence the copy engine's tensor form, on one map of all of this rank's slots as rows of 64
bytes; slots begin at multiples of 128.

Rejected: turning a thread's units by its lane instead, 64 selections a chunk for the epilogue's registers;
pieces in the operands' ring, as on SM90, where math warps consume both: here the tensor core frees its stages
and must not wait for an epilogue that waits for a peer.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import cpasync
from dsv4_symm_mem.device.roles import advance
from dsv4_symm_mem.device.vectors import load_shared_16
from dsv4_symm_mem.protocol.slots import BLOCK_COLUMNS

from dsv4_gemm_rs.kernels.sm100.config import PIECE_BYTES, PIECES, TILE_M

ROW_BYTES = BLOCK_COLUMNS * 2
UNIT_BYTES = 16


@dataclass(frozen=True)
class Pieces:
    """The ring of pieces, and where they come from.

    Attributes:
        atom, slots: Copy atom and coordinate tensor of the slots as rows of 64 bytes.
        shared: Staged byte tensor of the pieces.
        address: Shared-memory address of the first.
        full, empty: One mbarrier per piece each.
    """

    atom: cute.CopyAtom
    slots: cute.Tensor
    shared: cute.Tensor
    address: Int32
    full: cute.Pointer
    empty: cute.Pointer


def smem_layout() -> cute.ComposedLayout:
    """Staged shared-memory layout of the pieces."""
    atom = cute.make_composed_layout(
        cute.make_swizzle(2, 4, 3), 0, cute.make_layout((8, ROW_BYTES), stride=(ROW_BYTES, 1))
    )
    return cute.tile_to_shape(atom, (TILE_M, ROW_BYTES, PIECES), order=(0, 1, 2))


def tma_slots(slots: Int64, size: Int64, layout: cute.ComposedLayout) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Atom and coordinate tensor of the `size` bytes of slots at that address, unused where P is 1."""
    rows = cutlass.max(Int32(size // ROW_BYTES), 1)
    matrix = cute.make_tensor(
        cute.make_ptr(Uint8, slots, cute.AddressSpace.gmem, assumed_align=16),
        cute.make_layout((rows, ROW_BYTES), stride=(ROW_BYTES, 1)),
    )
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(),
        matrix,
        cute.slice_(layout, (None, None, 0)),
        (TILE_M, ROW_BYTES),
    )


@cute.jit
def load_piece(
    pieces: Constexpr[Pieces], row: Int32, load: cutlass.Boolean, stage: Int32, phase: Int32
) -> tuple[Int32, Int32]:
    """Load the piece that begins at `row` of the slots, or hand it out as it is, as a whole warp."""
    cute.arch.mbarrier_wait(pieces.empty + stage, phase ^ 1)
    if load:
        tile = cute.local_tile(cute.domain_offset((row, 0), pieces.slots), (TILE_M, ROW_BYTES), (0, 0))
        shared, source = cpasync.tma_partition(
            pieces.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(pieces.shared, 0, 2),
            cute.group_modes(tile, 0, 2),
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(pieces.full + stage, PIECE_BYTES)
        cute.copy(pieces.atom, source, shared[(None, stage)], tma_bar_ptr=pieces.full + stage)
    else:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pieces.full + stage)
    return advance(stage, phase, PIECES)


def row_units(pieces: Pieces, stage: Int32, row: Int32) -> list[tuple[Uint32, ...]]:
    """The four 16-byte units, in order of columns, of a row of the piece in that stage."""
    line = pieces.address + stage * PIECE_BYTES + row * ROW_BYTES
    turn = (row >> 1) & 3
    return [load_shared_16(line + (turn ^ unit) * UNIT_BYTES) for unit in range(4)]
