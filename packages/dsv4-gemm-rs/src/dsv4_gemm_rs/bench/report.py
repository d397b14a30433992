# SPDX-License-Identifier: Apache-2.0
"""The result file: what was measured, on what, how to do it again, and whether it meets its targets.

One JSON object with `name`, `machine`, `versions`, `command`, `date`, `rows` and `checks`. A row is one
measurement; a check is a claim with its value, its target and whether it holds. Misses are written like
everything else.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.probe import probe_device
from dsv4_symm_mem.protocol.layout import Strategy

from dsv4_gemm_rs._version import __version__
from dsv4_gemm_rs.environment import under_torchrun
from dsv4_gemm_rs.json_file import write_json

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Check:
    """A claim: `value` against `target`, in the sense that `name` states."""

    name: str
    value: float
    target: float
    holds: bool

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "MISSED"
        return f"{verdict}: {self.name} = {self.value:.3f} (target {self.target:g})"


@dataclass(frozen=True)
class Report:
    """A benchmark's result."""

    name: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    command: str
    date: str
    rows: Sequence[Mapping[str, Any]]
    checks: Sequence[Check] = field(default_factory=tuple)
    schema: int = SCHEMA_VERSION

    def write(self, path: Path) -> None:
        """Write the JSON file whole or not at all, making its folder."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a result file.

        Raises:
            ArgumentError: It is no result file of this schema.
        """
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            if held["schema"] != SCHEMA_VERSION:
                raise KeyError(f"schema {held['schema']}")
            checks = tuple(Check(**check) for check in held.pop("checks"))
            return cls(**held, checks=checks)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                "path", str(path), f"a result file of schema {SCHEMA_VERSION} ({error})"
            ) from None


def exchange_of(report: Report) -> str:
    """How fused kernels exchanged in a benchmark's result; those before there was a choice pushed."""
    return str(report.rows[0].get("exchange", Strategy.PUSH.value)) if report.rows else Strategy.PUSH.value


def describe_machine(device: torch.device, world_size: int, how: str) -> dict[str, Any]:
    """The device, the number of ranks and how they are realised ("virtual ranks", "processes")."""
    described = probe_device(device)
    return {
        "device": described.name,
        "arch": described.arch,
        "multiprocessors": described.multiprocessors,
        "driver": described.driver,
        "cuda": described.cuda,
        "multicast": described.multicast,
        "ranks": world_size,
        "ranks_are": how,
        "cpu": platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "system": platform.platform(terse=True),
    }


def describe_versions(device: torch.device) -> dict[str, str]:
    """Versions of Python, this package and what it builds on."""
    return {
        "python": platform.python_version(),
        "dsv4-gemm-rs": __version__,
        **probe_device(device).versions,
    }


def sm_clock_mhz(device: torch.device) -> int | None:
    """The SM clock right now in MHz, by the driver's account (NVML); None without it or on a CPU."""
    if device.type != "cuda":
        return None
    try:
        return int(torch.cuda.clock_rate(device))
    except Exception:
        return None


def this_command() -> str:
    """The command line that is running, as a user would type it."""
    program = "dsv4-gemm-rs"
    if under_torchrun():
        program = f"torchrun --nproc-per-node={os.environ['WORLD_SIZE']} -m dsv4_gemm_rs.cli.main"
    return " ".join([program, *sys.argv[1:]])


def today() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
