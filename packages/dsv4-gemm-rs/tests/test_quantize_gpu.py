# SPDX-License-Identifier: Apache-2.0
"""The GPU quantiser, bit for bit against the torch path on the CPU: shapes, dtypes, strides, graphs, streams.

Every output byte is 0xFF before each call, so that a byte the kernel leaves out shows, the layout's padding
included; guard bytes around the outputs show a store that strays.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dsv4_gemm_rs.quantize import (
    Mxfp8,
    ScaleLayout,
    ScaleRule,
    compile_quantizer,
    quantize_mxfp8,
    round_trip_mxfp8,
    swizzled_scale_numel,
)
from dsv4_symm_mem.errors import ArgumentError, UnsupportedError
from quantize_support import adversarial

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch.cuda finds none"),
]

E4M3 = torch.float8_e4m3fn
GUARD = 64
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = list(ScaleLayout)
RULES = list(ScaleRule)


@pytest.fixture(scope="module", autouse=True)
def _capability() -> None:
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        pytest.skip(f"needs compute capability 8.9 for E4M3 conversion; this device has {capability}")


def poisoned_bytes(numel: int) -> torch.Tensor:
    """`numel` device bytes between two guards, all 0xFF."""
    return torch.full((GUARD + numel + GUARD,), 0xFF, dtype=torch.uint8, device="cuda")


def check_bytes(buffer: torch.Tensor, expected: torch.Tensor) -> None:
    """A buffer of `poisoned_bytes` holds the bytes of `expected`, and its guards are whole."""
    got = buffer.cpu()
    assert (got[:GUARD] == 0xFF).all()
    assert (got[-GUARD:] == 0xFF).all()
    wrong = (got[GUARD:-GUARD] != expected.view(torch.uint8).flatten()).nonzero().flatten()
    assert not wrong.numel(), f"{wrong.numel()} bytes differ, the first at {wrong[:5].tolist()}"


class Poisoned:
    """Device outputs full of 0xFF with guards, and the check of what a call left in them."""

    def __init__(self, rows: int, k: int, layout: ScaleLayout) -> None:
        shape = (swizzled_scale_numel(rows, k),) if layout is ScaleLayout.SWIZZLED else (rows, k // 32)
        scales = torch.Size(shape).numel()
        self.buffers = [poisoned_bytes(rows * k), poisoned_bytes(scales)]
        data, scale = (buffer[GUARD:-GUARD] for buffer in self.buffers)
        self.out = Mxfp8(data.view(rows, k).view(E4M3), scale.view(shape), layout)

    def check(self, expected: Mxfp8) -> None:
        for buffer, want in zip(self.buffers, (expected.data, expected.scale), strict=True):
            check_bytes(buffer, want)


def check(x: torch.Tensor, layout: ScaleLayout, rule: ScaleRule) -> None:
    """`x` is on the device; the reference quantises its copy on the CPU."""
    poisoned = Poisoned(x.shape[0], x.shape[1], layout)
    assert quantize_mxfp8(x, layout=layout, rule=rule, out=poisoned.out) is poisoned.out
    poisoned.check(quantize_mxfp8(x.cpu(), layout=layout, rule=rule))


def bf16_output(buffer: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    return buffer[GUARD:-GUARD].view(torch.bfloat16).view(rows, k)


def check_round_trip(x: torch.Tensor, rule: ScaleRule) -> None:
    """0xFFFF, the poison, is a NaN that a round trip never writes."""
    buffer = poisoned_bytes(2 * x.numel())
    out = bf16_output(buffer, *x.shape)
    assert round_trip_mxfp8(x, rule=rule, out=out) is out
    check_bytes(buffer, round_trip_mxfp8(x.cpu(), rule=rule))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [32, 96, 128, 2048, 7168])
def test_bit_equal_to_the_cpu(dtype: torch.dtype, layout: ScaleLayout, rule: ScaleRule, k: int) -> None:
    x = adversarial(4097 if k < 7168 else 1000, k, dtype).cuda()
    for rows in (1, 31, 127, 128, 129, 1000, 4097):
        if rows <= x.shape[0]:
            check(x[:rows], layout, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [32, 96, 128, 2048, 7168])
def test_round_trip_is_bit_equal_to_the_cpu(dtype: torch.dtype, rule: ScaleRule, k: int) -> None:
    x = adversarial(4097 if k < 7168 else 1000, k, dtype).cuda()
    for rows in (1, 31, 127, 128, 129, 1000, 4097):
        if rows <= x.shape[0]:
            check_round_trip(x[:rows], rule)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_rows(layout: ScaleLayout) -> None:
    check(adversarial(4097, 7168, torch.bfloat16).cuda(), layout, ScaleRule.VLLM)


def test_round_trip_of_many_rows() -> None:
    check_round_trip(adversarial(4097, 7168, torch.bfloat16).cuda(), ScaleRule.VLLM)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_as_an_element(dtype: torch.dtype, rule: ScaleRule) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    check(values.view(-1, 32).cuda(), ScaleLayout.ROW_MAJOR, rule)
    shuffled = values[torch.randperm(2**16, generator=torch.Generator().manual_seed(5))]
    check(shuffled.view(-1, 128).cuda(), ScaleLayout.SWIZZLED, rule)
    check_round_trip(values.view(-1, 32).cuda(), rule)
    check_round_trip(shuffled.view(-1, 128).cuda(), rule)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_unaligned_rows(dtype: torch.dtype, layout: ScaleLayout) -> None:
    wide = adversarial(130, 683, dtype).cuda()
    vector = 16 // wide.element_size()
    aligned = adversarial(130, 672 + vector, dtype).cuda()
    for x in (
        aligned[:, :640],
        aligned[:, vector : vector + 96],
        aligned[:, 1:33],
        aligned[::2, :256],
        wide[:, :640],
        wide[:, 1:641],
        wide[:, vector - 1 : vector + 159],
        wide[3:4].expand(130, -1)[:, 5:165],
    ):
        check(x, layout, ScaleRule.VLLM)
        check_round_trip(x, ScaleRule.VLLM)


def test_storage_offset_of_one_element_in_contiguous_rows() -> None:
    for dtype in DTYPES:
        flat = adversarial(1, 129 * 256 + 32, dtype).flatten().cuda()
        for offset in (1, 2, 3, 4, 8):
            x = flat[offset : offset + 129 * 256].view(129, 256)
            check(x, ScaleLayout.SWIZZLED, ScaleRule.VLLM)
            check_round_trip(x, ScaleRule.VLLM)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_matrices(layout: ScaleLayout) -> None:
    for rows, k in ((0, 64), (4, 0)):
        got = quantize_mxfp8(torch.empty(rows, k, device="cuda"), layout=layout)
        assert got.data.shape == (rows, k)
        assert got.scale.numel() == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_replays_follow_the_input(layout: ScaleLayout) -> None:
    inputs = [adversarial(129, 2048, torch.bfloat16, seed) for seed in range(4)]
    x, poisoned = inputs[0].cuda(), Poisoned(129, 2048, layout)
    compile_quantizer(x.device, layout=layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_mxfp8(x, layout=layout, out=poisoned.out)
    for one in (inputs[1], inputs[2], inputs[3], inputs[1]):
        x.copy_(one)
        for buffer in poisoned.buffers:
            buffer.fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        poisoned.check(quantize_mxfp8(one, layout=layout))


def test_round_trip_graph_replays_follow_the_input() -> None:
    inputs = [adversarial(129, 2048, torch.bfloat16, seed) for seed in range(3)]
    x, buffer = inputs[0].cuda(), poisoned_bytes(2 * 129 * 2048)
    compile_quantizer(x.device, round_trip=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        round_trip_mxfp8(x, out=bf16_output(buffer, 129, 2048))
    for one in (inputs[1], inputs[2], inputs[1]):
        x.copy_(one)
        buffer.fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        check_bytes(buffer, round_trip_mxfp8(one))


def test_first_use_inside_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_gemm_rs.quantize import kernel

    x = torch.ones(4, 64, device="cuda")
    quantize_mxfp8(x)
    monkeypatch.setattr(kernel, "_ready", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(UnsupportedError, match="compile_quantizer"):
        quantize_mxfp8(x)


def test_round_trip_needs_its_own_kernel_before_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_gemm_rs.quantize import kernel

    monkeypatch.setattr(kernel, "_ready", {})
    x = torch.ones(4, 64, device="cuda")
    quantize_mxfp8(x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(UnsupportedError, match="BF16 output"):
        round_trip_mxfp8(x)
    compile_quantizer(x.device, dtype=x.dtype, round_trip=True)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        round_trip_mxfp8(x)


def test_runs_on_the_current_stream() -> None:
    x, later = torch.zeros(512, 2048, device="cuda"), torch.randn(512, 2048)
    source = later.cuda()
    expected = quantize_mxfp8(later)
    poisoned = Poisoned(512, 2048, ScaleLayout.SWIZZLED)
    compile_quantizer("cuda", dtype=torch.float32)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(source)
        quantize_mxfp8(x, out=poisoned.out)
    stream.synchronize()
    poisoned.check(expected)


def test_no_allocation_with_out() -> None:
    x, poisoned = torch.ones(300, 2048, device="cuda"), Poisoned(300, 2048, ScaleLayout.SWIZZLED)
    back = torch.empty(300, 2048, dtype=torch.bfloat16, device="cuda")
    quantize_mxfp8(x, out=poisoned.out)
    round_trip_mxfp8(x, out=back)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    quantize_mxfp8(x, out=poisoned.out)
    round_trip_mxfp8(x, out=back)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_threads_share_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_gemm_rs.quantize import kernel

    compile_launch, calls = kernel.compile_launch, []

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return compile_launch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setenv("DSV4_CACHE_DIR", "off")
    monkeypatch.setattr(kernel, "compile_launch", counted)
    monkeypatch.setattr(kernel, "_ready", {})
    monkeypatch.setattr("dsv4_symm_mem.compiled._kernels", {})
    inputs = [adversarial(129, 256, torch.bfloat16, seed) for seed in range(16)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda one: quantize_mxfp8(one.cuda()), inputs))
    for one, got in zip(inputs, results, strict=True):
        expected = quantize_mxfp8(one)
        assert torch.equal(got.data.view(torch.uint8).cpu(), expected.data.view(torch.uint8))
        assert torch.equal(got.scale.cpu(), expected.scale)
    assert len(calls) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_that_is_not_current() -> None:
    x = adversarial(129, 256, torch.bfloat16)
    got = quantize_mxfp8(x.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert torch.equal(got.scale.cpu(), quantize_mxfp8(x).scale)
    assert torch.equal(got.data.view(torch.uint8).cpu(), quantize_mxfp8(x).data.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operator_compiles(layout: ScaleLayout) -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def traced(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale = torch.ops.dsv4.quantize_mxfp8(x, str(layout), "vllm")
        return data, scale

    for rows in (5, 300):
        x = adversarial(rows, 96, torch.bfloat16)
        data, scale = traced(x.cuda())
        expected = quantize_mxfp8(x, layout=layout)
        assert torch.equal(data.view(torch.uint8).cpu(), expected.data.view(torch.uint8))
        assert torch.equal(scale.cpu(), expected.scale)


def test_bad_outputs_are_refused() -> None:
    x = torch.ones(64, 128, device="cuda")
    raw = torch.empty(64 * 128 + 16, dtype=torch.uint8, device="cuda")
    good = quantize_mxfp8(x)
    for argument, bad in (
        ("out.data.data_ptr()", good._replace(data=raw[8:-8].view(64, 128).view(E4M3))),
        ("out.scale.data_ptr()", good._replace(scale=raw[1:513])),
        ("out.data.device", good._replace(data=good.data.cpu())),
        ("out.scale.device", good._replace(scale=good.scale.cpu())),
    ):
        with pytest.raises(ArgumentError) as raised:
            quantize_mxfp8(x, out=bad)
        assert raised.value.argument == argument


def test_bad_round_trip_outputs_are_refused() -> None:
    x = torch.ones(64, 128, device="cuda")
    raw = torch.empty(64 * 128 + 8, dtype=torch.bfloat16, device="cuda")
    for argument, bad in (
        ("out.data_ptr()", raw[4:-4].view(64, 128)),
        ("out.device", torch.empty(64, 128, dtype=torch.bfloat16)),
    ):
        with pytest.raises(ArgumentError) as raised:
            round_trip_mxfp8(x, out=bad)
        assert raised.value.argument == argument


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None,
    reason="needs the flashinfer package, which is not installed",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flashinfer_writes_the_same_bytes(dtype: torch.dtype, layout: ScaleLayout) -> None:
    """On finite input in the range where the two definitions agree; see `rule.py` for the rest."""
    from flashinfer import mxfp8_quantize

    generator = torch.Generator().manual_seed(6)
    x = torch.randn(300, 2048, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, x.shape, generator=generator))
    x = x.to(dtype).cuda()
    try:
        data, scale = mxfp8_quantize(x, is_sf_swizzled_layout=layout is ScaleLayout.SWIZZLED)
    except Exception as error:
        pytest.skip(f"flashinfer.mxfp8_quantize does not run here: {type(error).__name__}: {error}")
    expected = quantize_mxfp8(x, layout=layout)
    assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scale.view(torch.uint8).flatten(), expected.scale.flatten())
