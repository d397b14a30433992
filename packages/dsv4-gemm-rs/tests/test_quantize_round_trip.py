# SPDX-License-Identifier: Apache-2.0
"""Quantised and back as BF16: the two-step expression, and the values it stands for, held by BF16 or not.

What depends on numbers only runs on the CPU and, where there is one, on a GPU; shapes, strides, streams and
graphs of the kernel are in `test_quantize_gpu.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from dsv4_gemm_rs.quantize import (
    ScaleRule,
    compile_quantizer,
    dequantize_mxfp8,
    quantize_mxfp8,
    round_trip_mxfp8,
)
from dsv4_symm_mem.errors import ArgumentError

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(
                not torch.cuda.is_available(), reason="needs a CUDA device; torch.cuda finds none"
            ),
        ],
    ),
]
RULES = list(ScaleRule)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAN = 0x7FFF

on_each_device = pytest.mark.parametrize("device", DEVICES)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.cpu().view(torch.int16)


def two_steps(x: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """The bits of the definition, on the CPU; torch leaves open which NaN a conversion gives."""
    values = dequantize_mxfp8(quantize_mxfp8(x.cpu(), rule=rule)).to(torch.bfloat16)
    return bits(values).masked_fill(values.isnan(), NAN)


def check(x: torch.Tensor, device: str, rule: ScaleRule) -> None:
    got = round_trip_mxfp8(x.to(device), rule=rule)
    assert (got.dtype, got.shape, got.device.type) == (torch.bfloat16, x.shape, device)
    wrong = (bits(got) != two_steps(x, rule)).nonzero()
    assert not wrong.numel(), f"{len(wrong)} elements differ, the first at {wrong[:3].tolist()}"


def every_code_at_scale(byte: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 [9, 32] whose blocks have the scale `byte` and hold its 254 finite codes; their FP64 values."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    codes = torch.cat([codes, codes.new_zeros(9 * 31 - codes.numel())]).view(9, 31)
    codes = torch.cat([torch.full((9, 1), 0x7E, dtype=torch.uint8), codes], 1)
    scale = torch.full((9, 1), byte, dtype=torch.uint8)
    values = dequantize_mxfp8(codes.view(torch.float8_e4m3fn), scale, torch.float64)
    return values.float(), values


@on_each_device
@pytest.mark.parametrize("byte", [*range(6), 9, 64, 127, 191, *range(243, 247)])
def test_every_code_comes_back_to_the_nearest_bf16(byte: int, device: str) -> None:
    """448 leads each block and makes every code its own nearest: what returns is what BF16 makes of it."""
    x, values = every_code_at_scale(byte)
    assert (quantize_mxfp8(x, layout="row_major").scale == byte).all()
    got = round_trip_mxfp8(x.to(device)).double().cpu()
    # All codes have four significant bits, so that only BF16's smallest step, 2^-133, can be too coarse.
    smallest = 2.0**-133
    nearest = np.rint(values.numpy() / smallest) * smallest
    np.testing.assert_array_equal(got.numpy(), nearest)
    assert torch.equal(torch.signbit(got), torch.signbit(values))
    multiple = (values * 2.0 ** (127 - byte) * 2**9).long()
    exact = multiple % max(1, 2 ** (3 - byte)) == 0
    assert torch.equal(got == values, exact)
    assert exact.all() == (byte >= 3)
    assert (values[~exact].abs() < 2.0**-130).all()


@on_each_device
def test_scale_bytes_up_to_246_never_overflow(device: str) -> None:
    x, _ = every_code_at_scale(246)
    for rule in RULES:
        assert round_trip_mxfp8(x.to(device), rule=rule).isfinite().all()


@on_each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_numbers_overflow_under_vllm_only(dtype: torch.dtype, device: str) -> None:
    tie = torch.tensor(248 * 2.0**120)
    below = tie * (1 - (2.0**-24 if dtype is torch.float32 else 2.0**-8))
    x = torch.zeros(1, 32)
    x[0, :5] = torch.stack([tie, -tie, below, -below, torch.tensor(torch.finfo(torch.bfloat16).max)])
    x = x.to(dtype).to(device)
    highest, infinite = 240 * 2.0**120, math.inf
    got = round_trip_mxfp8(x)[0]
    assert got[:5].tolist() == [infinite, -infinite, highest, -highest, infinite]
    assert (got[5:] == 0).all()
    saturated = 448 * 2.0**119
    assert round_trip_mxfp8(x, rule="ocp")[0, :4].tolist() == [saturated, -saturated, saturated, -saturated]


@on_each_device
@pytest.mark.parametrize("rule", RULES)
def test_special_values(rule: ScaleRule, device: str) -> None:
    x = torch.ones(6, 32)
    x[0], x[1] = 0.0, -0.0
    x[2, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    x[3] = torch.tensor([math.nan, -math.nan, math.inf, -math.inf] * 8)
    x[4, 0], x[4, 1] = 448.0, -(2.0**-30)
    x[5] = -(2.0**-149)
    got = bits(round_trip_mxfp8(x.to(device), rule=rule)).int() & 0xFFFF
    assert set(got[0].tolist()) == {0}
    assert set(got[1].tolist()) == {0x8000}
    assert set(got[2, :3].tolist()) == {NAN}
    assert set(got[2, 3:].tolist()) == {0x3F80}
    assert set(got[3].tolist()) == {NAN}
    assert got[4, :3].tolist() == [0x43E0, 0x8000, 0x3F80]
    assert set(got[5].tolist()) == {0x8000}


@on_each_device
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_two_steps_on_random_bit_patterns(
    dtype: torch.dtype, rule: ScaleRule, device: str
) -> None:
    generator = torch.Generator().manual_seed(7)
    word = torch.int32 if dtype is torch.float32 else torch.int16
    low, high = torch.iinfo(word).min, torch.iinfo(word).max
    x = torch.randint(low, high + 1, (300, 1024), dtype=torch.int64, generator=generator).to(word).view(dtype)
    assert x.isnan().any()
    check(x, device, rule)


@on_each_device
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("power", [-149, -140, -133, -126, -118, -60, 0, 14, 100, 127])
def test_equals_the_two_steps_at_every_magnitude(power: int, rule: ScaleRule, device: str) -> None:
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(power + 200))
    x[::5, 1::7] = torch.tensor([math.inf, -math.inf, math.nan]).repeat(5)[:14]
    check(torch.ldexp(x.double(), torch.tensor(power)).float(), device, rule)


@on_each_device
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "anchor", [0.0, 2.0**-133, 2.0**-119, 448 * 2.0**-127, 2.0**-117, 1.0, 450.0, 3.3895e38]
)
def test_equals_the_two_steps_for_every_bf16_value(anchor: float, rule: ScaleRule, device: str) -> None:
    """`anchor` leads each block: for the values up to it, it fixes the scale."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[~(values.float().abs() > anchor) | values.isinf()]
    blocks = torch.full((-(-values.numel() // 31), 32), anchor, dtype=torch.bfloat16)
    padded = torch.zeros(blocks.shape[0] * 31, dtype=torch.bfloat16)
    padded[: values.numel()] = values
    blocks[:, 1:] = padded.view(-1, 31)
    check(blocks, device, rule)


@on_each_device
def test_a_second_round_trip_changes_nothing(device: str) -> None:
    """Of numbers in the range where BF16 is exact."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(8)).bfloat16().to(device)
    once = round_trip_mxfp8(x)
    assert not torch.equal(once, x)
    assert torch.equal(round_trip_mxfp8(once), once)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_offset_and_repeated_rows(dtype: torch.dtype) -> None:
    wide = torch.randn(70, 203, generator=torch.Generator().manual_seed(9)).to(dtype)
    for x in (wide[:, 7:167], wide[::2, :64], wide[3:4].expand(70, -1)[:, 1:161], wide[10:11, :32]):
        check(x, "cpu", ScaleRule.VLLM)


def test_default_rule_is_vllm() -> None:
    x = torch.full((1, 32), 480.0)
    assert round_trip_mxfp8(x)[0, 0].item() == 480.0
    assert round_trip_mxfp8(x, rule="ocp")[0, 0].item() == 448.0


@on_each_device
@pytest.mark.parametrize(("rows", "k"), [(0, 64), (4, 0), (0, 0)])
def test_empty_matrices(rows: int, k: int, device: str) -> None:
    assert round_trip_mxfp8(torch.empty(rows, k, device=device)).shape == (rows, k)


def test_out_is_filled_whole_and_returned() -> None:
    x = torch.randn(129, 96, generator=torch.Generator().manual_seed(10))
    out = torch.full((129, 96), -1, dtype=torch.int16).view(torch.bfloat16)
    assert round_trip_mxfp8(x, out=out) is out
    assert torch.equal(bits(out), two_steps(x, ScaleRule.VLLM))


def test_input_that_requires_grad_gives_no_graph() -> None:
    assert not round_trip_mxfp8(torch.randn(2, 32, requires_grad=True)).requires_grad


X = torch.ones(64, 128, dtype=torch.bfloat16)


def with_out(out: object) -> Callable[[], object]:
    return lambda: round_trip_mxfp8(X, out=out)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda: round_trip_mxfp8([1.0])),  # type: ignore[arg-type]
        ("x", lambda: round_trip_mxfp8(X[0])),
        ("x.dtype", lambda: round_trip_mxfp8(X.double())),
        ("x.shape[1]", lambda: round_trip_mxfp8(X[:, :100])),
        ("x.stride()", lambda: round_trip_mxfp8(X.t())),
        ("rule", lambda: round_trip_mxfp8(X, rule="ceil")),
        ("out", with_out(quantize_mxfp8(X))),
        ("out", with_out(X.new_empty(64, 96))),
        ("out", with_out(X.new_empty(64 * 128))),
        ("out.dtype", with_out(X.half())),
        ("out.device", with_out(X.to("meta"))),
        ("out.stride()", with_out(X.new_empty(128, 64).t())),
        ("out.stride()", with_out(X.new_empty(64, 136)[:, :128])),
        ("dtype", lambda: compile_quantizer("cpu", dtype=torch.float64, round_trip=True)),
    ],
)
def test_bad_arguments_are_named(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError) as raised:
        call()
    assert raised.value.argument == argument
    assert str(raised.value).startswith(f"{argument}: got ")


def test_compile_quantizer_on_a_cpu_does_nothing() -> None:
    compile_quantizer("cpu", round_trip=True)
