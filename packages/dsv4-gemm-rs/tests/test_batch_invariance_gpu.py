# SPDX-License-Identifier: Apache-2.0
"""On a GPU: a row's bits depend on nothing but the row, where that was asked for."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from dsv4_gemm_rs import WeightKind
from dsv4_gemm_rs.dispatch import Gemm, Problem
from dsv4_gemm_rs.kernels.families import Operand, members
from gemm_rs_gpu_support import problems_for, ranks
from gemm_rs_support import assert_right

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

M, N, K = 1025, 512, 2048
PLACES = [1024, 7, 640, 99, 0, 513, 512, 511]


@pytest.mark.parametrize("size", [1, 4])
def test_bits_are_the_rows(size: int) -> None:
    problems = problems_for(size, M, N, K, WeightKind.MXFP8, made_on="cuda")
    few = [replace(p, x=p.x[PLACES].contiguous(), x_exact=p.x_exact[PLACES]) for p in problems]
    with ranks(size, M, N, batch_invariant=True) as group:
        machine = group.workspaces[0].machine
        decision = group.workspaces[0].decide(Problem(M, N, K, WeightKind.MXFP8))
        assert decision.gemm in (Gemm.FUSED_SM90, Gemm.FUSED_SM100)
        many = group.call(problems)
        assert_right(many, problems)
        wanted = torch.cat(many)[:M].view(torch.int16)[PLACES]
        operand = Operand.BF16 if machine.arch == 90 else Operand.MXFP8
        for config in members(machine.arch, operand):
            with mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=config):
                for space in group.workspaces:
                    space._plans.clear()
                    space._product_plans.clear()
                outs = group.call(few)
            assert torch.equal(torch.cat(outs)[: len(PLACES)].view(torch.int16), wanted), config
