# SPDX-License-Identifier: Apache-2.0
"""The kernels obey the memory consistency model: a few schedules here, hundreds in `nox -s emulate_long`."""

from __future__ import annotations

import pytest

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

SEEDS = 2
SCENARIOS = {
    "emulated_scenarios": (
        "fused_rings",
        "fused_and_unfused",
        "fused_lost",
        "fused_lost_at_once",
        "fused_lost_token",
        "sm100_banks",
        "sm100_rings",
        "sm100_lost",
        "sm100_lost_token",
        "sm100_pair",
        "sm100_pair_rings",
        "sm100_pair_lost",
        "sm100_pair_lost_token",
    ),
    "multicast_scenarios": (
        "multicast_banks",
        "multicast_rings",
        "multicast_lost",
        "multicast_lost_token",
        "multicast_lost_alone",
    ),
    "collective_scenarios": (
        "reduce_scatter_pair",
        "reduce_scatter_trio",
        "reduce_scatter_lost",
        "reduce_scatter_lost_token",
        "all_gather_trio",
        "all_gather_lost",
        "all_gather_lost_mismatch",
        "all_gather_lost_token",
    ),
}
"""By module."""
ARGUED = {
    # See kernels/sm100/pair.py: what cluster scope would cost there, and why the order holds without.
    "sm100_pair": ("tcgen05.cp.cta_group::2.32x128b.warpx4 reads shared", "scope .cta from another CTA"),
}
"""By beginning of a scenario, that of findings for which there is an argument, and what else they say."""


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in SCENARIOS.items() for name in names]
)
def test_nothing_is_found_but_what_is_argued(module: str, name: str) -> None:
    from dsv4_ptx_emulator.mutation.trial import clean, load

    result = clean(load(f"{module}:{name}"), range(SEEDS))
    assert result.failures == []
    texts = [finding.text for finding in result.findings.values()]
    begins, says = next((ARGUED[group] for group in ARGUED if name.startswith(group)), ("", ""))
    assert bool(texts) == bool(begins), texts
    assert all(text.startswith(begins) and says in text for text in texts), texts
