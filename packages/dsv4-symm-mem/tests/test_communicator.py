# SPDX-License-Identifier: Apache-2.0
"""Agreement: one rank's failure is every rank's error, and values that differ are named."""

from __future__ import annotations

import threading

import pytest
import torch
from dsv4_symm_mem.backends import VirtualGroup, VirtualRank
from dsv4_symm_mem.communicator import agree, communicator_of, require_equal
from dsv4_symm_mem.errors import ArgumentError, Dsv4Error, GroupError, MismatchError


def outcome(step: object) -> Dsv4Error | None:
    try:
        step()  # type: ignore[operator]
    except Dsv4Error as error:
        return error
    return None


def test_all_gather_is_in_rank_order_and_repeatable() -> None:
    group = VirtualGroup(5)
    assert (
        group.run(lambda r: [r.all_gather(r.rank * 10), r.all_gather(-r.rank)])
        == [[[0, 10, 20, 30, 40], [0, -1, -2, -3, -4]]] * 5
    )


def test_one_ranks_failure_is_the_same_error_on_all() -> None:
    def fail_on_two(rank: VirtualRank) -> Dsv4Error | None:
        def action() -> None:
            if rank.rank == 2:
                raise MemoryError("out of memory")

        return outcome(lambda: agree(rank, "allocating", action))

    errors = VirtualGroup(4).run(fail_on_two)
    assert all(type(e) is GroupError for e in errors)
    assert {str(e) for e in errors} == {"allocating failed on 1 rank(s) (rank 2: MemoryError: out of memory)"}
    assert isinstance(errors[2].__cause__, MemoryError)  # type: ignore[union-attr]
    assert errors[0].__cause__ is None  # type: ignore[union-attr]


def test_differing_values_are_named_on_all_ranks() -> None:
    errors = VirtualGroup(3).run(
        lambda r: outcome(lambda: require_equal(r, "creating", {"n": 5, "m": 1 if r.rank else 2}))
    )
    assert all(isinstance(e, MismatchError) for e in errors)
    assert errors[0].failures == {0: "m=2", 1: "m=1", 2: "m=1"}  # type: ignore[union-attr]


def test_a_rank_that_leaves_does_not_strand_the_others() -> None:
    def leave(rank: VirtualRank) -> None:
        if rank.rank == 1:
            raise RuntimeError("rank 1 is gone")
        rank.all_gather(0)

    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        VirtualGroup(3).run(leave)
    assert threading.active_count() < 20


def test_the_group_works_again_after_a_failure() -> None:
    group = VirtualGroup(2)
    with pytest.raises(ZeroDivisionError):
        group.run(lambda r: 1 // r.rank)
    assert group.run(lambda r: r.all_gather(r.rank)) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("group", [None, "WORLD", 3])
def test_a_group_is_never_implied(group: object) -> None:
    with pytest.raises(ArgumentError, match="group: got"):
        communicator_of(group)  # type: ignore[arg-type]


def test_a_device_that_is_not_the_ranks_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"device: got 'meta', expected cpu"):
        communicator_of(VirtualGroup(1).ranks[0], torch.device("meta"))


@pytest.mark.parametrize("size", [0, -1, 129])
def test_group_size_is_checked(size: int) -> None:
    with pytest.raises(ArgumentError, match="size"):
        VirtualGroup(size)
