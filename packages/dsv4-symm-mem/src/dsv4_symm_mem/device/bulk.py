# SPDX-License-Identifier: Apache-2.0
"""Bulk copies from shared memory to a peer and back, and how to know that they have arrived.

One thread owns a copy: bulk groups belong to the thread that commits them, so the thread that issues is the
one that waits and raises the flag. To publish through a flag:

    every writer of shared memory:  fence_proxy_async_shared(); barrier
    the publishing thread:          bulk_store(...); bulk_commit(); bulk_wait(0); fence_proxy_async();
                                    store_release(flag, signal)

`bulk_wait_read` is **not** enough before a flag: it says that the source may be overwritten, and nothing
about the destination (PTX ISA, "cp.async.bulk.wait_group"). Code that publishes after `.read` works until the
link is slow. After `bulk_wait` the writes are visible to the waiting thread, and the release then passes that
on; `fence_proxy_async` covers that they were made by the async proxy, which a release does not name.

The other way, `bulk_load` completes on an mbarrier that was told to expect its bytes; whoever waits for that
barrier's phase sees them. Where the source was written by a peer and acquired through a flag, the issuing
thread runs `fence_proxy_async` between the acquire and the copy: the copy reads in the async proxy, which an
acquire does not order.

A plain address and a byte count were preferred to tensor maps: slots are dense bursts whose base is
known only at run time, and a map per peer and bank would have to be encoded by the host.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from dsv4_symm_mem.device.address import global_pointer

_BULK_ALIGNMENT = 16


@dsl_user_op
def bulk_store(address: Int64, source: cute.Pointer, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Start copying `size` bytes from shared memory at `source` to global memory at `address`.

    Both addresses and `size` are multiples of 16. Runs asynchronously in the async proxy: `source` must stay
    as it is until `bulk_wait_read`, and nothing may be concluded about `address` before `bulk_wait`.

    PTX, sm_90a and sm_100a: `cp.async.bulk.global.shared::cta.bulk_group [a], [s], n;` (ISA section
    "cp.async.bulk"). To be issued by one thread.
    """
    nvvm.cp_async_bulk_global_shared_cta(
        global_pointer(address, Uint8, _BULK_ALIGNMENT, loc=loc, ip=ip).to_llvm_ptr(loc=loc, ip=ip),
        source.to_llvm_ptr(loc=loc, ip=ip),
        Int32(size).ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def bulk_commit(*, loc: Any = None, ip: Any = None) -> None:
    """Close the group of all bulk copies that this thread has issued since the last commit.

    PTX, sm_90a and sm_100a: `cp.async.bulk.commit_group;` (ISA section of that name).
    """
    cute.arch.cp_async_bulk_commit_group(loc=loc, ip=ip)


@dsl_user_op
def bulk_wait(pending: int, *, loc: Any = None, ip: Any = None) -> None:
    """Wait until at most `pending` (a constant) of this thread's latest groups are incomplete.

    The copies of the others are then complete, writes included, and visible to this thread.

    PTX, sm_90a and sm_100a: `cp.async.bulk.wait_group n;` (ISA section of that name).
    """
    cute.arch.cp_async_bulk_wait_group(pending, read=False, loc=loc, ip=ip)


@dsl_user_op
def bulk_wait_read(pending: int, *, loc: Any = None, ip: Any = None) -> None:
    """Wait until at most `pending` (a constant) of this thread's latest groups still read shared memory.

    Their source may then be overwritten. Nothing is said about their destination: never before a flag.

    PTX, sm_90a and sm_100a: `cp.async.bulk.wait_group.read n;` (ISA section of that name).
    """
    cute.arch.cp_async_bulk_wait_group(pending, read=True, loc=loc, ip=ip)


@dsl_user_op
def bulk_prefetch(address: Int64, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Start bringing `size` bytes at global `address`, both multiples of 16, into L2; orders nothing.

    PTX, sm_90a and sm_100a: `cp.async.bulk.prefetch.L2.global [a], n;` (ISA section
    "cp.async.bulk.prefetch"). To be issued by one thread.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
        read_only_args=[address, size],
        loc=loc,
        ip=ip,
    )


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
