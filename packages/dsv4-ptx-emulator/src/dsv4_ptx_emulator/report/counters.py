# SPDX-License-Identifier: Apache-2.0
"""Counters per launch: bytes over each link, flags, polls, MMAs, asynchronous copies, instructions.

Contract: an observer that only adds. A link (a, b) counts the bytes of global memory that move from rank a to
rank b: what a writes (or updates atomically) in b's memory, and what b reads from a's. A home's own accesses
are no link's. A flag is a store or reduction with release semantics at gpu or sys scope, counted by lanes; a
poll is a load stronger than weak, counted once for all lanes of a warp.

An asynchronous engine serves one CTA, so its accesses count for that CTA's launch. Counts are exact for the
schedule that ran; polls differ from seed to seed, everything else does not for a program without races.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsv4_ptx_emulator.machine.observer import Access, Observer
from dsv4_ptx_emulator.machine.warp import Warp

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.cta import Cta
    from dsv4_ptx_emulator.machine.launch import Launch

RELEASES = frozenset({"release", "acq_rel"})
ACQUIRES = frozenset({"acquire", "relaxed", "volatile"})
WIDE_SCOPES = frozenset({"gpu", "sys"})


@dataclass
class LaunchCounts:
    """What one launch did.

    Attributes:
        number: Of the launch, counted over the machine.
        rank: Where it ran.
        kernel: Its symbol.
        ctas: CTAs that have ended.
        instructions: Instructions that its warps executed.
        link_bytes: By (source rank, destination rank).
        flags: Releases to global memory.
        polls: Loads from global memory stronger than weak, by warps.
        loaded_bytes, stored_bytes: By asynchronous copies from and to global memory.
        events: What instruction groups report by name, such as "mma".
        finished: Whether its last warp has exited.
    """

    number: int
    rank: int
    kernel: str
    ctas: int = 0
    instructions: int = 0
    link_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    flags: int = 0
    polls: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    events: Counter[str] = field(default_factory=Counter)
    finished: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "launch": self.number,
            "rank": self.rank,
            "kernel": self.kernel,
            "ctas": self.ctas,
            "instructions": self.instructions,
            "link_bytes": _named(self.link_bytes),
            "flags": self.flags,
            "polls": self.polls,
            "async_loaded_bytes": self.loaded_bytes,
            "async_stored_bytes": self.stored_bytes,
            "events": dict(sorted(self.events.items())),
            "finished": self.finished,
        }


class Counters(Observer):
    """Counts of every launch of a machine, in `launches` by number."""

    def __init__(self) -> None:
        self.launches: dict[int, LaunchCounts] = {}

    def on_launch_begin(self, launch: Launch) -> None:
        """Begin a new record."""
        self.launches[launch.number] = LaunchCounts(launch.number, launch.rank, launch.kernel.name)

    def on_launch_end(self, launch: Launch) -> None:
        """The record is complete."""
        self.launches[launch.number].finished = True

    def on_cta_end(self, cta: Cta) -> None:
        """Count the CTA."""
        self.launches[cta.launch.number].ctas += 1

    def on_quantum(self, agent: Any, first_step: int, steps: int) -> None:
        """Add a turn of a warp."""
        # A CTA ends inside of its last warp's last turn, so warps cannot be asked then.
        if isinstance(agent, Warp):
            self.launches[agent.cta.launch.number].instructions += steps

    def on_access(self, access: Access) -> None:
        """Count an access to global memory."""
        if access.space != "global":
            return
        agent: Any = access.agent
        counts = self.launches[agent.cta.launch.number]
        kind = access.kind
        nbytes = access.size * len(access.addresses)
        if access.home != access.rank:
            read = access.action == "read"
            link = (access.home, access.rank) if read else (access.rank, access.home)
            counts.link_bytes[link] += nbytes
        if kind.proxy == "async":
            if access.action == "read":
                counts.loaded_bytes += nbytes
            else:
                counts.stored_bytes += nbytes
        elif kind.semantics != "weak":
            if access.action == "read":
                if kind.semantics in ACQUIRES:
                    counts.polls += 1
            elif kind.semantics in RELEASES and kind.scope in WIDE_SCOPES:
                counts.flags += len(access.addresses)

    def on_event(self, agent: Any, name: str, detail: dict[str, Any]) -> None:
        """Count an event by its name."""
        self.launches[agent.cta.launch.number].events[name] += 1

    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes over each link by all launches so far."""
        return dict(sum((counts.link_bytes for counts in self.launches.values()), Counter()))

    def instructions(self) -> int:
        """Instructions of all launches so far."""
        return sum(counts.instructions for counts in self.launches.values())

    def as_dict(self) -> dict[str, Any]:
        """All records and the links' totals, ready for JSON."""
        return {
            "launches": [counts.as_dict() for counts in self.launches.values()],
            "link_bytes": _named(self.link_bytes()),
        }


def summary_table(launches: Iterable[LaunchCounts]) -> str:
    """One line for each launch, by rank, and a matrix of the links that carried something."""
    records = sorted(launches, key=lambda counts: (counts.rank, counts.number))
    header = (
        "launch",
        "rank",
        "kernel",
        "CTAs",
        "instructions",
        "MMAs",
        "copied in",
        "copied out",
        "flags",
        "polls",
    )
    rows = [
        (
            str(counts.number),
            str(counts.rank),
            _short(counts.kernel),
            str(counts.ctas),
            f"{counts.instructions:,}",
            f"{counts.events['mma']:,}",
            f"{counts.loaded_bytes:,}",
            f"{counts.stored_bytes:,}",
            f"{counts.flags:,}",
            f"{counts.polls:,}",
        )
        for counts in records
    ]
    lines = _columns([header, *rows], 3)
    links: Counter[tuple[int, int]] = sum((counts.link_bytes for counts in records), Counter())
    if links:
        ranks = sorted({rank for link in links for rank in link})
        matrix = [("bytes from \\ to", *(f"rank {rank}" for rank in ranks))]
        for source in ranks:
            cells = (f"{links[source, to]:,}" if source != to else "-" for to in ranks)
            matrix.append((f"rank {source}", *cells))
        lines += ["", *_columns(matrix, 1)]
    return "\n".join(lines)


def _named(links: Mapping[tuple[int, int], int]) -> dict[str, int]:
    return {f"{source}->{to}": nbytes for (source, to), nbytes in sorted(links.items())}


def _short(name: str, limit: int = 40) -> str:
    """The name without what the DSL puts before every kernel's."""
    name = name.removeprefix("kernel_cutlass_")
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def _columns(rows: list[tuple[str, ...]], left: int) -> list[str]:
    """The rows with columns aligned, the first `left` to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
