# SPDX-License-Identifier: Apache-2.0
"""Prints what the model covers and what each broken rule leads to: `python -m dsv4_symm_mem.protocol.model`.

`--large` adds the cases that take minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dsv4_symm_mem.protocol.model.catalogue import BROKEN_CASES, LARGE_CASES, SOUND_CASES, SPARE_CASES, Case
from dsv4_symm_mem.protocol.model.search import Report, explore


def _run(case: Case) -> tuple[Report, bool]:
    report = explore(case.scenario, case.rules, reduce=False if case.full else None)
    found = report.violation.kind if report.violation else None
    return report, found is case.expected


def _row(case: Case, report: Report, as_expected: bool) -> str:
    verdict = report.violation.kind.value if report.violation else "clean"
    broken = ", ".join(sorted(case.rules.broken))
    name = f"{broken}: {case.scenario.name}" if broken else case.scenario.name
    covered = "reduced" if report.reduced else "all"
    surprise = "" if as_expected else "  UNEXPECTED"
    return f"{name:<76} {report.states:>8} {report.transitions:>9}  {covered:<8} {verdict}{surprise}"


def _table(title: str, cases: Sequence[Case], traces: bool = False) -> bool:
    print(f"{title}\n{'scenario':<76} {'states':>8} {'steps':>9}  orders   verdict")
    good = True
    for case in cases:
        report, as_expected = _run(case)
        good = good and as_expected
        print(_row(case, report, as_expected), flush=True)
        if traces and report.violation:
            for number, line in enumerate(report.trace, 1):
                print(f"    {number:>3} {line}")
            print(f"      = {report.violation.detail}\n")
    print()
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore the catalogue; 0 if the model found exactly what is expected of it."""
    parser = argparse.ArgumentParser(prog="python -m dsv4_symm_mem.protocol.model", description=__doc__)
    parser.add_argument("--large", action="store_true", help="add the cases that take minutes")
    options = parser.parse_args(arguments)
    good = _table("All rules kept", SOUND_CASES + (LARGE_CASES if options.large else ()))
    good = _table("Rules that a configuration does not need", SPARE_CASES) and good
    good = _table("One rule broken, with a shortest way to the harm", BROKEN_CASES, traces=True) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
