# SPDX-License-Identifier: Apache-2.0
"""The kernels of the link benchmark by name, with what it takes to compile them."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from dsv4_gemm_rs.bench.link.kernels.stopwatches import ping_pong, publication
from dsv4_gemm_rs.bench.link.kernels.transfers import (
    meet,
    pull_bulk,
    pull_loads,
    push_bulk,
    push_stores,
    read_sums,
)


def example_arguments(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The host function of kernel `name` and arguments to compile it with."""
    address, number, stream = Int64(0), Int32(1), make_fake_stream()
    examples: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "meet": (meet, (*[address] * 3, number, number, *[address] * 3, stream)),
        "push-bulk": (push_bulk, (address, *[number] * 4, stream)),
        "push-stores": (push_stores, (False, address, *[number] * 3, stream)),
        "push-blocks": (push_stores, (True, address, *[number] * 3, stream)),
        "pull-loads": (pull_loads, (address, address, number, number, stream)),
        "read-sums": (read_sums, (address, address, number, number, stream)),
        "pull-bulk": (pull_bulk, (address, address, *[number] * 3, stream)),
        "ping-pong": (ping_pong, (*[address] * 4, number, number, address, address, stream)),
        "publication": (publication, (*[address] * 3, *[number] * 3, stream)),
    }
    return examples[name]
