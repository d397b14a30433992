# SPDX-License-Identifier: Apache-2.0
"""The link benchmark: its kernels' instructions, the data it checks, its report, and one run on a GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4_gemm_rs.bench.link.cases import (
    CASES,
    MESSAGE_MULTIPLE,
    STORES,
    SUMS,
    TILE_M,
    UNIT_BYTES,
    UNIT_WORDS,
    Direction,
    block_offset,
    count_wrong,
    count_wrong_sums,
    fill,
    fill_addend,
    multiprocessor_counts,
    require_messages,
    sent_bytes,
)
from dsv4_gemm_rs.bench.link.endpoint import KERNELS, link_kernel
from dsv4_gemm_rs.bench.link.results import checks, plot, table
from dsv4_gemm_rs.bench.link.run import VIRTUAL, nanoseconds
from dsv4_gemm_rs.bench.report import Report
from dsv4_gemm_rs.cli.main import main
from dsv4_symm_mem import SymmetricArena, VirtualGroup
from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.slots import element_offset
from dsv4_symm_mem.testing.ptx import compile_ptx, instructions, opcodes, positions_in_order

ARCHES = ("sm_90a", "sm_100a")
STORE = "st.global.L1::no_allocate.v4.b32"
SUM = "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2"
LOAD = "ld.global.L1::no_allocate.v4.b32"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
COMMIT, WAIT, WAIT_READ = (
    f"cp.async.bulk.{name}" for name in ("commit_group", "wait_group", "wait_group.read")
)
ACQUIRE, RELEASE, RELAXED = (f"{name}.sys.global.b64" for name in ("ld.acquire", "st.release", "st.relaxed"))
CLOCK = "clock"
MEMORY = (
    "multimem",
    "ld.global",
    "ld.acquire",
    "ld.relaxed",
    "st.global",
    "st.re",
    "fence.",
    "cp.",
    "bar.",
    CLOCK,
)

EXPECTED = {
    "meet": ["ld.relaxed.sys.global.b64", "ld.global.b64", RELEASE, ACQUIRE, ACQUIRE, RELAXED],
    "push-bulk": [
        *("fence.proxy.async.shared::cta", "bar.sync"),
        *(BULK_STORE, COMMIT, WAIT_READ, WAIT),
    ],
    "push-stores": [*[STORE] * 8, "bar.sync", "fence.acq_rel.sys"],
    "push-blocks": [*[STORE] * 8, "bar.sync", "fence.acq_rel.sys"],
    "pull-loads": [*[LOAD] * 8, *[STORE] * 8],
    "read-sums": ["fence.proxy.alias", *[SUM] * 8, *[STORE] * 8],
    "pull-bulk": [
        *("fence.mbarrier_init.release.cluster", BULK_LOAD),
        *(BULK_STORE, COMMIT, WAIT_READ, BULK_LOAD, WAIT),
    ],
}
"""Global memory, fences and barriers of the kernels without a stop-watch, complete and in order."""


@functools.cache
def ptx_of(name: str, arch: str) -> str:
    from dsv4_gemm_rs.bench.link.kernels import example_arguments

    function, arguments = example_arguments(name)
    return compile_ptx(function, arch, arguments, "--enable-tvm-ffi")


def effects(ptx: str) -> list[str]:
    """Opcodes that touch global memory, order it, or read the clock."""
    pairs = zip(opcodes(ptx), instructions(ptx), strict=True)
    named = (CLOCK if statement.endswith("%clock64") else code for code, statement in pairs)
    return [code for code in named if code.startswith(MEMORY)]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_without_spills_and_one_with_multicast(name: str, arch: str) -> None:
    ptx = ptx_of(name, arch)
    assert f".target {arch}" in ptx
    assert not any(word in ptx for word in (".local", "membar", ".nc."))
    assert ("multimem" in ptx) == (name == "read-sums")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_transfers_are_exactly_the_intended_instructions(name: str, arch: str) -> None:
    assert effects(ptx_of(name, arch)) == EXPECTED[name]


@pytest.mark.parametrize("arch", ARCHES)
def test_pushes_keep_two_units_in_flight_and_end_when_they_have_landed(arch: str) -> None:
    found = instructions(ptx_of("push-bulk", arch))
    positions_in_order(found, "cp.async.bulk.wait_group.read 1", "cp.async.bulk.wait_group 0")


@pytest.mark.parametrize("arch", ARCHES)
def test_the_ping_pong_writes_and_polls_flags_and_nothing_else(arch: str) -> None:
    found = effects(ptx_of("ping-pong", arch))
    last = max(i for i, code in enumerate(found) if code == ACQUIRE)
    playing = found[: found.index(RELAXED)]
    assert set(playing) == {RELEASE, ACQUIRE, CLOCK}
    assert playing.count(RELEASE) == 2
    # Every poll that repeats is bounded: the clock follows it.
    assert all(found[i + 1] in (CLOCK, RELEASE) for i, code in enumerate(found[:last]) if code == ACQUIRE)
    assert set(found[found.index(RELAXED) :]) == {RELAXED}


@pytest.mark.parametrize("arch", ARCHES)
def test_a_publication_is_timed_alone_after_the_barrier(arch: str) -> None:
    found = effects(ptx_of("publication", arch))
    drain = ["fence.acq_rel.sys", "bar.sync"]
    timed: list[str] = []
    for operation in ([], [RELAXED], [RELEASE], ["fence.acq_rel.sys"]):
        timed += [STORE, "bar.sync", CLOCK, *operation, CLOCK, *drain]
    bulk = [CLOCK, BULK_STORE, COMMIT, WAIT, CLOCK, "fence.proxy.async", RELEASE, CLOCK, *drain]
    start = found.index(STORE)
    assert found[start : start + len(timed) + len(bulk)] == timed + bulk


def test_the_block_order_is_the_slot_layout_of_the_epilogue() -> None:
    seen = set()
    for warp, half, column, lane in itertools.product(range(8), range(2), range(4), range(32)):
        row = 16 * warp + 8 * half + lane // 4
        offset = block_offset(warp, half, column, lane)
        assert offset == 2 * element_offset(TILE_M, row, 32 * column + 8 * (lane % 4))
        seen.add(offset)
    assert seen == set(range(0, UNIT_BYTES, 16))


def test_every_wrong_byte_is_found() -> None:
    message = torch.empty(2 * UNIT_BYTES, dtype=torch.uint8)
    fill(message, 7)
    assert message.view(torch.int32).unique().numel() == UNIT_WORDS
    assert count_wrong(message, 7) == 0
    assert count_wrong(message, 8) == 2 * UNIT_WORDS
    for position in (0, 4097, 2 * UNIT_BYTES - 1):
        message[position] ^= 1
    assert count_wrong(message, 7) == 3
    assert count_wrong(message[:16], 7) == 1
    assert count_wrong(message[:0], 7) == 0


@pytest.mark.parametrize("world_size", [2, 3, 8, 16, 128])
def test_every_wrong_sum_is_found(world_size: int) -> None:
    message = torch.empty(2048, dtype=torch.uint8)
    for seed in (5, 6):
        fill_addend(message, seed, world_size)
        addends = message.view(torch.bfloat16)
        sums = torch.stack([addends] * world_size).double().sum(0)
        assert sums.max() <= 256
        landed = sums.bfloat16()
        assert torch.equal(landed.double(), sums)
        assert count_wrong_sums(landed.view(torch.uint8), seed, world_size) == 0
        # What was left by the measurement before, and sums that lack one rank.
        assert count_wrong_sums(landed.view(torch.uint8), seed - 1, world_size) == 512
        short = (sums - addends.double()).bfloat16().view(torch.uint8)
        assert count_wrong_sums(short, seed, world_size) >= 256
    assert message.view(torch.bfloat16).unique().numel() > 1


def test_who_reads_a_sum_makes_every_link_carry_it() -> None:
    one, both = (sent_bytes(SUMS, 100, direction, 4) for direction in Direction)
    assert (one, both) == (100, 400)
    assert {sent_bytes(case, 100, direction, 4) for case in CASES for direction in Direction} == {100}


@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_all_ranks_land(size: int, request: pytest.FixtureRequest) -> None:
    library = pytest.importorskip(
        "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
    )
    if obstacle := library.obstacle():
        pytest.skip(obstacle)
    make: Callable[..., Any] = request.getfixturevalue("emulator")
    emulation = make(size, arch="sm_100a")
    group = VirtualGroup(size, emulation=emulation)
    nbytes = MESSAGE_MULTIPLE
    arenas = group.run(lambda rank: SymmetricArena.create(rank, 2 * nbytes))
    source, landing = (
        [arena.allocate((nbytes,), torch.uint8, name) for arena in arenas] for name in ("source", "landing")
    )
    for mine in source:
        fill_addend(mine.local, 3, size)
    for rank, device in enumerate(emulation.accelerators):
        link_kernel("read-sums")(
            *(source[rank].multicast_pointer, landing[rank].pointers[rank], nbytes // UNIT_BYTES, 1),
            stream=device.current_stream(),
            memory=(source[rank].local, landing[rank].local),
        )
    assert all(count_wrong_sums(mine.local, 3, size) for mine in landing)
    emulation.run()
    assert [count_wrong_sums(mine.local, 3, size) for mine in landing] == [0] * size
    group.run(lambda rank: arenas[rank.rank].close())


@pytest.mark.parametrize(
    ("available", "counts"),
    [(132, (1, 2, 4, 8, 16, 32, 64, 132)), (64, (1, 2, 4, 8, 16, 32, 64)), (1, (1,)), (3, (1, 2, 3))],
)
def test_multiprocessor_counts(available: int, counts: tuple[int, ...]) -> None:
    assert multiprocessor_counts(available) == counts


@pytest.mark.parametrize("sizes", [(), (0,), (MESSAGE_MULTIPLE, UNIT_BYTES)])
def test_unusable_sizes_are_named(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="sizes"):
        require_messages(sizes)


def test_cycles_become_nanoseconds_by_the_whole_run() -> None:
    assert nanoseconds([2000, 1000], [10, 30, 20]) == {
        "median_ns": 10.0,
        "p10_ns": 5.0,
        "p90_ns": 15.0,
        "samples": 3,
        "ns_per_cycle": 0.5,
    }


def made_up_rows(both_ways: float, wrong: int = 0) -> list[dict[str, Any]]:
    """Rows as a run has them, on a device of 4 multiprocessors; 100 GB/s each with 4, 95 with 2."""
    rows: list[dict[str, Any]] = []
    for size, direction, case in itertools.product((2**26, 2**23), Direction, CASES):
        factor = both_ways if direction is Direction.BOTH_WAYS else 1.0
        rates = {None: 90.0} if case.way.by_torch else {1: 50.0, 2: 95.0, 4: 100.0}
        rows += [
            {
                "measure": "bandwidth",
                "case": case.name,
                "bytes": size,
                "direction": str(direction),
                "multiprocessors": count,
                "gb_per_s": rate * factor,
                "wrong_words": wrong,
            }
            for count, rate in rates.items()
        ]
    times = nanoseconds([2000, 1000], [1000, 2000])
    rows.append({"measure": "flag-round-trip", "case": "flag", **times})
    rows += [
        {"measure": "publication", "case": case, "stores": stores, "wrong_words": 0, **times}
        for case in ("st.relaxed.sys", "st.release.sys")
        for stores in STORES
    ]
    return rows


def made_up_report(rows: list[dict[str, Any]], separate_devices: bool = True) -> Report:
    machine = {"device": "NVIDIA H200", "ranks": 2, "ranks_are": "processes"}
    return Report("link", machine, {}, "", "", rows, checks(rows, separate_devices=separate_devices))


def test_the_table_shows_rates_latencies_and_what_suffices() -> None:
    text = table(made_up_report(made_up_rows(0.5)))
    assert "multiprocessors        1       2       4" in text
    assert "push-bulk-16k       50.0    95.0   100.0" in text
    assert "copy-push           90.0\n" in text
    assert (
        "64 MiB one-way push-blocks: best 100.0 GB/s, 0.22 of NVLink's data sheet; 90% of it from 2" in text
    )
    assert "flag round trip, flag: 750 ns" in text
    assert "MISSED: best push both ways / one way = 0.5 (target 0.9)" in text
    assert "holds: wrong 32-bit words that landed = 0 (target 0)" in text


def test_claims() -> None:
    assert [c.holds for c in checks(made_up_rows(0.95), separate_devices=True)] == [True, True]
    assert [c.holds for c in checks(made_up_rows(0.5), separate_devices=False)] == [True]
    (wrong,) = checks(made_up_rows(1.0, wrong=1), separate_devices=False)
    assert wrong.value > 0
    assert not wrong.holds


def test_the_report_survives_its_file_and_is_plotted(tmp_path: Path) -> None:
    report = made_up_report(made_up_rows(0.95))
    report.write(tmp_path / "link.json")
    assert Report.read(tmp_path / "link.json") == report
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    plot(report, tmp_path / "link.png")
    assert (tmp_path / "link.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "cpu"], "the link benchmark needs a GPU"),
        (["--samples", "0"], "--samples: got 0"),
        (["--mebibytes", "8", "0"], "--mebibytes: got 0"),
        (["--output", "/proc/nowhere/x.json"], "--output: got '/proc/nowhere/x.json'"),
    ],
)
def test_a_request_that_cannot_be_met_is_exit_code_2(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench-link", "--output", str(tmp_path / "link.json"), *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"
)
def test_a_run_on_virtual_ranks_moves_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "link.json"
    options = ["--mebibytes", "1", "--samples", "2", "--output", str(output)]
    assert main(["bench-link", "--ranks", "3", *options]) == 0
    assert VIRTUAL in capsys.readouterr().err
    report = Report.read(output)
    assert report.machine["ranks_are"] == VIRTUAL
    assert {row["case"] for row in report.rows if row["measure"] == "bandwidth"} == {c.name for c in CASES}
    assert all(row["gb_per_s"] > 0 for row in report.rows if row["measure"] == "bandwidth")
    assert all(row["median_ns"] > 0 for row in report.rows if row["measure"] == "flag-round-trip")
    assert [check.holds for check in report.checks] == [True]
