# SPDX-License-Identifier: Apache-2.0
"""The two ways in which `wo_b` ends, with vLLM's own computation of each and ours.

Contract: for equal inputs, `_fused` and `_unfused` of a class return the same rows of the same sum, apart
from rounding: ours rounds each remote partial once to BF16 and sums in FP32 in rank order; vLLM rounds every
partial, and its collective chooses the order and the precision of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dsv4_gemm_rs import PreparedWeight, Workspace, gemm_ar, gemm_rs

from dsv4_vllm_integration.seams.group import TensorParallelGroup
from dsv4_vllm_integration.seams.projection import FusedProjection
from dsv4_vllm_integration.switches import Feature


class ReduceScatterProjection(FusedProjection):
    """`wo_b` under sequence parallelism: this rank's [ceil(M / P), N], zeros at or past M.

    Args:
        group: As for `FusedProjection`.
        workspace: As for `FusedProjection`.
        min_tokens: As for `FusedProjection`.
        reduce_scatter: vLLM's `sp_reduce_scatter`.
    """

    feature = Feature.GEMM_RS

    def __init__(
        self,
        group: TensorParallelGroup,
        workspace: Workspace,
        min_tokens: int,
        reduce_scatter: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(group, workspace, min_tokens)
        self._reduce_scatter = reduce_scatter

    def _fused(self, x: Any, prepared: PreparedWeight) -> torch.Tensor:
        return gemm_rs(x, prepared, self.workspace)

    def _unfused(self, linear: Any, given: Any) -> torch.Tensor:
        return self._reduce_scatter(linear(given))


class AllReduceProjection(FusedProjection):
    """`wo_b` as a row-parallel layer that reduces its result: [M, N], the same bits on all ranks."""

    feature = Feature.GEMM_AR

    def _fused(self, x: Any, prepared: PreparedWeight) -> torch.Tensor:
        return gemm_ar(x, prepared, self.workspace)

    def _unfused(self, linear: Any, given: Any) -> torch.Tensor:
        result: torch.Tensor = linear(given)
        return result

    def _ending_obstacle(self, linear: Any) -> str:
        expected = {
            "reduce_results": True,
            "tp_size": self.group.size,
            "input_is_parallel": True,
            "return_bias": False,
        }
        for name, value in expected.items():
            found = getattr(linear, name, None)
            if found != value:
                return f"its {name} is {found}, expected {value}"
        return ""
