# SPDX-License-Identifier: Apache-2.0
"""The kernels obey the memory consistency model: a few schedules here, hundreds in `nox -s emulate_long`."""

from __future__ import annotations

import pytest

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

SEEDS = 2
SCENARIOS = (
    "fused_banks",
    "fused_trio",
    "fused_and_unfused",
    "fused_pair",
    "fused_lost",
    "fused_lost_at_once",
    "fused_lost_token",
    "reduce_scatter_pair",
    "reduce_scatter_trio",
    "reduce_scatter_lost",
    "reduce_scatter_lost_token",
    "all_gather_pair",
    "all_gather_trio",
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_found(name: str) -> None:
    import emulated_scenarios
    from dsv4_ptx_emulator.mutation.trial import clean

    result = clean(getattr(emulated_scenarios, name), range(SEEDS))
    assert result.failures == []
    assert [finding.text for finding in result.findings.values()] == []
