# SPDX-License-Identifier: Apache-2.0
"""Paired accuracy: the rule's three outcomes, what cannot be paired, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dsv4_symm_mem import UnsupportedError
from dsv4_vllm_integration.cli import main
from dsv4_vllm_integration.evaluate.paired import Verdict, pair, read_samples
from dsv4_vllm_integration.serve_bench.servers import get
from free_port import free_port

SUPPORT = Path(__file__).parent / "support"


def answers(total: int, wrong: set[int]) -> dict[tuple[str, str], bool]:
    return {("gsm8k", str(index)): index not in wrong for index in range(total)}


@pytest.mark.parametrize(
    ("only_baseline", "only_candidate", "total", "verdict"),
    [
        (0, 0, 1319, Verdict.ACCEPTED),
        (10, 12, 1319, Verdict.ACCEPTED),
        (0, 0, 100, Verdict.UNDECIDED),
        (14, 12, 1319, Verdict.ACCEPTED),
        (30, 20, 1319, Verdict.UNDECIDED),
        (40, 15, 1319, Verdict.REJECTED),
        # Significant and within the margin: accepted.
        (60, 30, 10_000, Verdict.ACCEPTED),
    ],
)
def test_the_rule(only_baseline: int, only_candidate: int, total: int, verdict: Verdict) -> None:
    baseline = answers(total, set(range(only_candidate)))
    candidate = answers(total, set(range(only_candidate, only_candidate + only_baseline)))
    found = pair(baseline, candidate, 0.01)
    assert (found.only_baseline, found.only_candidate) == (only_baseline, only_candidate)
    assert found.verdict is verdict, (found.loss_bound, found.p)


def test_other_questions_are_not_paired() -> None:
    with pytest.raises(UnsupportedError, match="1 questions only of the baseline"):
        pair(answers(5, set()), answers(4, set()), 0.01)


def test_samples_are_read_by_task_question_and_filter(tmp_path: Path) -> None:
    lines = [
        {"doc_id": 0, "filter": "strict-match", "exact_match": 1.0},
        {"doc_id": 0, "filter": "flexible-extract", "exact_match": 0.0},
    ]
    file = tmp_path / "model" / "samples_mmlu_pro_math_2026-11-30T12-00-00.1.jsonl"
    file.parent.mkdir()
    file.write_text("\n".join(map(json.dumps, lines)))
    assert read_samples(tmp_path, "exact_match", "strict-match") == {("mmlu_pro_math", "0"): True}
    with pytest.raises(UnsupportedError, match="choose one"):
        read_samples(tmp_path, "exact_match", "")
    with pytest.raises(UnsupportedError, match="expected 0 or 1"):
        read_samples(tmp_path, "acc", "strict-match")
    with pytest.raises(UnsupportedError, match="holds no samples"):
        read_samples(tmp_path, "exact_match", "other")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, str(SUPPORT / "openai_server.py"), str(port)])
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 60
        while get(f"{url}/health", 1.0) is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        options = ["eval", "--folder", str(tmp_path), "--json", str(tmp_path / "figures.json")]
        servers = ["--baseline", url, "--candidate", url, "--model", "small", "--limit", "400"]
        runner = ["--runner", f"{sys.executable} {SUPPORT / 'small_lm_eval.py'}"]
        assert main([*options, *servers, *runner]) == 0
    finally:
        process.terminate()
        process.wait(10)
    assert "accepted" in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["questions"], figures["baseline"], figures["p"]) == (400, 300, 1.0)
    # From the saved samples alone the same comes out; a smaller margin is more than they show.
    assert main(options) == 0
    assert main([*options, "--margin", "0.001"]) == 1
