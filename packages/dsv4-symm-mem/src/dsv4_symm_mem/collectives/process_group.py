# SPDX-License-Identifier: Apache-2.0
"""The collectives through a process group: for groups without symmetric memory.

Contract: the same sum, to the bit, as `collectives.reduce_scatter`: BF16 on the wire, FP32 addition in rank
order, own partial unrounded. A library reduce-scatter was rejected because it adds in BF16 in an order of
its own; an all-to-all moves the same S·(P-1)/P bytes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dsv4_symm_mem.collectives.operands import check_gathered, check_operands
from dsv4_symm_mem.protocol.layout import shard_rows


def reduce_scatter_all_to_all(group: dist.ProcessGroup, partial: torch.Tensor, out: torch.Tensor) -> None:
    """Reduce-scatter `partial` over `group`; collective.

    Args:
        group: The process group, one rank per shard.
        partial: FP32 or BF16 [M, N], M and N equal on all ranks.
        out: BF16 [ceil(M / P), N], filled completely; rows at or past M are zero.

    Raises:
        ArgumentError: Wrong dtype or shape; before anything is sent.
    """
    check_operands(partial, out, dist.get_world_size(group))
    m, n = partial.shape
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    own = shard_rows(m, world_size, rank)
    sent = [len(shard_rows(m, world_size, peer)) for peer in range(world_size)]
    wire = partial.to(torch.bfloat16)
    received = torch.empty(world_size * len(own), n, dtype=torch.bfloat16, device=partial.device)
    dist.all_to_all_single(
        received, wire, output_split_sizes=[len(own)] * world_size, input_split_sizes=sent, group=group
    )
    parts = received.view(world_size, len(own), n)

    def term(source: int) -> torch.Tensor:
        return partial[own.start : own.stop].float() if source == rank else parts[source].float()

    total = term(0)
    for source in range(1, world_size):
        total = total + term(source)
    out[: len(own)] = total
    out[len(own) :].zero_()


def all_gather_shards(group: dist.ProcessGroup, shard: torch.Tensor, out: torch.Tensor) -> None:
    """Gather every rank's shard over `group`; collective.

    Args:
        group: The process group, one rank per shard.
        shard: BF16 [ceil(M / P), N], M and N equal on all ranks.
        out: BF16 [M, N], filled completely.

    Raises:
        ArgumentError: Wrong dtype or shape; before anything is sent.
    """
    world_size = dist.get_world_size(group)
    check_gathered(shard, out, world_size)
    m, n = out.shape
    # Equal shares: the last shards reach past M.
    whole = torch.empty(world_size * len(shard), n, dtype=out.dtype, device=out.device)
    dist.all_gather_into_tensor(whole, shard.contiguous(), group=group)
    out.copy_(whole[:m])
