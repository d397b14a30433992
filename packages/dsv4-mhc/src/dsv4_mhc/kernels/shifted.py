# SPDX-License-Identifier: Apache-2.0
"""V4.1's seam in one pass: post, projection and sum of squares, collapse with the carried pre, RMSNorm.

Each residual element is read once and written once, each output element read once, each input element written
once: 10 H BF16 a token, as the V4.1 report counts for its single-pass form. Nothing of y depends on this
seam's projection, so y is only waiting for its own mean of squares; it waits in shared memory, in BF16.

A warp loads a chunk while it works on the one before: four streams and F of eight elements a lane. The
cluster meets once, when every CTA has its sums; then the first warps run Sinkhorn while all others write y.

Without the collapse the kernel is the first launch of V4's seam with many tokens (`plan.coupled_form`).
"""

import tilelang.language as T

from dsv4_mhc.kernels.device import (
    BF16,
    E4M3,
    FP32,
    PRELUDE,
    cluster_arrive_relaxed,
    cluster_wait,
    grid_wait,
    load_gains,
    meet,
)
from dsv4_mhc.kernels.seam import (
    AFFINE,
    PARTIALS,
    Sent,
    collapse_chunk,
    end_step,
    fill_ring,
    finish_chunk,
    finish_coefficients,
    keep,
    load_affine,
    load_chunk,
    load_norm,
    open_meetings,
    open_ring,
    project_ringed,
    receive_chunk,
    refill_ring,
    request_chunk,
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

ROWS = 24
BLOCKS = 3


def build(tile: Tile, options: SeamOptions):
    """The TileLang function for a tile and options."""
    tokens = T.dynamic("tokens")
    scale_bytes = T.dynamic("scale_bytes")
    hidden, size, cluster, threads = tile.hidden, tile.tokens, tile.cluster, tile.threads
    parallel, steps, groups = tile.parallel, tile.steps, tile.groups
    resident = resident_ctas(Kernel.SHIFTED if options.collapse else Kernel.PROJECT, tile)

    def streams():
        return T.Tensor((tokens, STREAMS, hidden), BF16)

    def present(used: bool, shape, dtype):
        return T.Tensor(shape, dtype) if used else streams()

    sent = Sent(mixes=True, squares=options.norm and options.collapse)
    quant = options.quant
    scale_shape = (scale_bytes,) if quant is Quant.MXFP8 else (tokens, hidden // 128)
    scale_dtype = "uint8" if quant is Quant.MXFP8 else FP32

    @T.prim_func
    def mhc_shifted(
        residual: streams(),
        output: present(options.post, (tokens, hidden), BF16),
        post_in: present(options.post, (tokens, STREAMS), FP32),
        comb_in: present(options.post, (tokens, STREAMS, STREAMS), FP32),
        carried: present(options.collapse, (tokens, STREAMS), FP32),
        fn: T.Tensor((hidden // CHUNK, STREAMS, BLOCKS, 2, 256), BF16),
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
            place = thread % 32
            lane = thread % LANES
            row = thread // 32 % groups * WARP_TOKENS + place // LANES
            inside = thread // (32 * groups * parallel)
            turn = thread // (32 * groups) % parallel
            origin = (rank * tile.per_cta + inside) * steps * STEP
            live = first + row < tokens
            token = T.min(first + row, tokens - 1)

            kept_s = T.alloc_shared((tile.chunks if options.collapse else 1, 1, size, CHUNK), BF16)
            parts_s = T.alloc_shared((max(1, tile.parts * tile.per_cta * size), 32), FP32)
            gathered = T.alloc_shared((tile.slices * tile.owned * PARTIALS,), FP32)
            gathered_y = T.alloc_shared((tile.slices * size,), FP32)
            meetings = T.alloc_shared((1,), "int64")

            ring = T.alloc_shared((max(1, tile.per_cta * tile.stages), STREAMS * BLOCKS * 512), BF16)
            full = T.alloc_shared((max(1, tile.per_cta * tile.stages),), "int64")
            empty = T.alloc_shared((max(1, tile.per_cta * tile.stages),), "int64")

            raw_s = T.alloc_shared((max(1, tile.depth), STREAMS + 1, threads if tile.depth else 1, 8), BF16)
            raw = T.alloc_local((STREAMS + 1, 8), BF16)
            later = T.alloc_local((STREAMS + 1, 8), BF16)
            packed = T.alloc_local((STREAMS, 8), BF16)
            result = T.alloc_local((1, 8), BF16)
            product = T.alloc_local((4 * BLOCKS,), FP32)
            squares = T.alloc_local((3,), FP32)
            total = T.alloc_local((2 * BLOCKS + 2,), FP32)
            post_gain = T.alloc_local((STREAMS,), FP32)
            pre_gain = T.alloc_local((STREAMS,), FP32)
            comb_gain = T.alloc_local((STREAMS * STREAMS,), FP32)
            affine = T.alloc_local((AFFINE,), FP32)
            norm = T.alloc_local((writing(tile)[2], 8), BF16)

            warm_weights(fn, origin, turn, thread, BLOCKS, tile)
            grid_wait()
            if tile.depth:
                for number in T.unroll(tile.depth - 1):
                    request_chunk(raw_s, residual, output, token, origin, number, thread, options, tile)
            else:
                load_chunk(raw, residual, output, token, origin + turn * STEP + lane * 8, options)
            open_meetings(meetings, (sent.bytes(tile),), thread)
            open_ring(full, empty, thread, tile)
            fill_ring(ring, full, fn, inside, origin, thread, BLOCKS, tile)
            cluster_arrive_relaxed()
            if options.collapse:
                for i in T.vectorized(STREAMS):
                    pre_gain[i] = carried[token, i]
            if options.post:
                load_gains(post_gain, comb_gain, post_in, comb_in, token)
            for i in T.unroll(2 * BLOCKS + 2):
                total[i] = T.float32(0)
            for i in T.serial(-(-steps // parallel)):
                step = i * parallel + turn
                column = origin + step * STEP + lane * 8
                chunk = (inside * steps + step) * 2
                if step < steps:
                    for k in T.unroll(4 * BLOCKS):
                        product[k] = T.float32(0)
                    for k in T.unroll(3):
                        squares[k] = T.float32(0)
                    refill_ring(ring, full, empty, fn, inside, origin, 2 * i, thread, BLOCKS, tile)
                    if tile.depth:
                        receive_chunk(
                            raw, raw_s, residual, output, token, origin, 2 * i, thread, options, tile
                        )
                    else:
                        load_chunk(later, residual, output, token, column + CHUNK, options)
                    finish_chunk(
                        packed, raw, post_gain, comb_gain, residual_out, token, column, live, options
                    )
                    project_ringed(
                        *(product, packed, fn, ring, full, empty, inside, column // CHUNK, 2 * i, place),
                        *(BLOCKS, tile),
                    )
                    collapse_chunk(result, squares, packed, mean_out, pre_gain, token, column, live, options)
                    if options.collapse:
                        keep(kept_s, chunk, 0, row, lane, result, 0)
                    refill_ring(ring, full, empty, fn, inside, origin, 2 * i + 1, thread, BLOCKS, tile)
                    if tile.depth:
                        receive_chunk(
                            later, raw_s, residual, output, token, origin, 2 * i + 1, thread, options, tile
                        )
                    elif step + parallel < steps:
                        load_chunk(raw, residual, output, token, column + parallel * STEP, options)
                    finish_chunk(
                        *(packed, later, post_gain, comb_gain, residual_out, token, column + CHUNK, live),
                        options,
                    )
                    project_ringed(
                        *(product, packed, fn, ring, full, empty, inside, column // CHUNK + 1, 2 * i + 1),
                        *(place, BLOCKS, tile),
                    )
                    collapse_chunk(
                        result, squares, packed, mean_out, pre_gain, token, column + CHUNK, live, options
                    )
                    if options.collapse:
                        keep(kept_s, chunk + 1, 0, row, lane, result, 0)
                    end_step(total, parts_s, product, squares, inside, step, row, place, BLOCKS, tile)

            load_affine(affine, scale, base, lane, False)
            if options.collapse:
                load_norm(norm, norm_weight, rank, thread, options, tile)
            cluster_wait()
            send_sums(
                *(gathered, gathered, gathered_y, total, parts_s, meetings, 0, rank, inside, row, thread),
                *(BLOCKS, sent, tile),
            )
            meet(meetings[0])
            finish_coefficients(
                *(gathered, affine, pre_out, post_out, comb_out, first, rank, thread, tokens),
                *(rms_eps, hc_eps, multiplier, iterations, tile),
            )
            if options.collapse:
                T.sync_threads()
                write_input(
                    *(
                        kept_s,
                        gathered_y,
                        norm,
                        norm_eps,
                        y,
                        codes_out,
                        scales_out,
                        first,
                        rank,
                        thread,
                    ),
                    *(tokens, options, tile),
                )

    return mhc_shifted
