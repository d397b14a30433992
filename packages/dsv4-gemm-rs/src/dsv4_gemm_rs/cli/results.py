# SPDX-License-Identifier: Apache-2.0
"""What every benchmark command does with its result: a file that can be written, the table, the plot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dsv4_symm_mem.errors import ArgumentError, UnsupportedError

from dsv4_gemm_rs.bench.report import Report


def require_writable(output: Path) -> None:
    """Find out before all measuring whether `output` can be written; makes its folder.

    Raises:
        ArgumentError: It cannot.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(output.parent, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ArgumentError("--output", str(output), "a file in a folder that can be written")


def publish(
    report: Report, output: Path, table: Callable[[Report], str], plot: Callable[[Report, Path], None]
) -> None:
    """Write `report` to `output`, print it as `table` has it, and draw `plot` beside it if that can be."""
    report.write(output)
    print(table(report))
    print(f"\nwritten: {output}")
    picture = output.with_suffix(".png")
    try:
        plot(report, picture)
        print(f"plotted: {picture}")
    except UnsupportedError as error:
        print(f"not plotted: {error}")
