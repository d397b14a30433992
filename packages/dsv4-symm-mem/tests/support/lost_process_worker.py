# SPDX-License-Identifier: Apache-2.0
"""One rank of test_lost_processes: runs calls until one of its peers is lost, and prints what it saw as JSON.

Arguments: rank, size, rendezvous file, rank to lose, signal by which it is lost ("KILL" or "STOP"), deadline.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from dsv4_symm_mem.arena import SymmetricArena
from dsv4_symm_mem.collectives.reduce_scatter import push_tiles
from dsv4_symm_mem.communicator import ProcessGroupCommunicator
from dsv4_symm_mem.errors import ExchangeError
from dsv4_symm_mem.protocol.host import HostExchange
from dsv4_symm_mem.protocol.layout import ExchangeLayout
from dsv4_symm_mem.protocol.tiles import Tile, TileGrid, TileShape

GOOD_CALLS = 5
SHAPE = TileShape(16, 32)
M, N = 96, 64


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    lost, how, deadline = int(sys.argv[4]), sys.argv[5], float(sys.argv[6])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size)
    group = ProcessGroupCommunicator(dist.new_group())
    layout = ExchangeLayout(size, 64, 64 * 16 * 32 * 2)
    arena = SymmetricArena.create(group, layout.total_bytes)
    block = arena.allocate((layout.total_bytes,), torch.uint8, "block")
    exchange = HostExchange(layout, block, rank, deadline)
    grid = TileGrid(M, N, size, SHAPE)
    order = [tile for d in range(1, size + 1) for tile in grid.tiles((rank + d) % size)]
    out = torch.empty(grid.shard_length, N, dtype=torch.bfloat16)
    for call in range(1, GOOD_CALLS + 3):

        def partial(tile: Tile, call: int = call) -> torch.Tensor:
            if (
                call == GOOD_CALLS + 1
                and rank == lost
                and tile.owner == (rank + 1) % size
                and tile.index == 1
            ):
                os.kill(os.getpid(), signal.SIGKILL if how == "KILL" else signal.SIGSTOP)
            return torch.full((len(tile.rows), len(tile.columns)), float(rank + call))

        started = time.monotonic()
        try:
            push_tiles(exchange, grid, order, partial, out)
        except ExchangeError as error:
            report = {
                "call": call,
                "kind": type(error).__name__,
                "blamed": error.blamed,
                "epoch": error.epoch,
                "seconds": time.monotonic() - started,
                "nan": bool(out.isnan().all()),
                "text": str(error),
            }
            print(json.dumps(report), flush=True)
            arena.close(wait=False)
            os._exit(0)
        assert (out == size * call + size * (size - 1) / 2).all()
    print(json.dumps({"call": call, "kind": "none"}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
