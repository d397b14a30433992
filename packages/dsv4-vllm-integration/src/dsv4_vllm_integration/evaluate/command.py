# SPDX-License-Identifier: Apache-2.0
"""`dsv4-vllm eval`: lm-eval's tasks on two servers, paired by question."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsv4_symm_mem import UnsupportedError

from dsv4_vllm_integration.evaluate.paired import MARGIN, Paired, Verdict, pair, read_samples
from dsv4_vllm_integration.serve_bench.plan import Arm


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser("eval", help="compare the accuracy of two servers, question by question")
    parser.add_argument("--baseline", help="URL of the baseline's server; without it saved samples are read")
    parser.add_argument("--candidate", help="URL of the candidate's server")
    parser.add_argument("--model", help="as the servers know it")
    parser.add_argument("--tasks", default="gsm8k", help="of lm-eval, comma-separated (default gsm8k)")
    parser.add_argument("--metric", default="exact_match", help="0 or 1 per question (default exact_match)")
    parser.add_argument(
        "--filter", default="strict-match", help="of lm-eval's answers (default strict-match)"
    )
    parser.add_argument("--limit", type=int, help="questions per task; default all")
    parser.add_argument("--concurrent", type=int, default=64, help="requests at a time (default 64)")
    parser.add_argument(
        "--margin", type=float, default=MARGIN, help="largest tolerated loss, a share (default 0.01)"
    )
    parser.add_argument("--folder", type=Path, required=True, help="where samples are saved, and read from")
    parser.add_argument("--runner", default="lm_eval", help="command of lm-eval (default lm_eval)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.set_defaults(run=run)


def arguments(options: argparse.Namespace, url: str, folder: Path) -> list[str]:
    """The command line of lm-eval for one server."""
    model = (
        f"model={options.model},base_url={url.rstrip('/')}/v1/completions,num_concurrent={options.concurrent}"
    )
    command = [*shlex.split(options.runner), "--model", "local-completions", "--model_args", model]
    command += ["--tasks", options.tasks, "--log_samples", "--output_path", str(folder)]
    # Greedy and the same questions for both servers.
    command += ["--gen_kwargs", "temperature=0", "--seed", "0"]
    return command if options.limit is None else [*command, "--limit", str(options.limit)]


def run(options: argparse.Namespace) -> int:
    """Run what was asked for and print the verdict; 1 unless it is "accepted"."""
    folders = {arm: options.folder / arm.value for arm in Arm}
    if options.baseline or options.candidate:
        if not (options.baseline and options.candidate and options.model):
            raise UnsupportedError("--baseline, --candidate and --model go together")
        for arm, url in zip(Arm, (options.baseline, options.candidate), strict=True):
            folders[arm].mkdir(parents=True, exist_ok=True)
            command = arguments(options, url, folders[arm])
            print(f"{arm.value}: {shlex.join(command)}", file=sys.stderr, flush=True)
            log = options.folder / f"{arm.value}.log"
            with log.open("wb") as output:
                done = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT)
            if done.returncode != 0:
                raise UnsupportedError(f"lm-eval ended with code {done.returncode}; see {log}")
    baseline, candidate = (read_samples(folders[arm], options.metric, options.filter) for arm in Arm)
    found = pair(baseline, candidate, options.margin)
    print(describe(found))
    if options.json is not None:
        shown = asdict(found) | {"p": found.p, "loss_bound": found.loss_bound, "verdict": found.verdict}
        options.json.write_text(json.dumps(shown, indent=1), encoding="utf-8")
    return 0 if found.verdict is Verdict.ACCEPTED else 1


def describe(found: Paired) -> str:
    """The figures and the verdict, for people."""
    total = found.questions
    return (
        f"{total} questions: baseline {found.baseline} ({100 * found.baseline / total:.2f} %), "
        f"candidate {found.candidate} ({100 * found.candidate / total:.2f} %)\n"
        f"only the baseline correct {found.only_baseline}, only the candidate {found.only_candidate}, "
        f"McNemar's exact p {found.p:.4f}\n"
        f"loss at most {100 * found.loss_bound:.2f} points (one-sided 95 %), "
        f"tolerated {100 * found.margin:.2f}: {found.verdict.value}"
    )
