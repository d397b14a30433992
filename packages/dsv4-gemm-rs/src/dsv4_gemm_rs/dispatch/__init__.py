# SPDX-License-Identifier: Apache-2.0
"""Which way a call takes and why: pure decisions over facts gathered elsewhere."""

from __future__ import annotations

from dsv4_gemm_rs.dispatch.decide import Decision, Exchange, Gemm, Machine, Path, Problem, Rejection, decide

__all__ = ["Decision", "Exchange", "Gemm", "Machine", "Path", "Problem", "Rejection", "decide"]
