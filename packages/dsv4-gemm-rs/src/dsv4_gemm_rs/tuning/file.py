# SPDX-License-Identifier: Apache-2.0
"""A user's own thresholds: where the file is, what it says of itself, when it is refused.

Contract: JSON with the version of this package, the architecture and the name of the GPU, the command, the
date and the entries (`dispatch.thresholds`). It counts only for the version and the architecture that it was
measured with: another version has other kernels. A file that was named (`DSV4_GEMM_RS_TABLE`) and cannot be
used is an error; one that merely lies at the default place is passed over with the reason, or an upgrade
would stop programs that never asked for it.

Rank 0's file counts for the group, so ranks on several hosts need no copies and cannot differ.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_symm_mem.errors import ArgumentError

from dsv4_gemm_rs._version import __version__
from dsv4_gemm_rs.dispatch.thresholds import SCHEMA, Table, as_json, from_json
from dsv4_gemm_rs.environment import TABLE_VARIABLE, table_setting
from dsv4_gemm_rs.json_file import write_json

OFF = "off"
NAME = "gemm_rs_thresholds.json"


@dataclass(frozen=True)
class TunedTable:
    """A file's contents.

    Attributes:
        version: Of this package, when it was measured.
        arch: Compute capability of the GPUs as 10 * major + minor.
        device: Their name.
        command: What was run.
        date: When, UTC, ISO 8601.
        entries: The thresholds.
    """

    version: str
    arch: int
    device: str
    command: str
    date: str
    entries: Table

    def obstacle(self, arch: int | None) -> str:
        """Why it does not count on GPUs of `arch` with this version; empty if it does."""
        if self.version != __version__:
            return f"it was measured with version {self.version} of dsv4-gemm-rs, this is {__version__}"
        if self.arch != arch:
            here = "no GPU" if arch is None else f"sm_{arch}"
            return f"it was measured on sm_{self.arch}, here is {here}"
        return ""


@dataclass(frozen=True)
class Found:
    """What `find` came to.

    Attributes:
        path: The file; None where none was looked for.
        table: Its contents, or None.
        obstacle: Why it does not count; empty where it does, or where there is none.
    """

    path: Path | None
    table: TunedTable | None
    obstacle: str

    @property
    def entries(self) -> Table:
        """Its thresholds, none where it does not count."""
        return () if self.table is None or self.obstacle else self.table.entries

    def __str__(self) -> str:
        if self.path is None:
            return "none, turned off"
        if self.obstacle:
            return f"{self.path} does not count: {self.obstacle}"
        if self.table is None:
            return f"none at {self.path}"
        shapes = f"{len(self.table.entries)} shapes"
        return f"{self.path}, {shapes} measured on {self.table.device}, {self.table.date[:10]}"


def default_path() -> Path | None:
    """`dsv4/gemm_rs_thresholds.json` in `XDG_CONFIG_HOME` or `~/.config`; None without a home."""
    if base := os.environ.get("XDG_CONFIG_HOME"):
        return Path(base) / "dsv4" / NAME
    try:
        return Path.home() / ".config" / "dsv4" / NAME
    except RuntimeError:
        return None


def find(arch: int | None) -> Found:
    """The user's file for GPUs of `arch`.

    Raises:
        ArgumentError: `DSV4_GEMM_RS_TABLE` names one that is missing, damaged, or of another version or
            architecture.
    """
    named = table_setting()
    if named.lower() == OFF:
        return Found(None, None, "")
    path = Path(named) if named else default_path()
    if path is None or (not named and not path.is_file()):
        return Found(path, None, "")
    table: TunedTable | None = None
    try:
        table = read(path)
        obstacle = table.obstacle(arch)
    except ArgumentError as error:
        obstacle = str(error)
    if named and obstacle:
        raise ArgumentError(TABLE_VARIABLE, named, f"a table that counts here; {obstacle}")
    return Found(path, table, obstacle)


def read(path: Path) -> TunedTable:
    """The table in `path`.

    Raises:
        ArgumentError: It cannot be read, or is no table of this schema.
    """
    expected = f"a table of schema {SCHEMA} as `dsv4-gemm-rs tune` writes it"
    try:
        held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if held["schema"] != SCHEMA:
            raise ValueError(f"schema {held['schema']}")
        fields = {name: held[name] for name in ("version", "arch", "device", "command", "date")}
        return TunedTable(**fields, entries=from_json(held["entries"]))
    except ArgumentError as error:
        raise ArgumentError("table", str(path), f"{expected} ({error})") from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError("table", str(path), f"{expected} ({error!r})") from None


def write(path: Path, table: TunedTable) -> None:
    """Write `table` whole or not at all, making its folder."""
    held = {
        "schema": SCHEMA,
        "version": table.version,
        "arch": table.arch,
        "device": table.device,
        "command": table.command,
        "date": table.date,
        "entries": as_json(table.entries),
    }
    write_json(path, held)
