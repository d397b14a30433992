# SPDX-License-Identifier: Apache-2.0
"""What the seam kernels share.

A chunk's way through a warp, the weights' ring, the cluster's exchange, writing y.

A warp has eight tokens, four lanes each, a lane eight hidden elements of all streams at a time. That is how
the matrix instruction (mma.sync m16n8k16) wants its second operand, so the streams go from the post map into
the product in registers. Rejected: wgmma, whose operand lies in shared memory, written by these threads and
read through another proxy; each step then has a fence that waits for everything a thread has under way, the
next step's loads included.

The weights, the first operand, lie as the lanes want them (`dsv4_mhc.weights`). With many tokens a ring in
shared memory, filled by bulk copies, serves all warps of a slice. Loading them into registers takes more of
them than 16 warps of an SM can have: with 128 the compiler loads few at a time and waits for each. With few
tokens a warp has 170 and starts all its loads at once.

Sums are exchanged as each slice's, through distributed shared memory, and added up in the slices' order by
who needs them. Each CTA has an mbarrier for an exchange, completed by the bytes that others send. Rejected:
the cluster's barrier, whose release waits for all that a warp has stored in memory. A warp's sums of a step
go to registers if it has all steps of its slice, else to shared memory, where they are added up in the same
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tilelang.language as T

from dsv4_mhc.kernels.device import (
    BF16,
    FP32,
    add_row_squares,
    barrier_arrive,
    barrier_init,
    barrier_wait,
    barriers_ready,
    copied,
    copies_end,
    copies_wait,
    copy_async,
    expect,
    fetch_piece,
    load_once,
    mix_streams,
    narrow,
    project,
    quantize_fp8,
    quantize_mxfp8,
    reads_end,
    send,
    sigmoid,
    sinkhorn,
    warm_piece,
    widen,
)
from dsv4_mhc.plan import CHUNK, LANES, STEP, STREAMS, WARP_TOKENS, Quant, SeamOptions, Tile

PARTIALS = 25
"""What a slice contributes to a token: 24 mixes, and the sum of squares last."""
GATES = 5
"""What it contributes to a token's pre: four mixes and the sum of squares."""
PART_COLUMNS = 32
"""The same of a step while the squares are still four lanes' sums, and those of y behind them."""
BLOCK_ROWS = 8
"""Mixes that a matrix instruction finds, in high and low parts."""


@T.macro
def load_chunk(raw, residual, output, token, column, options: SeamOptions):
    """raw[0:4] = eight elements of each stream, raw[4] = of F if there is a post map."""
    for i in T.unroll(STREAMS):
        load_once(raw[i, 0], residual[token, i, column])
    if options.post:
        load_once(raw[STREAMS, 0], output[token, column])


@T.macro
def request_chunk(raw_s, residual, output, token, origin, number, thread, options: SeamOptions, tile: Tile):
    """Start copying a thread's elements of its warp's chunk of this number into its own place."""
    if number < 2 * tile.steps:
        column = origin + number * CHUNK + thread % LANES * 8
        for i in T.unroll(STREAMS):
            copy_async(raw_s[number % tile.depth, i, thread, 0], residual[token, i, column])
        if options.post:
            copy_async(raw_s[number % tile.depth, STREAMS, thread, 0], output[token, column])
    copies_end()


@T.macro
def receive_chunk(
    raw, raw_s, residual, output, token, origin, number, thread, options: SeamOptions, tile: Tile
):
    """Load the chunk of this number into raw, and request the one that takes its place.

    Each thread reads what it has copied itself: nobody waits for anybody.
    """
    request_chunk(raw_s, residual, output, token, origin, number + tile.depth - 1, thread, options, tile)
    copies_wait(tile.depth - 1)
    for i in T.unroll(STREAMS + 1 if options.post else STREAMS):
        copied(raw[i, 0], raw_s[number % tile.depth, i, thread, 0])


@T.macro
def finish_chunk(packed, raw, post_gain, comb_gain, residual_out, token, column, live, options: SeamOptions):
    """Find packed, the streams after the post map, which are also written."""
    if options.post:
        mix_streams(packed, raw, post_gain, comb_gain)
    else:
        for j in T.unroll(STREAMS):
            for v in T.vectorized(8):
                packed[j, v] = raw[j, v]
    if options.post and options.store_residual:
        if live:
            for j in T.unroll(STREAMS):
                for v in T.vectorized(8):
                    residual_out[token, j, column + v] = packed[j, v]


@T.macro
def warm_weights(fn, origin, turn, thread, blocks: int, tile: Tile):
    """Start fetching a warp's weights into the L2, where it loads them from there."""
    if tile.stages == 0:
        if thread % (32 * tile.groups) == 0:
            for i in T.unroll(-(-tile.steps // tile.parallel)):
                if i * tile.parallel + turn < tile.steps:
                    warm_piece(
                        fn[0, 0, 0, 0, 0], origin // STEP + i * tile.parallel + turn, STREAMS * blocks * 2048
                    )


@T.macro
def open_ring(full, empty, thread, tile: Tile):
    """Initialise the barriers of the weights' buffers."""
    if tile.stages > 0:
        if thread < tile.per_cta * tile.stages:
            barrier_init(full[thread], 1)
            barrier_init(empty[thread], tile.groups)
            barriers_ready()
        T.sync_threads()


@T.macro
def feed_ring(ring, full, fn, inside, chunk, number, blocks: int, tile: Tile):
    """Start copying the weights of a slice's chunk of this number; one lane's work."""
    slot = inside * tile.stages + number % tile.stages
    # Not fn[chunk, ...]: TileLang 0.1.15 fails on the address of an element whose index it finds aligned.
    fetch_piece(ring[slot, 0], fn[inside, 0, 0, 0, 0], chunk - inside, STREAMS * blocks * 1024, full[slot])


@T.macro
def fill_ring(ring, full, fn, inside, origin, thread, blocks: int, tile: Tile):
    """Start copying the first chunks' weights."""
    if tile.stages > 0:
        if thread % (32 * tile.groups) == 0:
            for number in T.unroll(min(tile.stages - 1, 2 * tile.steps)):
                feed_ring(ring, full, fn, inside, origin // CHUNK + number, number, blocks, tile)


@T.macro
def refill_ring(ring, full, empty, fn, inside, origin, number, thread, blocks: int, tile: Tile):
    """Before chunk `number`, start copying one that takes the place of the chunk before."""
    if tile.stages > 0:
        if thread % (32 * tile.groups) == 0:
            later = number + tile.stages - 1
            if later < 2 * tile.steps:
                if later >= tile.stages:
                    barrier_wait(
                        empty[inside * tile.stages + later % tile.stages], (later // tile.stages - 1) % 2
                    )
                feed_ring(ring, full, fn, inside, origin // CHUNK + later, later, blocks, tile)


@T.macro
def project_chunk(product, packed, fn, chunk, place, blocks: int):
    """Add to product: weights of a chunk times its streams; `place` is the thread within its warp."""
    for j in T.unroll(STREAMS):
        project(product[0], packed[j, 0], fn[chunk, j, 0, 0, place * 8], blocks)


@T.macro
def project_ringed(
    product, packed, fn, ring, full, empty, inside, chunk, number, place, blocks: int, tile: Tile
):
    """The same with the weights in the ring, if there is one; `number` is the chunk's of its slice."""
    if tile.stages > 0:
        slot = inside * tile.stages + number % tile.stages
        barrier_wait(full[slot], number // tile.stages % 2)
        # Lanes leave that loop one by one, and the products need them together.
        T.sync_warp()
        for j in T.unroll(STREAMS):
            project(product[0], packed[j, 0], ring[slot, j * blocks * 512 + place * 8], blocks)
        reads_end()
        T.sync_warp()
        if place == 0:
            barrier_arrive(empty[slot])
    else:
        project_chunk(product, packed, fn, chunk, place, blocks)


@T.macro
def collapse_chunk(result, squares, packed, mean_out, pre_gain, token, column, live, options: SeamOptions):
    """Add squares of the streams to squares[0:2], write their mean; result = their weighted sum in BF16.

    squares[2] gets the squares of that sum.
    """
    mixed = T.alloc_local((1, 8), FP32)
    total = T.alloc_local((1, 8), FP32)
    mean = T.alloc_local((1, 8), FP32)
    for v in T.unroll(8):
        total[0, v] = T.float32(0)
        mean[0, v] = T.float32(0)
    for j in T.unroll(STREAMS):
        widen(mixed, 0, packed, j)
        for v in T.unroll(8):
            squares[v % 2] = squares[v % 2] + mixed[0, v] * mixed[0, v]
            if options.collapse:
                total[0, v] = total[0, v] + pre_gain[j] * mixed[0, v]
            if options.mean:
                mean[0, v] = mean[0, v] + mixed[0, v]
    if options.mean:
        for v in T.unroll(8):
            mean[0, v] = mean[0, v] * T.float32(0.25)
        narrow(result, 0, mean, 0)
        if live:
            for v in T.vectorized(8):
                mean_out[token, column + v] = result[0, v]
    if options.collapse:
        narrow(result, 0, total, 0)
        if options.norm:
            if not options.exact_statistic:
                widen(total, 0, result, 0)
            add_row_squares(squares, 2, total)


@T.macro
def keep(kept_s, chunk, stream, row, lane, packed, slot):
    """Leave a thread's elements of a chunk in shared memory.

    Two halves of a 128-byte line trade places on odd chunks, so that neither these writes nor reads of whole
    rows later meet in a bank.
    """
    for v in T.vectorized(8):
        kept_s[chunk, stream, row ^ (chunk % 2), lane * 8 + v] = packed[slot, v]


@T.macro
def fetch(packed, slot, kept_s, chunk, stream, row, lane):
    """What `keep` left."""
    for v in T.vectorized(8):
        packed[slot, v] = kept_s[chunk, stream, row ^ (chunk % 2), lane * 8 + v]


@T.macro
def end_step(total, parts_s, product, squares, inside, step, row, place, blocks: int, tile: Tile):
    """Add a step's sums to the thread's, or leave them in shared memory if warps share the slice.

    total[2 b + i]: mix 8 b + place / 4 of the warp's token 2 (place % 4) + i; then the thread's squares of
    the streams and of y.
    """
    if tile.parallel == 1:
        for b in T.unroll(blocks):
            for i in T.unroll(2):
                total[2 * b + i] = total[2 * b + i] + (product[4 * b + i] + product[4 * b + 2 + i])
        total[2 * blocks] = total[2 * blocks] + (squares[0] + squares[1])
        total[2 * blocks + 1] = total[2 * blocks + 1] + squares[2]
    else:
        line = (inside * tile.steps + step) * tile.tokens
        for b in T.unroll(blocks):
            for i in T.unroll(2):
                token = row // WARP_TOKENS * WARP_TOKENS + place % LANES * 2 + i
                parts_s[line + token, b * BLOCK_ROWS + place // LANES] = (
                    product[4 * b + i] + product[4 * b + 2 + i]
                )
        parts_s[line + row, 24 + place % LANES] = squares[0] + squares[1]
        parts_s[line + row, 28 + place % LANES] = squares[2]


@dataclass(frozen=True)
class Sent:
    """Which sums CTAs of a cluster exchange at a time.

    Attributes:
        mixes: All mixes and the sum of squares, to the CTA that finishes the token.
        gates: The mixes of pre and the sum of squares, to every CTA.
        squares: The squares of y, to every CTA.
    """

    mixes: bool = False
    gates: bool = False
    squares: bool = False

    def bytes(self, tile: Tile) -> int:
        """What a CTA gets, of all slices."""
        rows = self.gates * GATES + self.squares
        return 4 * tile.slices * (self.mixes * PARTIALS * tile.owned + rows * tile.tokens)


@T.macro
def open_meetings(meetings, sizes: Sequence[int], thread):
    """Initialise the barriers of the cluster's one or two exchanges; so many bytes complete each, once.

    The others send after a barrier of the cluster that this CTA arrives at afterwards.
    """
    if thread == 0:
        for which in T.unroll(len(sizes)):
            barrier_init(meetings[which], 1)
        barriers_ready()
        expect(meetings[0], sizes[0])
        if len(sizes) > 1:
            expect(meetings[1], sizes[1])


@T.macro
def send_sums(
    gathered,
    gates,
    gathered_y,
    total,
    parts_s,
    meetings,
    which: int,
    rank,
    inside,
    row,
    thread,
    blocks: int,
    sent: Sent,
    tile: Tile,
):
    """A CTA's sums of its slices to where they are added up in the slices' order; tells a meeting of them."""
    if tile.parallel == 1:
        place = thread % 32
        slot = rank * tile.per_cta + inside
        if sent.mixes or sent.gates:
            for b in T.unroll(blocks):
                for i in T.unroll(2):
                    token = row // WARP_TOKENS * WARP_TOKENS + place % LANES * 2 + i
                    mix = b * BLOCK_ROWS + place // LANES
                    if sent.mixes:
                        send(
                            gathered[(slot * tile.owned + token % tile.owned) * PARTIALS + mix],
                            token // tile.owned,
                            total[2 * b + i],
                            meetings[which],
                        )
                    if sent.gates:
                        if mix < STREAMS:
                            for c in T.unroll(tile.cluster):
                                send(
                                    gates[(slot * tile.tokens + token) * GATES + mix],
                                    c,
                                    total[2 * b + i],
                                    meetings[which],
                                )
            total[2 * blocks] = total[2 * blocks] + T.shfl_xor(total[2 * blocks], 1)
            total[2 * blocks] = total[2 * blocks] + T.shfl_xor(total[2 * blocks], 2)
            if sent.mixes:
                if place % LANES == 0:
                    send(
                        gathered[(slot * tile.owned + row % tile.owned) * PARTIALS + 24],
                        row // tile.owned,
                        total[2 * blocks],
                        meetings[which],
                    )
            if sent.gates:
                for c in T.unroll(-(-tile.cluster // LANES)):
                    if c * LANES + place % LANES < tile.cluster:
                        send(
                            gates[(slot * tile.tokens + row) * GATES + 4],
                            c * LANES + place % LANES,
                            total[2 * blocks],
                            meetings[which],
                        )
        if sent.squares:
            total[2 * blocks + 1] = total[2 * blocks + 1] + T.shfl_xor(total[2 * blocks + 1], 1)
            total[2 * blocks + 1] = total[2 * blocks + 1] + T.shfl_xor(total[2 * blocks + 1], 2)
            for c in T.unroll(-(-tile.cluster // LANES)):
                if c * LANES + place % LANES < tile.cluster:
                    send(
                        gathered_y[slot * tile.tokens + row],
                        c * LANES + place % LANES,
                        total[2 * blocks + 1],
                        meetings[which],
                    )
    else:
        count = tile.per_cta * tile.tokens * PART_COLUMNS
        T.sync_threads()
        for k in T.serial(-(-count // tile.threads)):
            item = k * tile.threads + thread
            if item < count:
                column = item % PART_COLUMNS
                token = item // PART_COLUMNS % tile.tokens
                part = item // PART_COLUMNS // tile.tokens
                slot = rank * tile.per_cta + part
                total[0] = T.float32(0)
                for s in T.unroll(tile.steps):
                    total[0] = total[0] + parts_s[(part * tile.steps + s) * tile.tokens + token, column]
                total[1] = total[0] + T.shfl_xor(total[0], 1)
                total[1] = total[1] + T.shfl_xor(total[1], 2)
                total[0] = T.if_then_else(column < 24, total[0], total[1])
                if sent.mixes:
                    if column <= 24:
                        send(
                            gathered[(slot * tile.owned + token % tile.owned) * PARTIALS + column],
                            token // tile.owned,
                            total[0],
                            meetings[which],
                        )
                if sent.gates:
                    if column < STREAMS or column == 24:
                        for c in T.unroll(tile.cluster):
                            send(
                                gates[(slot * tile.tokens + token) * GATES + T.min(column, STREAMS)],
                                c,
                                total[0],
                                meetings[which],
                            )
                if sent.squares:
                    for c in T.unroll(-(-tile.cluster // LANES)):
                        if column >= 28 and c * LANES + column % LANES < tile.cluster:
                            send(
                                gathered_y[slot * tile.tokens + token],
                                c * LANES + column % LANES,
                                total[0],
                                meetings[which],
                            )


AFFINE = 9
"""What turns a lane's mixes into logits: three scales; of base an entry of pre and of post, a row of comb."""


@T.macro
def load_affine(affine, scale, base, lane, head: bool):
    """Load a lane's part, or what `open_gates` needs of it, ahead of the barrier that its use is behind."""
    affine[0] = scale[0]
    affine[3] = base[lane]
    if not head:
        affine[1] = scale[1]
        affine[2] = scale[2]
        affine[4] = base[4 + lane]
        for i in T.unroll(STREAMS):
            affine[5 + i] = base[8 + 4 * lane + i]


@T.macro
def open_gates(pre_gain, gates, affine, row, lane, rms_eps, hc_eps, tile: Tile):
    """pre_gain = pre of a thread's token: four lanes find one each, as `finish_coefficients` does."""
    own = T.alloc_local((2,), FP32)
    own[0] = T.float32(0)
    own[1] = T.float32(0)
    for k in T.unroll(tile.slices):
        own[0] = own[0] + gates[(k * tile.tokens + row) * GATES + lane]
        own[1] = own[1] + gates[(k * tile.tokens + row) * GATES + STREAMS]
    own[1] = T.rsqrt(own[1] * T.float32(1.0 / (STREAMS * tile.hidden)) + rms_eps)
    own[0] = sigmoid(own[0] * own[1] * affine[0] + affine[3]) + hc_eps
    for j in T.unroll(STREAMS):
        pre_gain[j] = T.shfl_sync(own[0], j, STREAMS)


@T.macro
def find_logits(own, gathered, affine, token, lane, rms_eps, tile: Tile):
    """Logits of a token: own[0] of pre, own[1] of post, own[2:6] of a comb row; in the slices' order."""
    for i in T.unroll(7):
        own[i] = T.float32(0)
    for k in T.unroll(tile.slices):
        own[0] = own[0] + gathered[(k * tile.owned + token) * PARTIALS + lane]
        own[1] = own[1] + gathered[(k * tile.owned + token) * PARTIALS + 4 + lane]
        for i in T.unroll(STREAMS):
            own[2 + i] = own[2 + i] + gathered[(k * tile.owned + token) * PARTIALS + 8 + 4 * lane + i]
        own[6] = own[6] + gathered[(k * tile.owned + token) * PARTIALS + 24]
    own[6] = T.rsqrt(own[6] * T.float32(1.0 / (STREAMS * tile.hidden)) + rms_eps)
    own[0] = own[0] * own[6] * affine[0] + affine[3]
    own[1] = own[1] * own[6] * affine[1] + affine[4]
    for i in T.unroll(STREAMS):
        own[2 + i] = own[2 + i] * own[6] * affine[2] + affine[5 + i]


@T.macro
def finish_coefficients(
    gathered,
    affine,
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
        own = T.alloc_local((7,), FP32)
        lane = thread % LANES
        mine = T.min(thread // LANES, tile.owned - 1)
        token = first + rank * tile.owned + mine
        find_logits(own, gathered, affine, mine, lane, rms_eps, tile)
        sinkhorn(own, lane, hc_eps, iterations)
        if token < tokens:
            pre_out[token, lane] = sigmoid(own[0]) + hc_eps
            post_out[token, lane] = multiplier * sigmoid(own[1])
            for i in T.unroll(STREAMS):
                comb_out[token, lane, i] = own[2 + i]


def writing(tile: Tile) -> tuple[int, int, int]:
    """How a CTA writes y: rows at once, threads of a row, vectors of eight that each of them has of a row."""
    rows = min(tile.tokens, tile.threads // 16)
    writers = 1 << ((tile.threads // rows).bit_length() - 1)
    return rows, writers, -(-tile.chunks * LANES // writers)


@T.macro
def load_norm(norm, norm_weight, rank, thread, options: SeamOptions, tile: Tile):
    """Load a thread's part of the norm's weight, the same for each of its rows, ahead of the last barrier."""
    if options.norm:
        for c in T.unroll(writing(tile)[2]):
            within = c * (writing(tile)[1] // LANES) + thread % writing(tile)[1] // LANES
            chunk = T.min(within, tile.chunks - 1)
            for v in T.vectorized(8):
                norm[c, v] = norm_weight[(rank * tile.chunks + chunk) * CHUNK + thread % LANES * 8 + v]


@T.macro
def write_input(
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
    tokens,
    options: SeamOptions,
    tile: Tile,
):
    """Norm, quantise and write a CTA's part of y, which waits in shared memory as stream 0."""
    packed = T.alloc_local((1, 8), BF16)
    mixed = T.alloc_local((1, 8), FP32)
    gain = T.alloc_local((1, 8), FP32)
    codes = T.alloc_local((8,), "float8_e4m3fn")
    part = T.alloc_local((2,), FP32)
    inverse = T.alloc_local((1,), FP32)
    lane = thread % LANES
    rows_at_once, writers, vectors = writing(tile)
    worker = T.min(thread // writers, rows_at_once - 1)
    for k in T.serial(-(-tile.tokens // rows_at_once)):
        line = T.min(k * rows_at_once + worker, tile.tokens - 1)
        kept = first + line < tokens
        target = T.min(first + line, tokens - 1)
        if options.norm:
            inverse[0] = T.float32(0)
            for i in T.unroll(tile.slices):
                inverse[0] = inverse[0] + gathered_y[i * tile.tokens + line]
            inverse[0] = T.rsqrt(inverse[0] * T.float32(1.0 / tile.hidden) + norm_eps)
        for c in T.unroll(vectors):
            within = c * (writers // LANES) + thread % writers // LANES
            chunk = T.min(within, tile.chunks - 1)
            place = (rank * tile.chunks + chunk) * CHUNK + lane * 8
            store = T.alloc_var("bool")
            store = kept and within < tile.chunks and thread // writers < rows_at_once
            fetch(packed, 0, kept_s, chunk, 0, line, lane)
            if options.norm:
                widen(mixed, 0, packed, 0)
                widen(gain, 0, norm, c)
                for v in T.unroll(8):
                    mixed[0, v] = mixed[0, v] * inverse[0] * gain[0, v]
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
