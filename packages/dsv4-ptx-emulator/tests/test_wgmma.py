# SPDX-License-Identifier: Apache-2.0
"""wgmma in PTX: all types, swizzles and majors on integers, for which every order of summation is exact."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_ptx_emulator.errors import (
    AsyncMisuseError,
    DeadlockError,
    OutOfBoundsError,
    UnsupportedInstruction,
)
from dsv4_ptx_emulator.formats.floats import FORMATS, encode
from wgmma_kernels import (
    CASES,
    TILE,
    WHOLE,
    Case,
    fragments_of,
    image,
    instruction,
    kernel,
    launch,
    problem,
    tile_from,
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_integers_are_exact(case: Case) -> None:
    given = problem(case)
    fragments = fragments_of(given.c, case)
    body = WHOLE.format(mma=instruction(case))
    launch(kernel(case, body, fragments.shape[1]), given.matrices, fragments, given.a_registers)
    expected = case.scale_a * case.scale_b * (given.a @ given.b.T) + case.scale_d * given.c
    np.testing.assert_array_equal(tile_from(fragments, case), expected)


def test_rounding_is_once_to_nearest_even() -> None:
    """2^24 + 1 + 1: exact in float64, and a float32 that adds one by one would lose both."""
    case = Case(n=8)
    given = problem(case)
    a, b = np.zeros((64, 16), np.float32), np.zeros((8, 16), np.float32)
    a[:, :3], b[:, :3] = [4096, 1, 1], [4096, 1, 1]
    for which, values, at in (("a", a, 0), ("b", b, TILE)):
        codes = encode(FORMATS["bf16"], values)
        given.matrices[at : at + TILE] = image(case, which, codes)
    fragments = fragments_of(np.zeros((64, 8), np.float32), case)
    body = WHOLE.format(mma=instruction(case))
    launch(kernel(case, body, fragments.shape[1]), given.matrices, fragments, given.a_registers)
    np.testing.assert_array_equal(tile_from(fragments, case), 2.0**24 + 2)


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_in_several_groups(seed: int) -> None:
    """Three groups on the same accumulators; the first waits leave younger groups in flight."""
    case = Case()
    given = problem(case)
    fragments = fragments_of(given.c, case)
    one = instruction(case) + "wgmma.commit_group.sync.aligned;\n"
    body = "wgmma.fence.sync.aligned;\n" + one * 3
    body += "wgmma.wait_group.sync.aligned 1;\n" + one + "wgmma.wait_group.sync.aligned 0;"
    launch(kernel(case, body, fragments.shape[1]), given.matrices, fragments, given.a_registers, seed)
    np.testing.assert_array_equal(tile_from(fragments, case), 4 * (given.a @ given.b.T) + given.c)


def test_accumulators_are_poison_until_they_are_waited_for() -> None:
    case = Case(n=8)
    given = problem(case)
    fragments = fragments_of(given.c, case)
    mma = instruction(case)
    body = f"wgmma.fence.sync.aligned;\n{mma}\nwgmma.commit_group.sync.aligned;\n"
    body += "nanosleep.u32 100;\nst.global.b32 [%d3], %f0;\nld.global.b32 %r5, [%d3];\n"
    body += "wgmma.wait_group.sync.aligned 0;\nmov.b32 %f0, %r5;"
    launch(kernel(case, body, fragments.shape[1]), given.matrices, fragments, given.a_registers)
    values = fragments.view(np.float32)
    assert np.isnan(values[:, 0]).all()
    assert np.isfinite(values[:, 1:]).all()


def test_a_in_registers_is_read_when_the_operation_executes() -> None:
    """A program that changes them before it waits gets a result that depends on the seed."""
    case = Case(n=8, in_registers=True)
    given = problem(case)
    results = set()
    for seed in range(12):
        fragments = fragments_of(given.c, case)
        mma = instruction(case) + "wgmma.commit_group.sync.aligned;\n"
        body = "wgmma.fence.sync.aligned;\n" + mma + "bar.sync 0;\n"
        body += "".join(f"mov.b32 %a{i}, 0;" for i in range(4)) + "wgmma.wait_group.sync.aligned 0;"
        launch(kernel(case, body, fragments.shape[1]), given.matrices, fragments, given.a_registers, seed)
        results.add(tile_from(fragments, case).tobytes())
    assert len(results) > 1
    assert (given.a @ given.b.T + given.c).astype(np.float32).tobytes() in results


def failing(body: str, case: Case | None = None) -> None:
    case = case or Case(n=8)
    given = problem(case)
    fragments = fragments_of(given.c, case)
    launch(kernel(case, body, fragments.shape[1]), given.matrices, fragments, given.a_registers)


def test_misuse_is_named() -> None:
    case = Case(n=8)
    mma = instruction(case)
    with pytest.raises(AsyncMisuseError, match=r"no wgmma\.fence"):
        failing(WHOLE.format(mma=mma).replace("wgmma.fence.sync.aligned;", ""))
    again = WHOLE.format(mma=mma) + "\nadd.f32 %f0, %f0, %f0;\n" + mma
    with pytest.raises(AsyncMisuseError, match=r"no wgmma\.fence"):
        failing(again)
    with pytest.raises(AsyncMisuseError, match="reserved bits"):
        failing(WHOLE.format(mma=instruction(case, 1 << 15)))
    other = instruction(Case(n=16))
    with pytest.raises(AsyncMisuseError, match="another shape in flight"):
        failing("wgmma.fence.sync.aligned;\n" + mma + other, Case(n=16))
    lanes = WHOLE.format(mma=mma.replace("setp.ne.b32 %p1, 1, 0", "setp.ne.b32 %p1, %r2, 0"))
    with pytest.raises(AsyncMisuseError, match="differs between lanes"):
        failing(lanes)
    warps = mma.replace("setp.ne.b32 %p1, 1, 0", "shr.u32 %r4, %r2, 5; setp.ne.b32 %p1, %r4, 2")
    with pytest.raises(AsyncMisuseError, match="the warps of warpgroup 0 execute different wgmma"):
        failing(WHOLE.format(mma=warps))


def test_operands_outside_of_shared_memory() -> None:
    mma = instruction(Case(n=8), 200_000 >> 4)
    with pytest.raises(OutOfBoundsError, match=r"matrix pipe of rank 0, CTA .* are not mapped"):
        failing(WHOLE.format(mma=mma))


def test_untouched_registers_need_no_second_fence() -> None:
    case = Case(n=8)
    mma = instruction(case)
    again = mma + "\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
    given = problem(case)
    fragments = fragments_of(given.c, case)
    body = WHOLE.format(mma=mma) + again
    launch(kernel(case, body, fragments.shape[1]), given.matrices, fragments, given.a_registers)
    np.testing.assert_array_equal(tile_from(fragments, case), 2 * (given.a @ given.b.T) + given.c)


def test_a_warp_that_stays_away_is_told() -> None:
    case = Case(n=8)
    mma = WHOLE.format(mma=instruction(case))
    body = "shr.u32 %r4, %r2, 5; setp.eq.u32 %p3, %r4, 3; @%p3 bra AWAY;\n" + mma + "\nAWAY:"
    with pytest.raises(DeadlockError, match=r"warpgroup 0: 1 wgmma, first at line .* issued by 3 of 4 warps"):
        failing(body)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("m64n8k16", "m64n12k16"), "shape .m64n12k16"),
        (("m64n8k16", "m64n8k32"), "shape .m64n8k32"),
        (("f32.bf16.bf16", "s32.s8.s8"), "types .s32.s8.s8"),
        (("f32.bf16.bf16", "f16.bf16.bf16"), "types .f16.bf16"),
        (("f32.bf16.bf16", "f32.bf16.f16"), "types .bf16.f16 together"),
        ((".bf16.bf16 ", ".bf16.bf16.sp "), "a form other than"),
    ],
)
def test_forms_that_are_not_implemented(change: tuple[str, str], named: str) -> None:
    case = Case(n=8)
    mma = instruction(case)
    assert change[0] in mma
    with pytest.raises(UnsupportedInstruction, match=named):
        failing(mma.replace(*change))
