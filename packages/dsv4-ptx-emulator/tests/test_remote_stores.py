# SPDX-License-Identifier: Apache-2.0
"""st.async: values that land in another CTA and tell its barrier, in any order, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_ptx_emulator.emulator import MEMORY_MODEL, Emulator
from dsv4_ptx_emulator.errors import (
    AsyncMisuseError,
    DeadlockError,
    MemoryModelError,
    MisalignedError,
    OutOfBoundsError,
    UnsupportedInstruction,
)
from probe import kernel, run

SETUP = """
.shared .align 128 .b8 data[1024];
.shared .align 8 .b64 bar;
mov.u32 %r0, data; mov.u32 %r1, bar; mov.u32 %r2, %laneid; mov.u32 %r6, %cluster_ctarank;
ld.param.b64 %d1, [p0];
setp.eq.u32 %p0, %r2, 0;
@%p0 mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], BYTES;
mov.b32 %r10, 7; mad.lo.u32 %r12, %r2, 4, %r0; st.shared.b32 [%r12], %r10;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
xor.b32 %r7, %r6, 1;
mapa.shared::cluster.u32 %r8, %r0, %r7;
mapa.shared::cluster.u32 %r9, %r1, %r7;
mad.lo.u32 %r11, %r6, 1000, %r2;
"""
WAIT = """
LOOP: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1], 0;
@!%p1 bra LOOP;
"""
BACK = """
mad.lo.u32 %r10, %r2, 4, %r0;
ld.shared.b32 %r12, [%r10];
shl.b32 %r13, %r6, 5; add.u32 %r13, %r13, %r2;
mad.wide.u32 %d3, %r13, 4, %d1;
st.global.b32 [%d3], %r12;
"""
STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes"
SEND = f"""
mad.lo.u32 %r8, %r2, 4, %r8;
{STORE}.b32 [%r8], %r11, [%r9];
"""


def exchanged(body: str, size: int = 128, seed: int = 0) -> list[int]:
    out = np.zeros(256, np.uint8)
    run(SETUP.replace("BYTES", str(size)) + body, out, grid=2, cluster=2, seed=seed)
    found: list[int] = out.view(np.uint32).tolist()
    return found


@pytest.mark.parametrize("seed", range(8))
def test_each_lanes_value_is_there_once_the_barrier_says_so(seed: int) -> None:
    assert exchanged(SEND + WAIT + BACK, seed=seed) == [*range(1000, 1032), *range(32)]


@pytest.mark.parametrize("words", ["v2.b32", "v4.u32", "v2.f32", "b64", "v2.b64"])
def test_vectors_and_wide_elements(words: str) -> None:
    count, wide = int(words[1]) if words[0] == "v" else 1, "64" in words
    size = count * (8 if wide else 4)
    values = ["%d8", "%d9"][:count] if wide else ["%r11", "%r12", "%r14", "%r15"][:count]
    held = "{" + ", ".join(values) + "}" if count > 1 else values[0]
    body = f"""
    add.u32 %r12, %r11, 1; add.u32 %r14, %r11, 2; add.u32 %r15, %r11, 3;
    mov.b64 %d8, {{%r11, %r12}}; mov.b64 %d9, {{%r14, %r15}};
    @%p0 st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{words} [%r8], {held}, [%r9];
    """
    found = exchanged(body + WAIT + BACK, size)
    assert found[32 : 32 + size // 4] == list(range(size // 4))
    assert found[: size // 4] == list(range(1000, 1000 + size // 4))


def test_without_waiting_anything_may_be_there() -> None:
    late = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
    seen = {tuple(exchanged(SEND + BACK + WAIT + late, seed=seed)) for seed in range(12)}
    assert len(seen) > 1


def test_the_sender_may_change_its_register_at_once() -> None:
    changed = SEND + "mov.b32 %r11, 0;\n"
    assert exchanged(changed + WAIT + BACK)[:2] == [1000, 1001]


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r8], %r11, [%r1];",
            AsyncMisuseError,
            "",
        ),
        (
            STORE + ".b32 [%r8+2], %r11, [%r9];",
            MisalignedError,
            "multiple of 4",
        ),
        (
            "mov.b32 %r8, 0x01ffffc0;\n" + STORE + ".b32 [%r8], %r11, [%r9];",
            OutOfBoundsError,
            "",
        ),
        ("st.async.shared::cluster.b32 [%r8], %r11, [%r9];", UnsupportedInstruction, "complete_tx"),
        (
            STORE + ".v4.b64 [%r8], {%d8, %d9, %d8, %d9}, [%r9];",
            UnsupportedInstruction,
            "32 bytes",
        ),
    ],
)
def test_what_is_refused(body: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        exchanged(body)


def test_who_ends_before_its_values_have_come_is_found() -> None:
    with pytest.raises(AsyncMisuseError, match=r"st\.async"):
        exchanged(SEND)


def test_too_few_bytes_leave_the_waiting_one_waiting() -> None:
    with pytest.raises(DeadlockError, match="bytes pending"):
        exchanged("@%p0 " + SEND.splitlines()[2] + WAIT + BACK)


def watched(body: str, seed: int = 0) -> None:
    """Run a body in two CTAs under the memory model."""
    out = np.zeros(256, np.uint8)
    emulator = Emulator("sm_90a", seed=seed, checks=MEMORY_MODEL)
    emulator.register(out.ctypes.data, out.nbytes)
    parameters = int(out.ctypes.data).to_bytes(8, "little")
    emulator.launch(
        kernel(body), "probe", grid=(2, 1, 1), block=(32, 1, 1), cluster=(2, 1, 1), parameters=parameters
    )
    emulator.run()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("waits", [True, False])
def test_the_memory_model_wants_the_wait(waits: bool, seed: int) -> None:
    """Values are ordered by the barrier that they tell, and by nothing else."""
    late = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
    body = SETUP.replace("BYTES", "128") + SEND + (WAIT + BACK if waits else BACK + WAIT) + late
    if waits:
        watched(body, seed)
        return
    with pytest.raises(MemoryModelError):
        watched(body, seed)


@pytest.mark.parametrize("between", ["", "bar.warp.sync -1;", "bar.sync 0;"])
@pytest.mark.parametrize("fence", ["fence.mbarrier_init.release.cluster;", ""])
def test_a_fence_for_new_barriers_outlasts_meetings_until_the_clusters(fence: str, between: str) -> None:
    """With it the cluster may arrive relaxed; who sends has to know that the barrier is there."""
    body = SETUP.replace("BYTES", "128").replace("cluster.arrive.aligned", "cluster.arrive.relaxed.aligned")
    body = body.replace("mov.b32 %r10, 7; mad.lo.u32 %r12, %r2, 4, %r0; st.shared.b32 [%r12], %r10;", between)
    body = body.replace("fence.mbarrier_init.release.cluster;", f"@%p0 {fence}" if fence else "")
    body += SEND + WAIT + BACK
    if fence:
        watched(body)
        return
    with pytest.raises(MemoryModelError, match="initialisation nothing orders"):
        watched(body)
