# SPDX-License-Identifier: Apache-2.0
"""Running a plan: `vllm bench serve` for each load, arm, node and repeat; each run is saved as JSON.

A run that is saved already is not made again, so a comparison that was cut short goes on where it stopped.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from dsv4_symm_mem import UnsupportedError

from dsv4_vllm_integration.serve_bench.arithmetic import Run
from dsv4_vllm_integration.serve_bench.plan import Arm, Case, Node, Plan
from dsv4_vllm_integration.serve_bench.servers import preemptions, server

Say = Callable[[str], None]


def file_of(folder: Path, node: Node, arm: Arm, repeat: int, case: Case) -> Path:
    """Where a run is saved."""
    return folder / "runs" / f"{node.name}_{arm.value}_c{case.concurrency}_r{repeat}.json"


def arguments(plan: Plan, url: str, case: Case, repeat: int, result: Path) -> list[str]:
    """The client's command line."""
    options: dict[str, object] = {
        "--backend": "openai",
        "--base-url": url,
        "--model": plan.model,
        "--dataset-name": "random",
        "--random-input-len": plan.input_tokens,
        "--random-output-len": plan.output_tokens,
        "--random-range-ratio": 0,
        "--num-prompts": case.requests,
        "--max-concurrency": case.concurrency,
        # The arms of a repeat get the same prompts, repeats get others: prefix caches stay out of it.
        "--seed": repeat,
        "--percentile-metrics": "ttft,tpot,itl",
        "--result-dir": result.parent,
        "--result-filename": result.name,
    }
    if plan.tokenizer:
        options["--tokenizer"] = plan.tokenizer
    flags = ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
    listed = [str(part) for pair in options.items() for part in pair]
    return [*plan.client, *listed, *flags, *plan.client_arguments]


def run_plan(plan: Plan, folder: Path, say: Say) -> None:
    """Run everything that is not saved in `folder` yet; nodes at the same time.

    Raises:
        UnsupportedError: A server did not start, or the client failed; what is saved stays.
    """
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(plan.nodes)) as pool:
        futures = [pool.submit(_run_node, plan, index, folder, say) for index in range(len(plan.nodes))]
    for future in futures:
        future.result()


def _run_node(plan: Plan, index: int, folder: Path, say: Say) -> None:
    node = plan.nodes[index]
    for repeat in range(plan.repeats):
        for arm in plan.order(index, repeat):
            missing = [case for case in plan.cases if not file_of(folder, node, arm, repeat, case).exists()]
            if not missing:
                continue
            with _arm_server(plan, node, arm, repeat, folder):
                for case in missing:
                    say(f"{node.name}: {arm.value}, {case.concurrency} at a time, repeat {repeat + 1}")
                    _run_case(plan, node, arm, repeat, case, folder)


def _arm_server(plan: Plan, node: Node, arm: Arm, repeat: int, folder: Path) -> AbstractContextManager[None]:
    if not node.command:
        return nullcontext()
    log = folder / "logs" / f"{node.name}_{arm.value}_r{repeat}_server.log"
    return server(node.command, plan.environment[arm], node.urls[arm], log, plan.start_seconds)


def _run_case(plan: Plan, node: Node, arm: Arm, repeat: int, case: Case, folder: Path) -> None:
    target = file_of(folder, node, arm, repeat, case)
    raw = target.with_suffix(".client.json")
    log = folder / "logs" / f"{target.stem}_client.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    url = node.urls[arm]
    before = preemptions(url)
    command = arguments(plan, url, case, repeat, raw)
    with log.open("wb") as output:
        done = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode != 0 or not raw.exists():
        raise UnsupportedError(f"the client ended with code {done.returncode}; see {log}")
    after = preemptions(url)
    saved = {
        "node": node.name,
        "arm": arm.value,
        "repeat": repeat,
        "concurrency": case.concurrency,
        "requests": case.requests,
        "input_tokens": plan.input_tokens,
        "output_tokens": plan.output_tokens,
        "preemptions": None if before is None or after is None else after - before,
        "command": command,
        "bench": _without_texts(json.loads(raw.read_text(encoding="utf-8"))),
    }
    target.write_text(json.dumps(saved), encoding="utf-8")
    raw.unlink()


def _without_texts(bench: dict[str, Any]) -> dict[str, Any]:
    """The client's result without the generated texts, which are large and meaningless here."""
    return {name: value for name, value in bench.items() if name != "generated_texts"}


def saved_runs(folder: Path) -> Iterator[Run]:
    """The runs that `folder` holds.

    Raises:
        UnsupportedError: A file is no run; names it.
    """
    for path in sorted((folder / "runs").glob("*.json")):
        if path.name.endswith(".client.json"):
            continue
        try:
            yield Run.of(json.loads(path.read_text(encoding="utf-8")))
        except (KeyError, ValueError) as error:
            raise UnsupportedError(f"{path} holds no run: {type(error).__name__} {error}") from None
