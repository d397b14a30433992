# SPDX-License-Identifier: Apache-2.0
"""Where the scale of a block lies in memory: row-major, or the 128x4 swizzle that block-scaled MMAs read.

The swizzled buffer is a row of atoms of 512 bytes, one for each 128 rows x 4 scales (128 elements of K), K
tiles fastest. With m the row, kb the block along K and T = ceil(K/32 / 4), the scale of (m, kb) is at byte

    ((m // 128) * T + kb // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + kb % 4

so that a 16-byte line of an atom holds the four scales of the rows r, r+32, r+64 and r+96: what one
`tcgen05.cp.32x128b.warpx4` spreads over tensor memory (PTX ISA, tcgen05 block scaling, scale factor layout).
It is cuBLAS's layout for 1D block scaling factors and the "128x4" of FlashInfer and vLLM. Rows are padded to
128 and blocks to 4; the padding is zero bytes, as both libraries write it, because an uninitialised byte
could be 255, a NaN.

The two layouts often have the same number of bytes, and one read as the other gives silent nonsense. Hence a
one-dimensional tensor always means swizzled here and a two-dimensional one always row-major: a flat row-major
buffer is refused rather than guessed at.

Rejected: a layout attribute on the tensor (lost by every view and by torch.compile).
"""

from __future__ import annotations

from enum import StrEnum

import torch
from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs.quantize.rule import BLOCK

ATOM_ROWS = 128
ATOM_BLOCKS = 4
ATOM_BYTES = ATOM_ROWS * ATOM_BLOCKS
LANES = 32
"""Rows of an atom that lie 16 bytes apart; the other factor of 128 is the four rows that share 16 bytes."""


class ScaleLayout(StrEnum):
    """Layout of a matrix's scales."""

    SWIZZLED = "swizzled"
    ROW_MAJOR = "row_major"


def padded_rows(rows: int) -> int:
    """Rows of the swizzled layout: `rows` rounded up to 128."""
    return (rows + ATOM_ROWS - 1) // ATOM_ROWS * ATOM_ROWS


def k_tiles(k: int) -> int:
    """Atoms along K: groups of four blocks, the last one padded."""
    return (k // BLOCK + ATOM_BLOCKS - 1) // ATOM_BLOCKS


def swizzled_scale_numel(rows: int, k: int) -> int:
    """Bytes of the swizzled scales of a [rows, k] matrix, padding included."""
    return padded_rows(rows) * k_tiles(k) * ATOM_BLOCKS


def scale_shape(rows: int, k: int, layout: ScaleLayout) -> tuple[int, ...]:
    """Shape of the scale tensor of a [rows, k] matrix in `layout`."""
    if layout is ScaleLayout.SWIZZLED:
        return (swizzled_scale_numel(rows, k),)
    return (rows, k // BLOCK)


def scale_as_bytes(scale: torch.Tensor, *, argument: str = "scale") -> torch.Tensor:
    """`scale` as uint8, without a copy.

    Args:
        scale: uint8 or float8_e8m0fnu tensor.
        argument: Name for the error text.

    Raises:
        ArgumentError: `scale` is no tensor or has another dtype.
    """
    if not isinstance(scale, torch.Tensor):
        raise ArgumentError(argument, type(scale).__name__, "a torch.Tensor")
    if scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8)
    if scale.dtype != torch.uint8:
        raise ArgumentError(f"{argument}.dtype", scale.dtype, "torch.uint8 or torch.float8_e8m0fnu")
    return scale


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """Row-major scales in the swizzled layout, padded with zero bytes.

    Args:
        scale: [M, K/32] uint8 or float8_e8m0fnu, any strides, any device.

    Returns:
        New 1-D uint8 tensor of `swizzled_scale_numel(M, K)` bytes.

    Raises:
        ArgumentError: Another dtype or not two-dimensional.
    """
    scale = scale_as_bytes(scale)
    if scale.dim() != 2:
        raise ArgumentError("scale", tuple(scale.shape), "a row-major [M, K/32] tensor")
    rows, blocks = scale.shape
    tiles = k_tiles(blocks * BLOCK)
    padded = scale.new_zeros(padded_rows(rows), tiles * ATOM_BLOCKS)
    padded[:rows, :blocks] = scale
    atoms = padded.view(padded.shape[0] // ATOM_ROWS, ATOM_ROWS // LANES, LANES, tiles, ATOM_BLOCKS)
    return atoms.permute(0, 3, 2, 1, 4).flatten()


def unswizzle_scales(flat: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """Swizzled scales back in row-major order, padding dropped.

    Args:
        flat: 1-D uint8 or float8_e8m0fnu tensor of `swizzled_scale_numel(rows, k)` bytes.
        rows: M of the matrix the scales belong to.
        k: K of that matrix, in elements; a multiple of 32.

    Returns:
        New [rows, k/32] contiguous uint8 tensor.

    Raises:
        ArgumentError: Another dtype, shape or size, `rows` negative, or `k` no multiple of 32.
    """
    flat = scale_as_bytes(flat, argument="flat")
    if rows < 0:
        raise ArgumentError("rows", rows, "0 or more")
    if k < 0 or k % BLOCK:
        raise ArgumentError("k", k, f"a multiple of {BLOCK}")
    numel = swizzled_scale_numel(rows, k)
    if flat.dim() != 1 or flat.numel() != numel:
        raise ArgumentError("flat", tuple(flat.shape), f"({numel},) for rows={rows}, k={k}")
    row_tiles, tiles = padded_rows(rows) // ATOM_ROWS, k_tiles(k)
    atoms = flat.reshape(row_tiles, tiles, LANES, ATOM_ROWS // LANES, ATOM_BLOCKS)
    padded = atoms.permute(0, 3, 2, 1, 4).reshape(row_tiles * ATOM_ROWS, tiles * ATOM_BLOCKS)
    return padded[:rows, : k // BLOCK].contiguous()


def infer_layout(data: torch.Tensor, scale: torch.Tensor) -> ScaleLayout:
    """Layout of `scale`, from its shape against that of `data`; the dimension decides, the size must fit.

    Args:
        data: [M, K] tensor the scales belong to.
        scale: uint8 or float8_e8m0fnu; [M, K/32] is row-major, 1-D of the padded size is swizzled.

    Raises:
        ArgumentError: Dtype or shape of neither layout. A flat tensor of M*K/32 bytes counts as swizzled when
            that is the padded size and is refused otherwise.
    """
    scale = scale_as_bytes(scale)
    if data.dim() != 2 or data.shape[1] % BLOCK:
        raise ArgumentError("data", tuple(data.shape), f"[M, K] with K a multiple of {BLOCK}")
    rows, k = data.shape
    for layout in ScaleLayout:
        if tuple(scale.shape) == scale_shape(rows, k, layout):
            return layout
    shapes = " or ".join(f"{scale_shape(rows, k, layout)} ({layout})" for layout in ScaleLayout)
    raise ArgumentError("scale", tuple(scale.shape), f"{shapes} for data of shape {tuple(data.shape)}")
