# SPDX-License-Identifier: Apache-2.0
"""V4's seam in one launch for few tokens.

Post, projection, coefficients, collapse with the pre just found, RMSNorm.

The collapse waits for the projection of the whole row, so the streams after the post map wait in shared
memory, and nothing is read twice. 16 tokens of a cluster of 8 take 80 KiB of a CTA at H = 5120. More would
fit, but then the weights would not (see `seam`), and with many tokens a second launch costs less than the
meetings do: `plan.coupled_form`.

Two meetings of the cluster: sums of the projection, those of pre at every CTA, which finds the gates itself,
and all at the CTA that finishes the token; then the squares of y. Sinkhorn runs between the second's two
halves.

The same kernel is V4's `pre` (without post), and with four weight rows instead of 24 its head: the gates are
those of pre, and nothing but y comes out.
"""

from dataclasses import replace

import tilelang.language as T

from dsv4_mhc.kernels.device import (
    BF16,
    E4M3,
    FP32,
    PRELUDE,
    add_row_squares,
    cluster_arrive_relaxed,
    cluster_wait,
    grid_wait,
    load_gains,
    meet,
    narrow,
    widen,
)
from dsv4_mhc.kernels.seam import (
    AFFINE,
    GATES,
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
    open_gates,
    open_meetings,
    project_chunk,
    send_sums,
    warm_weights,
    write_input,
    writing,
)
from dsv4_mhc.plan import (
    CHUNK,
    LANES,
    STEP,
    STREAMS,
    WARP_TOKENS,
    Kernel,
    Quant,
    SeamOptions,
    Tile,
    resident_ctas,
)


def build(tile: Tile, options: SeamOptions, head: bool = False):
    """The TileLang function for a tile and options; `head` is V4's head."""
    tokens = T.dynamic("tokens")
    scale_bytes = T.dynamic("scale_bytes")
    hidden, size, cluster, threads = tile.hidden, tile.tokens, tile.cluster, tile.threads
    parallel, steps, groups = tile.parallel, tile.steps, tile.groups
    rows, blocks = (STREAMS, 1) if head else (24, 3)
    first_pass = replace(options, collapse=False)
    resident = resident_ctas(Kernel.COUPLED, tile)

    def streams():
        return T.Tensor((tokens, STREAMS, hidden), BF16)

    def present(used: bool, shape, dtype):
        return T.Tensor(shape, dtype) if used else streams()

    first_sent, last_sent = Sent(mixes=not head, gates=True), Sent(squares=options.norm)
    quant = options.quant
    scale_shape = (scale_bytes,) if quant is Quant.MXFP8 else (tokens, hidden // 128)
    scale_dtype = "uint8" if quant is Quant.MXFP8 else FP32

    @T.prim_func
    def mhc_coupled(
        residual: streams(),
        output: present(options.post, (tokens, hidden), BF16),
        post_in: present(options.post, (tokens, STREAMS), FP32),
        comb_in: present(options.post, (tokens, STREAMS, STREAMS), FP32),
        fn: T.Tensor((hidden // CHUNK, STREAMS, blocks, 2, 256), BF16),
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
            parts_s = T.alloc_shared((max(1, tile.parts * tile.per_cta * size), 32), FP32)
            gathered = T.alloc_shared((1 if head else tile.slices * tile.owned * PARTIALS,), FP32)
            gates = T.alloc_shared((tile.slices * size * GATES,), FP32)
            gathered_y = T.alloc_shared((tile.slices * size,), FP32)
            meetings = T.alloc_shared((2,), "int64")

            raw = T.alloc_local((STREAMS + 1, 8), BF16)
            later = T.alloc_local((STREAMS + 1, 8), BF16)
            packed = T.alloc_local((STREAMS, 8), BF16)
            result = T.alloc_local((1, 8), BF16)
            wide = T.alloc_local((1, 8), FP32)
            sum_y = T.alloc_local((1, 8), FP32)
            product = T.alloc_local((4 * blocks,), FP32)
            squares = T.alloc_local((3,), FP32)
            total = T.alloc_local((2 * blocks + 2,), FP32)
            post_gain = T.alloc_local((STREAMS,), FP32)
            pre_gain = T.alloc_local((STREAMS,), FP32)
            comb_gain = T.alloc_local((STREAMS * STREAMS,), FP32)
            affine = T.alloc_local((AFFINE,), FP32)
            norm = T.alloc_local((writing(tile)[2], 8), BF16)

            warm_weights(fn, origin, turn, thread, blocks, tile)
            grid_wait()
            load_chunk(raw, residual, output, token, origin + turn * STEP + lane * 8, options)
            open_meetings(meetings, (first_sent.bytes(tile), last_sent.bytes(tile)), thread)
            cluster_arrive_relaxed()
            if options.post:
                load_gains(post_gain, comb_gain, post_in, comb_in, token)
            for i in T.unroll(2 * blocks + 2):
                total[i] = T.float32(0)
            for i in T.unroll(STREAMS):
                pre_gain[i] = T.float32(0)
            for i in T.serial(-(-steps // parallel)):
                step = i * parallel + turn
                column = origin + step * STEP + lane * 8
                chunk = (inside * steps + step) * 2
                if step < steps:
                    for k in T.unroll(4 * blocks):
                        product[k] = T.float32(0)
                    for k in T.unroll(3):
                        squares[k] = T.float32(0)
                    load_chunk(later, residual, output, token, column + CHUNK, options)
                    finish_chunk(
                        packed, raw, post_gain, comb_gain, residual_out, token, column, live, options
                    )
                    for j in T.unroll(STREAMS):
                        keep(kept_s, chunk, j, row, lane, packed, j)
                    project_chunk(product, packed, fn, column // CHUNK, place, blocks)
                    collapse_chunk(
                        result, squares, packed, mean_out, pre_gain, token, column, live, first_pass
                    )
                    if step + parallel < steps:
                        load_chunk(raw, residual, output, token, column + parallel * STEP, options)
                    finish_chunk(
                        *(packed, later, post_gain, comb_gain, residual_out, token, column + CHUNK, live),
                        options,
                    )
                    for j in T.unroll(STREAMS):
                        keep(kept_s, chunk + 1, j, row, lane, packed, j)
                    project_chunk(product, packed, fn, column // CHUNK + 1, place, blocks)
                    collapse_chunk(
                        result, squares, packed, mean_out, pre_gain, token, column + CHUNK, live, first_pass
                    )
                    end_step(total, parts_s, product, squares, inside, step, row, place, blocks, tile)

            load_affine(affine, scale, base, lane, head)
            cluster_wait()
            send_sums(
                *(gathered, gates, gathered_y, total, parts_s, meetings, 0, rank, inside, row, thread),
                *(blocks, first_sent, tile),
            )
            meet(meetings[0])
            if parallel > 1:
                T.sync_threads()  # sums of steps, which are read, make way for those of y
            open_gates(pre_gain, gates, affine, row, lane, rms_eps, hc_eps, tile)
            load_norm(norm, norm_weight, rank, thread, options, tile)
            for i in T.serial(-(-steps // parallel)):
                step = i * parallel + turn
                if step < steps:
                    squares[2] = T.float32(0)
                    for half in T.unroll(2):
                        chunk = (inside * steps + step) * 2 + half
                        for v in T.unroll(8):
                            sum_y[0, v] = T.float32(0)
                        for j in T.unroll(STREAMS):
                            fetch(packed, j, kept_s, chunk, j, row, lane)
                            widen(wide, 0, packed, j)
                            for v in T.unroll(8):
                                sum_y[0, v] = sum_y[0, v] + pre_gain[j] * wide[0, v]
                        narrow(result, 0, sum_y, 0)
                        if options.norm:
                            if not options.exact_statistic:
                                widen(sum_y, 0, result, 0)
                            add_row_squares(squares, 2, sum_y)
                        # A thread's own elements of stream 0 are read; the input takes their place.
                        keep(kept_s, chunk, 0, row, lane, result, 0)
                    if parallel == 1:
                        total[2 * blocks + 1] = total[2 * blocks + 1] + squares[2]
                    else:
                        parts_s[(inside * steps + step) * size + row, 28 + lane] = squares[2]
            if options.norm:
                send_sums(
                    *(gathered, gates, gathered_y, total, parts_s, meetings, 1, rank, inside, row, thread),
                    *(blocks, last_sent, tile),
                )
            if not head:
                finish_coefficients(
                    *(gathered, affine, pre_out, post_out, comb_out, first, rank, thread, tokens),
                    *(rms_eps, hc_eps, multiplier, iterations, tile),
                )
            if options.norm:
                meet(meetings[1])
            T.sync_threads()
            write_input(
                *(kept_s, gathered_y, norm, norm_eps, y, codes_out, scales_out, first, rank, thread),
                *(tokens, options, tile),
            )

    return mhc_coupled
