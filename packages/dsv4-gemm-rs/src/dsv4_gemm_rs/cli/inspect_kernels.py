# SPDX-License-Identifier: Apache-2.0
"""`inspect`: what the compiled fused kernels of an architecture are made of; needs no GPU.

With the distribution nvidia-cuda-nvdisasm installed (or `nvdisasm` on PATH) the machine code is counted too;
without it PTX only, and the table says so.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from dsv4_symm_mem.compiled import gpu_arch
from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs.bench.report import Check, Report, describe_machine, describe_versions, this_command, today
from dsv4_gemm_rs.cli.groups import require_positive
from dsv4_gemm_rs.cli.results import require_writable
from dsv4_gemm_rs.inspection.kernels import inspect_kernel
from dsv4_gemm_rs.inspection.machine_code import DISASSEMBLER, disassembler
from dsv4_gemm_rs.kernels.families import FAMILIES, Strategy, family_of
from dsv4_gemm_rs.problems import WO_B_N

ARCHS = {gpu_arch(divmod(arch, 10)): arch for arch in FAMILIES}
SHARED_BYTES = 227 * 1024
"""That a CTA can have, on SM90 and on SM100."""
REGISTERS = 64 * 1024
"""Of a multiprocessor."""
TENSOR_COLUMNS = 512


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "inspect", help="report registers, memory, loops and stores of the compiled kernels; needs no GPU"
    )
    parser.add_argument("--arch", choices=list(ARCHS), default="sm_100a", help="default sm_100a")
    parser.add_argument(
        "--exchange",
        type=Strategy,
        choices=list(Strategy),
        nargs="+",
        default=None,
        help="which kernels (default: all that there are for the architecture)",
    )
    parser.add_argument(
        "--tp", type=int, default=4, help="ranks of the call whose bytes are told (default 4)"
    )
    parser.add_argument("--n", type=int, default=WO_B_N, help=f"its output features N (default {WO_B_N})")
    parser.add_argument("--tokens", type=int, default=8192, help="its M (default 8192)")
    parser.add_argument("--output", type=Path, default=Path("results/static.json"))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile and report; returns 1 if a kernel spills or does not fit."""
    require_positive(tp=options.tp, n=options.n, tokens=options.tokens)
    if options.n % 64:
        raise ArgumentError("--n", options.n, "a multiple of 64")
    require_writable(options.output)
    arch = ARCHS[options.arch]
    family = [config for each in options.exchange or Strategy for config in family_of(arch, each)]
    if not family:
        raise ArgumentError("--exchange", options.exchange, f"push, all that there is for {options.arch}")
    rows = []
    for number, config in enumerate(family, 1):
        rows.append(inspect_kernel(config, options.arch, options.tokens, options.n, options.tp))
        shown = name_of(rows[-1])
        print(f"[{number}/{len(family)}] {shown}", file=sys.stderr, flush=True)
    cpu = torch.device("cpu")
    report = Report(
        name="static",
        machine=describe_machine(cpu, options.tp, "not run, compiled only"),
        versions=describe_versions(cpu) | _tool(),
        command=this_command(),
        date=today(),
        rows=rows,
        checks=checks(rows),
    )
    report.write(options.output)
    print(table(rows))
    missed = [check for check in report.checks if not check.holds]
    print(f"{len(report.checks) - len(missed)} of {len(report.checks)} checks hold")
    for check in missed:
        print(check)
    print(f"\nwritten: {options.output}")
    return int(bool(missed))


def _tool() -> dict[str, str]:
    return {DISASSEMBLER: "found" if disassembler() else "not installed: PTX only"}


def name_of(row: Mapping[str, Any]) -> str:
    """What tells a row from the others."""
    pulled = f", {row['exchange']}" if row["exchange"] != Strategy.PUSH.value else ""
    return f"{row['operand']} {row['tile']}{pulled}"


def checks(rows: Sequence[Mapping[str, Any]]) -> tuple[Check, ...]:
    """The claims: nothing spills, and a CTA fits."""
    claims = []
    for row in rows:
        name = name_of(row)
        spilled = row["stack_bytes"] + (row["sass"] or row["ptx"])["local_accesses"]
        registers = row["registers"] * row["threads"]
        for what, value, most in (
            ("bytes of stack and accesses to local memory", spilled, 0),
            ("registers of a CTA", registers, REGISTERS),
            ("bytes of shared memory", row["shared_bytes"], SHARED_BYTES),
            ("columns of tensor memory", row["tensor_columns"], TENSOR_COLUMNS),
        ):
            claims.append(Check(f"{name}: {what}", value, most, value <= most))
    return tuple(claims)


def store_widths(row: Mapping[str, Any]) -> str:
    """Bytes of a thread's wide stores to global memory, with the number of instructions."""
    stores = row["sass"]["stores"] if row["sass"] else row["ptx"]["stores"]
    widths: dict[int, int] = {}
    for code, count in stores.items():
        if (bits := re.search(r"\.(128|256)$", code)) or (words := re.search(r"\.v([48])\.b32$", code)):
            width = int(bits[1]) // 8 if bits else 4 * int(words[1])  # type: ignore[index]
            widths[width] = widths.get(width, 0) + count
    return ", ".join(f"{count} x {width} B" for width, count in sorted(widths.items(), reverse=True))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each configuration."""
    lines = [head_and_cells(rows[0])[0]] if rows else []
    lines += [head_and_cells(row)[1] for row in rows]
    widths = [max(len(line[i]) for line in lines) + 2 for i in range(len(lines[0]))] if lines else []
    text = ["".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    if rows and not rows[0]["sass"]:
        text.append(f"loops and stores from PTX: {DISASSEMBLER} is not installed")
    return "\n".join(text)


def head_and_cells(row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Names of the table's columns, and one row of it."""
    counted = row["sass"] or row["ptx"]
    cells = {
        "operands": row["operand"],
        "tile": row["tile"],
        "exchange": row["exchange"],
        "registers": row["registers"],
        "stack": row["stack_bytes"],
        "shared memory": row["shared_bytes"],
        "stages": row["stages"],
        "tensor columns": row["tensor_columns"] or "",
        "k loop": (counted["multiply_loop"] or {}).get("instructions", ""),
        "epilogue loop": (counted["drain_loop"] or {}).get("instructions", ""),
        "wide stores": store_widths(row),
        "sent": row["sent_bytes"],
        "flags": row["flag_bytes"],
    }
    return list(cells), [str(cell) for cell in cells.values()]
