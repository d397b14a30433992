# SPDX-License-Identifier: Apache-2.0
"""Choosing how fused kernels exchange: asked for, agreed on, never taken by itself, refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dsv4_gemm_rs import WeightKind, Workspace
from dsv4_gemm_rs.dispatch import Exchange, Machine, Path, Problem, decide
from dsv4_gemm_rs.dispatch.costs import choose, estimate_us
from dsv4_gemm_rs.dispatch.decide import strategy_obstacle
from dsv4_gemm_rs.dispatch.plan import plan_launch
from dsv4_gemm_rs.dispatch.rates import SM100_MXFP8
from dsv4_gemm_rs.kernels.cache import kernels_of
from dsv4_gemm_rs.kernels.families import FAMILIES, Operand, Strategy, family_of, members, strategy_of
from dsv4_gemm_rs.workspace import FUSED_ARCHS, MULTICAST_ARCHS, exchange_layout
from dsv4_symm_mem import VirtualGroup
from dsv4_symm_mem.errors import ArgumentError, MismatchError, UnsupportedError

B200 = Machine(100, 4, True, True, True, False, 148, FUSED_ARCHS, multicast_archs=MULTICAST_ARCHS)
PULLING = replace(B200, strategy=Strategy.MULTICAST)
CALL = Problem(2048, 5120, 2048, WeightKind.MXFP8)


def test_multicast_is_never_taken_by_itself() -> None:
    decision = decide(B200, CALL)
    assert (decision.path, decision.exchange) == (Path.FUSED, Exchange.PUSH)
    assert strategy_of(plan_launch(B200, CALL).config) is Strategy.PUSH


def test_multicast_is_taken_where_it_was_asked_for() -> None:
    decision = decide(PULLING, CALL)
    assert (decision.path, decision.exchange) == (Path.FUSED, Exchange.MULTICAST)
    assert decision.capturable
    scatter, reduce = (plan_launch(PULLING, CALL, gathered=gathered) for gathered in (False, True))
    assert strategy_of(scatter.config) is Strategy.MULTICAST
    assert (scatter.gathered, reduce.gathered) == (False, True)
    # Ranks of which one scatters, another reduces and a third pushes tell each other apart.
    assert len({scatter.signature, reduce.signature, plan_launch(B200, CALL).signature}) == 3
    assert decide(PULLING, replace(CALL, m=100)).exchange is Exchange.PUSH_AFTER
    assert decide(replace(PULLING, world_size=1), CALL, Path.FUSED).exchange is Exchange.NONE


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (B200, ""),
        (PULLING, ""),
        (replace(PULLING, world_size=1, multicast=False), ""),
        (replace(PULLING, multicast=False), "symmetric memory has no multicast address on some rank"),
        (replace(PULLING, arch=90), "this version has no kernel for sm_90 that reads through multicast"),
        (replace(PULLING, arch=None), "this version has no kernel for a CPU that reads through multicast"),
    ],
)
def test_what_stands_in_its_way(machine: Machine, why: str) -> None:
    assert strategy_obstacle(machine) == why
    if why and machine.arch is not None:
        with pytest.raises(UnsupportedError, match=why):
            decide(machine, CALL, Path.FUSED)


def test_a_workspace_on_a_cpu_refuses_it() -> None:
    group = VirtualGroup(2)
    with pytest.raises(UnsupportedError, match=r"'multicast' was requested, but .* a CPU"):
        group.run(lambda rank: Workspace.create(rank, max_tokens=8, n=64, exchange=Strategy.MULTICAST))
    with pytest.raises(ArgumentError, match="exchange"):
        group.run(lambda rank: Workspace.create(rank, max_tokens=8, n=64, exchange="nccl"))
    with pytest.raises(MismatchError, match="exchange"):
        group.run(
            lambda rank: Workspace.create(
                rank, max_tokens=8, n=64, exchange="multicast" if rank.rank else "push"
            )
        )


def test_both_families_have_the_same_tiles_and_so_the_same_slots() -> None:
    for arch in FAMILIES:
        pushed, pulled = (family_of(arch, strategy) for strategy in Strategy)
        assert pulled == () or [(c.tile_m, c.tile_n, c.cluster) for c in pulled] == [
            (c.tile_m, c.tile_n, c.cluster) for c in pushed
        ]
        assert all(config.staging_bytes == 0 for config in pulled)
    assert {arch for arch in FAMILIES if family_of(arch, Strategy.MULTICAST)} == {100, 103}
    push, both = (exchange_layout(4, 8192, 5120, strategy) for strategy in Strategy)
    assert push.slot_bytes == both.slot_bytes
    assert both.total_bytes - push.total_bytes > 2 * push.slot_bytes


def test_every_kernel_of_an_exchange_is_made_ready_with_it() -> None:
    names = {
        strategy: {kernel.recipe.name for kernel in kernels_of("sm_100a", strategy)} for strategy in Strategy
    }
    only = names[Strategy.MULTICAST] - names[Strategy.PUSH]
    assert len(only) == len(family_of(100, Strategy.MULTICAST))
    assert len(names[Strategy.PUSH] - names[Strategy.MULTICAST]) == len(FAMILIES[100])
    assert not [
        kernel for kernel in kernels_of("sm_90a", Strategy.MULTICAST) if "gemm_rs" in kernel.recipe.name
    ]


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("m", [128, 1024, 8192])
def test_a_partial_that_crosses_the_link_whole_is_never_modelled_faster(m: int, world_size: int) -> None:
    shape = (m, 5120, 8192 // world_size, world_size, 148)
    times = []
    for strategy in Strategy:
        family = members(100, Operand.MXFP8, strategy)
        times.append(estimate_us(SM100_MXFP8, choose(SM100_MXFP8, family, *shape), *shape))
    push, pulled = times
    assert pulled > push
    assert pulled > 2 * m * 5120 / SM100_MXFP8.multicast_bytes_per_us
