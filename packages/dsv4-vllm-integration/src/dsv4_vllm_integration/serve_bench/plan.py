# SPDX-License-Identifier: Apache-2.0
"""What a comparison consists of, read from a TOML file.

    model = "deepseek-ai/DeepSeek-V4.1-Flash"
    repeats = 3

    [arms.baseline]
    VLLM_DSV41_GEMM_RS = "0"

    [arms.candidate]
    VLLM_DSV41_GEMM_RS = "1"

    [[nodes]]
    name = "first"
    url = "http://127.0.0.1:8000"
    command = ["vllm", "serve", "deepseek-ai/DeepSeek-V4.1-Flash", "--tensor-parallel-size", "4"]

    [[nodes]]
    name = "second"
    urls = { baseline = "http://10.0.0.2:8000", candidate = "http://10.0.0.3:8000" }

A node with a `command` gets a fresh server for each arm, started with the arm's variables; a node with `urls`
is only talked to. Defaults are the procedure by which vLLM pull request 57021 was judged: 8192 tokens in,
1024 out, 16, 64 and 964 requests at a time, 128, 128 and 1928 requests.
"""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_symm_mem import ArgumentError


class Arm(enum.StrEnum):
    """Which build."""

    BASELINE = "baseline"
    CANDIDATE = "candidate"


@dataclass(frozen=True)
class Case:
    """One load: how many requests, and how many at a time."""

    concurrency: int
    requests: int


CASES = (Case(16, 128), Case(64, 128), Case(964, 1928))
INPUT_TOKENS = 8192
OUTPUT_TOKENS = 1024


@dataclass(frozen=True)
class Node:
    """One machine, or one set of GPUs.

    Attributes:
        name: For people and file names.
        urls: Where each arm's server answers.
        command: Starts the server of an arm; empty if servers run already.
    """

    name: str
    urls: Mapping[Arm, str]
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A comparison.

    Attributes:
        model: As the servers know it.
        nodes: Each runs both arms.
        environment: Each arm's variables for the servers that are started.
        cases: Loads, in order.
        input_tokens: Of a request.
        output_tokens: Of a request, exactly.
        repeats: How often everything is done.
        tokenizer: Of the client; default the model's.
        client: Command of the client.
        client_arguments: Further arguments for it.
        start_seconds: How long a server may take to answer.
    """

    model: str
    nodes: tuple[Node, ...]
    environment: Mapping[Arm, Mapping[str, str]]
    cases: tuple[Case, ...] = CASES
    input_tokens: int = INPUT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    repeats: int = 1
    tokenizer: str = ""
    client: tuple[str, ...] = ("vllm", "bench", "serve")
    client_arguments: tuple[str, ...] = field(default=())
    start_seconds: float = 3600.0

    def order(self, node: int, repeat: int) -> tuple[Arm, Arm]:
        """Which arm a node runs first: neighbours and successive repeats swap, so drift hits both arms."""
        arms = (Arm.BASELINE, Arm.CANDIDATE)
        return arms if (node + repeat) % 2 == 0 else (arms[1], arms[0])


def read_plan(path: Path) -> Plan:
    """The plan in a TOML file.

    Raises:
        ArgumentError: Something is missing, unknown or of another kind.
        OSError: The file cannot be read.
        tomllib.TOMLDecodeError: It is no TOML.
    """
    with path.open("rb") as file:
        return plan_of(tomllib.load(file))


def plan_of(table: Mapping[str, Any]) -> Plan:
    """The plan that a table describes; errors as for `read_plan`."""
    known = {
        "model", "nodes", "arms", "cases", "input_tokens", "output_tokens", "repeats", "tokenizer", "client",
        "client_arguments", "start_seconds",
    }  # fmt: skip
    unknown = sorted(set(table) - known)
    if unknown:
        raise ArgumentError("plan", unknown[0], f"one of {', '.join(sorted(known))}")
    if not isinstance(table.get("model"), str):
        raise ArgumentError("model", table.get("model"), "the model's name")
    nodes = tuple(_node(entry) for entry in table.get("nodes", ()))
    if not nodes:
        raise ArgumentError("nodes", [], "at least one [[nodes]] table")
    if len({node.name for node in nodes}) < len(nodes):
        raise ArgumentError("nodes", [node.name for node in nodes], "a name for each")
    arms = table.get("arms", {})
    if set(arms) - {arm.value for arm in Arm}:
        raise ArgumentError("arms", sorted(arms), "baseline and candidate")
    cases = tuple(Case(_count(e, "concurrency"), _count(e, "requests")) for e in table.get("cases", ()))
    numbers = {
        name: _count(table, name) for name in ("input_tokens", "output_tokens", "repeats") if name in table
    }
    return Plan(
        model=table["model"],
        nodes=nodes,
        environment={arm: {str(k): str(v) for k, v in arms.get(arm.value, {}).items()} for arm in Arm},
        cases=cases or CASES,
        tokenizer=str(table.get("tokenizer", "")),
        client=tuple(table.get("client", Plan.client)),
        client_arguments=tuple(table.get("client_arguments", ())),
        start_seconds=float(table.get("start_seconds", Plan.start_seconds)),
        **numbers,
    )


def _node(entry: Mapping[str, Any]) -> Node:
    name = entry.get("name")
    if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum():
        raise ArgumentError("nodes.name", name, "letters, digits, - and _")
    command = tuple(entry.get("command", ()))
    if command and isinstance(entry.get("url"), str):
        return Node(name, dict.fromkeys(Arm, entry["url"]), command)
    urls = entry.get("urls", {})
    if command or set(urls) != {arm.value for arm in Arm}:
        raise ArgumentError(
            f"nodes.{name}", dict(entry), "command and url, or urls of baseline and candidate"
        )
    return Node(name, {arm: urls[arm.value] for arm in Arm})


def _count(table: Mapping[str, Any], name: str) -> int:
    value = table.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(name, value, "an integer, at least 1")
    return value
