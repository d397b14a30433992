# SPDX-License-Identifier: Apache-2.0
"""`tune`: measure from how many tokens the fused kernel is faster here, and keep it for later workspaces.

Shapes measured before stay in the file unless they are measured again, or the file is of another version,
architecture or GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsv4_symm_mem.errors import ArgumentError, UnsupportedError
from dsv4_symm_mem.probe import probe_device

from dsv4_gemm_rs._version import __version__
from dsv4_gemm_rs.bench.report import this_command, today
from dsv4_gemm_rs.bench.timing import Group
from dsv4_gemm_rs.cli.groups import (
    add_group_options,
    add_out_features,
    command_group,
    progress_of,
    require_positive,
    speaks,
)
from dsv4_gemm_rs.cli.results import require_writable
from dsv4_gemm_rs.dispatch.decide import operand_for
from dsv4_gemm_rs.dispatch.thresholds import Shape, Table, as_json, merged
from dsv4_gemm_rs.environment import TABLE_VARIABLE, table_setting
from dsv4_gemm_rs.problems import WO_B_N, default_k
from dsv4_gemm_rs.tuning.file import OFF, TunedTable, default_path, read, write
from dsv4_gemm_rs.tuning.measure import Timer, graph_timer, shared, tune
from dsv4_gemm_rs.weights import WeightKind
from dsv4_gemm_rs.workspace import FUSED_ARCHS

TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "tune", help="measure from how many tokens the fused kernel is faster here, for later calls to go by"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="values of M to measure")
    shapes = f"output features N, each with each K (default {WO_B_N})"
    add_out_features(parser, nargs="+", default=[WO_B_N], help=shapes)
    parser.add_argument("--k", type=int, nargs="+", default=None, help="input features of a rank")
    parser.add_argument("--kind", type=WeightKind, choices=list(WeightKind), default=WeightKind.MXFP8)
    parser.add_argument("--workspaces", type=int, default=6, help="that rotate (default 6)")
    parser.add_argument("--samples", type=int, default=20, help="samples per case (default 20)")
    add_group_options(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        help=f"the table (default: {TABLE_VARIABLE}, else dsv4/ in XDG_CONFIG_HOME or ~/.config)",
    )
    parser.add_argument("--json", action="store_true", help="print the new entries as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and write; returns 0, or 1 where no shape's threshold lies within what was measured."""
    require_positive(
        workspaces=options.workspaces,
        samples=options.samples,
        tokens=min(options.tokens),
        n=min(options.n),
        k=None if options.k is None else min(options.k),
        ranks=options.ranks,
    )
    output = options.output or _default_output()
    require_writable(output)
    with _no_table(), command_group(options) as group:
        timer = graph_timer(group, options.kind, options.workspaces, options.samples)
        table = measured(group, options, timer)
        if not speaks(group):
            return 0
    if not table.entries:
        print("no threshold lies between the tokens measured; nothing was written", file=sys.stderr)
        return 1
    kept = _kept(output, table)
    write(output, TunedTable(**{**vars(table), "entries": merged(kept, table.entries)}))
    if options.json:
        print(json.dumps({"path": str(output), "entries": as_json(table.entries)}, indent=1))
    else:
        for entry in table.entries:
            least = "never fused" if entry.least_tokens is None else f"fused from {entry.least_tokens} tokens"
            print(f"{entry.shape}: {least}")
        print(f"written: {output}, {len(kept)} entries were there before")
    return 0


def measured(group: Group, options: argparse.Namespace, timer: Timer) -> TunedTable:
    """The table of this group's shapes; collective.

    Raises:
        UnsupportedError: There is no fused kernel to measure here, or nothing to exchange.
    """
    device = probe_device(group.device)
    if device.arch not in FUSED_ARCHS or group.device.type != "cuda":
        raise UnsupportedError("tune measures a fused kernel, and this version has none for this device")
    if group.size < 2:
        raise UnsupportedError("one rank has nothing to exchange, so there is nothing to tune")
    operand = operand_for(device.arch, options.kind).value
    ks = [default_k(group.size)] if options.k is None else options.k
    command, date = this_command(), today()
    entries = tune(
        [
            Shape(device.arch, group.size, shared(group), operand, n, k)
            for n, k in itertools.product(options.n, ks)
        ],
        options.tokens,
        timer,
        device=device.name,
        date=date,
        source=command,
        progress=progress_of(group),
    )
    return TunedTable(__version__, device.arch, device.name, command, date, tuple(entries))


def _default_output() -> Path:
    named = table_setting()
    path = Path(named) if named and named.lower() != OFF else default_path()
    if path is None:
        raise ArgumentError("--output", None, "a file: there is no home directory for the default one")
    return path


def _kept(output: Path, table: TunedTable) -> Table:
    """What an older file at `output` still has to say beside `table`."""
    try:
        older = read(output)
    except ArgumentError:
        return ()
    fresh = {entry.shape for entry in table.entries}
    same = (older.version, older.arch, older.device) == (table.version, table.arch, table.device)
    return tuple(entry for entry in older.entries if entry.shape not in fresh) if same else ()


@contextmanager
def _no_table() -> Iterator[None]:
    """Leave a user's present table, which may be stale, out of the workspaces that measure."""
    before = os.environ.get(TABLE_VARIABLE)
    os.environ[TABLE_VARIABLE] = OFF
    try:
        yield
    finally:
        if before is None:
            del os.environ[TABLE_VARIABLE]
        else:
            os.environ[TABLE_VARIABLE] = before
