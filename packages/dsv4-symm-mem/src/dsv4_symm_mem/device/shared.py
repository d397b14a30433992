# SPDX-License-Identifier: Apache-2.0
"""Global memory into shared memory by the bulk copy engine, and 16-byte reads of it.

Contract: the incoming half of `device.bulk`. A copy completes on an mbarrier that was told to expect its
bytes; whoever waits for that barrier's phase sees them. Where the source was written by a peer and acquired
through a flag, the issuing thread runs `fence_proxy_async` between the acquire and the copy: the copy reads
in the async proxy, which an acquire does not order.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def bulk_load(
    target: Int32, address: Int64, size: Int32, barrier: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """Start copying `size` bytes from global `address` to shared memory at `target`, completing on `barrier`.

    `target` and `barrier` are shared-memory addresses of this CTA; addresses and `size` are multiples of 16.
    To be issued by one thread, after `mbarrier.arrive.expect_tx` or together with it.

    PTX, sm_90a and sm_100a:
    `cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [a], n, [b];` (ISA section
    "cp.async.bulk"; a CTA's own shared memory is part of its cluster's window).
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, address, size, barrier],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_shared_16(address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    """Read 16 bytes of shared memory; `address` a multiple of 16.

    PTX, sm_90a and sm_100a: `ld.shared.v4.b32 {d0, d1, d2, d3}, [a];` (ISA section "ld").
    """
    words = cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )
    assert isinstance(words, tuple)
    return words
