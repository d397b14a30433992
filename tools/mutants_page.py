# SPDX-License-Identifier: Apache-2.0
"""Writes docs/emulator_mutants.md from docs/results/mutants_*.json, so that no line of it is typed by hand.

Run `python -m tools.mutants_page` after `nox -s emulate_long`; a test holds the page to the files.
"""

from __future__ import annotations

import json
import sys

from dsv4_ptx_emulator.mutation.table import markdown

from tools.workspace import RESULTS, ROOT

PAGE = ROOT / "docs" / "emulator_mutants.md"
PATTERN = "mutants_*.json"
"""Names of results that belong to this page and not to the measurements."""
TITLES = {
    "mutants_sm90_gemm_rs": "GEMM + reduce-scatter for SM90",
    "mutants_sm100_gemm_rs": "GEMM + reduce-scatter for SM100, single SMs",
    "mutants_sm100_pair": "GEMM + reduce-scatter for SM100, pairs of SMs",
    "mutants_sm100_multicast": "GEMM + reduce-scatter or all-reduce for SM100, sums read through multicast",
    "mutants_reduce_scatter": "Stand-alone reduce-scatter",
    "mutants_all_gather": "Stand-alone all-gather",
}
HEAD = """<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by python -m tools.mutants_page. -->
# Mutants

What the emulator notices if one synchronisation of a kernel is missing or weaker: each fence, wait, arrival,
commit, release, acquire and expected byte count in turn, with everything else as it is. "Wrong by" names the
section of PTX ISA 9.4 that the mutant violates, "noticed by" who said so first: the checker of the memory
model and its rule, another checker, a deadlock, a wrong answer. "Runs" counts schedules up to then.

What is found in an original is passed over in its mutants, which can hide behind it.
"""


def page() -> str:
    """The whole page."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(PATTERN))]
    return "\n".join([HEAD, *(markdown(result, TITLES[result["name"]]) for result in results)])


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
