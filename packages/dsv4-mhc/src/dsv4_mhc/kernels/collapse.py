# SPDX-License-Identifier: Apache-2.0
"""Collapse with given weights, with or without a post map before it and an RMSNorm after it.

V4.1's tail (post, collapse, final norm, and the streams only if somebody wants them) and the bare collapse.
One token a CTA: without a projection nothing is shared between tokens, and a row of y fits into registers. A
few tokens without norm get several CTAs each, because one SM would take as long as all of them to load a row.
"""

import tilelang.language as T

from dsv4_mhc.kernels.device import (
    BF16,
    E4M3,
    FP32,
    PRELUDE,
    add_row_squares,
    load_gains,
    load_row,
    load_streams,
    mix_streams,
    narrow,
    quantize_fp8,
    quantize_mxfp8,
    widen,
)
from dsv4_mhc.plan import CHUNK, LANES, STEP, STREAMS, Quant, SeamOptions, row_threads, slice_count


def build(hidden: int, options: SeamOptions, spread: bool = False):
    """The TileLang function for a hidden size and options; `spread`: several CTAs a token, without norm."""
    tokens = T.dynamic("tokens")
    scale_bytes = T.dynamic("scale_bytes")
    threads = row_threads(hidden)
    rounds = -(-hidden // (8 * threads))
    parts, rounds = (rounds, 1) if spread else (1, rounds)
    slices = slice_count(hidden)
    steps = hidden // slices // STEP
    quant = options.quant
    scale_shape = (scale_bytes,) if quant is Quant.MXFP8 else (tokens, hidden // 128)
    scale_dtype = "uint8" if quant is Quant.MXFP8 else FP32

    def present(used: bool, shape, dtype):
        return T.Tensor(shape, dtype) if used else T.Tensor((tokens, STREAMS, hidden), BF16)

    @T.prim_func
    def mhc_collapse(
        residual: T.Tensor((tokens, STREAMS, hidden), BF16),
        output: present(options.post, (tokens, hidden), BF16),
        post_in: present(options.post, (tokens, STREAMS), FP32),
        comb_in: present(options.post, (tokens, STREAMS, STREAMS), FP32),
        carried: T.Tensor((tokens, STREAMS), FP32),
        norm_weight: present(options.norm, (hidden,), BF16),
        residual_out: T.Tensor((tokens, STREAMS, hidden), BF16),
        y: present(options.y, (tokens, hidden), BF16),
        codes_out: present(quant is not Quant.NONE, (tokens, hidden), E4M3),
        scales_out: present(quant is not Quant.NONE, scale_shape, scale_dtype),
        mean_out: present(options.mean, (tokens, hidden), BF16),
        norm_eps: T.float32,
    ):
        with T.Kernel(tokens, parts, threads=threads, prelude=PRELUDE) as (token, block):
            thread = block * threads + T.get_thread_binding(0)
            squares_s = T.alloc_shared((slices * steps * LANES,), FP32)
            raw = T.alloc_local((STREAMS + 1, 8), BF16)
            packed = T.alloc_local((STREAMS, 8), BF16)
            kept = T.alloc_local((rounds, 8), BF16)
            mixed = T.alloc_local((1, 8), FP32)
            total = T.alloc_local((1, 8), FP32)
            mean = T.alloc_local((1, 8), FP32)
            codes = T.alloc_local((8,), E4M3)
            part = T.alloc_local((2,), FP32)
            post_gain = T.alloc_local((STREAMS,), FP32)
            pre_gain = T.alloc_local((STREAMS,), FP32)
            comb_gain = T.alloc_local((STREAMS * STREAMS,), FP32)
            squares = T.alloc_local((2,), FP32)

            for i in T.vectorized(STREAMS):
                pre_gain[i] = carried[token, i]
            if options.post:
                load_gains(post_gain, comb_gain, post_in, comb_in, token)
            for k in T.unroll(rounds):
                vector = k * threads + thread
                column = vector * 8
                squares[0] = T.float32(0)
                if column < hidden:
                    load_streams(raw, residual, token, column)
                    for v in T.unroll(8):
                        total[0, v] = T.float32(0)
                        mean[0, v] = T.float32(0)
                    if options.post:
                        load_row(raw, STREAMS, output, token, column)
                        mix_streams(packed, raw, post_gain, comb_gain)
                        if options.store_residual:
                            for j in T.unroll(STREAMS):
                                for v in T.vectorized(8):
                                    residual_out[token, j, column + v] = packed[j, v]
                    for j in T.unroll(STREAMS):
                        widen(mixed, 0, packed if options.post else raw, j)
                        for v in T.unroll(8):
                            total[0, v] = total[0, v] + pre_gain[j] * mixed[0, v]
                            mean[0, v] = mean[0, v] + mixed[0, v]
                    if options.mean:
                        for v in T.unroll(8):
                            mean[0, v] = mean[0, v] * T.float32(0.25)
                        narrow(packed, 0, mean, 0)
                        for v in T.vectorized(8):
                            mean_out[token, column + v] = packed[0, v]
                    narrow(kept, k, total, 0)
                    if options.norm:
                        if not options.exact_statistic:
                            widen(total, 0, kept, k)
                        add_row_squares(squares, 0, total)
                if options.norm:
                    squares[0] = squares[0] + T.shfl_xor(squares[0], LANES)
                    if column < hidden and vector // LANES % 2 == 0:
                        squares_s[vector // (2 * LANES) * LANES + vector % LANES] = squares[0]
            if options.norm:
                T.sync_threads()
                # Every warp adds up the steps' sums as a seam's cluster does: lanes of a slice, then slices.
                squares[0] = T.float32(0)
                for s in T.unroll(steps):
                    squares[0] = (
                        squares[0]
                        + squares_s[
                            (T.min(thread % 32 // LANES, slices - 1) * steps + s) * LANES + thread % LANES
                        ]
                    )
                squares[0] = squares[0] + T.shfl_xor(squares[0], 1)
                squares[0] = squares[0] + T.shfl_xor(squares[0], 2)
                squares[1] = T.float32(0)
                for s in T.unroll(slices):
                    squares[1] = squares[1] + T.shfl_sync(squares[0], s * LANES)
                squares[1] = T.rsqrt(squares[1] * T.float32(1.0 / hidden) + norm_eps)
            for k in T.unroll(rounds):
                store = T.alloc_var("bool")
                store = (k * threads + thread) * 8 < hidden
                column = T.min((k * threads + thread) * 8, hidden - 8)
                if options.norm:
                    widen(mixed, 0, kept, k)
                    for v in T.vectorized(8):
                        packed[0, v] = norm_weight[column + v]
                    widen(total, 0, packed, 0)
                    for v in T.unroll(8):
                        mixed[0, v] = mixed[0, v] * squares[1] * total[0, v]
                    narrow(kept, k, mixed, 0)
                if options.y:
                    if store:
                        for v in T.vectorized(8):
                            y[token, column + v] = kept[k, v]
                if quant is Quant.MXFP8:
                    widen(mixed, 0, kept, k)
                    quantize_mxfp8(
                        codes, mixed, part, codes_out, scales_out, token, column, store, hidden // CHUNK
                    )
                if quant is Quant.FP8:
                    widen(mixed, 0, kept, k)
                    quantize_fp8(codes, mixed, part, codes_out, scales_out, token, column, store)

    return mhc_collapse
