# SPDX-License-Identifier: Apache-2.0
"""`gemm_ar`: every rank gets what `gemm_rs` gives the rows' owners, to the bit, whatever serves it."""

from __future__ import annotations

import pytest
import torch
from dsv4_gemm_rs import Path, WeightKind, Workspace, gemm_ar
from dsv4_symm_mem.errors import ArgumentError, PeerTimeoutError
from gemm_rs_support import assert_right, problems_for, ranks
from torch._subclasses.fake_tensor import FakeTensorMode

N, K = 192, 256


@pytest.mark.parametrize("kind", list(WeightKind))
@pytest.mark.parametrize("path", [Path.HOST, Path.UNFUSED])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_has_every_shard(size: int, path: Path, kind: WeightKind) -> None:
    with ranks(size, max_tokens=300, n=N, path=path) as group:
        for m in sorted({0, 1, size - 1, size + 1, 129, 300}):
            problems = problems_for(size, m, N, K, kind, seed=m)
            shards = group.call(problems)
            outs = group.run(lambda s, p=problems: gemm_ar(p[s.rank].x, p[s.rank].weight, s))  # type: ignore[misc]
            assert_right(shards, problems)
            whole = torch.cat(shards)[:m]
            assert all(torch.equal(out, whole) for out in outs)


def test_writes_into_what_is_given_and_checks_it() -> None:
    problems = problems_for(2, 5, N, K, WeightKind.BF16)
    with ranks(2, max_tokens=8, n=N) as group:
        outs = group.run(lambda s: torch.full((5, N), float("nan"), dtype=torch.bfloat16))

        def step(space: Workspace) -> bool:
            problem, out = problems[space.rank], outs[space.rank]
            return gemm_ar(problem.x, problem.weight, space, out) is out

        assert all(group.run(step))
        assert torch.equal(outs[0], outs[1])
        assert not outs[0].isnan().any()
        for space in group.workspaces:
            p = problems[space.rank]
            with pytest.raises(ArgumentError, match=r"out: got \(3, 192\), expected \(5, 192\), M rows"):
                gemm_ar(p.x, p.weight, space, torch.empty(3, N, dtype=torch.bfloat16))


def test_the_operator_has_a_fake_and_passes_torchs_checks() -> None:
    (p,) = problems_for(1, 9, N, K, WeightKind.BF16)
    with ranks(1, max_tokens=16, n=N) as group:
        space = group.workspaces[0]
        arguments = (p.x, None, p.weight.data, None, space.order, space.handle, p.weight.handle)
        torch.library.opcheck(torch.ops.dsv4.gemm_ar.default, arguments)
        out = torch.empty(9, N, dtype=torch.bfloat16)
        torch.library.opcheck(torch.ops.dsv4.gemm_ar_out.default, (*arguments, out))
    with ranks(3, max_tokens=16, n=N) as group:
        space = group.workspaces[0]
        with FakeTensorMode() as mode:
            tensors = [mode.from_tensor(t) for t in (p.x, p.weight.data, space.order)]
            x, weight, order = tensors
            fake = torch.ops.dsv4.gemm_ar(x, None, weight, None, order, space.handle, p.weight.handle)
        assert fake.shape == (9, N)


def test_a_missing_rank_ends_both_halves() -> None:
    problems = problems_for(2, 40, N, K, WeightKind.BF16)
    with ranks(2, max_tokens=40, n=N, path="host", deadline=0.2) as group:
        out = torch.zeros(40, N, dtype=torch.bfloat16)
        space = group.workspaces[0]
        with pytest.raises(PeerTimeoutError):
            gemm_ar(problems[0].x, problems[0].weight, space, out)
        assert out.isnan().all()
        with pytest.raises(PeerTimeoutError):
            gemm_ar(problems[0].x, problems[0].weight, space)
