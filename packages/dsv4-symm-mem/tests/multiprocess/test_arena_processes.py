# SPDX-License-Identifier: Apache-2.0
"""The arena and the reduce-scatter between real processes."""

from __future__ import annotations

import random
import time

import pytest
import torch
from dsv4_symm_mem.arena import SymmetricArena
from dsv4_symm_mem.collectives.process_group import reduce_scatter_all_to_all
from dsv4_symm_mem.collectives.reduce_scatter import reduce_scatter
from dsv4_symm_mem.communicator import ProcessGroupCommunicator
from dsv4_symm_mem.errors import ArgumentError, GroupError, MismatchError
from dsv4_symm_mem.probe import probe
from dsv4_symm_mem.protocol.host import HostExchange
from dsv4_symm_mem.protocol.layout import ExchangeLayout, shard_length
from dsv4_symm_mem.protocol.tiles import TileShape

pytestmark = [pytest.mark.multi_gpu, pytest.mark.multiprocess_cpu]

TILE = TileShape(16, 32)
N = 96


def test_peers_see_each_others_memory(group: ProcessGroupCommunicator) -> None:
    arena = SymmetricArena.create(group, 4096)
    assert arena.backend == ("torch" if group.device.type == "cuda" else "shared")
    piece = arena.allocate((group.size, 4), torch.int64, "marks")
    arena.verify()
    for peer in range(group.size):
        piece.peers[peer][group.rank].fill_(100 * group.rank + peer)
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    group.all_gather(None)
    assert piece.local[:, 0].tolist() == [100 * source + group.rank for source in range(group.size)]
    assert arena.multicast_reason or piece.multicast_pointer
    arena.close()


def test_a_failed_allocation_on_one_rank_is_everyones(
    group: ProcessGroupCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsv4_symm_mem.backends import BACKENDS, default_backend

    kind = type(BACKENDS[default_backend(group)](group))
    if group.rank == group.size - 1:

        def fail(self: object, nbytes: int) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(kind, "allocate", fail)
    with pytest.raises(GroupError, match="MemoryError: no room") as caught:
        SymmetricArena.create(group, 4096)
    assert list(caught.value.failures) == [group.size - 1]


def test_different_sizes_are_refused(group: ProcessGroupCommunicator) -> None:
    with pytest.raises(MismatchError, match="nbytes"):
        SymmetricArena.create(group, 4096 + 128 * group.rank)


def test_the_probe_describes_every_rank(group: ProcessGroupCommunicator) -> None:
    described = probe(group)
    assert len(described.devices) == group.size
    assert described.links[group.rank][group.rank] == "self"


def test_sums_are_exact_and_the_same_over_slots_and_over_the_process_group(
    group: ProcessGroupCommunicator,
) -> None:
    layout = ExchangeLayout(group.size, 256, 256 * 16 * 32 * 2)
    arena = SymmetricArena.create(group, layout.total_bytes)
    block = arena.allocate((layout.total_bytes,), torch.uint8, "block")
    exchange = HostExchange(layout, block, group.rank, deadline=30.0)
    delays = random.Random(group.rank)
    for call in range(40):
        m = (0, 1, group.size - 1, group.size, 33, 127, 128, 129)[call % 8]
        partials = [
            torch.randn(m, N, generator=torch.Generator().manual_seed(97 * call + r))
            for r in range(group.size)
        ]
        mine = partials[group.rank].to(group.device)
        out = torch.full(
            (shard_length(m, group.size), N), float("nan"), dtype=torch.bfloat16, device=group.device
        )
        time.sleep(delays.random() * 2e-3)
        reduce_scatter(exchange, mine, out, TILE)
        start, stop = (min(i * len(out), m) for i in (group.rank, group.rank + 1))
        total = torch.zeros(stop - start, N)
        for source, partial in enumerate(partials):
            term = partial[start:stop]
            total = total + (term if source == group.rank else term.bfloat16().float())
        expected = torch.zeros(len(out), N, dtype=torch.bfloat16)
        expected[: stop - start] = total
        assert torch.equal(out.cpu(), expected)
        other = torch.full_like(out, float("nan"))
        reduce_scatter_all_to_all(group.group, mine, other)
        assert torch.equal(other, out)
    arena.close()


def test_operands_of_the_process_group_path_are_checked(group: ProcessGroupCommunicator) -> None:
    partial = torch.zeros(8, N, device=group.device)
    with pytest.raises(ArgumentError, match="out"):
        reduce_scatter_all_to_all(group.group, partial, torch.zeros(1, 1, device=group.device))
