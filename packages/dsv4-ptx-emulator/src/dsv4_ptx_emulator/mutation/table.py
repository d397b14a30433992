# SPDX-License-Identifier: Apache-2.0
"""The result of a campaign as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


def markdown(result: dict[str, Any], title: str) -> str:
    """A section: how it was made, what was found in the original, one line per mutant, the arguments."""
    schema, rows, versions = result["schema"], result["rows"], result["versions"]
    counts = Counter(row["status"] for row in rows)
    by = Counter(row["by"].split(":")[0] for row in rows if row["by"])
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"## {title}",
        "",
        f"{len(rows)} mutants: {counts['caught']} caught ("
        + ", ".join(f"{count} by {name}" for name, count in by.most_common())
        + f"), {counts['equivalent']} equivalent, {counts['survived']} survived, "
        f"{counts['not reached']} not reached. "
        f"The original ran over {schema['clean_seeds']} schedules of each of "
        f"{len(schema['scenarios'])} scenarios ({', '.join(schema['scenarios'])}). "
        f"Mutants were caught within {_most(rows, 'caught')} schedules of each, the others ran over "
        f"{_least(rows)} or more. {software}; {_digest(schema)}{result['date'][:10]}.",
        "",
        f"`{result['command']}`",
        "",
        *_original(result),
        "",
        *_table(
            ["line", "mutant", "wrong by", "noticed by", "runs", "scenario"],
            [
                [
                    str(row["line"]),
                    _code(row["mutant"]),
                    row["rule"],
                    row["by"] or row["status"],
                    str(row["runs"]),
                    row["scenario"],
                ]
                for row in rows
            ],
        ),
    ]
    arguments: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] == "equivalent":
            arguments.setdefault(row["argument"], []).append(_code(row["mutant"]))
    if arguments:
        lines += ["", "Equivalent, because:", ""]
        lines += [f"* {', '.join(names)}: {argument}" for argument, names in arguments.items()]
    return "\n".join(lines) + "\n"


def _most(rows: list[dict[str, Any]], status: str) -> int:
    return max((row["seeds"] for row in rows if row["status"] == status), default=0)


def _digest(schema: dict[str, Any]) -> str:
    # Results of schema 1 have none.
    return f"SHA-256 of the PTX {schema['kernel_sha256'][:16]}…; " if "kernel_sha256" in schema else ""


def _least(rows: list[dict[str, Any]]) -> int:
    return min((row["seeds"] for row in rows if row["status"] != "caught"), default=0)


def _original(result: dict[str, Any]) -> list[str]:
    findings, failures = result["schema"]["findings"], result["schema"]["failures"]
    if not findings and not failures:
        return ["Nothing was found in the original."]
    groups: dict[str, list[dict[str, Any]]] = {}
    for finding in findings:
        groups.setdefault(finding["rule"], []).append(finding)
    lines = ["Found in the original:", ""]
    for rule, group in groups.items():
        pairs = sorted({(finding["first_line"], finding["second_line"]) for finding in group})
        shown = ", ".join(f"{first} and {second}" for first, second in pairs[:6])
        more = f" and {len(pairs) - 6} more pairs" if len(pairs) > 6 else ""
        lines.append(f"* {rule}, lines {shown}{more}. One of them: {group[0]['text']}")
        because = dict.fromkeys(finding.get("argument", "") for finding in group)
        lines += [f"  It stays, because {argument.strip()}" for argument in because if argument]
    return [*lines, *(f"* {failure}" for failure in failures)]


def _code(text: str) -> str:
    opcode, _, change = text.partition(" #")
    ordinal, _, change = change.partition(": ")
    return f"`{opcode}` {ordinal}, {change}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]
