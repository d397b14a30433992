# SPDX-License-Identifier: Apache-2.0
"""V4.1's Engram seam in one launch: post, Engram gate, value, then projection and the shifted collapse.

An Engram looks at the streams after the post map and adds to them before the next sublayer's projection,
which elsewhere breaks the seam into three operators of 27 to 31 H BF16 a token. Here the streams wait in
shared memory for their gates, as in the coupled seam: 15 H BF16 a token (streams read and written, F, four
keys, the value, y).

First pass: post map, and three sums over the row for each stream: streams squared, keys squared, and the
product of stream, key and both norm weights. A warp adds up its steps, the CTA its warps, the cluster
exchanges what the slices give, and each CTA adds that up in the slices' order and has the gates. Second pass:
the value is added, the sum rounded, written, and multiplied by the weights.

Which warp takes which step decides the order of the first pass's sums; so all tiles of a hidden size divide a
slice among as many warps.
"""

from dataclasses import replace

import tilelang.language as T

from dsv4_mhc.kernels.device import (
    BF16,
    FP32,
    PRELUDE,
    cluster_arrive_relaxed,
    cluster_wait,
    grid_wait,
    load_gains,
    load_once,
    meet,
    narrow,
    send,
    sigmoid,
    widen,
)
from dsv4_mhc.kernels.seam import (
    AFFINE,
    PARTIALS,
    Sent,
    collapse_chunk,
    end_step,
    fetch,
    finish_chunk,
    finish_coefficients,
    keep,
    load_affine,
    load_chunk,
    load_norm,
    open_meetings,
    project_chunk,
    send_sums,
    warm_weights,
    write_input,
    writing,
)
from dsv4_mhc.plan import CHUNK, LANES, STEP, STREAMS, WARP_TOKENS, Kernel, SeamOptions, Tile, resident_ctas

ROWS = 24
BLOCKS = 3
SUMS = 3 * STREAMS
EACH_STREAM = tuple(range(STREAMS))
"""Loops over these are written out, so that the sums stay in registers."""


@T.macro
def weigh_chunk(kept_s, sums, packed, keys, query_weight, key_weight, chunk, row, lane, column):
    """Keep a chunk's streams; add to sums[3 j:] of each stream its products, its squares and its key's."""
    raw = T.alloc_local((2, 8), BF16)
    gain = T.alloc_local((2, 8), FP32)
    wide = T.alloc_local((1, 8), FP32)
    key = T.alloc_local((1, 8), FP32)
    for v in T.vectorized(8):
        raw[0, v] = query_weight[column + v]
    for v in T.vectorized(8):
        raw[1, v] = key_weight[column + v]
    widen(gain, 0, raw, 0)
    widen(gain, 1, raw, 1)
    for v in T.unroll(8):
        gain[0, v] = gain[0, v] * gain[1, v]
    for j in EACH_STREAM:
        keep(kept_s, chunk, j, row, lane, packed, j)
        widen(wide, 0, packed, j)
        widen(key, 0, keys, j)
        for v in T.unroll(8):
            sums[3 * j] = sums[3 * j] + wide[0, v] * key[0, v] * gain[0, v]
            sums[3 * j + 1] = sums[3 * j + 1] + wide[0, v] * wide[0, v]
            sums[3 * j + 2] = sums[3 * j + 2] + key[0, v] * key[0, v]


@T.macro
def send_weighed(gathered_gate, warps_s, sums, meetings, rank, turn, inside, row, lane, thread, tile: Tile):
    """A CTA's sums of its slices to every CTA: lanes, then warps in their order."""
    for i in T.unroll(SUMS):
        sums[i] = sums[i] + T.shfl_xor(sums[i], 1)
        sums[i] = sums[i] + T.shfl_xor(sums[i], 2)
        if lane == i % LANES:
            warps_s[(inside * tile.parallel + turn) * tile.tokens + row, i] = sums[i]
    T.sync_threads()
    count = tile.per_cta * tile.tokens * SUMS
    for k in T.serial(-(-count // tile.threads)):
        item = k * tile.threads + thread
        if item < count:
            part = item // (tile.tokens * SUMS)
            token = item // SUMS % tile.tokens
            sums[0] = T.float32(0)
            for p in T.unroll(tile.parallel):
                sums[0] = sums[0] + warps_s[(part * tile.parallel + p) * tile.tokens + token, item % SUMS]
            for c in T.unroll(tile.cluster):
                send(
                    gathered_gate[((rank * tile.per_cta + part) * tile.tokens + token) * SUMS + item % SUMS],
                    *(c, sums[0], meetings[0]),
                )


@T.macro
def find_gates(gate, gathered_gate, open_gate, token, row, lane, engram_eps, tile: Tile):
    """Find a token's gate of each stream; four lanes find one each."""
    own = T.alloc_local((3,), FP32)
    for i in T.unroll(3):
        own[i] = T.float32(0)
        for k in T.unroll(tile.slices):
            own[i] = own[i] + gathered_gate[(k * tile.tokens + row) * SUMS + 3 * lane + i]
    own[0] = own[0] * T.rsqrt(own[1] * T.float32(1.0 / tile.hidden) + engram_eps)
    own[0] = own[0] * T.rsqrt(own[2] * T.float32(1.0 / tile.hidden) + engram_eps)
    own[0] = own[0] * T.float32(tile.hidden**-0.5)
    # sign(s) sqrt(max(|s|, 1e-6)), where NaN stays NaN and zero stays zero.
    own[1] = T.sqrt(T.if_then_else(T.abs(own[0]) < T.float32(1e-6), T.float32(1e-6), T.abs(own[0])))
    own[1] = T.if_then_else(own[0] < T.float32(0), -own[1], own[1])
    own[1] = T.if_then_else(own[0] == T.float32(0), T.float32(0), own[1])
    own[1] = T.if_then_else(open_gate[token] != 0, sigmoid(own[1]), T.float32(0))
    for j in T.unroll(STREAMS):
        gate[j] = T.shfl_sync(own[1], j, STREAMS)


def build(tile: Tile, options: SeamOptions):
    """The TileLang function; `y` and the residual are always written, `quant` never."""
    tokens = T.dynamic("tokens")
    hidden, size, cluster, threads = tile.hidden, tile.tokens, tile.cluster, tile.threads
    parallel, steps, groups = tile.parallel, tile.steps, tile.groups
    unstored = replace(options, store_residual=False)
    resident = resident_ctas(Kernel.ENGRAM, tile)
    sent = Sent(mixes=True, squares=options.norm)

    def streams():
        return T.Tensor((tokens, STREAMS, hidden), BF16)

    def present(used: bool, shape, dtype):
        return T.Tensor(shape, dtype) if used else streams()

    @T.prim_func
    def mhc_engram(
        residual: streams(),
        output: present(options.post, (tokens, hidden), BF16),
        post_in: present(options.post, (tokens, STREAMS), FP32),
        comb_in: present(options.post, (tokens, STREAMS, STREAMS), FP32),
        memory: T.Tensor((tokens, STREAMS + 1, hidden), BF16),
        query_weight: T.Tensor((hidden,), BF16),
        key_weight: T.Tensor((hidden,), BF16),
        open_gate: T.Tensor((tokens,), "uint8"),
        carried: T.Tensor((tokens, STREAMS), FP32),
        fn: T.Tensor((hidden // CHUNK, STREAMS, BLOCKS, 2, 256), BF16),
        scale: T.Tensor((3,), FP32),
        base: T.Tensor((ROWS,), FP32),
        norm_weight: present(options.norm, (hidden,), BF16),
        residual_out: streams(),
        y: T.Tensor((tokens, hidden), BF16),
        pre_out: T.Tensor((tokens, STREAMS), FP32),
        post_out: T.Tensor((tokens, STREAMS), FP32),
        comb_out: T.Tensor((tokens, STREAMS, STREAMS), FP32),
        rms_eps: T.float32,
        hc_eps: T.float32,
        norm_eps: T.float32,
        engram_eps: T.float32,
        multiplier: T.float32,
        iterations: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(tokens, size) * cluster, threads=threads, cluster_dims=cluster, prelude=PRELUDE
        ) as block:
            T.annotate_min_blocks_per_sm(resident)
            thread = T.get_thread_binding(0)
            rank = block % cluster
            first = block // cluster * size
            place = thread % 32
            lane = thread % LANES
            row = thread // 32 % groups * WARP_TOKENS + place // LANES
            inside = thread // (32 * groups * parallel)
            turn = thread // (32 * groups) % parallel
            origin = (rank * tile.per_cta + inside) * steps * STEP
            live = first + row < tokens
            token = T.min(first + row, tokens - 1)

            kept_s = T.alloc_shared((tile.chunks, STREAMS, size, CHUNK), BF16)
            warps_s = T.alloc_shared((tile.per_cta * parallel * size, SUMS), FP32)
            parts_s = T.alloc_shared((max(1, tile.parts * tile.per_cta * size), 32), FP32)
            gathered = T.alloc_shared((tile.slices * tile.owned * PARTIALS,), FP32)
            gathered_y = T.alloc_shared((tile.slices * size,), FP32)
            gathered_gate = T.alloc_shared((tile.slices * size * SUMS,), FP32)
            meetings = T.alloc_shared((2,), "int64")

            raw = T.alloc_local((STREAMS + 1, 8), BF16)
            keys = T.alloc_local((STREAMS, 8), BF16)
            packed = T.alloc_local((STREAMS, 8), BF16)
            value = T.alloc_local((1, 8), BF16)
            result = T.alloc_local((1, 8), BF16)
            wide = T.alloc_local((1, 8), FP32)
            mixed = T.alloc_local((1, 8), FP32)
            product = T.alloc_local((4 * BLOCKS,), FP32)
            squares = T.alloc_local((3,), FP32)
            total = T.alloc_local((2 * BLOCKS + 2,), FP32)
            post_gain = T.alloc_local((STREAMS,), FP32)
            pre_gain = T.alloc_local((STREAMS,), FP32)
            comb_gain = T.alloc_local((STREAMS * STREAMS,), FP32)
            gate = T.alloc_local((STREAMS,), FP32)
            sums = T.alloc_local((SUMS,), FP32)
            affine = T.alloc_local((AFFINE,), FP32)
            norm = T.alloc_local((writing(tile)[2], 8), BF16)

            warm_weights(fn, origin, turn, thread, BLOCKS, tile)
            grid_wait()
            open_meetings(meetings, (4 * tile.slices * size * SUMS, sent.bytes(tile)), thread)
            cluster_arrive_relaxed()
            for i in T.unroll(STREAMS):
                pre_gain[i] = carried[token, i]
            if options.post:
                load_gains(post_gain, comb_gain, post_in, comb_in, token)
            for i in T.unroll(SUMS):
                sums[i] = T.float32(0)
            for i in T.unroll(2 * BLOCKS + 2):
                total[i] = T.float32(0)
            for i in T.serial(-(-steps // parallel)):
                step = i * parallel + turn
                if step < steps:
                    for half in T.serial(2):
                        column = origin + step * STEP + half * CHUNK + lane * 8
                        load_chunk(raw, residual, output, token, column, unstored)
                        for j in T.unroll(STREAMS):
                            load_once(keys[j, 0], memory[token, j, column])
                        finish_chunk(
                            packed, raw, post_gain, comb_gain, residual_out, token, column, live, unstored
                        )
                        weigh_chunk(
                            *(kept_s, sums, packed, keys, query_weight, key_weight),
                            *((inside * steps + step) * 2 + half, row, lane, column),
                        )

            cluster_wait()
            send_weighed(gathered_gate, warps_s, sums, meetings, rank, turn, inside, row, lane, thread, tile)
            load_once(value[0, 0], memory[token, STREAMS, origin + turn * STEP + lane * 8])
            meet(meetings[0])
            find_gates(gate, gathered_gate, open_gate, token, row, lane, engram_eps, tile)
            for i in T.serial(-(-steps // parallel)):
                step = i * parallel + turn
                if step < steps:
                    for k in T.unroll(4 * BLOCKS):
                        product[k] = T.float32(0)
                    for k in T.unroll(3):
                        squares[k] = T.float32(0)
                    for half in T.unroll(2):
                        chunk = (inside * steps + step) * 2 + half
                        column = origin + step * STEP + half * CHUNK + lane * 8
                        widen(wide, 0, value, 0)
                        if half == 0:
                            load_once(value[0, 0], memory[token, STREAMS, column + CHUNK])
                        else:
                            if step + parallel < steps:
                                load_once(
                                    value[0, 0], memory[token, STREAMS, column - CHUNK + parallel * STEP]
                                )
                        for j in T.unroll(STREAMS):
                            fetch(packed, j, kept_s, chunk, j, row, lane)
                            widen(mixed, 0, packed, j)
                            for v in T.unroll(8):
                                mixed[0, v] = mixed[0, v] + gate[j] * wide[0, v]
                            narrow(packed, j, mixed, 0)
                            if live:
                                for v in T.vectorized(8):
                                    residual_out[token, j, column + v] = packed[j, v]
                        project_chunk(product, packed, fn, column // CHUNK, place, BLOCKS)
                        collapse_chunk(
                            result, squares, packed, residual_out, pre_gain, token, column, live, options
                        )
                        # A thread's own elements of stream 0 are read; the input takes their place.
                        keep(kept_s, chunk, 0, row, lane, result, 0)
                    end_step(total, parts_s, product, squares, inside, step, row, place, BLOCKS, tile)

            load_affine(affine, scale, base, lane, False)
            load_norm(norm, norm_weight, rank, thread, options, tile)
            send_sums(
                *(gathered, gathered, gathered_y, total, parts_s, meetings, 1, rank, inside, row, thread),
                *(BLOCKS, sent, tile),
            )
            meet(meetings[1])
            finish_coefficients(
                *(gathered, affine, pre_out, post_out, comb_out, first, rank, thread, tokens),
                *(rms_eps, hc_eps, multiplier, iterations, tile),
            )
            T.sync_threads()
            write_input(
                *(kept_s, gathered_y, norm, norm_eps, y, y, y, first, rank, thread),
                *(tokens, options, tile),
            )

    return mhc_engram
