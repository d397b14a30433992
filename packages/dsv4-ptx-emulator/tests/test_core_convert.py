# SPDX-License-Identifier: Apache-2.0
"""cvt as an instruction: integers, floats, packed narrow floats (the formats: test_formats.py)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from dsv4_ptx_emulator.formats.floats import BF16, E4M3, E5M2, F16, UE8M0, decode, encode
from numpy.typing import NDArray
from probe import evaluate


def floats(seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    fixed = [
        0.0,
        -0.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        3.5e9,
        -3.5e9,
        1e20,
        -1e20,
        np.inf,
        -np.inf,
        np.nan,
        1e-40,
        447.0,
    ]
    return np.concatenate([np.array(fixed, np.float32), (rng.normal(size=16) * 300).astype(np.float32)])


@pytest.mark.parametrize("rounding", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("target", ["s32", "u32", "s64", "u64", "s16"])
def test_float_to_integer(rounding: str, target: str) -> None:
    a = floats(1)
    bits = int(target[1:])
    register = {16: "%h1", 32: "%r1", 64: "%d1"}[bits]
    got = evaluate(
        f"cvt.{rounding}.{target}.f32 {register}, %r0;", {"%r0": a.view(np.uint32)}, {register: bits // 8}
    )
    low = -(2 ** (bits - 1)) if target[0] == "s" else 0
    high = 2 ** (bits - 1) - 1 if target[0] == "s" else 2**bits - 1
    for x, y in zip(a.tolist(), got[register].tolist(), strict=True):
        if math.isnan(x):
            want = 1 << 63 if bits == 64 else 0
        elif math.isinf(x):
            want = high if x > 0 else low
        else:
            ways: dict[str, Callable[[float], int]] = {
                "rni": round,
                "rzi": math.trunc,
                "rmi": math.floor,
                "rpi": math.ceil,
            }
            whole = ways[rounding](x)
            want = max(min(whole, high), low)
        assert y == want & (1 << bits) - 1, x


def test_integer_to_float_rounds_to_nearest() -> None:
    rng = np.random.default_rng(2)
    a = rng.integers(0, 2**32, 32, dtype=np.uint32)
    wide = rng.integers(0, 2**64, 32, dtype=np.uint64)
    body = """cvt.rn.f32.s32 %r1, %r0; cvt.rn.f32.u32 %r2, %r0; cvt.rn.f64.s32 %d1, %r0;
        cvt.rn.f32.u64 %r3, %d0;
    cvt.rz.f32.u32 %r4, %r0; cvt.rn.f64.s64 %d2, %d0;"""
    outputs = {"%r1": 4, "%r2": 4, "%d1": 8, "%r3": 4, "%r4": 4, "%d2": 8}
    got = evaluate(body, {"%r0": a, "%d0": wide}, outputs)
    assert np.array_equal(got["%d2"].view(np.float64), wide.view(np.int64).astype(np.float64))
    assert np.array_equal(got["%r1"].view(np.float32), a.view(np.int32).astype(np.float32))
    assert np.array_equal(got["%r2"].view(np.float32), a.astype(np.float32))
    assert np.array_equal(got["%d1"].view(np.float64), a.view(np.int32).astype(np.float64))
    assert np.array_equal(got["%r3"].view(np.float32), wide.astype(np.float32))
    down = got["%r4"].view(np.float32).astype(np.float64)
    assert (down <= a).all()
    assert (np.nextafter(got["%r4"].view(np.float32), np.float32(np.inf)).astype(np.float64) > a).all()


def test_integers_extend_truncate_and_saturate() -> None:
    rng = np.random.default_rng(3)
    a = rng.integers(0, 2**32, 32, dtype=np.uint32)
    a[:4] = [0xFFFF_FFFF, 5, 0x8000_0000, 127]
    body = """cvt.s64.s32 %d1, %r0; cvt.u64.u32 %d2, %r0; cvt.u32.u64 %r1, %d1; cvt.s32.s8 %r2, %r0;
    cvt.u32.u8 %r3, %r0; cvt.sat.s32.u32 %r4, %r0; cvt.sat.u32.s32 %r5, %r0; cvt.s16.s32 %h1, %r0;"""
    outputs = {"%d1": 8, "%d2": 8, "%r1": 4, "%r2": 4, "%r3": 4, "%r4": 4, "%r5": 4, "%h1": 2}
    got = evaluate(body, {"%r0": a}, outputs)
    signed = a.view(np.int32)
    assert np.array_equal(got["%d1"].view(np.int64), signed.astype(np.int64))
    assert np.array_equal(got["%d2"], a.astype(np.uint64))
    assert np.array_equal(got["%r1"], a)
    assert np.array_equal(got["%r2"].view(np.int32), a.astype(np.uint8).view(np.int8).astype(np.int32))
    assert np.array_equal(got["%r3"], a & 0xFF)
    assert np.array_equal(got["%r4"], np.minimum(a, 0x7FFF_FFFF))
    assert np.array_equal(got["%r5"], np.where(signed < 0, 0, a))
    assert np.array_equal(got["%h1"], a.astype(np.uint16))


def test_between_float_types() -> None:
    a = floats(4)
    body = """cvt.rn.f16.f32 %h1, %r0; cvt.f32.f16 %r1, %h1; cvt.rn.bf16.f32 %h2, %r0; cvt.f32.bf16 %r2, %h2;
    cvt.f64.f32 %d1, %r0; cvt.rn.f32.f64 %r3, %d1; cvt.rzi.f32.f32 %r4, %r0; cvt.rna.tf32.f32 %r5, %r0;"""
    outputs = {"%h1": 2, "%r1": 4, "%h2": 2, "%r2": 4, "%d1": 8, "%r3": 4, "%r4": 4, "%r5": 4}
    got = evaluate(body, {"%r0": a.view(np.uint32)}, outputs)
    number = ~np.isnan(a)
    with np.errstate(over="ignore"):
        half = a.astype(np.float16)
    assert np.array_equal(got["%h1"][number], half.view(np.uint16)[number])
    assert np.array_equal(got["%r1"].view(np.float32)[number], half.astype(np.float32)[number])
    assert np.array_equal(got["%h2"], encode(BF16, a))
    assert np.array_equal(got["%r2"].view(np.float32)[number], decode(BF16, encode(BF16, a))[number])
    assert np.array_equal(got["%d1"].view(np.float64), a.astype(np.float64), equal_nan=True)
    assert np.array_equal(got["%r3"].view(np.float32), a, equal_nan=True)
    assert np.array_equal(got["%r4"].view(np.float32), np.trunc(a), equal_nan=True)
    assert not (got["%r5"][number] & 0x1FFF).any()
    assert set(got["%r3"][~number].tolist()) == {0x7FC0_0000}


def test_nan_of_f64_keeps_sign_and_payload() -> None:
    a = np.zeros(32, np.uint64)
    a[:4] = [0xFFF5_5555_5555_5555, 0x7FF0_0000_0000_0001, 0x7FFA_AAAA_AAAA_AAAA, 0xFFF0_0000_0000_0000]
    body = """cvt.rn.f32.f64 %r1, %d0; cvt.rp.f32.f64 %r2, %d0; cvt.rn.f16.f64 %h1, %d0;
    cvt.rn.sat.f32.f64 %r3, %d0; cvt.rn.bf16.f64 %h2, %d0;"""
    got = evaluate(body, {"%d0": a}, {"%r1": 4, "%r2": 4, "%r3": 4, "%h1": 2, "%h2": 2})
    assert got["%r1"][:4].tolist() == [0xFFEA_AAAA, 0x7FC0_0000, 0x7FD5_5555, 0xFF80_0000]
    assert got["%r2"][:4].tolist() == got["%r1"][:4].tolist()
    assert got["%h1"][:4].tolist() == [0xFF55, 0x7E00, 0x7EAA, 0xFC00]
    assert got["%h2"][:4].tolist() == [0xFFEA, 0x7FC0, 0x7FD5, 0xFF80]
    assert got["%r3"][:4].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("opcode", "bits"),
    [
        ("cvt.rn.bf16x2.f32", 16),
        ("cvt.rz.bf16x2.f32", 16),
        ("cvt.rn.relu.bf16x2.f32", 16),
        ("cvt.rn.f16x2.f32", 16),
        ("cvt.rn.satfinite.e4m3x2.f32", 8),
        ("cvt.rn.satfinite.e5m2x2.f32", 8),
        ("cvt.rp.satfinite.ue8m0x2.f32", 8),
    ],
)
def test_pairs_put_the_first_source_above(opcode: str, bits: int) -> None:
    a, b = floats(5), floats(6)
    words = opcode.split(".")
    form = {"bf16x2": BF16, "f16x2": F16, "e4m3x2": E4M3, "e5m2x2": E5M2, "ue8m0x2": UE8M0}[words[-2]]
    options = {"saturate": "satfinite" in words, "relu": "relu" in words}
    register = "%r2" if bits == 16 else "%h2"
    got = evaluate(
        f"{opcode} {register}, %r0, %r1;",
        {"%r0": a.view(np.uint32), "%r1": b.view(np.uint32)},
        {register: bits // 4},
        arch="sm_100a",
    )[register]
    high, low = (encode(form, x, words[1], **options).astype(np.uint32) for x in (a, b))
    assert np.array_equal(got, high << bits | low)
    # Without NaN the conversion takes a shorter way.
    rng = np.random.default_rng(7)
    a, b = rng.normal(size=(2, 32)).astype(np.float32)
    got = evaluate(
        f"{opcode} {register}, %r0, %r1;",
        {"%r0": a.view(np.uint32), "%r1": b.view(np.uint32)},
        {register: bits // 4},
        arch="sm_100a",
    )[register]
    high, low = (encode(form, x, words[1], **options).astype(np.uint32) for x in (a, b))
    assert np.array_equal(got, high << bits | low)


def test_fp8_pairs_to_halves() -> None:
    codes = np.arange(256, dtype=np.uint16)
    pairs = (codes[:32] | codes[96:128] << 8).astype(np.uint16)
    body = "cvt.rn.f16x2.e4m3x2 %r1, %h0; cvt.rn.f16x2.e5m2x2 %r2, %h0;"
    got = evaluate(body, {"%h0": pairs}, {"%r1": 4, "%r2": 4})
    for register, form in (("%r1", E4M3), ("%r2", E5M2)):
        low, high = decode(form, (pairs & 0xFF).astype(np.uint8)), decode(form, (pairs >> 8).astype(np.uint8))
        halves = got[register].view(np.float16).reshape(32, 2).astype(np.float32)
        assert np.array_equal(halves[:, 0], low, equal_nan=True)
        assert np.array_equal(halves[:, 1], high, equal_nan=True)
