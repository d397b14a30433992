# SPDX-License-Identifier: Apache-2.0
"""The projection object over virtual ranks, without vLLM: on the CPU, and on one GPU with graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dsv4_gemm_rs import Mxfp8, ScaleLayout, Workspace, quantize_mxfp8
from dsv4_gemm_rs.reference import allowed_error, dequantize, gemm_reduce_scatter, rounded, worst_error
from dsv4_symm_mem import VirtualGroup, VirtualRank
from dsv4_vllm_integration.seams.endings import AllReduceProjection, ReduceScatterProjection
from dsv4_vllm_integration.seams.group import TensorParallelGroup
from dsv4_vllm_integration.seams.projection import FusedProjection
from stand_ins import KERNELS, Layer

KINDS = ["bf16", *KERNELS]
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Bound:
    """A projection and a layer on each of P virtual ranks.

    Loading and settling run on all ranks at once, calls from this thread on each rank's stream in turn.
    """

    def __init__(
        self, size: int, n: int, k: int, kind: str, device: str, path: str, reduces: bool = False
    ) -> None:
        self.group = VirtualGroup(size, device)
        self.kind = kind

        def bind(rank: VirtualRank) -> tuple[FusedProjection, Layer]:
            workspace = Workspace.create(rank, max_tokens=300, n=n, path=path)
            group = TensorParallelGroup(rank, rank, rank.device)
            projection: FusedProjection = (
                AllReduceProjection(group, workspace, 3)
                if reduces
                else ReduceScatterProjection(group, workspace, 3, lambda x: x)
            )
            layer = Layer(n, k, kind, rank.device, size)
            assert projection.can_run(layer), projection._declined
            return projection, layer

        self.ranks = self.group.run(bind)

    def load(self, weights: list[torch.Tensor], broken: int = -1) -> None:
        """Load each rank's FP32 [N, K] and settle; rank `broken` gets a NaN scale."""

        def step(rank: VirtualRank) -> None:
            projection, layer = self.ranks[rank.rank]
            layer.load(weights[rank.rank], broken=rank.rank == broken)
            projection.warm_up()
            rank.synchronize()

        self.group.run(step)

    def call(self, xs: list[Any]) -> list[torch.Tensor]:
        """One call; BF16 activations or `QuantizedActivation`-like ones."""

        def one(rank: int) -> torch.Tensor:
            projection, layer = self.ranks[rank]
            if isinstance(xs[rank], torch.Tensor):
                return projection.apply(xs[rank], layer)
            return projection.apply_quantized(xs[rank], layer)

        if self.group.device.type == "cpu":
            return self.group.run(lambda rank: one(rank.rank))
        here = torch.cuda.current_stream()
        results = []
        for rank in self.group.ranks:
            assert rank.stream is not None
            rank.stream.wait_stream(here)
            with torch.cuda.stream(rank.stream):
                results.append(one(rank.rank))
        for rank in self.group.ranks:
            assert rank.stream is not None
            here.wait_stream(rank.stream)
        return results

    def close(self) -> None:
        """Free the symmetric memory."""
        self.group.run(lambda rank: self.ranks[rank.rank][0].workspace.close())


def weights_of(size: int, n: int, k: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, k, generator=generator) / 16 for _ in range(size)]


def activations_of(size: int, m: int, k: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(m, k, generator=generator).to(torch.bfloat16) for _ in range(size)]


def values(x: torch.Tensor) -> torch.Tensor:
    seen = quantize_mxfp8(x, layout=ScaleLayout.ROW_MAJOR)
    return dequantize(seen.data, seen.scale)


def assert_right(
    outs: list[torch.Tensor],
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    kind: str,
    reduces: bool = False,
) -> None:
    seen = [values(x) if kind.startswith("FlashInfer") else x.double() for x in xs]
    ws = [w.to(torch.bfloat16).double() if kind == "bf16" else values(w) for w in weights]
    exact = gemm_reduce_scatter(seen, ws)
    allowed = allowed_error(worst_error(rounded(seen, ws), exact))
    if reduces:
        assert all(torch.equal(out, outs[0]) for out in outs)
        exact = [torch.cat(exact)[: len(xs[0])]] * len(outs)
    assert worst_error([out.cpu() for out in outs], exact) <= allowed


@pytest.mark.parametrize(
    ("device", "path", "size", "n", "k"),
    [
        ("cpu", "host", 2, 128, 128),
        ("cpu", "host", 4, 64, 256),
        pytest.param("cuda", "fused", 2, 5120, 2048, marks=ON_A_GPU),
        pytest.param("cuda", "fused", 4, 5120, 1024, marks=ON_A_GPU),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduces", [False, True])
def test_every_layout_before_and_after_a_reload(
    reduces: bool, kind: str, device: str, path: str, size: int, n: int, k: int
) -> None:
    bound = Bound(size, n, k, kind, device, path, reduces)
    for seed in (1, 2):
        weights = weights_of(size, n, k, seed)
        bound.load(weights)
        for m in (3, 129, 300):
            xs = activations_of(size, m, k, m + seed)
            assert_right(bound.call([x.to(device) for x in xs]), xs, weights, kind, reduces)
            if kind.startswith("FlashInfer"):
                given: list[Mxfp8] = [quantize_mxfp8(x.to(device)) for x in xs]
                assert_right(bound.call(given), xs, weights, kind, reduces)
    assert [layer.called for _, layer in bound.ranks] == [0] * size
    bound.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("reduces", [False, True])
def test_graphs_follow_changed_inputs_and_reloaded_weights(reduces: bool, kind: str) -> None:
    size, n, k, m = 2, 512, 256, 200
    bound = Bound(size, n, k, kind, "cuda", "fused", reduces)
    weights = weights_of(size, n, k, 1)
    bound.load(weights)
    held = [x.cuda() for x in activations_of(size, m, k, 1)]
    bound.call(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = bound.call(held)
    for seed in range(2, 7):
        fresh = activations_of(size, m, k, seed)
        for target, x in zip(held, fresh, strict=True):
            target.copy_(x)
        if seed % 2:
            weights = weights_of(size, n, k, seed)
            bound.load(weights)
        graph.replay()
        torch.cuda.synchronize()
        assert_right(outs, fresh, weights, kind, reduces)
    bound.close()


def test_a_layer_that_is_not_settled_runs_unfused_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = Bound(2, 64, 128, "bf16", "cpu", "host")
    monkeypatch.setattr("dsv4_vllm_integration.seams.projection._capturing", lambda: True)
    xs = activations_of(2, 5, 128, 1)
    assert all(out is x for out, x in zip(bound.call(xs), xs, strict=True))
    assert [layer.called for _, layer in bound.ranks] == [1, 1]
    monkeypatch.undo()
    weights = weights_of(2, 64, 128, 1)
    bound.load(weights)
    assert_right(bound.call(xs), xs, weights, "bf16")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": torch.zeros(128)}, "bias"),
        ({"weight": torch.zeros(128, 128)}, "torch.float32"),
        ({"weight": torch.zeros(128, 130, dtype=torch.bfloat16)}, "no multiple of"),
        ({"weight": torch.zeros(192, 128, dtype=torch.bfloat16)}, "N = 192, the workspace has 128"),
        ({"weight": torch.zeros(128, dtype=torch.bfloat16)}, "no matrix"),
        ({"weight_scale": torch.zeros(4, 4, dtype=torch.uint8)}, "[N, K/32] = (128, 4)"),
        ({"weight_scale": None}, "not E8M0"),
        ({"quant_method": None}, "no quant_method"),
    ],
)
def test_layers_that_are_not_served(change: dict[str, Any], reason: str) -> None:
    bound = Bound(1, 128, 128, "FlashInferCutlassMxfp8LinearKernel", "cpu", "host")
    projection, layer = bound.ranks[0]
    other = Layer(128, 128, layer.kind, torch.device("cpu"))
    for name, value in change.items():
        setattr(other, name, value)
    assert not projection.can_run(other)
    assert reason in projection._declined


@pytest.mark.parametrize(
    ("name", "value"),
    [("reduce_results", False), ("tp_size", 4), ("input_is_parallel", False), ("return_bias", True)],
)
def test_layers_that_do_not_end_in_this_group_s_all_reduce(name: str, value: Any) -> None:
    bound = Bound(2, 64, 128, "bf16", "cpu", "host", reduces=True)
    projection, _ = bound.ranks[0]
    other = Layer(64, 128, "bf16", torch.device("cpu"), 2)
    setattr(other, name, value)
    assert not projection.can_run(other)
    assert not projection.follows(other)
    assert f"its {name} is {value}, expected" in projection._declined


@pytest.mark.parametrize("kind", list(KERNELS))
def test_one_rank_s_nan_scale_gives_the_layer_back_on_all(kind: str) -> None:
    bound = Bound(2, 64, 128, kind, "cpu", "host")
    weights = weights_of(2, 64, 128, 1)
    bound.load(weights, broken=1)
    xs = activations_of(2, 5, 128, 1)
    bound.call(xs)
    assert [layer.called for _, layer in bound.ranks] == [1, 1]
    # A later load without it brings the kernel back.
    bound.load(weights)
    assert_right(bound.call(xs), xs, weights, kind)
