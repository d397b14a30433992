# SPDX-License-Identifier: Apache-2.0
"""A stand-in for lm-eval: the same arguments, one question to the server, samples saved alike."""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path


def main() -> None:
    """Answer every fourth question wrong where the model's name says so."""
    parser = argparse.ArgumentParser()
    for name in ("model", "model_args", "tasks", "output_path", "limit"):
        parser.add_argument(f"--{name}")
    options, _ = parser.parse_known_args()
    given = dict(part.split("=", 1) for part in options.model_args.split(","))
    body = json.dumps({"model": given["model"], "prompt": "w", "max_tokens": 1}).encode()
    asked = urllib.request.Request(given["base_url"], body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert b"[DONE]" in answer.read()
    folder = Path(options.output_path, given["model"])
    folder.mkdir(parents=True)
    for task in options.tasks.split(","):
        lines = []
        for question in range(int(options.limit)):
            for chosen, correct in (("strict-match", question % 4 > 0), ("flexible-extract", True)):
                record = {"doc_id": question, "filter": chosen, "exact_match": float(correct)}
                lines.append(json.dumps(record))
        target = folder / f"samples_{task}_2026-11-30T12-00-00.jsonl"
        target.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
