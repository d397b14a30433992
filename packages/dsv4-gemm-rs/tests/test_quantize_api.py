# SPDX-License-Identifier: Apache-2.0
"""The calls: both layouts, caller's outputs, strides, empty matrices, every bad argument, the operator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsv4_gemm_rs.quantize import (
    Mxfp8,
    ScaleLayout,
    ScaleRule,
    compile_quantizer,
    dequantize_mxfp8,
    quantize_mxfp8,
    quantize_mxfp8_op,
    swizzle_scales,
    swizzled_scale_numel,
)
from dsv4_symm_mem.errors import ArgumentError
from torch._subclasses.fake_tensor import FakeTensorMode

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def matrix(rows: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(rows + k)).to(dtype)


def poisoned(rows: int, k: int, layout: ScaleLayout, scale_dtype: torch.dtype = torch.uint8) -> Mxfp8:
    shape = (swizzled_scale_numel(rows, k),) if layout is ScaleLayout.SWIZZLED else (rows, k // 32)
    data = torch.full((rows, k), 0xFF, dtype=torch.uint8).view(E4M3)
    return Mxfp8(data, torch.full(shape, 0xFF, dtype=torch.uint8).view(scale_dtype), layout)


def same(a: Mxfp8, b: Mxfp8) -> bool:
    data = torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    return data and torch.equal(a.scale.view(torch.uint8), b.scale.view(torch.uint8)) and a.layout == b.layout


@pytest.mark.parametrize("rule", list(ScaleRule))
def test_layouts_hold_the_same_bytes(rule: ScaleRule) -> None:
    x = matrix(130, 160)
    rows = quantize_mxfp8(x, layout="row_major", rule=rule)
    swizzled = quantize_mxfp8(x, rule=rule)
    assert (rows.data.dtype, rows.data.shape, rows.layout) == (E4M3, x.shape, ScaleLayout.ROW_MAJOR)
    assert (swizzled.scale.dtype, swizzled.scale.shape) == (torch.uint8, (256 * 8,))
    assert torch.equal(rows.data.view(torch.uint8), swizzled.data.view(torch.uint8))
    assert torch.equal(swizzle_scales(rows.scale), swizzled.scale)


def test_defaults_are_vllm_and_swizzled() -> None:
    x = matrix(3, 64) * 500
    assert same(quantize_mxfp8(x), quantize_mxfp8(x, layout="swizzled", rule="vllm"))
    assert not torch.equal(quantize_mxfp8(x).scale, quantize_mxfp8(x, rule="ocp").scale)


@pytest.mark.parametrize("layout", list(ScaleLayout))
@pytest.mark.parametrize("scale_dtype", [torch.uint8, E8M0])
def test_out_is_filled_whole_and_returned(layout: ScaleLayout, scale_dtype: torch.dtype) -> None:
    x = matrix(129, 96)
    out = poisoned(129, 96, layout, scale_dtype)
    assert quantize_mxfp8(x, layout=layout, out=out) is out
    assert same(out, quantize_mxfp8(x, layout=layout))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_strided_offset_and_repeated_rows(dtype: torch.dtype) -> None:
    wide = matrix(70, 203, dtype)
    for x in (wide[:, 7:167], wide[::2, :64], wide[3:4].expand(70, -1)[:, 1:161], wide[:, 0:32][10:11]):
        assert same(quantize_mxfp8(x), quantize_mxfp8(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("layout", list(ScaleLayout))
@pytest.mark.parametrize(("rows", "k"), [(0, 64), (4, 0), (0, 0)])
def test_empty_matrices(layout: ScaleLayout, rows: int, k: int) -> None:
    got = quantize_mxfp8(torch.empty(rows, k), layout=layout)
    assert got.data.shape == (rows, k)
    assert got.scale.numel() == 0
    assert dequantize_mxfp8(got).shape == (rows, k)


def test_dequantize_takes_every_form() -> None:
    x = matrix(130, 160)
    rows, swizzled = quantize_mxfp8(x, layout="row_major"), quantize_mxfp8(x)
    expected = dequantize_mxfp8(rows)
    assert expected.dtype == torch.float32
    for got in (
        dequantize_mxfp8(swizzled),
        dequantize_mxfp8(swizzled.data, swizzled.scale),
        dequantize_mxfp8(swizzled.data, rows.scale.view(E8M0)),
        dequantize_mxfp8(swizzled.data, swizzled.scale.view(E8M0), torch.float64).float(),
        dequantize_mxfp8(swizzled.data.t().contiguous().t(), rows.scale),
    ):
        assert torch.equal(got, expected)


X = matrix(64, 128)
Q = quantize_mxfp8(X, layout="row_major")


def with_out(asked: str = "row_major", **fields: Any) -> Callable[[], object]:
    out = poisoned(64, 128, ScaleLayout.ROW_MAJOR)._replace(**fields)
    return lambda: quantize_mxfp8(X, layout=asked, out=out)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda: quantize_mxfp8([1.0])),  # type: ignore[arg-type]
        ("x", lambda: quantize_mxfp8(X[0])),
        ("x", lambda: quantize_mxfp8(X[None])),
        ("x.dtype", lambda: quantize_mxfp8(X.double())),
        ("x.dtype", lambda: quantize_mxfp8(Q.data)),
        ("x.shape[1]", lambda: quantize_mxfp8(X[:, :100])),
        ("x.stride()", lambda: quantize_mxfp8(X[:, ::2])),
        ("x.stride()", lambda: quantize_mxfp8(X.t())),
        ("layout", lambda: quantize_mxfp8(X, layout="128x4")),
        ("rule", lambda: quantize_mxfp8(X, rule="ceil")),
        ("out", lambda: quantize_mxfp8(X, out=(Q.data, Q.scale))),  # type: ignore[arg-type]
        ("out.layout", with_out("swizzled")),
        ("out.data", with_out(data=torch.empty(64, 96, dtype=E4M3))),
        ("out.data", with_out(data=torch.empty(128, 64, dtype=E4M3))),
        ("out.data", with_out(data=None)),
        ("out.data.dtype", with_out(data=torch.empty(64, 128, dtype=torch.uint8))),
        ("out.data.stride()", with_out(data=torch.empty(128, 64, dtype=E4M3).t())),
        ("out.data.device", with_out(data=torch.empty(64, 128, dtype=E4M3, device="meta"))),
        ("out.scale", with_out(scale=torch.empty(512, dtype=torch.uint8))),
        ("out.scale", with_out(scale=torch.empty(64, 8, dtype=torch.uint8))),
        ("out.scale.dtype", with_out(scale=torch.empty(64, 4))),
        ("out.scale.stride()", with_out(scale=torch.empty(4, 64, dtype=torch.uint8).t())),
        ("out.scale", with_out("swizzled", layout=ScaleLayout.SWIZZLED)),
        ("q", lambda: dequantize_mxfp8("q", Q.scale)),  # type: ignore[arg-type]
        ("q.dtype", lambda: dequantize_mxfp8(X, Q.scale)),
        ("q.layout", lambda: dequantize_mxfp8(Q._replace(layout=ScaleLayout.SWIZZLED))),
        ("scale", lambda: dequantize_mxfp8(Q, Q.scale)),
        ("scale", lambda: dequantize_mxfp8(Q.data)),
        ("scale", lambda: dequantize_mxfp8(Q.data, Q.scale.flatten())),
        ("scale.dtype", lambda: dequantize_mxfp8(Q.data, Q.scale.float())),
        ("scale.device", lambda: dequantize_mxfp8(Q.data, Q.scale.to("meta"))),
        ("dtype", lambda: dequantize_mxfp8(Q, dtype=torch.bfloat16)),
        ("data", lambda: dequantize_mxfp8(Q.data[0], Q.scale)),
        ("dtype", lambda: compile_quantizer("cpu", dtype=torch.float64)),
        ("layout", lambda: compile_quantizer("cpu", layout="128x4")),
    ],
)
def test_bad_arguments_are_named(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError) as raised:
        call()
    assert raised.value.argument == argument
    assert str(raised.value).startswith(f"{argument}: got ")


def test_failed_call_leaves_out_alone() -> None:
    out = poisoned(64, 128, ScaleLayout.ROW_MAJOR)
    with pytest.raises(ArgumentError):
        quantize_mxfp8(X[:, :96], layout="row_major", out=out)
    assert (out.data.view(torch.uint8) == 0xFF).all()
    assert (out.scale == 0xFF).all()


def test_compile_quantizer_on_a_cpu_does_nothing() -> None:
    compile_quantizer("cpu")


def test_operator_equals_the_function() -> None:
    for layout in ScaleLayout:
        for rule in ScaleRule:
            data, scale = torch.ops.dsv4.quantize_mxfp8(X, layout, rule)
            assert same(Mxfp8(data, scale, layout), quantize_mxfp8(X, layout=layout, rule=rule))
    data, scale = quantize_mxfp8_op(X)
    assert same(Mxfp8(data, scale, ScaleLayout.SWIZZLED), quantize_mxfp8(X))


@pytest.mark.parametrize("layout", list(ScaleLayout))
def test_operator_registration_is_complete(layout: ScaleLayout) -> None:
    torch.library.opcheck(torch.ops.dsv4.quantize_mxfp8.default, (X, str(layout), "vllm"))


def test_operator_is_traced_with_a_dynamic_row_count() -> None:
    graphs = 0

    def count(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return module.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=count)
    def traced(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale = torch.ops.dsv4.quantize_mxfp8(x * 2, "swizzled", "ocp")
        return data, scale

    for rows in (5, 128, 300):
        x = matrix(rows, 64)
        data, scale = traced(x)
        expected = quantize_mxfp8(x * 2, rule="ocp")
        assert same(Mxfp8(data, scale, ScaleLayout.SWIZZLED), expected)
    assert graphs == 1


def test_operator_refuses_bad_input_while_tracing() -> None:
    with FakeTensorMode():
        for k, layout, rule in ((100, "swizzled", "vllm"), (96, "128x4", "vllm"), (96, "swizzled", "ceil")):
            with pytest.raises(ArgumentError):
                torch.ops.dsv4.quantize_mxfp8(torch.empty(64, k), layout, rule)


def test_import_and_use_on_a_cpu_do_not_load_the_dsl() -> None:
    script = """
import sys, torch
from dsv4_gemm_rs.quantize import quantize_mxfp8, round_trip_mxfp8
quantize_mxfp8(torch.ones(2, 32))
round_trip_mxfp8(torch.ones(2, 32))
sys.exit(any(name.split(".")[0] == "cutlass" for name in sys.modules) or torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
