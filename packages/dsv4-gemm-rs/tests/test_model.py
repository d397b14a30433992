# SPDX-License-Identifier: Apache-2.0
"""The model of whole calls: against what was published and measured, and that it moves as it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dsv4_gemm_rs.bench.report import Report
from dsv4_gemm_rs.cli.main import main
from dsv4_gemm_rs.dispatch.costs import choose, estimate_us
from dsv4_gemm_rs.model import calls
from dsv4_gemm_rs.model.calls import Call
from dsv4_gemm_rs.model.inputs import B200, H200, NAMES, SOURCES
from dsv4_gemm_rs.model.report import (
    PUBLISHED,
    PULLED_TILE,
    SM90,
    SM100,
    SM100_MULTICAST,
    all_rows,
    comparison,
    prediction,
    sensitivity,
)


def test_one_set_of_inputs_meets_what_was_published() -> None:
    """Within 18 %; docs/sm100.md says on which side."""
    for row in comparison([]):
        assert 0.82 < row["ratio"] < 1.18, row
    # What is left of the published fused kernel does not depend on M: a constant per call.
    left = [
        fused - calls.pulled_us(B200, PULLED_TILE, Call(m, 5120, 2048, 4))
        for m, (_, fused) in PUBLISHED.items()
    ]
    assert max(left) - min(left) < 2.0
    assert min(left) > 5.0


def test_ours_is_never_below_its_parts() -> None:
    for row in prediction():
        assert row["ours_us"] > row["quantise_us"] + max(row["wire_us"], 0.9 * row["gemm_us"])
        assert row["unfused_us"] > row["quantise_us"] + row["gemm_us"]


def test_a_call_is_the_quantiser_and_the_dispatchers_kernel() -> None:
    call = Call(4096, 5120, 2048, 4)
    shape = (4096, 5120, 2048, 4, 148)
    kernel = estimate_us(B200.rates, choose(B200.rates, SM100, *shape), *shape)
    assert calls.ours_us(B200, SM100, call) == calls.quantise_us(B200, call) + kernel
    assert calls.gemm_us(H200, SM90, call) > calls.gemm_us(B200, SM100, call)


def test_every_input_has_a_source_and_moves_something() -> None:
    assert NAMES - {"multiprocessors"} <= SOURCES.keys()
    busy, linked = Call(2048, 5120, 4096, 2), Call(8192, 5120, 512, 4)

    def times(inputs: object) -> list[float]:
        assert isinstance(inputs, type(B200))
        return [
            *(calls.ours_us(inputs, SM100, call) for call in (busy, linked)),
            calls.unfused_us(inputs, SM100, busy),
            calls.pulled_us(inputs, PULLED_TILE, busy),
        ]

    for name in SOURCES:
        faster = name.endswith("per_us")
        changed = B200.scaled(name, 0.5 if faster else 2.0)
        assert changed.value(name) == pytest.approx(B200.value(name) * (0.5 if faster else 2.0))
        assert max(slow - base for slow, base in zip(times(changed), times(B200), strict=True)) > 0, name


def test_sensitivity_has_the_right_signs() -> None:
    rows = {row["input"]: row for row in sensitivity() if row["exchange"] == "push"}
    pulled = {row["input"]: row for row in sensitivity() if row["exchange"] == "multicast"}
    link = rows["link_bytes_per_us"]
    assert link["down_8192"] > 10 > -10 > link["up_8192"]
    assert rows["launch_us"]["up_256"] == pytest.approx(0.25 * B200.rates.launch_us)
    assert "multicast_bytes_per_us" not in rows
    assert not {"barrier_us", "collective_us", "collective_bytes_per_us"} & (rows.keys() | pulled.keys())
    # A whole partial crosses the link, through multicast by a rate of its own; owners add nothing.
    rate = pulled["multicast_bytes_per_us"]
    assert rate["down_8192"] > link["down_8192"] > 10
    assert rate["up_8192"] < -10
    assert not {"link_bytes_per_us", "peer_us_per_element"} & pulled.keys()


def test_the_command_puts_a_benchmark_beside_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"case": "fused", "m": 2048, "n": 5120, "k": 2048, "median_us": 50.0}
    machine = {"device": "NVIDIA B200", "arch": 100, "ranks": 4, "ranks_are": "processes"}
    small = row | {"m": 16}
    others = [small, row | {"case": "other"}, row | {"kind": "bf16"}]
    bench = Report("kernel", machine, {}, "bench", "2026-11-30", [row, *others])
    names = ("bench.json", "virtual.json", "pulled.json", "model.json")
    measured, virtual, through, output = (tmp_path / name for name in names)
    bench.write(measured)
    pulled = [row | {"exchange": "multicast", "case": case} for case in ("fused", "quantise")]
    Report("kernel", machine, {}, "bench", "2026-11-30", pulled).write(through)
    Report("kernel", machine | {"ranks_are": "virtual"}, {}, "bench", "2026-11-30", [row]).write(virtual)
    files = [str(path) for path in (measured, virtual, through)]
    assert main(["model", "--measured", *files, "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert "4 x B200  fused, measured" in text
    assert "4 x B200  fused through multicast, measured" in text
    assert text.index("push, TP4") < text.index("multicast, TP4")
    assert main(["model", "--measured", str(tmp_path / "none.json"), "--output", str(output)]) == 2
    assert "a result file of schema 1 ([Errno 2]" in capsys.readouterr().err
    rows = json.loads(output.read_text())["rows"]
    beside = [r for r in rows if "measured" in r.get("what", "")]
    families = (SM100, SM100_MULTICAST)
    modelled, slower = (calls.fused_us(B200, family, Call(2048, 5120, 2048, 4)) for family in families)
    assert [(r["machine"], r["m"], r["known_us"], r["modelled_us"]) for r in beside] == [
        ("4 x B200", 2048, 50.0, pytest.approx(modelled)),
        ("4 x B200", 2048, 50.0, pytest.approx(slower)),
    ]
    assert len(rows) == len(all_rows([bench])) + 1


def test_measured_calls_fill_the_prediction() -> None:
    row = {"case": "dispatched", "m": 2048, "n": 5120, "k": 2048, "median_us": 50.0, "exchange": "push"}
    machine = {"device": "NVIDIA B200", "arch": 100, "ranks": 4, "ranks_are": "processes"}

    def result(exchange: str, microseconds: float, **facts: object) -> Report:
        rows = [row | {"exchange": exchange, "median_us": microseconds}, row | {"k": 1024}]
        return Report("kernel", machine | facts, {}, "bench", "2026-11-30", rows)

    given = [result("push", 50.0), result("multicast", 60.0), result("push", 1.0, arch=90)]
    given += [result("push", 2.0, ranks_are="virtual ranks"), result("push", 70.0, ranks=2)]
    found = {
        (row["world_size"], row["m"]): (row["measured_push_us"], row["measured_multicast_us"])
        for row in prediction(given)
        if row["measured_push_us"] is not None
    }
    # A rank of two has another K.
    assert found == {(4, 2048): (50.0, 60.0)}
