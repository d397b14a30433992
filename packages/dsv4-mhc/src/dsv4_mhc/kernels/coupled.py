# SPDX-License-Identifier: Apache-2.0
"""V4's seam in one launch: post, projection, coefficients, collapse with the pre just found, RMSNorm.

The collapse waits for the projection of the whole row, so the streams after the post map wait in shared
memory: a cluster holds 32 tokens' streams at H = 5120 (160 KiB a CTA), and reads neither them nor anything
else twice. The streams in shared memory are at once the tensor cores' operand and what is collapsed.

Three meetings of the cluster: main loops done; partial mixes at the CTA that finishes the token, and those
of pre at all, which each finds for itself; sums of squares of y at all. While the others write y, the first
warps run Sinkhorn.

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
    cluster_arrive,
    cluster_arrive_relaxed,
    cluster_meet,
    cluster_wait,
    fold_classes,
    load_gains,
    mix_streams,
    narrow,
    store_remote,
    widen,
)
from dsv4_mhc.kernels.seam import (
    GATE_PARTIALS,
    PARTIALS,
    finish_coefficients,
    finish_product,
    load_batch,
    open_gates,
    pad_weights,
    send_gates,
    send_partials,
    settle_weights,
    start_product,
    start_weights,
    write_input,
)
from dsv4_mhc.plan import CHUNK, DEPTH, LANES, STREAMS, WGMMA_ROWS, Quant, SeamOptions, Tile


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
            sums_s = T.alloc_shared((1, size), FP32)
            gathered = T.alloc_shared((cluster * owned * PARTIALS,), FP32)
            gathered_pre = T.alloc_shared((cluster * size * GATE_PARTIALS,), FP32)
            gathered_y = T.alloc_shared((cluster * size,), FP32)
            pre_s = T.alloc_shared((size * STREAMS,), FP32)

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

            pad_weights(fn_s, rows, tile)
            start_weights(fn_s, fn, rank, rows, tile)
            T.clear(product)
            if options.post:
                load_gains(post_gain, comb_gain, post_in, comb_in, token)
            for q in T.unroll(tile.slots):
                squares[q] = T.float32(0)
            load_batch(raw, residual, output, token, (rank * chunks + group) * CHUNK + lane * 8, options)

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
                settle_weights(batch, tile)
                if batch + 1 < batches:
                    load_batch(raw, residual, output, token, column + CHUNK * groups, options)
                if options.post and options.store_residual:
                    if live:
                        for j in T.unroll(STREAMS):
                            for v in T.vectorized(8):
                                residual_out[token, j, column + v] = packed[j, v]
                start_product(product, fn_s, streams_s[batch, :, :], batch, tile)
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
                finish_product(fn_s, fn, rank, batch, rows, tile)

            if not head:
                claim(gathered)
            claim(gathered_pre)
            claim(gathered_y)
            cluster_arrive_relaxed()
            fold_classes(part, 0, squares, tile)
            if lane == 0 and group == 0:
                sums_s[0, row] = part[0]
            T.copy(product, mixes_s)
            T.sync_threads()
            cluster_wait()
            send_gates(gathered_pre, mixes_s, sums_s, part, rank, thread, rows, tile)
            if not head:
                send_partials(gathered, mixes_s, sums_s, part, rank, thread, rows, tile)
            cluster_meet()

            open_gates(pre_s, gathered_pre, part, scale, base, thread, rms_eps, hc_eps, tile)
            T.sync_threads()
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
            T.sync_threads()
            if options.norm:
                cluster_arrive()
            if not head:
                finish_coefficients(
                    *(own, work, gathered, scale, base, pre_out, post_out, comb_out),
                    *(first, rank, thread, tokens, rms_eps, hc_eps, multiplier, iterations, tile),
                )
            if options.norm:
                cluster_wait()
            write_input(
                lambda chunk, line, at: streams_s[chunk // groups, line, chunk % groups * DEPTH + at],
                *(packed, mixed, total, part, codes, norm_weight, gathered_y, norm_eps),
                *(y, codes_out, scales_out, first, rank, thread, tokens, options, tile),
            )

    return mhc_coupled
