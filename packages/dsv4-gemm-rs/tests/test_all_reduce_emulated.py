# SPDX-License-Identifier: Apache-2.0
"""`gemm_ar` by the compiled kernels, in the PTX emulator: what `gemm_rs` gives the owners, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from dsv4_gemm_rs import WeightKind, Workspace, gemm_ar, gemm_rs
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig as Sm100Config
from dsv4_gemm_rs.kernels.sm100.config import Operand
from dsv4_symm_mem import VirtualGroup
from gemm_rs_support import assert_right, problems_for

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

N = 192


def test_sm100_pushes_and_gathers(emulator: Callable[..., Any]) -> None:
    """Two calls of the exchange; test_multicast_emulated.py has those that take one."""
    size, m = 4, 129
    emulation = emulator(size, arch="sm_100a", processors=2)
    group = VirtualGroup(size, emulation=emulation)
    tile = Sm100Config(Operand.MXFP8, 64)
    with mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=tile):
        spaces = group.run(lambda rank: Workspace.create(rank, max_tokens=m, n=64, path="fused"))
        problems = problems_for(size, m, 64, 128, WeightKind.MXFP8)
        pairs = list(zip(problems, spaces, strict=True))
        outs = [gemm_ar(p.x, p.weight, space) for p, space in pairs]
        shards = [gemm_rs(p.x, p.weight, space) for p, space in pairs]
        emulation.run()
        assert_right(shards, problems)
        assert all(torch.equal(out, torch.cat(shards)[:m]) for out in outs)
        group.run(lambda rank: spaces[rank.rank].close())


@pytest.mark.parametrize("path", ["fused", "unfused"])
@pytest.mark.parametrize(("size", "m"), [(2, 130), (4, 129), (3, 2)])
def test_the_kernels_agree(size: int, m: int, path: str, emulator: Callable[..., Any]) -> None:
    """Reduce-scatters and all-reduces of changing M, queued at once, on one workspace."""
    emulation = emulator(size)
    group = VirtualGroup(size, emulation=emulation)
    with mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=KernelConfig(64, 128)):
        spaces = group.run(lambda rank: Workspace.create(rank, max_tokens=m, n=N, path=path))
        cases = []
        for tokens in (m, 1, m):
            problems = problems_for(size, tokens, N, 64, WeightKind.BF16, seed=tokens)
            pairs = list(zip(problems, spaces, strict=True))
            shards = [gemm_rs(p.x, p.weight, space) for p, space in pairs]
            cases.append((problems, shards, [gemm_ar(p.x, p.weight, space) for p, space in pairs]))
        emulation.run()
        for problems, shards, outs in cases:
            assert_right(shards, problems)
            whole = torch.cat(shards)[: len(outs[0])]
            assert all(torch.equal(out, whole) for out in outs)
        group.run(lambda rank: spaces[rank.rank].close())
