# SPDX-License-Identifier: Apache-2.0
"""tcgen05 fences between threads, and what a commit passes on."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_ptx_emulator.checkers.memory_model.model import MemoryModel
from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.errors import MemoryModelError
from tensor_core_kernels import WAIT, Case, filled, multiplications, problem, whole

CASE = Case(128, 32, 64)
AFTER, BEFORE = "tcgen05.fence::after_thread_sync;", "tcgen05.fence::before_thread_sync;"


def rules(text: str, seeds: int = 4) -> set[str]:
    """What the memory model says of a kernel, by seed; "" where it says nothing."""
    given = problem(CASE)
    found = set()
    for seed in range(seeds):
        emulator = Emulator("sm_100a", seed=seed, max_steps=2_000_000)
        emulator.attach(MemoryModel())
        out = np.zeros((1, 128, CASE.n), np.uint32)
        for name, buffer in (("image", given.image), ("out", out)):
            emulator.register(buffer.ctypes.data, buffer.nbytes, name)
        parameters = b"".join(buffer.ctypes.data.to_bytes(8, "little") for buffer in (given.image, out))
        emulator.launch(
            text,
            "probe",
            grid=(1, 1, 1),
            block=(128, 1, 1),
            shared_bytes=len(given.image),
            parameters=parameters,
        )
        try:
            emulator.run()
            found.add("")
        except MemoryModelError as error:
            found.add(error.rule if error.line and error.first_line else "without lines")
    return found


def test_a_load_behind_a_commit_needs_the_second_fence() -> None:
    text = whole(CASE)
    assert WAIT in text
    assert rules(text) == {""}
    assert rules(text.replace(WAIT, WAIT.replace(AFTER, ""))) == {"tensor-fence"}


@pytest.mark.parametrize("missing", ["", BEFORE, AFTER])
def test_a_multiplication_over_what_warps_have_stored_needs_both(missing: str) -> None:
    handed_over = filled(CASE.n)
    issue = f"@!%p3 bra ISSUED;\n{multiplications(CASE)}\n"
    text = whole(CASE).replace(issue, handed_over + issue)
    assert handed_over in text
    assert rules(text) == {""}
    if missing:
        assert rules(text.replace(handed_over, handed_over.replace(missing, ""))) == {"tensor-fence"}


REFILL = """
setp.eq.u32 %p6, %r2, 32;
@%p6 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
@%p6 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r0], [%d0], 128, [%r1];
REFILLED: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 1;
@!%p2 bra REFILLED;
"""


def test_a_stage_is_loaded_again_behind_the_commit_of_its_multiplications() -> None:
    """By a thread that has not seen the first load, as their thread has: the commit passes that on."""
    first = "LOADED: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;\n@!%p2 bra LOADED;"
    text = whole(CASE)
    assert first in text
    text = text.replace(first, f"setp.ne.u32 %p6, %r6, 0;\n@%p6 bra UNSEEN;\n{first}\nUNSEEN:")
    assert rules(text.replace(WAIT, WAIT + REFILL)) == {""}


@pytest.mark.parametrize(("sync", "rule"), [("bar.warp.sync -1;", ""), ("", "tensor-fence")])
def test_one_lane_tells_for_its_warp(sync: str, rule: str) -> None:
    """Warp 1 stores, and its first lane arrives; then thread 0 multiplies over it."""
    told = f"""{sync} setp.eq.u32 %p6, %r2, 32; @%p6 mbarrier.arrive.shared.b64 _, [%r1];
    OTHERS: mbarrier.try_wait.parity.shared.b64 %p6, [%r1], 1; @!%p6 bra OTHERS;"""
    stored = filled(CASE.n)
    assert stored.count("bar.sync 0;") == 1
    handed_over = "bar.sync 0; setp.eq.u32 %p6, %r6, 1; @!%p6 bra OTHERS;\n" + stored.replace(
        "bar.sync 0;", told
    )
    issue = f"@!%p3 bra ISSUED;\n{multiplications(CASE)}\n"
    assert rules(whole(CASE).replace(issue, handed_over + issue)) == {rule}
