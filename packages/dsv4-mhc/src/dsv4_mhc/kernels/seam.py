# SPDX-License-Identifier: Apache-2.0
"""What the seam kernels share: the projection's pipeline, the cluster's exchange, coefficients, writing y.

Macros take TileLang's buffers as they are and allocate none in shared memory: which buffers live at the same
time is each kernel's own account. `rows` is the number of the projection's outputs, 24 or V4's head's 4; high
and low parts of its weights are stacked, so a product has twice as many rows, and 64 with padding.
"""

from __future__ import annotations

import tilelang.language as T

from dsv4_mhc.kernels.device import (
    BF16,
    FP32,
    load_row,
    load_streams,
    narrow,
    quantize_fp8,
    quantize_mxfp8,
    sigmoid,
    sinkhorn,
    store_remote,
    wait_products,
    widen,
)
from dsv4_mhc.plan import CHUNK, DEPTH, LANES, STREAMS, WGMMA_ROWS, Quant, SeamOptions, Tile

PARTIALS = 25
"""What a CTA contributes to a token: a place for each of 24 mixes, and the sum of squares last."""
GATE_PARTIALS = 5
"""What it contributes to a token's pre: four mixes and the sum of squares."""
WRITERS = 16
"""Threads that share a row when y is written: 256 contiguous bytes, and a group of FP8 scales."""


@T.macro
def load_weights(fn_s, fn, rank, batch, stage, rows: int, tile: Tile):
    """Start copying a batch's weights into a stage."""
    for g in T.unroll(tile.groups):
        T.async_copy(
            fn[rank * tile.chunks + batch * tile.groups + g, :, :],
            fn_s[stage, 0 : 2 * rows, g * DEPTH : (g + 1) * DEPTH],
        )


@T.macro
def start_weights(fn_s, fn, rank, rows: int, tile: Tile):
    """Start copying into every stage."""
    for s in range(tile.stages):
        load_weights(fn_s, fn, rank, s, s, rows, tile)


@T.macro
def pad_weights(fn_s, rows: int, tile: Tile):
    """Zero the rows that no weight fills."""
    for s, i, k in T.Parallel(tile.stages, WGMMA_ROWS - 2 * rows, tile.groups * DEPTH):
        fn_s[s, 2 * rows + i, k] = T.cast(0, BF16)


@T.macro
def load_batch(raw, residual, output, token, column, options: SeamOptions):
    """Start loading a thread's elements of the streams and, for the post map, of F."""
    load_streams(raw, residual, token, column)
    if options.post:
        load_row(raw, STREAMS, output, token, column)


@T.macro
def settle_weights(batch, tile: Tile):
    """Wait for a batch's weights; let the tensor cores see them and what this thread has stored.

    A fence between proxies waits for all that the thread has under way, loads and stores of global memory
    included: they are to begin after it, not before.
    """
    if batch + tile.stages <= tile.batches:
        T.ptx_wait_group((tile.stages - 1) * tile.groups)
    else:
        T.ptx_wait_group(0)
    T.fence_proxy_async()


@T.macro
def start_product(product, fn_s, operand, batch, tile: Tile):
    """Begin product += weights of a batch times its streams, both settled."""
    T.sync_threads()
    T.gemm(fn_s[batch % tile.stages, :, :], operand, product, transpose_B=True, annotations={"wg_wait": -1})


@T.macro
def finish_product(fn_s, fn, rank, batch, rows: int, tile: Tile):
    """End what `start_product` began, in all warpgroups; then the stage takes the next weights."""
    wait_products()
    T.sync_threads()
    if batch + tile.stages < tile.batches:
        load_weights(fn_s, fn, rank, batch + tile.stages, batch % tile.stages, rows, tile)


@T.macro
def send_partials(gathered, mixes_s, sums_s, part, rank, thread, rows: int, tile: Tile):
    """Every token's partial mixes and sum of squares to the CTA that finishes it, at the sender's place."""
    count = tile.tokens * PARTIALS
    for k in T.serial(-(-count // tile.threads)):
        item = k * tile.threads + thread
        token = item // PARTIALS
        part_number = item % PARTIALS
        if item < count:
            part[0] = sums_s[0, token]
            if part_number < rows:
                part[0] = mixes_s[part_number, token] + mixes_s[rows + part_number, token]
            store_remote(
                gathered[(rank * tile.owned + token % tile.owned) * PARTIALS + part_number],
                token // tile.owned,
                part[0],
            )


@T.macro
def send_gates(gathered, mixes_s, sums_s, part, rank, thread, rows: int, tile: Tile):
    """Every token's partial mixes of pre and sum of squares to every CTA, at the sender's place."""
    count = tile.cluster * tile.tokens * GATE_PARTIALS
    for k in T.serial(-(-count // tile.threads)):
        item = k * tile.threads + thread
        place = item % (tile.tokens * GATE_PARTIALS)
        token = place // GATE_PARTIALS
        number = place % GATE_PARTIALS
        if item < count:
            part[0] = sums_s[0, token]
            if number < STREAMS:
                part[0] = mixes_s[number, token] + mixes_s[rows + number, token]
            store_remote(
                gathered[rank * tile.tokens * GATE_PARTIALS + place],
                item // (tile.tokens * GATE_PARTIALS),
                part[0],
            )


@T.macro
def open_gates(pre_s, gathered, part, scale, base, thread, rms_eps, hc_eps, tile: Tile):
    """pre_s = pre of every token, from sums in CTA order: each CTA finds the same."""
    if thread < tile.tokens * STREAMS:
        part[0] = T.float32(0)
        part[1] = T.float32(0)
        for k in T.unroll(tile.cluster):
            place = (k * tile.tokens + thread // STREAMS) * GATE_PARTIALS
            part[0] = part[0] + gathered[place + thread % STREAMS]
            part[1] = part[1] + gathered[place + STREAMS]
        part[1] = T.rsqrt(part[1] * T.float32(1.0 / (STREAMS * tile.hidden)) + rms_eps)
        pre_s[thread] = sigmoid(part[0] * part[1] * scale[0] + base[thread % STREAMS]) + hc_eps


@T.macro
def find_logits(own, gathered, scale, base, token, lane, rms_eps, hc_eps, tile: Tile):
    """own[0] = pre, own[1] = the logit of post, own[2:6] = those of a comb row, from sums in CTA order.

    Four lanes have a token: each an element of pre and post and a row of comb.
    """
    for i in T.unroll(7):
        own[i] = T.float32(0)
    for k in T.unroll(tile.cluster):
        place = (k * tile.owned + token) * PARTIALS
        own[0] = own[0] + gathered[place + lane]
        own[1] = own[1] + gathered[place + 4 + lane]
        for i in T.unroll(STREAMS):
            own[2 + i] = own[2 + i] + gathered[place + 8 + 4 * lane + i]
        own[6] = own[6] + gathered[place + 24]
    own[6] = T.rsqrt(own[6] * T.float32(1.0 / (STREAMS * tile.hidden)) + rms_eps)
    own[0] = sigmoid(own[0] * own[6] * scale[0] + base[lane]) + hc_eps
    own[1] = own[1] * own[6] * scale[1] + base[4 + lane]
    for i in T.unroll(STREAMS):
        own[2 + i] = own[2 + i] * own[6] * scale[2] + base[8 + 4 * lane + i]


@T.macro
def finish_coefficients(
    own,
    work,
    gathered,
    scale,
    base,
    pre_out,
    post_out,
    comb_out,
    first,
    rank,
    thread,
    tokens,
    rms_eps,
    hc_eps,
    multiplier,
    iterations,
    tile: Tile,
):
    """Coefficients of the tokens that this CTA owns, to memory; the first warps' work."""
    if thread < -(-tile.owned * LANES // 32) * 32:
        lane = thread % LANES
        mine = T.min(thread // LANES, tile.owned - 1)
        token = first + rank * tile.owned + mine
        find_logits(own, gathered, scale, base, mine, lane, rms_eps, hc_eps, tile)
        sinkhorn(own, work, hc_eps, iterations)
        if token < tokens:
            pre_out[token, lane] = own[0]
            post_out[token, lane] = multiplier * sigmoid(own[1])
            for i in T.unroll(STREAMS):
                comb_out[token, lane, i] = own[2 + i]


@T.macro
def write_input(
    read,
    packed,
    mixed,
    total,
    part,
    codes,
    norm_weight,
    gathered_y,
    norm_eps,
    y,
    codes_out,
    scales_out,
    first,
    rank,
    thread,
    tokens,
    options: SeamOptions,
    tile: Tile,
):
    """Norm, quantise and write a CTA's part of y, a row by sixteen threads.

    `read(chunk, row, element)` is the place in shared memory where y waits, in BF16. Its sums of squares are
    added up in CTA order by every thread of a row: that costs less than to have one do it and wait for it.
    """
    inverse = T.alloc_local((1,), FP32)
    lane = thread % LANES
    rows_at_once = tile.threads // WRITERS
    for k in T.serial(tile.tokens // rows_at_once if tile.tokens >= rows_at_once else 1):
        line = T.min(k * rows_at_once + thread // WRITERS, tile.tokens - 1)
        kept = first + line < tokens
        target = T.min(first + line, tokens - 1)
        if options.norm:
            inverse[0] = T.float32(0)
            for i in T.unroll(tile.cluster):
                inverse[0] = inverse[0] + gathered_y[i * tile.tokens + line]
            inverse[0] = T.rsqrt(inverse[0] * T.float32(1.0 / tile.hidden) + norm_eps)
        for c in T.serial(-(-tile.chunks // 4)):
            within = c * 4 + thread % WRITERS // LANES
            chunk = T.min(within, tile.chunks - 1)
            place = (rank * tile.chunks + chunk) * CHUNK + lane * 8
            store = T.alloc_var("bool")
            store = kept and within < tile.chunks
            for v in T.vectorized(8):
                packed[0, v] = read(chunk, line, lane * 8 + v)
            if options.norm:
                widen(mixed, 0, packed, 0)
                for v in T.vectorized(8):
                    packed[0, v] = norm_weight[place + v]
                widen(total, 0, packed, 0)
                for v in T.unroll(8):
                    mixed[0, v] = mixed[0, v] * inverse[0] * total[0, v]
                narrow(packed, 0, mixed, 0)
            if options.y:
                if store:
                    for v in T.vectorized(8):
                        y[target, place + v] = packed[0, v]
            if options.quant is Quant.MXFP8:
                widen(mixed, 0, packed, 0)
                quantize_mxfp8(
                    codes, mixed, part, codes_out, scales_out, target, place, store, tile.hidden // 32
                )
            if options.quant is Quant.FP8:
                widen(mixed, 0, packed, 0)
                quantize_fp8(codes, mixed, part, codes_out, scales_out, target, place, store)
