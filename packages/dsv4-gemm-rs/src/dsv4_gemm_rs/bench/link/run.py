# SPDX-License-Identifier: Apache-2.0
"""The link benchmark's main loop: every way, size, direction and number of multiprocessors; then latencies.

A sample of a transfer is the time between two CUDA events around one launch, of the slowest rank that moves
data; the ranks meet on the device immediately before, and the device is held back until the host has enqueued
all samples. It thus includes a launch's own few microseconds, which matter to a small message. Every
measurement is followed by a check of what has landed, and wrong words are counted in its row.

Rejected: one pair of events around many launches. Both ways, a rank that is ahead would finish while the
other has the link to itself. A CUDA graph: torch's events cannot be read from inside one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.communicator import Communicator
from dsv4_symm_mem.errors import ArgumentError, GroupError, UnsupportedError

from dsv4_gemm_rs.bench.link.cases import (
    CASES,
    STORES,
    SUMS,
    Case,
    Direction,
    count_wrong,
    multiprocessor_counts,
    require_messages,
    sent_bytes,
)
from dsv4_gemm_rs.bench.link.endpoint import MEET_SECONDS, Endpoint
from dsv4_gemm_rs.bench.link.results import checks
from dsv4_gemm_rs.bench.report import (
    Report,
    describe_machine,
    describe_versions,
    this_command,
    today,
)
from dsv4_gemm_rs.bench.timing import Group, Timing

VIRTUAL = "virtual ranks on one device: no link is crossed, all share its memory and multiprocessors"
HOLD_SECONDS = 0.003
"""How long a device is kept waiting at first, so that the host's launches are in no event's time."""
ROUNDS = 2000
REPETITIONS = 200
SETTLING = 16
"""First round trips and repetitions that are left out."""

Row = dict[str, Any]
Progress = Callable[[str], None]


def run_link_benchmark(
    group: Group, *, sizes: Sequence[int], samples: int, progress: Progress = lambda line: None
) -> Report:
    """Measure the link between each rank and the next; collective.

    Args:
        group: A `VirtualGroup` (all ranks in this process) or one rank's communicator.
        sizes: Message sizes in bytes, multiples of 64 KiB.
        samples: Samples per transfer.
        progress: Called with a line for each case as it is done, on rank 0.

    Raises:
        UnsupportedError: The ranks have no CUDA device.
        ArgumentError: There is only one rank, or a size is not usable.
        GroupError: A rank did not come to a meeting in time.
    """
    if group.device.type != "cuda":
        raise UnsupportedError("the link benchmark needs a GPU for each rank, or one for virtual ranks")
    if group.size < 2:
        raise ArgumentError("ranks", group.size, "at least 2")
    require_messages(sizes)
    if isinstance(group, VirtualGroup):
        how = VIRTUAL
        rows = group.run(lambda rank: _measure(rank, sizes, samples, progress))[0]
    else:
        how = "processes"
        rows = _measure(group, sizes, samples, progress)
    machine = describe_machine(group.device, group.size, how)
    return Report(
        name="link",
        machine=machine,
        versions=describe_versions(group.device),
        command=this_command(),
        date=today(),
        rows=rows,
        checks=checks(rows, separate_devices=how != VIRTUAL),
    )


def _measure(communicator: Communicator, sizes: Sequence[int], samples: int, progress: Progress) -> list[Row]:
    say = progress if communicator.rank == 0 else lambda line: None
    end = Endpoint(communicator, max(sizes))
    try:
        end.prepare()
        say("kernels are compiled")
        if end.no_multicast:
            say(f"sums are not read through multicast: {end.no_multicast}")
        # Data of one seed are used by one measurement only; 0 was used above.
        seeds = iter(range(1, 2**31))
        rows = [
            *_transfers(end, sizes, samples, seeds, say),
            _round_trips(end, say),
            *_publications(end, seeds, say),
        ]
    except BaseException:
        # Another rank may have failed somewhere else, so nothing more is done together.
        end.close(wait=False)
        raise
    end.close()
    return rows


def _transfers(
    end: Endpoint, sizes: Sequence[int], samples: int, seeds: Iterator[int], say: Progress
) -> Iterator[Row]:
    counts = multiprocessor_counts(torch.cuda.get_device_properties(end.device).multi_processor_count)
    for size in sizes:
        for direction in Direction:
            for case in CASES if end.no_multicast else (*CASES, SUMS):
                rates = []
                for count in (None,) if case.way.by_torch else counts:
                    row = _transfer(end, case, size, direction, count, samples, next(seeds))
                    rates.append(f"{'' if count is None else f'{count}:'}{row['gb_per_s']:.1f}")
                    yield row
                say(f"{size / 2**20:g} MiB {direction} {case.name:<14} GB/s {' '.join(rates)}")


def _transfer(
    end: Endpoint,
    case: Case,
    size: int,
    direction: Direction,
    count: int | None,
    samples: int,
    seed: int,
) -> Row:
    end.fill(case, size, seed)
    _meet_on_host(end)
    active = direction.active(end.rank)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(samples + 1)]
    end.meet(hold_seconds=HOLD_SECONDS)
    for start, stop in events:
        end.meet()
        start.record()
        if active:
            end.move(case, size, count or 0, seed)
        stop.record()
    end.meet()
    end.synchronize()
    # The first one finds cold translation buffers.
    mine = [start.elapsed_time(stop) * 1e-3 for start, stop in events[1:]] if active else None
    received = active if case.way.pulls else direction.active(end.previous)
    wrong = end.count_wrong(case, size, seed) if received else 0
    gathered = _gather(end, (mine, wrong))
    times = [times for times, _ in gathered if times is not None]
    timing = Timing.of([max(sample) for sample in zip(*times, strict=True)])
    return {
        "measure": "bandwidth",
        "case": case.name,
        "bytes": size,
        "direction": str(direction),
        "multiprocessors": count,
        **asdict(timing),
        "gb_per_s": sent_bytes(case, size, direction, end.size) / timing.median_us * 1e-3,
        "wrong_words": sum(wrong for _, wrong in gathered),
    }


def _round_trips(end: Endpoint, say: Progress) -> Row:
    _meet_on_host(end)
    end.meet()
    end.play_ping_pong(ROUNDS)
    end.synchronize()
    words = _gather(end, end.read_times(2 + ROUNDS))[0]
    row = {
        "measure": "flag-round-trip",
        "case": "st.release.sys, ld.acquire.sys",
        **nanoseconds(words, words[2 + SETTLING :]),
    }
    say(f"flag round trip {row['median_ns']:.0f} ns")
    return row


def _publications(end: Endpoint, seeds: Iterator[int], say: Progress) -> Iterator[Row]:
    # The names are those of a module that needs the DSL, which is loaded by now.
    from dsv4_gemm_rs.bench.link.kernels.stopwatches import PUBLICATIONS

    for stores in STORES:
        seed = next(seeds)
        _meet_on_host(end)
        if end.rank == 0:
            end.time_publication(stores, REPETITIONS, seed)
        end.meet()
        end.synchronize()
        wrong = count_wrong(end.landing.local[: 16 * stores], seed) if end.previous == 0 else 0
        gathered = _gather(end, (end.read_times(2 + len(PUBLICATIONS) * REPETITIONS), wrong))
        words = gathered[0][0]
        medians = []
        for index, operation in enumerate(PUBLICATIONS):
            first = 2 + index * REPETITIONS
            times = nanoseconds(words, words[first + SETTLING : first + REPETITIONS])
            medians.append(f"{operation} {times['median_ns']:.0f}")
            yield {
                "measure": "publication",
                "case": operation,
                "stores": stores,
                **times,
                "wrong_words": sum(wrong for _, wrong in gathered),
            }
        say(f"after {stores} stores, ns: {'; '.join(medians)}")


def nanoseconds(clocks: Sequence[int], cycles: Sequence[int]) -> Row:
    """Median and percentiles of `cycles` in ns; `clocks` begins with a stop-watch's whole cycles and ns."""
    ns_per_cycle = clocks[1] / clocks[0]
    ordered = sorted(cycles)
    return {
        "median_ns": statistics.median(ordered) * ns_per_cycle,
        "p10_ns": ordered[len(ordered) // 10] * ns_per_cycle,
        "p90_ns": ordered[len(ordered) * 9 // 10] * ns_per_cycle,
        "samples": len(ordered),
        "ns_per_cycle": ns_per_cycle,
    }


def _meet_on_host(end: Endpoint) -> None:
    end.synchronize()
    end.communicator.all_gather(None)


def _gather(end: Endpoint, value: Any) -> list[Any]:
    """Every rank's value, or the error of those that waited in vain."""
    gathered = end.communicator.all_gather((value, end.failed()))
    failures = {
        rank: f"a peer did not come within {MEET_SECONDS:g} s"
        for rank, (_, failed) in enumerate(gathered)
        if failed
    }
    if failures:
        raise GroupError("meeting on the device", failures)
    return [value for value, _ in gathered]
