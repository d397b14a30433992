# SPDX-License-Identifier: Apache-2.0
"""Two stop-watches: the round trip of a flag, and what it costs to publish what has been stored.

In-kernel times come from `%clock64`, which counts one multiprocessor's cycles and is read in a few of them.
`%globaltimer` advances in steps of up to a microsecond, so it serves to convert: each stop-watch also
returns both clocks' advance over its whole run. Times are kept in shared memory until the end: a time
stored to global memory would be one more write for the next release to wait for.

Rejected: polls that read `%globaltimer` for their deadline. The read would be part of every round trip.
"""

# The DSL's decorators have no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from dsv4_symm_mem.device import (
    bulk_commit,
    bulk_store,
    bulk_wait,
    fence_acq_rel_sys,
    fence_proxy_async,
    globaltimer,
    load_acquire,
    store_16,
    store_relaxed,
    store_release,
)

from dsv4_gemm_rs.bench.link.cases import UNIT_WORDS
from dsv4_gemm_rs.bench.link.kernels.transfers import STORE_THREADS, store_unit, unit_words_from

MAX_ROUNDS = 4096
"""Round trips of one launch of the ping-pong, at most."""
MAX_REPETITIONS = 256
"""Repetitions of one launch of `publication`, at most."""
PUBLICATIONS = (
    "nothing",
    "st.relaxed.sys",
    "st.release.sys",
    "fence.acq_rel.sys",
    "bulk copy, wait_group 0",
    "then fence.proxy.async, st.release.sys",
)
"""What `publication` times, in the order of its results; the first is the cost of reading the clock twice."""


@dsl_user_op
def _clock(*, loc: Any = None, ip: Any = None) -> Int64:
    """Cycles of this multiprocessor, read where it stands: the clobber keeps memory accesses on their side.

    The DSL's own `clock64` has none, and a compiler may move stores across it. PTX: `mov.u64 d, %clock64;`
    """
    return Int64(
        llvm.inline_asm(
            T.i64(), [], "mov.u64 $0, %clock64;", "=l,~{memory}", has_side_effects=True, loc=loc, ip=ip
        )
    )


@cute.jit
def _await(flag: Int64, want: Int64, limit: Int64) -> Boolean:
    """Poll until the word at `flag` is at least `want`; false if the cycle `limit` came first."""
    seen = load_acquire(flag)
    while seen < want and _clock() < limit:
        seen = load_acquire(flag)
    return seen >= want


@cute.kernel
def ping_pong_kernel(
    own: Int64,
    peer: Int64,
    failed: Int64,
    times: Int64,
    leads: Int32,
    rounds: Int32,
    base: Int64,
    limit: Int64,
) -> None:
    """One thread on each side."""
    taken = cute.arch.alloc_smem(Int64, MAX_ROUNDS, alignment=8)
    began = globaltimer()
    start = _clock()
    before = start
    limit += start
    done = Int32(0)
    arrived = Boolean(True)
    while done < rounds and arrived:
        turn = base + Int64(done) + 1
        if leads != 0:
            store_release(peer, turn)
        arrived = _await(own, turn, limit)
        if leads == 0 and arrived:
            store_release(peer, turn)
        now = _clock()
        cute.arch.store(taken + done, now - before, ss="cta")
        before = now
        done += 1
    if not arrived:
        store_relaxed(failed, Int64(1))
    store_relaxed(times, before - start)
    store_relaxed(times + 8, globaltimer() - began)
    for i in cutlass.range(0, done, 1, unroll=1):
        store_relaxed(times + 16 + Int64(i) * 8, cute.arch.load(taken + i, Int64, ss="cta"))


@cute.jit
def ping_pong(
    own: Int64,
    peer: Int64,
    failed: Int64,
    times: Int64,
    leads: Int32,
    rounds: Int32,
    base: Int64,
    limit: Int64,
    stream: Any,
) -> None:
    """Pass a flag to and fro with release stores and acquire polls, each side in its own memory.

    Args:
        own: Address of the int64 that this side polls.
        peer: Address of the int64 that the other side polls.
        failed: Address of an int64 that becomes 1 if the other side does not answer.
        times: Address of int64[2 + rounds]: cycles and nanoseconds of the whole, then cycles of each round.
        leads: 1 on the side that serves, 0 on the other.
        rounds: Round trips, at most 4096; 0 makes the launch do nothing.
        base: Value of both flags before; they are `base + rounds` afterwards.
        limit: Cycles after which the launch gives up.
        stream: CUDA stream.
    """
    ping_pong_kernel(own, peer, failed, times, leads, rounds, base, limit).launch(
        grid=(1, 1, 1), block=(1, 1, 1), stream=stream
    )


@cute.kernel
def publication_kernel(
    target: Int64, flag: Int64, times: Int64, stores: Int32, repetitions: Int32, seed: Int32
) -> None:
    """One CTA; thread 0 holds the stop-watch, after a barrier as in a publication."""
    thread, _, _ = cute.arch.thread_idx()
    stage = cute.arch.alloc_smem(Uint32, UNIT_WORDS, alignment=128)
    taken = cute.arch.alloc_smem(Int64, len(PUBLICATIONS) * MAX_REPETITIONS, alignment=8)
    store_unit(stage, thread, STORE_THREADS, seed)
    began = globaltimer()
    start = _clock()
    for repetition in cutlass.range(0, repetitions, 1, unroll=1):
        for operation in cutlass.range_constexpr(4):
            for i in cutlass.range(thread, stores, STORE_THREADS, unroll=1):
                store_16(target + Int64(i) * 16, unit_words_from(i * 4, seed))
            cute.arch.sync_threads()
            if thread == 0:
                before = _clock()
                if cutlass.const_expr(operation == 1):
                    store_relaxed(flag, Int64(repetition))
                elif cutlass.const_expr(operation == 2):
                    store_release(flag, Int64(repetition))
                elif cutlass.const_expr(operation == 3):
                    fence_acq_rel_sys()
                cute.arch.store(taken + operation * MAX_REPETITIONS + repetition, _clock() - before, ss="cta")
                # The next operation starts with nothing in flight.
                fence_acq_rel_sys()
            cute.arch.sync_threads()
        if thread == 0:
            before = _clock()
            if stores > 0:
                bulk_store(target, stage, stores * 16)
            bulk_commit()
            bulk_wait(0)
            landed = _clock()
            fence_proxy_async()
            store_release(flag, Int64(repetition))
            cute.arch.store(taken + 4 * MAX_REPETITIONS + repetition, landed - before, ss="cta")
            cute.arch.store(taken + 5 * MAX_REPETITIONS + repetition, _clock() - landed, ss="cta")
            fence_acq_rel_sys()
        cute.arch.sync_threads()
    if thread == 0:
        store_relaxed(times, _clock() - start)
        store_relaxed(times + 8, globaltimer() - began)
        for operation in cutlass.range_constexpr(len(PUBLICATIONS)):
            for i in cutlass.range(0, repetitions, 1, unroll=1):
                store_relaxed(
                    times + 16 + (Int64(operation) * Int64(repetitions) + Int64(i)) * 8,
                    cute.arch.load(taken + operation * MAX_REPETITIONS + i, Int64, ss="cta"),
                )


@cute.jit
def publication(
    target: Int64, flag: Int64, times: Int64, stores: Int32, repetitions: Int32, seed: Int32, stream: Any
) -> None:
    """Time what follows `stores` remote 16-byte stores, or a bulk copy of as many bytes, up to its flag.

    Args:
        target: Address of a peer's memory, one unit.
        flag: Address of an int64 of a peer.
        times: Address of int64[2 + 6 * repetitions]: cycles and nanoseconds of the whole, then the cycles of
            each repetition of each of `PUBLICATIONS`.
        stores: 0 to 2048, shared by the 256 threads of the CTA.
        repetitions: At most 256; 0 makes the launch touch nothing but `times`.
        seed: Of the data.
        stream: CUDA stream.
    """
    publication_kernel(target, flag, times, stores, repetitions, seed).launch(
        grid=(1, 1, 1), block=(STORE_THREADS, 1, 1), stream=stream
    )
