# SPDX-License-Identifier: Apache-2.0
"""The measuring product in E4M3 with block scales, in the emulator: right for every tile, at odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dsv4_gemm_rs.bench.scaled.config import CONFIGS, ScaledConfig
from dsv4_gemm_rs.bench.scaled.run import Operands, case_name, error_of, multiply
from dsv4_gemm_rs.reference import tolerance
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.protocol.launch import LaunchExchange

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())


@pytest.mark.parametrize("config", CONFIGS, ids=case_name)
@pytest.mark.parametrize(("m", "n", "k", "processors"), [(129, 320, 256, 2), (3, 64, 1152, 1)])
def test_right_for_every_tile(
    config: ScaledConfig, m: int, n: int, k: int, processors: int, emulator: Callable[..., Any]
) -> None:
    emulation = emulator(1, processors=processors, checks="memory-model")
    (rank,) = VirtualGroup(1, "cpu", emulation=emulation).ranks
    launches = LaunchExchange.scratch(rank.device, rank.accelerator)
    operands = Operands.random(m, n, k, rank.device, seed=m)
    x, w = operands.exact(m)

    def step() -> None:
        multiply(operands, config, launches, processors)
        emulation.run()

    assert error_of(operands, x @ w.T, tolerance([x], [w]), step) <= 1
    assert not operands.out.isnan().any()
