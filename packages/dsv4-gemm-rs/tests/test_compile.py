# SPDX-License-Identifier: Apache-2.0
"""The torch operator: its schema, its fake, torch.compile, and the order of calls in a graph."""

from __future__ import annotations

import pytest
import torch
from dsv4_gemm_rs import WeightKind, Workspace, gemm_rs
from gemm_rs_support import Ranks, assert_right, problems_for, ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

N, K = 128, 128


@pytest.mark.parametrize("kind", list(WeightKind))
def test_the_operator_passes_torchs_own_checks(kind: WeightKind) -> None:
    (p,) = problems_for(1, 9, N, K, kind)
    with ranks(1, max_tokens=16, n=N) as group:
        space, w = group.workspaces[0], p.weight
        arguments = (p.x, None, w.data, w.scale, space.order, space.handle, w.handle)
        # Torch's schema check multiplies every input, which it cannot do for FP8.
        checks = ["test_faketensor", "test_aot_dispatch_dynamic"]
        checks += ["test_schema"] if kind is WeightKind.BF16 else []
        torch.library.opcheck(torch.ops.dsv4.gemm_rs.default, arguments, test_utils=checks)
        out = torch.empty(9, N, dtype=torch.bfloat16)
        torch.library.opcheck(torch.ops.dsv4.gemm_rs_out.default, (*arguments, out), test_utils=checks)


@pytest.mark.parametrize("m", [0, 1, 10, 11])
def test_the_fake_has_the_real_shape(m: int) -> None:
    problems = problems_for(3, m, N, K, WeightKind.BF16)
    with ranks(3, max_tokens=16, n=N) as group:
        real = group.call(problems)
        space, p = group.workspaces[0], problems[0]
        with FakeTensorMode() as mode:
            fake = torch.ops.dsv4.gemm_rs(
                mode.from_tensor(p.x),
                None,
                mode.from_tensor(p.weight.data),
                None,
                mode.from_tensor(space.order),
                space.handle,
                p.weight.handle,
            )
        assert fake.shape == real[0].shape
        assert fake.dtype == real[0].dtype


def model(group: Ranks, problems: list) -> list:  # type: ignore[type-arg]
    """Two chained calls with work around them, as a function of x, for each rank."""

    def of(space: Workspace):  # type: ignore[no-untyped-def]
        weight = problems[space.rank].weight

        def forward(x: torch.Tensor) -> torch.Tensor:
            first = gemm_rs(x * 2, weight, space)
            second = gemm_rs(x + 1, weight, space)
            return first + 3 * second

        return forward

    return [of(space) for space in group.workspaces]


def test_compiled_ranks_agree_with_eager_ones_for_changing_m() -> None:
    problems = {m: problems_for(2, m, N, K, WeightKind.MXFP8, seed=5) for m in (8, 9, 13)}
    weights = problems[8]
    with ranks(2, max_tokens=16, n=N) as group:
        eager = model(group, weights)
        compiled = [torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True) for f in eager]
        for m in (8, 9, 13):
            # Compilation is not re-entrant over threads, so every rank's first call is traced alone.
            xs = [p.x for p in problems[m]]
            expected = group.run(lambda s, xs=xs: eager[s.rank](xs[s.rank]))  # type: ignore[misc]
            got = group.run(lambda s, xs=xs: compiled[s.rank](xs[s.rank]))  # type: ignore[misc]
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_traced_graph_keeps_both_calls_even_when_one_result_is_unused() -> None:
    problems = problems_for(1, 8, N, K, WeightKind.BF16)
    with ranks(1, max_tokens=16, n=N) as group:
        space, weight = group.workspaces[0], problems[0].weight

        def forward(x: torch.Tensor) -> torch.Tensor:
            gemm_rs(x, weight, space)
            return gemm_rs(x, weight, space)

        graph = make_fx(forward)(problems[0].x)
        graph.graph.eliminate_dead_code()
        calls = [node for node in graph.graph.nodes if "gemm_rs" in str(node.target)]
        assert len(calls) == 2
        assert_right([graph(problems[0].x)], problems)
