# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `vllm bench serve` where vLLM is not installed: the same arguments, the same JSON."""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main() -> None:
    """Make the requests and save the result."""
    parser = argparse.ArgumentParser()
    for name in ("base-url", "model", "result-dir", "result-filename"):
        parser.add_argument(f"--{name}")
    for name in ("num-prompts", "max-concurrency", "random-input-len", "random-output-len"):
        parser.add_argument(f"--{name}", type=int)
    options, _ = parser.parse_known_args()

    def ask(_: int) -> tuple[float, float, int]:
        body = {
            "model": options.model,
            "prompt": "w",
            "max_tokens": options.random_output_len,
            "stream": True,
        }
        asked = urllib.request.Request(
            f"{options.base_url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        start = time.perf_counter()
        times = []
        with urllib.request.urlopen(asked, timeout=60) as answer:
            for line in answer:
                if b'"text"' in line:
                    times.append(time.perf_counter())
        return times[0] - start, (times[-1] - times[0]) / (len(times) - 1), len(times)

    start = time.perf_counter()
    with ThreadPoolExecutor(options.max_concurrency) as pool:
        answers = list(pool.map(ask, range(options.num_prompts)))
    count = len(answers)
    result = {
        "duration": time.perf_counter() - start,
        "completed": count,
        "failed": 0,
        "total_input_tokens": count * options.random_input_len,
        "total_output_tokens": sum(length for _, _, length in answers),
        "mean_ttft_ms": 1000 * sum(first for first, _, _ in answers) / count,
        "mean_tpot_ms": 1000 * sum(rest for _, rest, _ in answers) / count,
        "output_lens": [length for _, _, length in answers],
    }
    Path(options.result_dir, options.result_filename).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
