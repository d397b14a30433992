# SPDX-License-Identifier: Apache-2.0
"""Batch invariance without a GPU: refused where no kernel of ours multiplies, and agreed by the ranks."""

from __future__ import annotations

import pytest
from dsv4_gemm_rs import Workspace
from dsv4_symm_mem import VirtualGroup
from dsv4_symm_mem.errors import MismatchError, UnsupportedError


def test_a_cpu_group_is_refused_on_every_rank() -> None:
    group = VirtualGroup(2, "cpu")
    with pytest.raises(UnsupportedError, match="batch invariance was requested, but this version has no"):
        group.run(lambda rank: Workspace.create(rank, max_tokens=8, n=64, batch_invariant=True))


def test_ranks_must_ask_alike() -> None:
    group = VirtualGroup(2, "cpu")
    with pytest.raises(MismatchError, match="batch_invariant=True"):
        group.run(lambda rank: Workspace.create(rank, max_tokens=8, n=64, batch_invariant=rank.rank == 0))
