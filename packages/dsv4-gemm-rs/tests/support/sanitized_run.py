# SPDX-License-Identifier: Apache-2.0
"""A run small enough for compute-sanitizer: two ranks, the largest and the smallest tile, fused and unfused.

    compute-sanitizer --tool memcheck --report-api-errors no python .../tests/support/sanitized_run.py

Only the two tile shapes are compiled; results are checked like any test's. Deadlines are long, as a sanitised
kernel is slow.
"""

from __future__ import annotations

from unittest import mock

from dsv4_gemm_rs import WeightKind
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig
from gemm_rs_gpu_support import problems_for, ranks
from gemm_rs_support import assert_right

CONFIGS = (KernelConfig(128, 160), KernelConfig(64, 128))


def main() -> None:
    with mock.patch.dict("dsv4_gemm_rs.kernels.families.FAMILIES", {90: CONFIGS}):
        for config in CONFIGS:
            for path in ("fused", "unfused"):
                with (
                    mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=config),
                    ranks(2, 300, 640, path=path, deadline=60.0) as group,
                ):
                    for m in (300, 1, 0):
                        problems = problems_for(2, m, 640, 256, WeightKind.MXFP8, seed=m)
                        assert_right(group.call(problems), problems)
                    for space in group.workspaces:
                        space.check()
    print("right")


if __name__ == "__main__":
    main()
