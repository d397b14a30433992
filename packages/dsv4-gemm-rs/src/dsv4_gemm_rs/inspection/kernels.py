# SPDX-License-Identifier: Apache-2.0
"""One row for each configuration of an architecture: its resources, its loops, its stores, what it sends.

Contract: everything here is read off the compiled code or follows from the schedule; nothing is measured.
Loop counts come from the machine code where a disassembler is at hand and from PTX in any case. What the GPU
executes is the machine code; PTX counts only compare one configuration with another.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_symm_mem.protocol.layout import WORD_BYTES, ceil_div, shard_rows
from dsv4_symm_mem.protocol.slots import BLOCK_COLUMNS, BLOCK_ROWS

from dsv4_gemm_rs.inspection.listing import Listing, listing_of_ptx, listing_of_sass
from dsv4_gemm_rs.inspection.machine_code import disassemble, disassembler, resources_of
from dsv4_gemm_rs.kernels.families import Strategy, TileConfig, operand_of, strategy_of
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig as Sm90Config
from dsv4_gemm_rs.kernels.sm90.swapped_config import SwappedConfig
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig as Sm100Config

MULTIPLY = {"sass": r"UTC[HQO]MMA|HGMMA", "ptx": r"tcgen05\.mma|wgmma\.mma_async"}
"""Instructions of the loop over K, which issues them."""
DRAIN = {"sass": r"LDTM", "ptx": r"tcgen05\.ld\."}
"""The instruction of the epilogue's loop over a tile's chunks, on SM100."""
STORE = {"sass": r"STG", "ptx": r"st\.(?:\w+\.)*global"}
LOCAL = {"sass": r"STL|LDL", "ptx": r"(?:st|ld)\.local"}
"""Accesses to local memory: what spilled registers cost."""


@dataclass(frozen=True)
class Compiled:
    """A kernel as the DSL leaves it: PTX, machine code, and bytes of shared memory that it lays out."""

    ptx: str
    cubin: bytes
    shared_bytes: int


def compile_kernel(config: TileConfig, arch: str) -> Compiled:
    """Compile the kernel of `config` for `arch`, such as "sm_100a", which need not be present.

    Raises:
        Exception: What the compiler raised.
    """
    import cutlass.cute as cute

    kernel, arguments = _kernel(config)
    with tempfile.TemporaryDirectory(prefix="dsv4-inspect-") as folder:
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder} --enable-tvm-ffi"
        cute.compile(kernel, *arguments, options=options)
        (ptx,), (cubin,) = (sorted(Path(folder).glob(f"*.{kind}")) for kind in ("ptx", "cubin"))
        return Compiled(ptx.read_text(), cubin.read_bytes(), kernel.storage.size_in_bytes())


def _kernel(config: TileConfig) -> tuple[Any, tuple[Any, ...]]:
    if isinstance(config, Sm100Config):
        from dsv4_gemm_rs.kernels.sm100 import kernel as sm100

        return sm100.GemmReduceScatter(config), sm100.example_arguments()
    if isinstance(config, SwappedConfig):
        from dsv4_gemm_rs.kernels.sm90 import swapped_kernel as swapped

        return swapped.SwappedGemmReduceScatter(config), swapped.example_arguments()
    if isinstance(config, Sm90Config):
        from dsv4_gemm_rs.kernels.sm90 import kernel as sm90

        return sm90.GemmReduceScatter(config), sm90.example_arguments()
    raise TypeError(f"no kernel has the configuration {config!r}")


def inspect_kernel(config: TileConfig, arch: str, m: int, n: int, world_size: int) -> dict[str, Any]:
    """The row of one configuration; [m, n] and `world_size` are of the call whose bytes are told."""
    made = compile_kernel(config, arch)
    resources = resources_of(made.cubin)
    program = disassembler()
    listings = {"ptx": listing_of_ptx(made.ptx)}
    if program is not None:
        listings["sass"] = listing_of_sass(disassemble(made.cubin, program))
    row: dict[str, Any] = {
        "measure": "static",
        "arch": arch,
        "operand": operand_of(config).value,
        "tile": f"{config.tile_m * config.cluster}x{config.tile_n}",
        "exchange": strategy_of(config).value,
        "cluster": config.cluster,
        "registers": resources.registers,
        "stack_bytes": resources.stack_bytes,
        "shared_bytes": made.shared_bytes,
        **_ring(config),
        "m": m,
        "n": n,
        "world_size": world_size,
        **sent_bytes(config, m, n, world_size),
    }
    for language in ("sass", "ptx"):
        row[language] = _counts(listings[language], language) if language in listings else None
    return row


def _ring(config: TileConfig) -> dict[str, int]:
    if not isinstance(config, (Sm90Config, SwappedConfig, Sm100Config)):
        raise TypeError(f"no kernel has the configuration {config!r}")
    return {
        "threads": config.threads,
        "stages": config.stages,
        "stage_bytes": config.stage_bytes,
        "tensor_columns": config.tensor_columns if isinstance(config, Sm100Config) else 0,
    }


def _counts(listing: Listing, language: str) -> dict[str, Any]:
    return {
        "instructions": len(listing.opcodes),
        "local_accesses": listing.matching(LOCAL[language]).total(),
        "multiply_loop": _loop(listing.loop_around(MULTIPLY[language])),
        "drain_loop": _loop(listing.loop_around(DRAIN[language])),
        "stores": dict(listing.matching(STORE[language])),
    }


def _loop(codes: Counter[str] | None) -> dict[str, Any] | None:
    """A loop's number of instructions, and of each that touches a memory, a barrier or the tensor core."""
    if codes is None:
        return None
    shown = r"(UTC|HGMMA|LDTM|LDS|STS|STG|LDG|SYNCS|UTMA|MEMBAR|FENCE|tcgen05|wgmma|ld\.|st\.|mbarrier|cp\.)"
    return {
        "instructions": codes.total(),
        "of_which": dict(sorted(Listing(tuple(codes.elements()), ()).matching(shown).items())),
    }


def sent_bytes(config: TileConfig, m: int, n: int, world_size: int) -> dict[str, int]:
    """Bytes that rank 0 sends in a reduce-scatter: partials, in whole blocks of a slot, and flags.

    Where sums are read through multicast its partial of its own rows crosses the link as well.
    """
    pieces = ceil_div(n, BLOCK_COLUMNS)
    columns = ceil_div(n, config.tile_n)
    data = tiles = tokens = 0
    if strategy_of(config) is Strategy.MULTICAST and world_size > 1:
        own = len(shard_rows(m, world_size, 0))
        data = ceil_div(own, BLOCK_ROWS) * BLOCK_ROWS * pieces * BLOCK_COLUMNS * 2
    for rows in _remote_rows(m, world_size):
        data += ceil_div(rows, BLOCK_ROWS) * BLOCK_ROWS * pieces * BLOCK_COLUMNS * 2
        tiles += ceil_div(rows, config.tile_m) * columns
        tokens += rows == 0
    return {"sent_bytes": data, "flag_bytes": (tiles + tokens) * WORD_BYTES}


def _remote_rows(m: int, world_size: int) -> Iterator[int]:
    for owner in range(1, world_size):
        yield len(shard_rows(m, world_size, owner))
