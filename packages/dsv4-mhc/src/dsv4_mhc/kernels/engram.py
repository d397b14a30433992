# SPDX-License-Identifier: Apache-2.0
"""V4.1's Engram seam in one launch: post, Engram gate, value, then projection and the shifted collapse.

An Engram looks at the streams after the post map and adds to them before the next sublayer's projection,
which elsewhere breaks the seam into three operators of 27 to 31 H BF16 a token. Here the streams wait in
shared memory for their gates, as in the coupled seam: 15 H BF16 a token (streams read and written, F, four
keys, the value, y).

First pass: post map, and three sums over the row for each stream: streams squared, keys squared, and the
product of stream, key and both norm weights. The cluster exchanges them, each CTA adds them up in CTA order
and has the gates. Second pass: the value is added, the sum rounded, written, and multiplied by the weights.
"""

import tilelang.language as T

from dsv4_mhc.kernels.device import (
    BF16,
    FP32,
    PRELUDE,
    add_squares,
    add_to_class,
    claim,
    coefficient_logits,
    fold_classes,
    load_gains,
    load_row,
    load_streams,
    mix_streams,
    narrow,
    sigmoid,
    sinkhorn,
    store_remote,
    widen,
)
from dsv4_mhc.plan import CHUNK, DEPTH, LANES, STREAMS, WGMMA_ROWS, SeamOptions, Tile

ROWS = 24
SUMS = 3 * STREAMS
EACH_STREAM = tuple(range(STREAMS))
EACH_SUM = tuple(range(SUMS))
"""Loops over these are written out, so that the sums stay in registers."""
WRITERS = 16


def build(tile: Tile, options: SeamOptions):
    """The TileLang function; `y` and the residual are always written, `quant` never."""
    tokens = T.dynamic("tokens")
    hidden, chunks, batches = tile.hidden, tile.chunks, tile.batches
    size, cluster, groups, stages, owned = tile.tokens, tile.cluster, tile.groups, tile.stages, tile.owned
    threads = tile.threads

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
        fn: T.Tensor((hidden // CHUNK, 2 * ROWS, DEPTH), BF16),
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
            thread = T.get_thread_binding(0)
            rank = block % cluster
            first = block // cluster * size
            row = T.min(thread // (LANES * groups), size - 1)
            group = thread // LANES % groups
            lane = thread % LANES
            live = first + row < tokens
            token = T.min(first + row, tokens - 1)

            streams_s = T.alloc_shared((batches, size, groups * DEPTH), BF16)
            fn_s = T.alloc_shared((stages, WGMMA_ROWS, groups * DEPTH), BF16)
            mixes_s = T.alloc_shared((WGMMA_ROWS, size), FP32)
            sums_s = T.alloc_shared((2, size), FP32)
            gathered = T.alloc_shared((cluster * owned * 25,), FP32)
            gathered_y = T.alloc_shared((cluster * size,), FP32)
            gathered_gate = T.alloc_shared((cluster * size * SUMS,), FP32)
            inverse_s = T.alloc_shared((size,), FP32)

            product = T.alloc_fragment((WGMMA_ROWS, size), FP32)
            raw = T.alloc_local((STREAMS + 1, 8), BF16)
            packed = T.alloc_local((STREAMS, 8), BF16)
            wide = T.alloc_local((1, 8), FP32)
            mixed = T.alloc_local((1, 8), FP32)
            total = T.alloc_local((1, 8), FP32)
            gain = T.alloc_local((2, 8), FP32)
            post_gain = T.alloc_local((STREAMS,), FP32)
            pre_gain = T.alloc_local((STREAMS,), FP32)
            comb_gain = T.alloc_local((STREAMS * STREAMS,), FP32)
            sums = T.alloc_local((SUMS, tile.slots), FP32)
            squares = T.alloc_local((tile.slots,), FP32)
            squares_y = T.alloc_local((tile.slots,), FP32)
            part = T.alloc_local((2,), FP32)
            own = T.alloc_local((7,), FP32)
            work = T.alloc_local((STREAMS,), FP32)

            for s, i, k in T.Parallel(stages, WGMMA_ROWS - 2 * ROWS, groups * DEPTH):
                fn_s[s, 2 * ROWS + i, k] = T.cast(0, BF16)
            claim(gathered_gate, cluster * size * SUMS, thread, tile)
            T.clear(product)
            for i in T.unroll(STREAMS):
                pre_gain[i] = carried[token, i]
            if options.post:
                load_gains(post_gain, comb_gain, post_in, comb_in, token)
            for i in T.unroll(SUMS):
                for q in T.unroll(tile.slots):
                    sums[i, q] = T.float32(0)
            for q in T.unroll(tile.slots):
                squares[q] = T.float32(0)
                squares_y[q] = T.float32(0)

            for batch in T.serial(batches):
                column = (rank * chunks + batch * groups + group) * CHUNK + lane * 8
                load_streams(raw, residual, token, column)
                if options.post:
                    load_row(raw, STREAMS, output, token, column)
                for v in T.vectorized(8):
                    packed[0, v] = query_weight[column + v]
                widen(gain, 0, packed, 0)
                for v in T.vectorized(8):
                    packed[0, v] = key_weight[column + v]
                widen(gain, 1, packed, 0)
                for v in T.unroll(8):
                    gain[0, v] = gain[0, v] * gain[1, v]
                if options.post:
                    mix_streams(packed, raw, post_gain, comb_gain)
                else:
                    for j in T.unroll(STREAMS):
                        for v in T.vectorized(8):
                            packed[j, v] = raw[j, v]
                for j in EACH_STREAM:
                    for v in T.vectorized(8):
                        streams_s[batch, row, group * DEPTH + j * CHUNK + lane * 8 + v] = packed[j, v]
                    widen(mixed, 0, packed, j)
                    for v in T.vectorized(8):
                        packed[j, v] = memory[token, j, column + v]
                    widen(total, 0, packed, j)
                    part[0] = T.float32(0)
                    part[1] = T.float32(0)
                    add_squares(part, 0, mixed, 0)
                    add_squares(part, 1, total, 0)
                    work[0] = T.float32(0)
                    for v in T.unroll(8):
                        work[0] = work[0] + mixed[0, v] * total[0, v] * gain[0, v]
                    for q in T.unroll(tile.slots):
                        chosen = batch % tile.slots == q
                        sums[3 * j, q] = sums[3 * j, q] + T.if_then_else(chosen, work[0], T.float32(0))
                        sums[3 * j + 1, q] = sums[3 * j + 1, q] + T.if_then_else(
                            chosen, part[0], T.float32(0)
                        )
                        sums[3 * j + 2, q] = sums[3 * j + 2, q] + T.if_then_else(
                            chosen, part[1], T.float32(0)
                        )

            # A peer may write into gathered_gate from here on: all CTAs have claimed theirs.
            T.cluster_sync()
            for i in EACH_SUM:
                for q in T.unroll(tile.slots):
                    squares[q] = sums[i, q]
                fold_classes(part, 0, squares, tile)
                if lane == 0 and group == 0:
                    for k in T.unroll(cluster):
                        store_remote(gathered_gate[(rank * size + row) * SUMS + i], k, part[0])
            T.cluster_sync()
            for j in T.unroll(STREAMS):
                for i in T.unroll(3):
                    own[i] = T.float32(0)
                    for k in T.unroll(cluster):
                        own[i] = own[i] + gathered_gate[(k * size + row) * SUMS + 3 * j + i]
                own[0] = own[0] * T.rsqrt(own[1] * T.float32(1.0 / hidden) + engram_eps)
                own[0] = own[0] * T.rsqrt(own[2] * T.float32(1.0 / hidden) + engram_eps)
                own[0] = own[0] * T.float32(hidden**-0.5)
                # sign(s) sqrt(max(|s|, 1e-6)), where NaN stays NaN and zero stays zero.
                own[1] = T.sqrt(
                    T.if_then_else(T.abs(own[0]) < T.float32(1e-6), T.float32(1e-6), T.abs(own[0]))
                )
                own[1] = T.if_then_else(own[0] < T.float32(0), -own[1], own[1])
                own[1] = T.if_then_else(own[0] == T.float32(0), T.float32(0), own[1])
                post_gain[j] = T.if_then_else(open_gate[token] != 0, sigmoid(own[1]), T.float32(0))
            for q in T.unroll(tile.slots):
                squares[q] = T.float32(0)
            for s in range(stages):
                for g in T.unroll(groups):
                    T.async_copy(
                        fn[rank * chunks + s * groups + g, :, :],
                        fn_s[s, 0 : 2 * ROWS, g * DEPTH : (g + 1) * DEPTH],
                    )

            for batch in T.serial(batches):
                column = (rank * chunks + batch * groups + group) * CHUNK + lane * 8
                for v in T.vectorized(8):
                    raw[0, v] = memory[token, STREAMS, column + v]
                widen(wide, 0, raw, 0)
                part[0] = T.float32(0)
                part[1] = T.float32(0)
                for v in T.unroll(8):
                    total[0, v] = T.float32(0)
                for j in T.unroll(STREAMS):
                    for v in T.vectorized(8):
                        packed[0, v] = streams_s[batch, row, group * DEPTH + j * CHUNK + lane * 8 + v]
                    widen(mixed, 0, packed, 0)
                    for v in T.unroll(8):
                        mixed[0, v] = mixed[0, v] + post_gain[j] * wide[0, v]
                    narrow(packed, 0, mixed, 0)
                    for v in T.vectorized(8):
                        streams_s[batch, row, group * DEPTH + j * CHUNK + lane * 8 + v] = packed[0, v]
                    if live:
                        for v in T.vectorized(8):
                            residual_out[token, j, column + v] = packed[0, v]
                    widen(mixed, 0, packed, 0)
                    add_squares(part, 0, mixed, 0)
                    for v in T.unroll(8):
                        total[0, v] = total[0, v] + pre_gain[j] * mixed[0, v]
                add_to_class(squares, part[0], batch, tile)
                if batch + stages <= batches:
                    T.ptx_wait_group((stages - 1) * groups)
                else:
                    T.ptx_wait_group(0)
                T.sync_threads()
                T.gemm(fn_s[batch % stages, :, :], streams_s[batch, :, :], product, transpose_B=True)
                if batch + stages < batches:
                    for g in T.unroll(groups):
                        T.async_copy(
                            fn[rank * chunks + (batch + stages) * groups + g, :, :],
                            fn_s[batch % stages, 0 : 2 * ROWS, g * DEPTH : (g + 1) * DEPTH],
                        )
                # The product is complete; the input takes the place of its own elements of stream 0.
                narrow(packed, 0, total, 0)
                for v in T.vectorized(8):
                    streams_s[batch, row, group * DEPTH + lane * 8 + v] = packed[0, v]
                if options.norm:
                    if not options.exact_statistic:
                        widen(total, 0, packed, 0)
                    add_squares(part, 1, total, 0)
                    add_to_class(squares_y, part[1], batch, tile)

            fold_classes(part, 0, squares, tile)
            fold_classes(part, 1, squares_y, tile)
            if lane == 0 and group == 0:
                sums_s[0, row] = part[0]
                sums_s[1, row] = part[1]
            T.copy(product, mixes_s)
            claim(gathered, cluster * owned * 25, thread, tile)
            claim(gathered_y, cluster * size, thread, tile)
            T.cluster_sync()
            for k in T.serial(-(-cluster * size // threads)):
                item = k * threads + thread
                if item < cluster * size:
                    store_remote(gathered_y[rank * size + item % size], item // size, sums_s[1, item % size])
            for k in T.serial(-(-size * 25 // threads)):
                item = k * threads + thread
                if item < size * 25:
                    part[0] = sums_s[0, item // 25]
                    if item % 25 < ROWS:
                        part[0] = mixes_s[item % 25, item // 25] + mixes_s[ROWS + item % 25, item // 25]
                    store_remote(
                        gathered[(rank * owned + item // 25 % owned) * 25 + item % 25],
                        item // 25 // owned,
                        part[0],
                    )
            T.cluster_sync()

            if thread < -(-owned * LANES // 32) * 32:
                mine = T.min(thread // LANES, owned - 1)
                coefficient_logits(own, gathered, scale, base, mine, lane, rms_eps, tile)
                sinkhorn(own, work, hc_eps, iterations)
                finished = first + rank * owned + mine
                if finished < tokens:
                    pre_out[finished, lane] = sigmoid(own[0]) + hc_eps
                    post_out[finished, lane] = multiplier * sigmoid(own[1])
                    for i in T.unroll(STREAMS):
                        comb_out[finished, lane, i] = own[2 + i]
            if options.norm:
                for k in T.serial(-(-size // threads)):
                    if k * threads + thread < size:
                        part[1] = T.float32(0)
                        for i in T.unroll(cluster):
                            part[1] = part[1] + gathered_y[i * size + k * threads + thread]
                        inverse_s[k * threads + thread] = T.rsqrt(
                            part[1] * T.float32(1.0 / hidden) + norm_eps
                        )
            T.sync_threads()
            for k in T.serial(size * WRITERS // threads if size * WRITERS >= threads else 1):
                line = T.min(k * (threads // WRITERS) + thread // WRITERS, size - 1)
                kept = first + line < tokens
                target = T.min(first + line, tokens - 1)
                for c in T.serial(-(-chunks // 4)):
                    within = c * 4 + thread % WRITERS // LANES
                    chunk = T.min(within, chunks - 1)
                    place = (rank * chunks + chunk) * CHUNK + lane * 8
                    for v in T.vectorized(8):
                        packed[0, v] = streams_s[chunk // groups, line, chunk % groups * DEPTH + lane * 8 + v]
                    if options.norm:
                        widen(mixed, 0, packed, 0)
                        for v in T.vectorized(8):
                            packed[0, v] = norm_weight[place + v]
                        widen(total, 0, packed, 0)
                        for v in T.unroll(8):
                            mixed[0, v] = mixed[0, v] * inverse_s[line] * total[0, v]
                        narrow(packed, 0, mixed, 0)
                    if kept and within < chunks:
                        for v in T.vectorized(8):
                            y[target, place + v] = packed[0, v]

    return mhc_engram
