# SPDX-License-Identifier: Apache-2.0
"""What the kernels share: vectors of eight BF16, the arithmetic of a seam, sums over a cluster, coefficients.

Thread-level code inside TileLang: these kernels need to say which thread has which element, because the order
of every sum is part of their contract, and tile operators leave that to layout inference. The tensor-core
product alone is a tile operator (`T.gemm`).

Escapes from TileLang, all in `PRELUDE`: a store into another CTA's shared memory (TileLang has it for bulk
copies only), and the approximate reciprocal (1 ulp, PTX ISA 9.7.3.13) and power of two (9.7.3.21), which
Sinkhorn's 160 divisions per row of four and the gates are made of; TileLang offers them for a whole module
only.

A buffer that other CTAs of the cluster write is first written by its owner, before the cluster barrier that
precedes their writes ("claimed"). TileLang lets buffers share memory when their uses do not overlap in
program order, and knows nothing of uses from outside; the claim puts the buffer into program order early
enough.
"""

from __future__ import annotations

import tilelang.language as T

from dsv4_mhc.plan import LANES, STREAMS, Tile

BF16 = "bfloat16"
FP32 = "float32"
E4M3 = "float8_e4m3fn"

FINITE_MAX = 3.4028234663852886e38

PRELUDE = r"""
__device__ __forceinline__ void dsv4_store_remote(float* address, int rank, float value) {
  unsigned local = static_cast<unsigned>(__cvta_generic_to_shared(address)), remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(remote), "f"(value) : "memory");
}
__device__ __forceinline__ float dsv4_reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float dsv4_exp(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}
"""


def reciprocal(x):
    """1 / x to 1 ulp."""
    return T.call_extern(FP32, "dsv4_reciprocal", x)


def exponential(x):
    """exp(x) with a relative error of about 2^-22 + |x| 2^-24.

    Both uses weigh that by the result, so what reaches a gate or a row of weights is below 2e-7.
    """
    return T.call_extern(FP32, "dsv4_exp", x)


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return T.float32(1) / (T.float32(1) + exponential(-x))


def store_remote(element, rank, value):
    """Write `value` to the place of `element`, a shared FP32 buffer's element, in the CTA `rank`."""
    return T.call_extern("handle", "dsv4_store_remote", T.address_of(element), rank, value)


@T.macro
def load_streams(raw, residual, token, column):
    """raw[0:4] = eight elements of each stream."""
    for i in T.unroll(STREAMS):
        for v in T.vectorized(8):
            raw[i, v] = residual[token, i, column + v]


@T.macro
def load_row(raw, slot, source, token, column):
    """raw[slot] = eight elements of a row."""
    for v in T.vectorized(8):
        raw[slot, v] = source[token, column + v]


@T.macro
def widen(wide, slot, raw, source):
    """wide[slot] = raw[source] in FP32."""
    for v in T.vectorized(8):
        wide[slot, v] = T.cast(raw[source, v], FP32)


@T.macro
def narrow(raw, slot, wide, source):
    """raw[slot] = wide[source] rounded to BF16."""
    for v in T.vectorized(8):
        raw[slot, v] = T.cast(wide[source, v], BF16)


@T.macro
def load_gains(post_gain, comb_gain, post, comb, token):
    """A token's post and comb coefficients."""
    for i in T.vectorized(STREAMS):
        post_gain[i] = post[token, i]
    for j in T.unroll(STREAMS):
        for i in T.vectorized(STREAMS):
            comb_gain[STREAMS * j + i] = comb[token, j, i]


@T.macro
def mix_streams(packed, raw, post_gain, comb_gain):
    """packed[0:4] = post F + sum of comb X for each target stream; raw[0:4] are the streams, raw[4] is F.

    In halves of four elements, so that what is widened is never all of it: registers are what limits CTAs.
    """
    wide = T.alloc_local((STREAMS + 1, 4), FP32)
    mixed = T.alloc_local((4,), FP32)
    for half in T.unroll(2):
        for i in T.unroll(STREAMS + 1):
            for v in T.vectorized(4):
                wide[i, v] = T.cast(raw[i, half * 4 + v], FP32)
        for j in T.unroll(STREAMS):
            for v in T.unroll(4):
                mixed[v] = post_gain[j] * wide[STREAMS, v]
                for i in T.unroll(STREAMS):
                    mixed[v] = mixed[v] + comb_gain[STREAMS * i + j] * wide[i, v]
            for v in T.vectorized(4):
                packed[j, half * 4 + v] = T.cast(mixed[v], BF16)


@T.macro
def add_squares(total, slot, wide, source):
    """total[slot] += squares of wide[source], element by element."""
    for v in T.unroll(8):
        total[slot] = total[slot] + wide[source, v] * wide[source, v]


@T.macro
def add_to_class(sums, part, batch, tile: Tile):
    """Add a batch's part to its class of chunk numbers modulo 4; a thread has the classes of its group."""
    for q in T.unroll(tile.slots):
        sums[q] = sums[q] + T.if_then_else(batch % tile.slots == q, part, T.float32(0))


@T.macro
def fold_classes(total, slot, sums, tile: Tile):
    """total[slot] = sum over classes, groups and lanes, in one order whatever the number of groups."""
    if tile.groups == 1:
        total[slot] = (sums[0] + sums[1]) + (sums[2] + sums[3])
    elif tile.groups == 2:
        for q in T.unroll(2):
            sums[q] = sums[q] + T.shfl_xor(sums[q], LANES)
        total[slot] = sums[0] + sums[1]
    else:
        total[slot] = sums[0] + T.shfl_xor(sums[0], LANES)
        total[slot] = total[slot] + T.shfl_xor(total[slot], 2 * LANES)
    total[slot] = total[slot] + T.shfl_xor(total[slot], 1)
    total[slot] = total[slot] + T.shfl_xor(total[slot], 2)


@T.macro
def claim(buffer, elements, thread, tile: Tile):
    """First write of a flat FP32 buffer that other CTAs write after the next cluster barrier."""
    for k in T.serial(-(-elements // tile.threads)):
        if k * tile.threads + thread < elements:
            buffer[k * tile.threads + thread] = T.float32(0)


@T.macro
def coefficient_logits(own, gathered, scale, base, token, lane, rms_eps, tile: Tile):
    """Logits of a token: own[0] of pre, own[1] of post, own[2:6] of a comb row; summed in CTA order."""
    own[6] = T.float32(0)
    for i in T.unroll(6):
        own[i] = T.float32(0)
    for k in T.unroll(tile.cluster):
        own[0] = own[0] + gathered[(k * tile.owned + token) * 25 + lane]
        own[1] = own[1] + gathered[(k * tile.owned + token) * 25 + 4 + lane]
        for i in T.unroll(STREAMS):
            own[2 + i] = own[2 + i] + gathered[(k * tile.owned + token) * 25 + 8 + 4 * lane + i]
        own[6] = own[6] + gathered[(k * tile.owned + token) * 25 + 24]
    own[6] = T.rsqrt(own[6] * T.float32(1.0 / (STREAMS * tile.hidden)) + rms_eps)
    own[0] = own[0] * own[6] * scale[0] + base[lane]
    own[1] = own[1] * own[6] * scale[1] + base[4 + lane]
    for i in T.unroll(STREAMS):
        own[2 + i] = own[2 + i] * own[6] * scale[2] + base[8 + 4 * lane + i]


@T.macro
def columns(own, sums, eps):
    """One column step: four lanes have a row each."""
    for i in T.unroll(STREAMS):
        sums[i] = own[2 + i] + T.shfl_xor(own[2 + i], 1)
        sums[i] = sums[i] + T.shfl_xor(sums[i], 2)
        own[2 + i] = own[2 + i] * reciprocal(sums[i] + eps)


@T.macro
def sinkhorn(own, sums, eps, iterations):
    """Logits own[2:6] of a row to the row of the matrix, with the rows of the other three lanes."""
    sums[0] = T.max(T.max(own[2], own[3]), T.max(own[4], own[5]))
    for i in T.unroll(STREAMS):
        own[2 + i] = exponential(own[2 + i] - sums[0])
    sums[0] = reciprocal((own[2] + own[3]) + (own[4] + own[5]))
    for i in T.unroll(STREAMS):
        own[2 + i] = own[2 + i] * sums[0] + eps
    columns(own, sums, eps)
    for _ in T.serial(iterations - 1):
        sums[0] = reciprocal((own[2] + own[3]) + (own[4] + own[5]) + eps)
        for i in T.unroll(STREAMS):
            own[2 + i] = own[2 + i] * sums[0]
        columns(own, sums, eps)


@T.macro
def block_sum(total, slot, partial_s, thread, warps):
    """total[slot] = sum over the CTA's threads, in one order; `partial_s` has an element for each warp."""
    for i in T.unroll(5):
        total[slot] = total[slot] + T.shfl_xor(total[slot], 1 << i)
    if thread % 32 == 0:
        partial_s[thread // 32] = total[slot]
    T.sync_threads()
    total[slot] = T.float32(0)
    for i in T.serial(warps):
        total[slot] = total[slot] + partial_s[i]


@T.macro
def quantize_mxfp8(codes, wide, part, codes_out, scales_out, token, column, store, hidden_blocks):
    """Eight elements of a block of 32 that four neighbouring lanes share; wide[0] holds rounded BF16."""
    part[0] = T.float32(0)
    for v in T.unroll(8):
        part[0] = T.max(
            part[0],
            T.if_then_else(T.abs(wide[0, v]) <= T.float32(FINITE_MAX), T.abs(wide[0, v]), T.float32(0)),
        )
    part[0] = T.max(part[0], T.shfl_xor(part[0], 1))
    part[0] = T.max(part[0], T.shfl_xor(part[0], 2))
    bits = T.reinterpret(part[0], "int32")
    byte = T.max((bits >> 23) - 8 + T.if_then_else((bits & 0x7FFFFF) > 0x600000, 1, 0), 0)
    part[0] = T.reinterpret((254 - byte) << 23, FP32)
    for v in T.unroll(8):
        wide[0, v] = T.if_then_else(
            T.abs(wide[0, v]) <= T.float32(FINITE_MAX),
            wide[0, v] * part[0],
            T.reinterpret(T.int32(0x7FC00000), FP32),
        )
    for v in T.vectorized(8):
        codes[v] = T.cast(wide[0, v], E4M3)
    if store:
        for v in T.vectorized(8):
            codes_out[token, column + v] = codes[v]
        if column % 32 == 0:
            scales_out[
                (token // 128 * T.ceildiv(hidden_blocks, 4) + column // 128) * 512
                + token % 32 * 16
                + token % 128 // 32 * 4
                + column // 32 % 4
            ] = T.cast(byte, "uint8")


@T.macro
def quantize_fp8(codes, wide, part, codes_out, scales_out, token, column, store):
    """Eight elements of a group of 128 that sixteen neighbouring lanes share."""
    part[0] = T.float32(0)
    part[1] = T.float32(0)
    for v in T.unroll(8):
        part[0] = T.max(part[0], T.abs(wide[0, v]))
        # Not wide * 0, which TileLang simplifies to 0.
        part[1] = part[1] + T.if_then_else(
            T.abs(wide[0, v]) <= T.float32(FINITE_MAX),
            T.float32(0),
            T.reinterpret(T.int32(0x7FC00000), FP32),
        )
    for i in T.unroll(4):
        part[0] = T.max(part[0], T.shfl_xor(part[0], 1 << i))
        part[1] = part[1] + T.shfl_xor(part[1], 1 << i)
    # The second sum is zero, or NaN if an element is not finite, which a maximum would hide.
    part[0] = T.max(part[0], T.float32(1e-4)) + part[1]
    part[1] = T.float32(448) / part[0]
    for v in T.unroll(8):
        wide[0, v] = wide[0, v] * part[1]
    for v in T.vectorized(8):
        codes[v] = T.cast(wide[0, v], E4M3)
    if store:
        for v in T.vectorized(8):
            codes_out[token, column + v] = codes[v]
        if column % 128 == 0:
            scales_out[token, column // 128] = part[0] * T.float32(1.0 / 448.0)
