# SPDX-License-Identifier: Apache-2.0
"""What is argued about a kernel: why mutants are equivalent to it, and why findings in it stay.

Arguments are applied to what a campaign has found, also later (`dsv4-emulate argue`): no run depends on them
but how long a survivor runs on.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments about one kernel.

    Attributes:
        mutants: By mutant's name, why it is equivalent.
        findings: Rule and part of the text of what is found in the original, and why it stays.
    """

    mutants: dict[str, str] = field(default_factory=dict)
    findings: tuple[tuple[str, str, str], ...] = ()

    def of(self, rule: str, text: str) -> str:
        """Why a finding in the original stays; "" if nothing is argued."""
        return next((why for about, says, why in self.findings if about == rule and says in text), "")


def read_arguments(path: Path | None) -> Arguments:
    """Arguments from TOML.

    Tables `[[equivalent]]` with `mutants` (names) and `because`, and `[[finding]]` with `rule`, `says` and
    `because`.
    """
    if path is None:
        return Arguments()
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    equivalent, findings = tables.get("equivalent", []), tables.get("finding", [])
    return Arguments(
        {name: table["because"] for table in equivalent for name in table["mutants"]},
        tuple((table["rule"], table["says"], table["because"]) for table in findings),
    )


def argue(result: dict[str, Any], arguments: Arguments) -> None:
    """Apply arguments to a result, in place of any before: rows, findings and checks."""
    rows, schema = result["rows"], result["schema"]
    for row in rows:
        if row["status"] == "equivalent":
            row["status"] = "survived" if row["runs"] else "not reached"
        row["argument"] = "" if row["status"] == "caught" else arguments.mutants.get(row["mutant"], "")
        if row["argument"]:
            row["status"] = "equivalent"
    for finding in schema["findings"]:
        finding["argument"] = arguments.of(finding["rule"], finding["text"])
    counts = Counter(row["status"] for row in rows)
    caught = {row["mutant"] for row in rows if row["status"] == "caught"}
    names = {row["mutant"] for row in rows}
    values = {
        "findings in the original that no argument explains": sum(
            not finding["argument"] for finding in schema["findings"]
        ),
        "failures of the original": len(schema["failures"]),
        "mutants that nobody noticed and no argument explains": counts["survived"] + counts["not reached"],
        "arguments that a run refutes": len(caught & arguments.mutants.keys()),
        "arguments about no mutant": 0 if schema["only"] else len(arguments.mutants.keys() - names),
    }
    result["checks"] = [
        {"name": name, "value": value, "target": 0, "holds": value == 0} for name, value in values.items()
    ]
