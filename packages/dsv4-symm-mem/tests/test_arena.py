# SPDX-License-Identifier: Apache-2.0
"""The arena on virtual ranks: alignment, peers, agreement on failure, closing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dsv4_symm_mem.arena import SymmetricArena
from dsv4_symm_mem.backends import VirtualBackend, VirtualGroup, VirtualRank
from dsv4_symm_mem.errors import ArgumentError, ClosedError, GroupError, MismatchError


@pytest.mark.parametrize("size", [1, 2, 5])
def test_pieces_lie_alike_and_peers_see_each_other(size: int) -> None:
    group = VirtualGroup(size)

    def step(rank: VirtualRank) -> list[int]:
        arena = SymmetricArena.create(rank, 4096)
        flags = arena.allocate((3,), torch.int64, "flags")
        data = arena.allocate((5, 7), torch.bfloat16, "data")
        assert (flags.offset, data.offset) == (0, 128)
        assert all(pointer % 128 == 0 for piece in (flags, data) for pointer in piece.pointers)
        assert data.local.data_ptr() == data.pointers[rank.rank]
        assert not data.local.any()
        assert arena.free_bytes == 4096 - 256
        arena.verify()
        rank.all_gather(None)
        for peer in range(size):
            data.peers[peer][0, rank.rank] = rank.rank + 1
        rank.all_gather(None)
        seen = data.local[0, :size].int().tolist()
        arena.close()
        return seen

    assert group.run(step) == [list(range(1, size + 1))] * size


def test_absent_multicast_has_a_reason() -> None:
    arena = SymmetricArena.create(VirtualGroup(1).ranks[0], 128)
    assert arena.multicast_reason == "virtual ranks share one device, and multicast needs several"
    assert arena.allocate((1,), torch.int64, "x").multicast_pointer == 0


class AllocationFails(VirtualBackend):
    def allocate(self, nbytes: int) -> None:
        if self._communicator.rank == 1:
            raise MemoryError(f"no room for {nbytes} bytes")
        super().allocate(nbytes)


class MappingFails(VirtualBackend):
    def map(self) -> Any:
        from dsv4_symm_mem.communicator import agree

        def open_peers() -> None:
            if self._communicator.rank == 0:
                raise OSError("cannot map")

        agree(self._communicator, "mapping", open_peers)
        return super().map()


@pytest.mark.parametrize(("broken", "text"), [(AllocationFails, "no room"), (MappingFails, "cannot map")])
def test_a_failure_on_one_rank_is_everyones(
    broken: type[VirtualBackend], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4_symm_mem.arena.BACKENDS", {"virtual": broken})

    def step(rank: VirtualRank) -> str:
        with pytest.raises(GroupError, match=text) as caught:
            SymmetricArena.create(rank, 256)
        return str(caught.value)

    assert len(set(VirtualGroup(3).run(step))) == 1


def test_sizes_that_differ_are_refused_on_every_rank() -> None:
    def step(rank: VirtualRank) -> None:
        with pytest.raises(MismatchError, match="nbytes=256"):
            SymmetricArena.create(rank, 128 + 128 * rank.rank)

    VirtualGroup(2).run(step)


def test_allocations_that_differ_are_found_by_verify() -> None:
    def step(rank: VirtualRank) -> None:
        arena = SymmetricArena.create(rank, 1024)
        arena.allocate((1 + rank.rank,), torch.int64, "flags")
        with pytest.raises(MismatchError, match="flags"):
            arena.verify()

    VirtualGroup(2).run(step)


def test_bad_arguments_name_themselves() -> None:
    rank = VirtualGroup(1).ranks[0]
    with pytest.raises(ArgumentError, match="nbytes: got 0, expected at least 1"):
        SymmetricArena.create(rank, 0)
    with pytest.raises(ArgumentError, match="backend: got 'mpi'"):
        SymmetricArena.create(rank, 128, backend="mpi")
    arena = SymmetricArena.create(rank, 128)
    with pytest.raises(ArgumentError, match=r"shape: got \(65,\), expected .* at most 128 bytes"):
        arena.allocate((65,), torch.int16, "too large")
    with pytest.raises(ArgumentError, match="shape"):
        arena.allocate((-1,), torch.int16, "negative")


@pytest.mark.parametrize("backend", ["torch", "shared"])
def test_a_back_end_that_does_not_suit_the_group_says_so(backend: str) -> None:
    def step(rank: VirtualRank) -> None:
        if backend == "shared":
            arena = SymmetricArena.create(rank, 128, backend=backend)
            arena.close()
        else:
            with pytest.raises(GroupError, match=r"needs a torch\.distributed process group"):
                SymmetricArena.create(rank, 128, backend=backend)

    VirtualGroup(2).run(step)


def test_close_is_idempotent_and_final() -> None:
    def step(rank: VirtualRank) -> None:
        arena = SymmetricArena.create(rank, 128)
        arena.close()
        arena.close()
        assert arena.closed
        for use in (
            lambda: arena.allocate((1,), torch.int8, "x"),
            arena.verify,
            lambda: arena.multicast_reason,
        ):
            with pytest.raises(ClosedError):
                use()

    VirtualGroup(2).run(step)
