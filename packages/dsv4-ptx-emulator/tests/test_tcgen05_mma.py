# SPDX-License-Identifier: Apache-2.0
"""tcgen05.mma in PTX against float64: block scaling with one and two CTAs, every scale id, types, layouts."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_ptx_emulator.formats.floats import FORMATS, encode
from tensor_core_kernels import (
    WAIT,
    Case,
    canonical_image,
    commit,
    epilogue,
    launch,
    matrix_of,
    multiplications,
    problem,
    prologue,
    result,
    shared_descriptor,
    whole,
)

SCALED = [
    Case(128, 64, 160),
    Case(128, 128, 256),
    Case(128, 192, 96),
    Case(128, 24, 32),
    Case(128, 256, 128),
    Case(256, 128, 160),
    Case(256, 256, 224),
    Case(256, 48, 64),
]


def close(case: Case, seed: int = 0) -> None:
    given = problem(case, seed)
    found = matrix_of(case, result(case, whole(case), given, seed))
    # One rounding to float32 per instruction, of a partial sum that `magnitude` bounds.
    assert (np.abs(found - given.exact) <= case.steps * 2.0**-24 * given.magnitude).all()


@pytest.mark.parametrize("case", SCALED, ids=str)
def test_block_scaling(case: Case) -> None:
    close(case)


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("m", [128, 256])
def test_each_scale_id(step: int, m: int) -> None:
    """Factors are in one byte of each cell, A's and B's in different ones; the others are NaN."""
    close(Case(m, 64, 32, a_shift=step, b_shift=(step + 1) % 4))


@pytest.mark.parametrize("types", [("e5m2", "e4m3"), ("e4m3", "e2m1"), ("e2m1", "e2m1"), ("e3m2", "e2m3")])
def test_types(types: tuple[str, str]) -> None:
    close(Case(128, 64, 64, a=types[0], b=types[1]))
    close(Case(128, 64, 64, "f8f6f4", a=types[0], b=types[1]))


@pytest.mark.parametrize(
    "case",
    [
        Case(128, 64, 64, "f16", "bf16", "bf16"),
        Case(128, 128, 64, "f16", "bf16", "bf16"),
        Case(256, 128, 48, "f16", "bf16", "bf16"),
        Case(256, 256, 64, "f16", "bf16", "bf16"),
        Case(128, 48, 80, "f16", "f16", "f16"),
        Case(64, 40, 64, "f16", "bf16", "bf16"),
        Case(256, 96, 64, "f16", "f16", "f16"),
        Case(256, 256, 64, "f8f6f4"),
        Case(64, 64, 96, "f8f6f4"),
        Case(128, 32, 40, "tf32", "tf32", "tf32"),
        Case(128, 32, 32, "f8f6f4", negate=1),
        Case(128, 32, 32, "f8f6f4", negate=3),
        Case(128, 32, 32, negate=2),
    ],
    ids=str,
)
def test_other_kinds(case: Case) -> None:
    close(case)


@pytest.mark.parametrize("case", [Case(128, 128, 256), Case(256, 256, 128)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_integers_are_exact(case: Case, seed: int) -> None:
    given = problem(case, integers=True)
    np.testing.assert_array_equal(matrix_of(case, result(case, whole(case), given, seed)), given.exact)


def test_half_accumulators() -> None:
    """float16 in the lower half of each cell."""
    case = Case(128, 32, 64, "f8f6f4", half=True)
    given = problem(case, integers=True)
    cells = result(case, whole(case), given)
    assert (cells < 1 << 16).all()
    np.testing.assert_array_equal(matrix_of(case, cells), given.exact)


def test_rounding_is_once_to_nearest_even() -> None:
    """2^24 + 1 + 1: exact in float64, and a float32 that adds one by one would lose both."""
    values = np.zeros((128, 32), np.float32)
    values[:, 0], values[:, 1:3] = 256, 1
    other = np.zeros((16, 32), np.float32)
    other[:, 0], other[:, 1:3] = 256, 1
    scaled = Case(128, 16, 32)
    given = problem(scaled)
    for name, matrix in (("a", values), ("b", other)):
        codes = encode(FORMATS["e4m3"], matrix, saturate=True)
        start = scaled.offsets[name]
        image = canonical_image(codes, 3, False, 16, 1024, len(matrix) * 128)
        given.image[start : start + len(image)] = image
    given.image[scaled.offsets["sfa"] :] = 127 + 4
    found = matrix_of(scaled, result(scaled, whole(scaled), given))
    # Scales of 2^4 on both sides: (2^16 + 2) * 2^8.
    np.testing.assert_array_equal(found, 2.0**24 + 512)


@pytest.mark.parametrize("swizzle", range(4))
@pytest.mark.parametrize("transposed", [False, True])
def test_layouts_of_operands(swizzle: int, transposed: bool) -> None:
    """Every swizzle, K major and transposed, for 16-bit elements, against the canonical layouts of CuTe."""
    rng = np.random.default_rng(5)
    case = Case(128, 64, 16, "f16", "bf16", "bf16")
    values = {"a": rng.integers(-4, 5, (128, 16)), "b": rng.integers(-4, 5, (64, 16))}
    lbo = 4096 if transposed or not swizzle else 16
    sbo = 8 * (16 << swizzle) if swizzle else 128
    starts = {"a": 0, "b": 65536}
    image = np.zeros(131072, np.uint8)
    for name, matrix in values.items():
        codes = encode(FORMATS["bf16"], matrix.astype(np.float32))
        image[starts[name] : starts[name] + 65536] = canonical_image(
            codes, swizzle, transposed, lbo, sbo, 65536
        )
    descriptors = {name: shared_descriptor(start, lbo, sbo, swizzle) for name, start in starts.items()}
    bits = case.instruction_descriptor(0) | (0b11 << 15 if transposed else 0)
    issue = f"""add.u64 %d6, %d5, {descriptors["a"]}; add.u64 %d7, %d5, {descriptors["b"]};
    setp.ne.b32 %p5, 0, 0;
    tcgen05.mma.cta_group::1.kind::f16 [%t0], %d6, %d7, {bits}, %p5;"""
    text = prologue(case, size=len(image)) + f"@!%p3 bra ISSUED;\n{issue}\n{commit(case)}\nISSUED:\n{WAIT}\n"
    out = np.zeros((1, 128, 64), np.uint32)
    launch(text + epilogue(case, 64), case, image, out)
    np.testing.assert_array_equal(matrix_of(case, out), values["a"] @ values["b"].T)


def test_pair_with_64_rows_each() -> None:
    """M = 128 of a pair: the right half of the columns is in lanes 64 to 127 (layout B)."""
    rng = np.random.default_rng(6)
    wide = Case(256, 64, 16, "f16", "bf16", "bf16")
    a, b = rng.integers(-4, 5, (128, 16)), rng.integers(-4, 5, (64, 16))
    image = np.zeros((2, wide.offsets["end"]), np.uint8)
    for rank in range(2):
        for name, matrix in (("a", a[64 * rank : 64 * rank + 64]), ("b", b[32 * rank : 32 * rank + 32])):
            codes = encode(FORMATS["bf16"], matrix.astype(np.float32))
            part = canonical_image(codes, 3, False, 16, 1024, len(matrix) * 128)
            image[rank, wide.offsets[name] : wide.offsets[name] + len(part)] = part
    issue = multiplications(wide).replace(
        str(wide.instruction_descriptor(0)), str(wide.instruction_descriptor(0) - (8 << 24))
    )
    out = np.zeros((2, 128, 32), np.uint32)
    text = whole(wide, issue, columns=32)
    launch(text, wide, image.reshape(-1), out)
    found = np.zeros((128, 64))
    for rank in range(2):
        for lane in range(128):
            column = lane // 64 * 32
            found[64 * rank + lane % 64, column : column + 32] = out[rank, lane].view(np.float32)
    np.testing.assert_array_equal(found, a @ b.T)


def test_disabled_lanes_and_scaled_accumulator() -> None:
    """D = A B + D / 4 in enabled lanes only."""
    case = Case(128, 16, 16, "f16", "bf16", "bf16")
    given = problem(case, integers=True)
    again = """setp.eq.b32 %p5, 0, 0; mov.b32 %r10, 0xffff0000; mov.b32 %r11, 0;
    tcgen05.mma.cta_group::1.kind::f16 [%t0], %d6, %d7, %r9, {%r11, %r10, %r11, %r11}, %p5, 2;"""
    found = matrix_of(case, result(case, whole(case, multiplications(case) + again), given))
    expected = given.exact * 1.25
    expected[48:64] = given.exact[48:64]
    np.testing.assert_array_equal(found, expected)


def test_a_in_tensor_memory() -> None:
    """BF16 pairs in 8 columns, lane by lane."""
    case = Case(128, 32, 16, "f16", "bf16", "bf16")
    given = problem(case, integers=True)
    values = np.random.default_rng(7).integers(-3, 4, (128, 16))
    codes = encode(FORMATS["bf16"], values.astype(np.float32)).view(np.uint32)
    # A is loaded by each thread from p1, where the result goes later.
    stores = "shl.b32 %r8, %r6, 21; add.u32 %t1, %t0, %r8; add.u32 %t1, %t1, 100;\n"
    stores += "mad.wide.u32 %d2, %r2, 128, %d1;\n"
    stores += "".join(f"ld.global.b32 %f{i}, [%d2+{4 * i}];\n" for i in range(8))
    registers = ", ".join(f"%f{i}" for i in range(8))
    stores += f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%t1], {{{registers}}};\n"
    stores += "tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0;\n"
    issue = multiplications(case).replace("[%t0], %d6,", "[%t0], [%t6],")
    issue = "tcgen05.fence::after_thread_sync; add.u32 %t6, %t0, 100;\n" + issue
    text = prologue(case, size=case.offsets["end"]) + stores
    text += f"@!%p3 bra ISSUED;\n{issue}\n{commit(case)}\nISSUED:\n{WAIT}\n" + epilogue(case, 32)
    out = np.zeros((1, 128, 32), np.uint32)
    out[0, :, :8] = codes
    launch(text, case, given.image, out)
    np.testing.assert_array_equal(matrix_of(case, out), values @ given.b.T)
