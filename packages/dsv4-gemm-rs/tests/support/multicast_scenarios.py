# SPDX-License-Identifier: Apache-2.0
"""Scenarios for mutation testing: the SM100 kernel whose owners read sums through multicast, in small.

See `emulated_scenarios`. The kernel is launched by itself, reduce-scatters and all-reduces side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import forked_workers  # noqa: F401
import pytest
import torch
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig, Operand
from dsv4_symm_mem.errors import ExchangeError, PeerTimeoutError
from dsv4_symm_mem.protocol.layout import Strategy
from gemm_rs_support import assert_right
from sm100_support import Group, case

ARCH = "sm_100a"
# Few stages, so that a ring of them comes round soon.
TILE = KernelConfig(Operand.MXFP8, 64, max_stages=3, strategy=Strategy.MULTICAST)
N = 64
K = 128


_case = cache(case)


def _calls(system: Any, calls: Sequence[tuple[int, bool]], n: int, k: int, *, early: bool = False) -> None:
    """Calls of the given M, queued at once on banks that are poisoned before; True makes an all-reduce.

    `early` ones may begin while others still run.
    """
    size = len(system.devices)
    group = Group(system, TILE, max(m for m, _ in calls), n)
    group.poison()
    results = []
    for m, gathered in calls:
        problems, operands = _case(TILE, size, m, n, k, m)
        outs = [
            group.launch(rank, mine, gathered=gathered, early=early) for rank, mine in enumerate(operands)
        ]
        results.append((problems, m, gathered, outs))
    group.finish()
    for problems, m, gathered, outs in results:
        if gathered:
            assert all(torch.equal(out, outs[0]) for out in outs)
            length = -(-m // size)
            whole = torch.zeros(length * size, n, dtype=torch.bfloat16)
            whole[:m] = outs[0]
            outs = list(whole.split(length))
        assert_right(outs, problems, multicast=True)
    group.close()


def multicast_banks(system: Any) -> None:
    """Two ranks, two CTAs each: banks are used again by either operation, behind calls of a single token."""
    _calls(system, [(131, False), (1, False), (131, True), (1, True), (131, False)], N, K, early=True)


multicast_banks.ranks, multicast_banks.processors = 2, 2  # type: ignore[attr-defined]
multicast_banks.arch = ARCH  # type: ignore[attr-defined]


def multicast_rings(system: Any) -> None:
    """Two ranks, one CTA each: stages, accumulators and publications come round."""
    _calls(system, [(131, True)], 5 * N, K)


multicast_rings.ranks, multicast_rings.processors = 2, 1  # type: ignore[attr-defined]
multicast_rings.arch = ARCH  # type: ignore[attr-defined]


def _lost(system: Any, m: int, n: int, alive: Sequence[int], blamed: int) -> None:
    """Ranks that are not `alive` never come: the deadline ends an all-reduce on the others, and the next."""
    size = len(system.devices)
    _, operands = _case(TILE, size, m, n, K, m)
    group = Group(system, TILE, m, n, deadline=0.001)
    ended = [[group.launch(rank, operands[rank], gathered=True) for rank in alive] for _ in range(2)]
    system.run()
    kinds = set()
    for rank, *outs in zip(alive, *ended, strict=True):
        with pytest.raises(ExchangeError) as caught:
            group.exchanges[rank].check()
        assert caught.value.blamed == blamed
        kinds.add(type(caught.value))
        assert all(out.isnan().all() for out in outs)
    assert PeerTimeoutError in kinds


def multicast_lost(system: Any) -> None:
    """Two ranks with two CTAs each wait for tiles and sums of two others."""
    _lost(system, 4, N, [0, 1], 3)


multicast_lost.ranks, multicast_lost.processors, multicast_lost.arch = 4, 2, ARCH  # type: ignore[attr-defined]


def multicast_lost_token(system: Any) -> None:
    """Two ranks without rows wait for three others: for their tokens, and in both of their CTAs for sums."""
    _lost(system, 3, N, [3, 4], 2)


multicast_lost_token.ranks, multicast_lost_token.processors = 5, 2  # type: ignore[attr-defined]
multicast_lost_token.arch = ARCH  # type: ignore[attr-defined]


def multicast_lost_alone(system: Any) -> None:
    """The same for one rank, into whose waits no other's abort comes."""
    _lost(system, 3, N, [3], 2)


multicast_lost_alone.ranks, multicast_lost_alone.processors = 4, 2  # type: ignore[attr-defined]
multicast_lost_alone.arch = ARCH  # type: ignore[attr-defined]
