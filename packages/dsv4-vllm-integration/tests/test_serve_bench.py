# SPDX-License-Identifier: Apache-2.0
"""The comparison's arithmetic on constructed results, its plan, and its whole way over servers of a test."""

from __future__ import annotations

import json
import math
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from dsv4_symm_mem import ArgumentError
from dsv4_vllm_integration.cli import main
from dsv4_vllm_integration.serve_bench.arithmetic import Run, compare
from dsv4_vllm_integration.serve_bench.plan import CASES, Arm, Case, plan_of
from dsv4_vllm_integration.serve_bench.report import as_json, markdown, plot
from free_port import free_port

SUPPORT = Path(__file__).parent / "support"


def saved(
    node: str,
    arm: str,
    concurrency: int,
    requests: int,
    duration: float,
    ttft: float,
    tpot: float,
    **more: Any,
) -> dict[str, Any]:
    bench = {
        "completed": requests,
        "failed": 0,
        "duration": duration,
        "total_input_tokens": requests * 8192,
        "total_output_tokens": requests * 1024,
        "mean_ttft_ms": ttft,
        "mean_tpot_ms": tpot,
        "output_lens": [1024] * requests,
    }
    changes = more.pop("bench", {})
    envelope = {
        "node": node,
        "arm": arm,
        "repeat": 0,
        "concurrency": concurrency,
        "requests": requests,
        "output_tokens": 1024,
        "preemptions": 0,
        "bench": bench | changes,
    }
    return envelope | more


def test_aggregates_are_over_all_tokens_all_seconds_and_all_requests() -> None:
    # 128 requests of 1024 tokens on each node. Durations are chosen so that the aggregates come out as
    # 1000 and 1100 tokens a second, while the mean of the nodes' own rates would be another figure.
    total = 2 * 128 * 1024
    runs = [
        Run.of(saved("a", "baseline", 16, 128, 0.4 * total / 1000, 500.0, 10.0)),
        Run.of(saved("b", "baseline", 16, 128, 0.6 * total / 1000, 700.0, 12.0)),
        Run.of(saved("a", "candidate", 16, 128, 0.4 * total / 1100, 450.0, 9.0)),
        Run.of(saved("b", "candidate", 16, 128, 0.6 * total / 1100, 630.0, 11.4)),
    ]
    (found,) = compare(runs)
    assert found.arms[Arm.BASELINE].output_rate == pytest.approx(1000)
    assert found.arms[Arm.CANDIDATE].output_rate == pytest.approx(1100)
    mean_of_rates = sum(run.output_rate for run in runs[:2]) / 2
    assert mean_of_rates == pytest.approx(1041.67, abs=0.01)
    assert found.arms[Arm.BASELINE].ttft_ms == pytest.approx(600)
    assert found.arms[Arm.CANDIDATE].tpot_ms == pytest.approx(10.2)
    assert found.changes == pytest.approx({"output_rate": 0.1, "ttft_ms": -0.1, "tpot_ms": -0.8 / 11})
    assert found.node_changes["tpot_ms"] == pytest.approx({"a": -0.1, "b": -0.05})
    assert found.arms[Arm.BASELINE].sound


def test_means_are_weighted_by_requests() -> None:
    runs = [
        Run.of(saved("a", arm, 964, requests, 100.0, ttft, 20.0))
        for arm in ("baseline", "candidate")
        for requests, ttft in ((1928, 1000.0), (964, 4000.0))
    ]
    (found,) = compare(runs)
    assert found.arms[Arm.BASELINE].ttft_ms == pytest.approx(2000)


def test_nodes_that_disagree_establish_nothing() -> None:
    runs = [
        Run.of(saved(node, arm, 64, 128, duration, 500.0, 10.0))
        for node, arm, duration in [
            ("a", "baseline", 100.0),
            ("a", "candidate", 97.0),
            ("b", "baseline", 100.0),
            ("b", "candidate", 101.0),
        ]
    ]
    (found,) = compare(runs)
    assert found.changes["output_rate"] > 0.01
    assert not found.intervals["output_rate"].established
    assert "not established" in markdown([found])


def test_repeats_that_agree_establish_it() -> None:
    runs = [
        Run.of(saved(node, arm, 64, 128, duration * (1 + 0.002 * repeat), 500.0, 10.0, repeat=repeat))
        for repeat in range(3)
        for node in ("a", "b")
        for arm, duration in (("baseline", 100.0), ("candidate", 95.0 + 0.1 * repeat))
    ]
    (found,) = compare(runs)
    held = found.intervals["output_rate"]
    assert held.count == 6
    assert held.established
    assert held.low < found.changes["output_rate"] < held.high


def test_failed_and_short_requests_are_seen() -> None:
    lengths = {"bench": {"output_lens": [1024] * 126 + [1000, 0], "completed": 127}}
    runs = [
        Run.of(saved("a", "baseline", 16, 128, 10.0, 1.0, 1.0)),
        Run.of(saved("a", "candidate", 16, 128, 10.0, 1.0, 1.0, preemptions=3, **lengths)),
    ]
    (found,) = compare(runs)
    candidate = found.arms[Arm.CANDIDATE]
    assert (candidate.completed, candidate.wrong_lengths, candidate.preemptions) == (127, 2, 3)
    assert not candidate.sound
    assert "127 of 128 | 2 | 3" in markdown([found])
    (shown,) = as_json([found])
    assert shown["intervals"]["ttft_ms"]["low"] is None
    assert math.isfinite(json.loads(json.dumps(shown))["changes"]["output_rate"])


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        Run.of(saved(node, arm, 64, 128, duration, 500.0, 10.0))
        for node in ("a", "b")
        for arm, duration in (("baseline", 100.0), ("candidate", 95.0))
    ]
    plot(compare(runs), tmp_path / "changes.png")
    assert (tmp_path / "changes.png").read_bytes().startswith(b"\x89PNG")


def test_the_default_plan_is_the_published_procedure() -> None:
    plan = plan_of({"model": "m", "nodes": [{"name": "a", "urls": {"baseline": "x", "candidate": "y"}}]})
    assert plan.cases == CASES == (Case(16, 128), Case(64, 128), Case(964, 1928))
    assert (plan.input_tokens, plan.output_tokens) == (8192, 1024)
    orders = [plan.order(node, repeat)[0] for repeat in (0, 1) for node in (0, 1)]
    assert orders == [Arm.BASELINE, Arm.CANDIDATE, Arm.CANDIDATE, Arm.BASELINE]


def test_the_documented_plan_is_one() -> None:
    page = Path(__file__).parents[3] / "docs" / "vllm.md"
    text = page.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    plan = plan_of(tomllib.loads(text))
    assert [node.name for node in plan.nodes] == ["first", "second"]
    assert plan.environment[Arm.CANDIDATE] == {"VLLM_DSV41_GEMM_RS": "1"}
    assert plan.repeats == 3


@pytest.mark.parametrize(
    ("table", "argument"),
    [
        ({}, "model"),
        ({"model": "m"}, "nodes"),
        ({"model": "m", "nodes": [{"name": "a/b"}]}, "nodes.name"),
        ({"model": "m", "nodes": [{"name": "a"}]}, "nodes.a"),
        ({"model": "m", "nodes": [{"name": "a", "url": "u", "command": ["c"]}] * 2}, "nodes"),
        ({"model": "m", "nodes": [{"name": "a", "url": "u", "command": ["c"]}], "case": []}, "plan"),
        ({"model": "m", "nodes": [{"name": "a", "url": "u", "command": ["c"]}], "repeats": 0}, "repeats"),
    ],
)
def test_a_plan_that_is_none(table: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        plan_of(table)
    assert caught.value.argument == argument


def write_plan(folder: Path, client: list[str], extra: str, loads: dict[int, int]) -> Path:
    """Two nodes, both arms on servers of the test's own; the candidate's tokens take half the time."""
    nodes = ""
    for name in ("first", "second"):
        port = free_port()
        command = [sys.executable, str(SUPPORT / "openai_server.py"), str(port)]
        nodes += (
            f'[[nodes]]\nname = "{name}"\nurl = "http://127.0.0.1:{port}"\ncommand = {json.dumps(command)}\n'
        )
    path = folder / "plan.toml"
    path.write_text(
        f'model = "small"\ninput_tokens = 16\noutput_tokens = 20\nstart_seconds = 60\n'
        f"client = {json.dumps(client)}\n{extra}\n"
        + "".join(f"[[cases]]\nconcurrency = {c}\nrequests = {r}\n" for c, r in loads.items())
        + '[arms.baseline]\nTOKEN_SECONDS = "0.02"\n[arms.candidate]\nTOKEN_SECONDS = "0.01"\n'
        + nodes
    )
    return path


def check_results(folder: Path, capsys: pytest.CaptureFixture[str], loads: list[int]) -> None:
    figures = json.loads((folder / "figures.json").read_text())
    assert [found["concurrency"] for found in figures] == loads
    for found in figures:
        for arm in found["arms"].values():
            assert arm["sound"]
            assert (arm["wrong_lengths"], arm["preemptions"]) == (0, 0)
        assert set(found["node_changes"]["output_rate"]) == {"first", "second"}
        assert found["changes"]["tpot_ms"] < -0.25
        assert found["changes"]["output_rate"] > 0.2
    assert f"| {loads[0]} | output tok/s |" in capsys.readouterr().out
    # From the saved files alone the same comes out.
    assert main(["bench-serve", "--folder", str(folder), "--json", str(folder / "again.json")]) == 0
    assert json.loads((folder / "again.json").read_text()) == figures


def test_the_whole_way_with_a_small_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_plan(tmp_path, [sys.executable, str(SUPPORT / "small_client.py")], "", {2: 4, 4: 8})
    options = ["--plan", str(plan), "--folder", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    assert main(["bench-serve", *options]) == 0
    check_results(tmp_path, capsys, [2, 4])


def test_a_server_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    command = json.dumps([sys.executable, "-c", "raise SystemExit(3)"])
    plan.write_text(
        f'model = "m"\n[[nodes]]\nname = "a"\nurl = "http://127.0.0.1:{free_port()}"\ncommand = {command}\n'
    )
    assert main(["bench-serve", "--plan", str(plan), "--folder", str(tmp_path)]) == 2
    assert "ended with code 3" in capsys.readouterr().err


@pytest.mark.vllm
def test_the_whole_way_with_vllm_s_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0} | {f"w{index}": index + 1 for index in range(200)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    client = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    plan = write_plan(tmp_path, client, f'tokenizer = "{folder}"', {4: 8})
    options = ["--plan", str(plan), "--folder", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    assert main(["bench-serve", *options]) == 0
    check_results(tmp_path, capsys, [4])
