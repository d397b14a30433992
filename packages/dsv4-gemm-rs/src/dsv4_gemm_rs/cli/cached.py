# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled kernels as commands show it: where, whether it can be used, what is in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dsv4_symm_mem.artefacts.container import DamagedError
from dsv4_symm_mem.artefacts.folder import CacheFolder, default_folder
from dsv4_symm_mem.artefacts.key import is_current

from dsv4_gemm_rs.kernels.cache import kernels_of
from dsv4_gemm_rs.kernels.families import Strategy


@dataclass(frozen=True)
class CacheState:
    """The cache, for some architectures.

    Attributes:
        folder: Where; empty when caching is off.
        obstacle: Why nothing can be loaded from it; empty if it can.
        read_only: Why nothing can be put into it; empty if it can.
        artefacts: Number of files in it, of whatever version and architecture.
        nbytes: Their size.
        exchange: Strategy of the workspaces that are asked about.
        needed: Number of kernels that a workspace makes ready, by architecture.
        missing: Names of those that are not in it as they would be compiled now, by architecture.
    """

    folder: str
    obstacle: str
    read_only: str
    artefacts: int
    nbytes: int
    exchange: Strategy
    needed: dict[str, int]
    missing: dict[str, list[str]]

    @classmethod
    def of(
        cls, archs: Iterable[str], path: Path | None = None, exchange: Strategy = Strategy.PUSH
    ) -> CacheState:
        """Look at the cache at `path`, by default the one that workspaces use."""
        cache = CacheFolder(path or default_folder())
        entries = cache.entries()
        kernels = {arch: kernels_of(arch, exchange) for arch in archs}
        return cls(
            folder=str(cache.path or ""),
            obstacle=cache.obstacle,
            read_only=cache.read_only,
            artefacts=len(entries),
            nbytes=sum(entry.nbytes for entry in entries),
            exchange=exchange,
            needed={arch: len(each) for arch, each in kernels.items()},
            missing={
                arch: [kernel.recipe.name for kernel in each if not kernel.is_cached(arch, cache.path)]
                for arch, each in kernels.items()
            },
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"compiled kernels: {self.folder or 'not kept'}"]
        if self.obstacle or self.read_only:
            state = "not usable" if self.obstacle else "usable, but nothing can be added"
            lines[0] += f", {state}: {self.obstacle or self.read_only}"
        else:
            lines[0] += f", {self.artefacts} files, {self.nbytes:,} bytes"
        for arch, names in self.missing.items():
            there = self.needed[arch] - len(names)
            asked = "" if self.exchange is Strategy.PUSH else f" --exchange {self.exchange.value}"
            whose = "" if self.exchange is Strategy.PUSH else f" with exchange {self.exchange.value!r}"
            lines.append(f"  {arch}: {there} of {self.needed[arch]} that a workspace{whose} needs are there")
            if names and not self.obstacle:
                if there:
                    lines.append(f"    missing: {', '.join(names)}")
                lines.append(f"    to compile them: dsv4-gemm-rs compile --arch {arch}{asked}")
        return "\n".join(lines)


def listing(cache: CacheFolder) -> str:
    """A line for each artefact of a usable cache: kernel, size, when it was used, whether it would be now."""
    lines = []
    for entry in cache.entries():
        try:
            facts = cache.read(entry.path.name, touch=False).facts
            state = "current" if is_current(facts) else "of other sources or versions"
        except FileNotFoundError:
            continue
        except DamagedError as error:
            state = f"not usable: {error}"
        used = datetime.fromtimestamp(entry.used, UTC).isoformat(timespec="seconds")
        lines.append(f"{entry.path.name}  {entry.nbytes:,} bytes, used {used}, {state}")
    return "\n".join([*lines, f"{len(lines)} files in {cache.path}"])
