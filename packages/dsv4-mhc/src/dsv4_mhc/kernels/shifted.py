# SPDX-License-Identifier: Apache-2.0
"""V4.1's seam in one pass: post, projection and sum of squares, collapse with the carried pre, RMSNorm.

Each residual element is read once and written once, each output element read once, each input element written
once: 10 H BF16 a token, as the V4.1 report counts for its single-pass form. Nothing of y depends on this
seam's projection, so y is only waiting for its own mean of squares; it waits in shared memory, in BF16.

A CTA goes through its slice in batches. Thread (row, group, lane) has eight hidden elements of one token: it
holds the next batch's four streams and F in registers (those loads are what keeps the memory busy; no staging
buffer for them), computes the four target streams, stores them to global memory and, as the tensor cores' N
operand, to shared memory. The weights, 24 rows of high parts and 24 of low parts stacked as M, come by
cp.async. The product of a BF16 residual with high plus low parts is exact in FP32 up to the parts' own
rounding (2^-17 of a weight), so two BF16 products replace one of TF32 at 100 times less error.

Swapping the operands (weights as M, tokens as N) makes N = 8 possible, so decoding pads to 8 tokens, not 64.

At the end the CTAs of a cluster exchange sums of squares of y (to all) and partial mixes (to the CTA that
finishes that token) through distributed shared memory, in CTA order, then warp 0 runs Sinkhorn while all
others write y.
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
from dsv4_mhc.plan import (
    CHUNK,
    DEPTH,
    LANES,
    STREAMS,
    WGMMA_ROWS,
    Kernel,
    Quant,
    SeamOptions,
    Tile,
    resident_ctas,
)

ROWS = 24
WRITERS = 16
"""Threads that share a row when y is written: 256 contiguous bytes, and a group of FP8 scales."""


def build(tile: Tile, options: SeamOptions):
    """The TileLang function for a tile and options."""
    tokens = T.dynamic("tokens")
    scale_bytes = T.dynamic("scale_bytes")
    hidden, chunks, batches = tile.hidden, tile.chunks, tile.batches
    size, cluster, groups, stages, owned = tile.tokens, tile.cluster, tile.groups, tile.stages, tile.owned
    threads = tile.threads
    resident = resident_ctas(Kernel.SHIFTED, tile)

    def streams():
        return T.Tensor((tokens, STREAMS, hidden), BF16)

    def present(used: bool, shape, dtype):
        return T.Tensor(shape, dtype) if used else streams()

    quant = options.quant
    scale_shape = (scale_bytes,) if quant is Quant.MXFP8 else (tokens, hidden // 128)
    scale_dtype = "uint8" if quant is Quant.MXFP8 else FP32

    @T.prim_func
    def mhc_shifted(
        residual: streams(),
        output: present(options.post, (tokens, hidden), BF16),
        post_in: present(options.post, (tokens, STREAMS), FP32),
        comb_in: present(options.post, (tokens, STREAMS, STREAMS), FP32),
        carried: T.Tensor((tokens, STREAMS), FP32),
        fn: T.Tensor((hidden // CHUNK, 2 * ROWS, DEPTH), BF16),
        scale: T.Tensor((3,), FP32),
        base: T.Tensor((ROWS,), FP32),
        norm_weight: present(options.norm, (hidden,), BF16),
        residual_out: streams(),
        y: present(options.y, (tokens, hidden), BF16),
        codes_out: present(quant is not Quant.NONE, (tokens, hidden), E4M3),
        scales_out: present(quant is not Quant.NONE, scale_shape, scale_dtype),
        mean_out: present(options.mean, (tokens, hidden), BF16),
        pre_out: T.Tensor((tokens, STREAMS), FP32),
        post_out: T.Tensor((tokens, STREAMS), FP32),
        comb_out: T.Tensor((tokens, STREAMS, STREAMS), FP32),
        rms_eps: T.float32,
        hc_eps: T.float32,
        norm_eps: T.float32,
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
            row = T.min(thread // (LANES * groups), size - 1)
            group = thread // LANES % groups
            lane = thread % LANES
            live = first + row < tokens
            token = T.min(first + row, tokens - 1)

            streams_s = T.alloc_shared((size, groups * DEPTH), BF16)
            fn_s = T.alloc_shared((stages, WGMMA_ROWS, groups * DEPTH), BF16)
            y_s = T.alloc_shared((chunks, size, CHUNK), BF16)
            mixes_s = T.alloc_shared((WGMMA_ROWS, size), FP32)
            sums_s = T.alloc_shared((2, size), FP32)
            gathered = T.alloc_shared((cluster * owned * 25,), FP32)
            gathered_y = T.alloc_shared((cluster * size,), FP32)
            inverse_s = T.alloc_shared((size,), FP32)

            product = T.alloc_fragment((WGMMA_ROWS, size), FP32)
            raw = T.alloc_local((STREAMS + 1, 8), BF16)
            packed = T.alloc_local((STREAMS, 8), BF16)
            mixed = T.alloc_local((1, 8), FP32)
            total = T.alloc_local((1, 8), FP32)
            mean = T.alloc_local((1, 8), FP32)
            codes = T.alloc_local((8,), E4M3)
            post_gain = T.alloc_local((STREAMS,), FP32)
            pre_gain = T.alloc_local((STREAMS,), FP32)
            comb_gain = T.alloc_local((STREAMS * STREAMS,), FP32)
            squares = T.alloc_local((tile.slots,), FP32)
            squares_y = T.alloc_local((tile.slots,), FP32)
            part = T.alloc_local((2,), FP32)
            own = T.alloc_local((7,), FP32)
            work = T.alloc_local((STREAMS,), FP32)

            for s, i, k in T.Parallel(stages, WGMMA_ROWS - 2 * ROWS, groups * DEPTH):
                fn_s[s, 2 * ROWS + i, k] = T.cast(0, BF16)
            for s in range(stages):
                for g in T.unroll(groups):
                    T.async_copy(
                        fn[rank * chunks + s * groups + g, :, :],
                        fn_s[s, 0 : 2 * ROWS, g * DEPTH : (g + 1) * DEPTH],
                    )
            T.clear(product)
            for i in T.unroll(STREAMS):
                pre_gain[i] = carried[token, i]
            if options.post:
                load_gains(post_gain, comb_gain, post_in, comb_in, token)
            for q in T.unroll(tile.slots):
                squares[q] = T.float32(0)
                squares_y[q] = T.float32(0)
            load_streams(raw, residual, token, (rank * chunks + group) * CHUNK + lane * 8)
            if options.post:
                load_row(raw, STREAMS, output, token, (rank * chunks + group) * CHUNK + lane * 8)

            for batch in T.serial(batches):
                column = (rank * chunks + batch * groups + group) * CHUNK + lane * 8
                part[0] = T.float32(0)
                part[1] = T.float32(0)
                for v in T.unroll(8):
                    total[0, v] = T.float32(0)
                    if options.mean:
                        mean[0, v] = T.float32(0)
                if options.post:
                    mix_streams(packed, raw, post_gain, comb_gain)
                else:
                    for j in T.unroll(STREAMS):
                        for v in T.vectorized(8):
                            packed[j, v] = raw[j, v]
                for j in T.unroll(STREAMS):
                    for v in T.vectorized(8):
                        streams_s[row, group * DEPTH + j * CHUNK + lane * 8 + v] = packed[j, v]
                if options.post and options.store_residual:
                    if live:
                        for j in T.unroll(STREAMS):
                            for v in T.vectorized(8):
                                residual_out[token, j, column + v] = packed[j, v]
                for j in T.unroll(STREAMS):
                    widen(mixed, 0, packed, j)
                    add_squares(part, 0, mixed, 0)
                    for v in T.unroll(8):
                        total[0, v] = total[0, v] + pre_gain[j] * mixed[0, v]
                        if options.mean:
                            mean[0, v] = mean[0, v] + mixed[0, v]
                if options.mean:
                    for v in T.unroll(8):
                        mean[0, v] = mean[0, v] * T.float32(0.25)
                    narrow(packed, 0, mean, 0)
                    if live:
                        for v in T.vectorized(8):
                            mean_out[token, column + v] = packed[0, v]
                narrow(packed, 0, total, 0)
                # Two halves of a 128-byte line trade places on odd chunks, so that neither these writes nor
                # the reads of whole rows below meet in a bank.
                for v in T.vectorized(8):
                    y_s[batch * groups + group, row ^ ((batch * groups + group) % 2), lane * 8 + v] = packed[
                        0, v
                    ]
                if options.norm:
                    if not options.exact_statistic:
                        widen(total, 0, packed, 0)
                    add_squares(part, 1, total, 0)
                add_to_class(squares, part[0], batch, tile)
                add_to_class(squares_y, part[1], batch, tile)
                if batch + 1 < batches:
                    load_streams(raw, residual, token, column + CHUNK * groups)
                    if options.post:
                        load_row(raw, STREAMS, output, token, column + CHUNK * groups)
                if batch + stages <= batches:
                    T.ptx_wait_group((stages - 1) * groups)
                else:
                    T.ptx_wait_group(0)
                T.sync_threads()
                T.gemm(fn_s[batch % stages, :, :], streams_s, product, transpose_B=True)
                if batch + stages < batches:
                    for g in T.unroll(groups):
                        T.async_copy(
                            fn[rank * chunks + (batch + stages) * groups + g, :, :],
                            fn_s[batch % stages, 0 : 2 * ROWS, g * DEPTH : (g + 1) * DEPTH],
                        )

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
                    store = T.alloc_var("bool")
                    store = kept and within < chunks
                    for v in T.vectorized(8):
                        packed[0, v] = y_s[chunk, line ^ (chunk % 2), lane * 8 + v]
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

    return mhc_shifted
