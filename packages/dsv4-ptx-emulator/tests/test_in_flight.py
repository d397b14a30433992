# SPDX-License-Identifier: Apache-2.0
"""CTAs that end while copies still use their shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dsv4_ptx_emulator.errors import AsyncMisuseError
from probe import run

SETUP = """
.shared .align 128 .b8 data[4096];
.shared .align 8 .b64 bar;
mov.u32 %r0, data; mov.u32 %r1, bar; mov.u32 %r2, %tid.x;
setp.eq.u32 %p0, %r2, 0;
ld.param.b64 %d0, [p0];
@%p0 mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
mad.lo.u32 %r3, %r2, 16, %r0; mov.b32 %r4, 7;
st.shared.v4.b32 [%r3], {%r4, %r4, %r4, %r4};
fence.proxy.async;
bar.sync 0;
"""
STORE = """
@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r0], 512;
@%p0 cp.async.bulk.commit_group;
"""
LOAD = """
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r0], [%d0], 512, [%r1];
"""


def outcomes(body: str, **options: Any) -> set[str]:
    found = set()
    for seed in range(10):
        try:
            run(SETUP + body, np.zeros(512, np.uint8), seed=seed, **options)
        except AsyncMisuseError as error:
            place, text = str(error).split(": ", 1)
            found.add(text.split(" (")[0] if "CTA (" in place and "line " in place else str(error))
        else:
            found.add("clean")
    return found


@pytest.mark.parametrize("suffix", ["", ".read"])
def test_a_store_is_waited_for_at_least_until_its_source_is_read(suffix: str) -> None:
    assert outcomes(STORE + f"@%p0 cp.async.bulk.wait_group{suffix} 0;") == {"clean"}
    assert "the CTA ended while bulk.store" in outcomes(STORE)


def test_a_load_is_waited_for() -> None:
    wait = "WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;\n@!%p1 bra WAIT;"
    assert outcomes(LOAD + wait) == {"clean"}
    assert "the CTA ended while bulk.load" in outcomes(LOAD)


def test_a_copy_into_another_cta_needs_that_cta_to_wait() -> None:
    body = """
    mov.u32 %r6, %cluster_ctarank;
    setp.eq.and.u32 %p2, %r6, 0, %p0;
    mapa.shared::cluster.u32 %r7, %r0, 1;
    mapa.shared::cluster.u32 %r8, %r1, 1;
    setp.eq.and.u32 %p3, %r6, 1, %p0;
    @%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%p2 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r7], [%r0], 512, [%r8];
    """
    assert "the CTA ended while bulk.send" in outcomes(body, grid=2, cluster=2)
