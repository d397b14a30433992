# SPDX-License-Identifier: Apache-2.0
"""Ways to move a message, or to read its sum over ranks, and a meeting of ranks.

Contract: kernels take integers only, sizes and grids at run time, so that few are compiled. A push ends when
its data have arrived, by what an exchange would wait for before its flag: `bulk_wait`, or a barrier and a
fence at system scope. A pull stores what it got into own memory, as otherwise nobody could check it; a GPU's
memory is many times faster than its link, so the stores do not set the pace.

Bytes in flight are alike where the hardware lets us choose: 64 KiB per CTA for pushes by bulk copy (counted
until shared memory has been read; what is on its way in the network is not ours to bound) and for loads,
and a ring of 128 KiB for bulk loads, of which one piece is being stored or refilled. One CTA per
multiprocessor: a grid no larger than the device is spread over it.

Rejected: one kernel per piece size, as waiting by groups of a whole unit makes the size a run-time argument
and keeps the bytes in flight equal.
"""

# The DSL's decorators have no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Constexpr, Int32, Int64, Uint32
from dsv4_symm_mem.device import (
    bulk_commit,
    bulk_load,
    bulk_store,
    bulk_wait,
    bulk_wait_read,
    fence_acq_rel_sys,
    fence_proxy_alias,
    fence_proxy_async_shared,
    global_pointer,
    globaltimer,
    load_16,
    load_acquire,
    load_relaxed,
    multimem_ld_reduce_bf16,
    nanosleep,
    store_16,
    store_relaxed,
    store_release,
)
from dsv4_symm_mem.protocol.layout import LINE_BYTES

from dsv4_gemm_rs.bench.link.cases import STEP, UNIT_BYTES, UNIT_WORDS, block_offset

STORE_THREADS = 256
"""Threads of a storing CTA: the math warps of a fused kernel with tiles of 128 rows."""
LOAD_THREADS = 512
LOADS_IN_FLIGHT = 8
"""16-byte loads that a thread has in flight: 64 KiB per CTA."""
RING_BYTES = 131072
MAX_STAGES = RING_BYTES // 4096
MEET_THREADS = 128
HOLD_SLEEP_NS = 256


def unit_words_from(index: Int32, seed: Int32) -> tuple[Uint32, ...]:
    """Four words of a unit from word `index` on."""
    first = Uint32(index) * Uint32(STEP) + Uint32(seed)
    return tuple(first + Uint32(i * STEP % 2**32) for i in range(4))


@cute.jit
def store_unit(stage: cute.Pointer, thread: Int32, threads: Constexpr[int], seed: Int32) -> None:
    """Write one unit into shared memory and hand it to the async proxy; all threads meet."""
    for i in cutlass.range(thread, UNIT_WORDS // 4, threads, unroll=1):
        words = unit_words_from(i * 4, seed)
        for j in cutlass.range_constexpr(4):
            cute.arch.store(stage + i * 4 + j, words[j], ss="cta")
    fence_proxy_async_shared()
    cute.arch.sync_threads()


@cute.kernel
def meet_kernel(
    flags: Int64,
    bases: Int64,
    failed: Int64,
    rank: Int32,
    world_size: Int32,
    epoch: Int64,
    timeout_ns: Int64,
    hold_ns: Int64,
) -> None:
    """One thread per rank: tell it that this rank is here, wait until it has said so too."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < world_size:
        held = globaltimer() + hold_ns
        while globaltimer() < held:
            nanosleep(Int32(HOLD_SLEEP_NS))
        deadline = globaltimer() + timeout_ns
        if load_relaxed(failed) != 0:
            # Who has waited in vain once does not do so at each later meeting.
            deadline = Int64(0)
        peer = cute.arch.load(global_pointer(bases + Int64(thread) * 8, Int64, 8), Int64)
        store_release(peer + Int64(rank) * LINE_BYTES, epoch)
        flag = flags + Int64(thread) * LINE_BYTES
        # A fast peer may be at its next meeting already.
        seen = load_acquire(flag)
        while seen < epoch and globaltimer() < deadline:
            seen = load_acquire(flag)
        if seen < epoch:
            store_relaxed(failed, Int64(1))


@cute.jit
def meet(
    flags: Int64,
    bases: Int64,
    failed: Int64,
    rank: Int32,
    world_size: Int32,
    epoch: Int64,
    timeout_ns: Int64,
    hold_ns: Int64,
    stream: Any,
) -> None:
    """Meet all ranks on the device; what follows on the stream starts on all ranks within microseconds.

    Args:
        flags: Address of this rank's flags, int64 128 bytes apart, one per rank.
        bases: Address of int64[P], every rank's `flags` as mapped here.
        failed: Address of an int64 that becomes 1 if a rank does not come.
        rank: This rank.
        world_size: Ranks P, at most 128; 0 makes the launch do nothing.
        epoch: Number of the meeting, rising from 1.
        timeout_ns: How long to wait for the others.
        hold_ns: How long to stay before meeting, while the host enqueues what follows.
        stream: CUDA stream.
    """
    meet_kernel(flags, bases, failed, rank, world_size, epoch, timeout_ns, hold_ns).launch(
        grid=(1, 1, 1), block=(MEET_THREADS, 1, 1), stream=stream
    )


@cute.kernel
def push_bulk_kernel(target: Int64, units: Int32, piece: Int32, seed: Int32) -> None:
    """A unit in shared memory is copied to every unit of the target, by one thread, in pieces."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    stage = cute.arch.alloc_smem(Uint32, UNIT_WORDS, alignment=128)
    store_unit(stage, thread, STORE_THREADS, seed)
    if thread == 0:
        for unit in cutlass.range(block, units, blocks, unroll=1):
            for offset in cutlass.range(0, UNIT_BYTES, piece, unroll=1):
                bulk_store(target + Int64(unit) * UNIT_BYTES + Int64(offset), stage + offset // 4, piece)
            bulk_commit()
            bulk_wait_read(1)
        bulk_wait(0)


@cute.jit
def push_bulk(target: Int64, units: Int32, piece: Int32, seed: Int32, grid: Int32, stream: Any) -> None:
    """Push `units` units to `target` with bulk copies of `piece` bytes, a divisor of 32 KiB."""
    push_bulk_kernel(target, units, piece, seed).launch(
        grid=(grid, 1, 1), block=(STORE_THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
    )


@cute.kernel
def push_stores_kernel(blocked: Constexpr[bool], target: Int64, units: Int32, seed: Int32) -> None:
    """Registers are stored, 16 bytes a lane: straight through each unit, or in the epilogue's order."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    warp, lane = thread // 32, thread % 32
    for unit in cutlass.range(block, units, blocks, unroll=1):
        base = target + Int64(unit) * UNIT_BYTES
        if cutlass.const_expr(blocked):
            for half in cutlass.range_constexpr(2):
                for column in cutlass.range_constexpr(4):
                    offset = block_offset(warp, half, column, lane)
                    store_16(base + Int64(offset), unit_words_from(offset // 4, seed))
        else:
            for i in cutlass.range_constexpr(UNIT_BYTES // (16 * STORE_THREADS)):
                offset = (i * STORE_THREADS + thread) * 16
                store_16(base + Int64(offset), unit_words_from(offset // 4, seed))
    cute.arch.sync_threads()
    if thread == 0:
        fence_acq_rel_sys()


@cute.jit
def push_stores(
    blocked: Constexpr[bool], target: Int64, units: Int32, seed: Int32, grid: Int32, stream: Any
) -> None:
    """Push `units` units to `target` with 16-byte stores.

    `blocked` is the order in which the fused epilogue writes a tile: warp w has the 8-row blocks 2w and
    2w + 1, and stores 512-byte bursts 8 KiB apart, all 32-column blocks of one before the other's.
    """
    push_stores_kernel(blocked, target, units, seed).launch(
        grid=(grid, 1, 1), block=(STORE_THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
    )


@cute.kernel
def pull_loads_kernel(source: Int64, target: Int64, units: Int32) -> None:
    """Each thread loads 8 times 16 bytes, then stores them; two units at a time."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    for pair in cutlass.range(block, units // 2, blocks, unroll=1):
        first = Int64(pair) * (2 * UNIT_BYTES) + Int64(thread * 16)
        words = [load_16(source + first + i * (16 * LOAD_THREADS)) for i in range(LOADS_IN_FLIGHT)]
        for i in cutlass.range_constexpr(LOADS_IN_FLIGHT):
            store_16(target + first + i * (16 * LOAD_THREADS), words[i])


@cute.jit
def pull_loads(source: Int64, target: Int64, units: Int32, grid: Int32, stream: Any) -> None:
    """Pull `units` units, an even number, from `source` to own memory at `target` with 16-byte loads."""
    pull_loads_kernel(source, target, units).launch(
        grid=(grid, 1, 1), block=(LOAD_THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
    )


@cute.kernel
def read_sums_kernel(source: Int64, target: Int64, units: Int32) -> None:
    """Each thread reads 8 times 16 bytes of the ranks' sum, then stores them; two units at a time."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    fence_proxy_alias()
    for pair in cutlass.range(block, units // 2, blocks, unroll=1):
        first = Int64(pair) * (2 * UNIT_BYTES) + Int64(thread * 16)
        words = [
            multimem_ld_reduce_bf16(source + first + i * (16 * LOAD_THREADS)) for i in range(LOADS_IN_FLIGHT)
        ]
        for i in cutlass.range_constexpr(LOADS_IN_FLIGHT):
            store_16(target + first + i * (16 * LOAD_THREADS), words[i])


@cute.jit
def read_sums(source: Int64, target: Int64, units: Int32, grid: Int32, stream: Any) -> None:
    """Read the sum over ranks of `units` units of BF16, an even number, into own memory at `target`.

    `source` is a multicast address. A launch of no units is the alias fence that a writer of what lies
    behind it needs: it is to follow the writing on its stream, and to come before the meeting.
    """
    read_sums_kernel(source, target, units).launch(
        grid=(grid, 1, 1), block=(LOAD_THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
    )


@cute.jit
def _request(source: Int64, index: Int32, piece: Int32, full: cute.Pointer, data: cute.Pointer) -> None:
    """Start loading the CTA's piece number `index` into its stage."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    stage = index % (RING_BYTES // piece)
    address = source + (Int64(index) * Int64(blocks) + Int64(block)) * Int64(piece)
    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, piece)
    bulk_load(Int32((data + stage * (piece // 4)).toint()), address, piece, Int32((full + stage).toint()))


@cute.kernel
def pull_bulk_kernel(source: Int64, target: Int64, units: Int32, piece: Int32) -> None:
    """One thread loads pieces into a ring and stores each, by bulk copies both ways."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    shared = cutlass.utils.SmemAllocator()
    data = shared.allocate_array(Uint32, RING_BYTES // 4, byte_alignment=128)
    full = shared.allocate_array(Int64, MAX_STAGES)
    if thread == 0:
        for i in cutlass.range_constexpr(MAX_STAGES):
            cute.arch.mbarrier_init(full + i, 1)
        cute.arch.mbarrier_init_fence()
        stages = RING_BYTES // piece
        count = (units * (UNIT_BYTES // piece) - block + blocks - 1) // blocks
        for index in cutlass.range(0, cutlass.min(count, stages), 1, unroll=1):
            _request(source, index, piece, full, data)
        for index in cutlass.range(0, count, 1, unroll=1):
            stage = index % stages
            cute.arch.mbarrier_wait(full + stage, (index // stages) % 2)
            address = target + (Int64(index) * Int64(blocks) + Int64(block)) * Int64(piece)
            bulk_store(address, data + stage * (piece // 4), piece)
            bulk_commit()
            # The piece before this one has left its stage, which takes the next that belongs there.
            bulk_wait_read(1)
            if index > 0 and index - 1 + stages < count:
                _request(source, index - 1 + stages, piece, full, data)
        bulk_wait(0)


@cute.jit
def pull_bulk(source: Int64, target: Int64, units: Int32, piece: Int32, grid: Int32, stream: Any) -> None:
    """Pull `units` units from `source` to own memory at `target` with bulk copies of `piece` bytes."""
    pull_bulk_kernel(source, target, units, piece).launch(
        grid=(grid, 1, 1), block=(32, 1, 1), min_blocks_per_mp=1, stream=stream
    )
