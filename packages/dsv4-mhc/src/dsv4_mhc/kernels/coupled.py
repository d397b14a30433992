# SPDX-License-Identifier: Apache-2.0
"""V4's seam in one launch: post, projection, coefficients, collapse with the pre just found, RMSNorm.

The collapse waits for the projection of the whole row, so the streams after the post map wait in shared
memory: a cluster holds 32 tokens' streams at H = 5120 (160 KiB a CTA), and reads neither them nor anything
else twice. The streams in shared memory are at once the tensor cores' operand and what is collapsed.

Four meetings of the cluster: main loops done; partial mixes at the CTA that finishes the token; its pre at
all; sums of squares of y at all. Sinkhorn runs after the third, in warp 0, while the others collapse.

The same kernel is V4's `pre` (without post), and with four weight rows instead of 24 its head: the gates are
those of pre, and nothing but y comes out.

Rejected: reading the streams again from L2 in a second phase (they are 4 times as large as y, and 84 MB of
them would be in flight at 64 tokens a cluster, more than L2 holds).
"""

import tilelang.language as T

from dsv4_mhc.kernels.device import (
    BF16,
    E4M3,
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
    quantize_fp8,
    quantize_mxfp8,
    sigmoid,
    sinkhorn,
    store_remote,
    widen,
)
from dsv4_mhc.plan import CHUNK, DEPTH, LANES, STREAMS, WGMMA_ROWS, Quant, SeamOptions, Tile

WRITERS = 16
"""Threads that share a row when y is written: 256 contiguous bytes, and a group of FP8 scales."""


def build(tile: Tile, options: SeamOptions, head: bool = False):
    """The TileLang function for a tile and options; `head` is V4's head."""
    tokens = T.dynamic("tokens")
    scale_bytes = T.dynamic("scale_bytes")
    hidden, chunks, batches = tile.hidden, tile.chunks, tile.batches
    size, cluster, groups, stages, owned = tile.tokens, tile.cluster, tile.groups, tile.stages, tile.owned
    threads = tile.threads
    rows = STREAMS if head else 24

    def streams():
        return T.Tensor((tokens, STREAMS, hidden), BF16)

    def present(used: bool, shape, dtype):
        return T.Tensor(shape, dtype) if used else streams()

    quant = options.quant
    scale_shape = (scale_bytes,) if quant is Quant.MXFP8 else (tokens, hidden // 128)
    scale_dtype = "uint8" if quant is Quant.MXFP8 else FP32

    @T.prim_func
    def mhc_coupled(
        residual: streams(),
        output: present(options.post, (tokens, hidden), BF16),
        post_in: present(options.post, (tokens, STREAMS), FP32),
        comb_in: present(options.post, (tokens, STREAMS, STREAMS), FP32),
        fn: T.Tensor((hidden // CHUNK, 2 * rows, DEPTH), BF16),
        scale: T.Tensor((1 if head else 3,), FP32),
        base: T.Tensor((rows,), FP32),
        norm_weight: present(options.norm, (hidden,), BF16),
        residual_out: streams(),
        y: present(options.y, (tokens, hidden), BF16),
        codes_out: present(quant is not Quant.NONE, (tokens, hidden), E4M3),
        scales_out: present(quant is not Quant.NONE, scale_shape, scale_dtype),
        mean_out: present(options.mean, (tokens, hidden), BF16),
        pre_out: present(not head, (tokens, STREAMS), FP32),
        post_out: present(not head, (tokens, STREAMS), FP32),
        comb_out: present(not head, (tokens, STREAMS, STREAMS), FP32),
        rms_eps: T.float32,
        hc_eps: T.float32,
        norm_eps: T.float32,
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
            sums_s = T.alloc_shared((size,), FP32)
            gathered = T.alloc_shared((cluster * owned * 25,), FP32)
            gathered_y = T.alloc_shared((cluster * size,), FP32)
            pre_s = T.alloc_shared((size * STREAMS,), FP32)
            inverse_s = T.alloc_shared((size,), FP32)

            product = T.alloc_fragment((WGMMA_ROWS, size), FP32)
            raw = T.alloc_local((STREAMS + 1, 8), BF16)
            packed = T.alloc_local((STREAMS, 8), BF16)
            mixed = T.alloc_local((1, 8), FP32)
            total = T.alloc_local((1, 8), FP32)
            codes = T.alloc_local((8,), E4M3)
            post_gain = T.alloc_local((STREAMS,), FP32)
            comb_gain = T.alloc_local((STREAMS * STREAMS,), FP32)
            squares = T.alloc_local((tile.slots,), FP32)
            part = T.alloc_local((2,), FP32)
            own = T.alloc_local((7,), FP32)
            work = T.alloc_local((STREAMS,), FP32)

            for s, i, k in T.Parallel(stages, WGMMA_ROWS - 2 * rows, groups * DEPTH):
                fn_s[s, 2 * rows + i, k] = T.cast(0, BF16)
            for s in range(stages):
                for g in T.unroll(groups):
                    T.async_copy(
                        fn[rank * chunks + s * groups + g, :, :],
                        fn_s[s, 0 : 2 * rows, g * DEPTH : (g + 1) * DEPTH],
                    )
            T.clear(product)
            if options.post:
                load_gains(post_gain, comb_gain, post_in, comb_in, token)
            for q in T.unroll(tile.slots):
                squares[q] = T.float32(0)
            load_streams(raw, residual, token, (rank * chunks + group) * CHUNK + lane * 8)
            if options.post:
                load_row(raw, STREAMS, output, token, (rank * chunks + group) * CHUNK + lane * 8)

            for batch in T.serial(batches):
                column = (rank * chunks + batch * groups + group) * CHUNK + lane * 8
                part[0] = T.float32(0)
                if options.mean:
                    for v in T.unroll(8):
                        total[0, v] = T.float32(0)
                if options.post:
                    mix_streams(packed, raw, post_gain, comb_gain)
                else:
                    for j in T.unroll(STREAMS):
                        for v in T.vectorized(8):
                            packed[j, v] = raw[j, v]
                for j in T.unroll(STREAMS):
                    for v in T.vectorized(8):
                        streams_s[batch, row, group * DEPTH + j * CHUNK + lane * 8 + v] = packed[j, v]
                if options.post and options.store_residual:
                    if live:
                        for j in T.unroll(STREAMS):
                            for v in T.vectorized(8):
                                residual_out[token, j, column + v] = packed[j, v]
                for j in T.unroll(STREAMS):
                    widen(mixed, 0, packed, j)
                    add_squares(part, 0, mixed, 0)
                    if options.mean:
                        for v in T.unroll(8):
                            total[0, v] = total[0, v] + mixed[0, v]
                if options.mean:
                    for v in T.unroll(8):
                        total[0, v] = total[0, v] * T.float32(0.25)
                    narrow(packed, 0, total, 0)
                    if live:
                        for v in T.vectorized(8):
                            mean_out[token, column + v] = packed[0, v]
                add_to_class(squares, part[0], batch, tile)
                if batch + 1 < batches:
                    load_streams(raw, residual, token, column + CHUNK * groups)
                    if options.post:
                        load_row(raw, STREAMS, output, token, column + CHUNK * groups)
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
                            fn_s[batch % stages, 0 : 2 * rows, g * DEPTH : (g + 1) * DEPTH],
                        )

            fold_classes(part, 0, squares, tile)
            if lane == 0 and group == 0:
                sums_s[row] = part[0]
            T.copy(product, mixes_s)
            claim(gathered, cluster * owned * 25, thread, tile)
            claim(pre_s, size * STREAMS, thread, tile)
            claim(gathered_y, cluster * size, thread, tile)
            T.cluster_sync()
            for k in T.serial(-(-size * 25 // threads)):
                item = k * threads + thread
                if item < size * 25:
                    part[0] = sums_s[item // 25]
                    if item % 25 < rows:
                        part[0] = mixes_s[item % 25, item // 25] + mixes_s[rows + item % 25, item // 25]
                    store_remote(
                        gathered[(rank * owned + item // 25 % owned) * 25 + item % 25],
                        item // 25 // owned,
                        part[0],
                    )
            T.cluster_sync()

            mine = T.min(thread // LANES, owned - 1)
            if thread < -(-owned * LANES // 32) * 32:
                if head:
                    own[0] = T.float32(0)
                    own[6] = T.float32(0)
                    for k in T.unroll(cluster):
                        own[0] = own[0] + gathered[(k * owned + mine) * 25 + lane]
                        own[6] = own[6] + gathered[(k * owned + mine) * 25 + 24]
                    own[6] = T.rsqrt(own[6] * T.float32(1.0 / (STREAMS * hidden)) + rms_eps)
                    own[0] = own[0] * own[6] * scale[0] + base[lane]
                else:
                    coefficient_logits(own, gathered, scale, base, mine, lane, rms_eps, tile)
                own[0] = sigmoid(own[0]) + hc_eps
                for k in T.unroll(cluster):
                    store_remote(pre_s[(rank * owned + mine) * STREAMS + lane], k, own[0])
            T.cluster_sync()

            if not head:
                if thread < -(-owned * LANES // 32) * 32:
                    sinkhorn(own, work, hc_eps, iterations)
                    finished = first + rank * owned + mine
                    if finished < tokens:
                        pre_out[finished, lane] = own[0]
                        post_out[finished, lane] = multiplier * sigmoid(own[1])
                        for i in T.unroll(STREAMS):
                            comb_out[finished, lane, i] = own[2 + i]
            for i in T.unroll(STREAMS):
                post_gain[i] = pre_s[row * STREAMS + i]
            for q in T.unroll(tile.slots):
                squares[q] = T.float32(0)
            for batch in T.serial(batches):
                part[1] = T.float32(0)
                for v in T.unroll(8):
                    total[0, v] = T.float32(0)
                for j in T.unroll(STREAMS):
                    for v in T.vectorized(8):
                        packed[0, v] = streams_s[batch, row, group * DEPTH + j * CHUNK + lane * 8 + v]
                    widen(mixed, 0, packed, 0)
                    for v in T.unroll(8):
                        total[0, v] = total[0, v] + post_gain[j] * mixed[0, v]
                narrow(packed, 0, total, 0)
                # Its own elements of stream 0 are read; the input takes their place.
                for v in T.vectorized(8):
                    streams_s[batch, row, group * DEPTH + lane * 8 + v] = packed[0, v]
                if options.norm:
                    if not options.exact_statistic:
                        widen(total, 0, packed, 0)
                    add_squares(part, 1, total, 0)
                    add_to_class(squares, part[1], batch, tile)
            if options.norm:
                fold_classes(part, 1, squares, tile)
                if lane == 0 and group == 0:
                    for k in T.unroll(cluster):
                        store_remote(gathered_y[rank * size + row], k, part[1])
                T.cluster_sync()
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
                    store = T.alloc_var("bool")
                    store = kept and within < chunks
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
                    if options.y:
                        if store:
                            for v in T.vectorized(8):
                                y[target, place + v] = packed[0, v]
                    if quant is Quant.MXFP8:
                        widen(mixed, 0, packed, 0)
                        quantize_mxfp8(
                            codes, mixed, part, codes_out, scales_out, target, place, store, hidden // 32
                        )
                    if quant is Quant.FP8:
                        widen(mixed, 0, packed, 0)
                        quantize_fp8(codes, mixed, part, codes_out, scales_out, target, place, store)

    return mhc_coupled
