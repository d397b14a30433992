# SPDX-License-Identifier: Apache-2.0
"""What the kernels share: vectors of eight BF16, the arithmetic of a seam, Sinkhorn, quantisation.

Thread-level code inside TileLang: these kernels need to say which thread has which element, because the order
of every sum is part of their contract, and tile operators leave that to layout inference.

Escapes from TileLang, all in `PRELUDE`: stores into another CTA's shared memory that tell its mbarrier; the
cluster's barrier in two halves, by which CTAs know that all of them run; mbarriers with bulk copies where one
lane of a warp issues them; mma.sync on operands that are registers already; loads that do not stay in the L1;
two BF16 of a register to FP32 by a shift and a mask, where a cast takes three instructions; the approximate
reciprocal (1 ulp, PTX ISA 9.7.3.13) and power of two (9.7.3.21), which Sinkhorn's 160 divisions per row of
four and the gates are made of; TileLang offers them for a whole module only.

The first arrival at a cluster's barrier needs no release: nothing was written for the others. That their
writes find nothing else in their place is seen to by `compile.pass_configs`: no two buffers share memory.
"""

from __future__ import annotations

import tilelang.language as T

from dsv4_mhc.plan import STREAMS

BF16 = "bfloat16"
FP32 = "float32"
E4M3 = "float8_e4m3fn"

FINITE_MAX = 3.4028234663852886e38

PRELUDE = r"""
__device__ __forceinline__ unsigned dsv4_shared(const void* address) {
  return static_cast<unsigned>(__cvta_generic_to_shared(address));
}
__device__ __forceinline__ unsigned dsv4_there(const void* address, int rank) {
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(dsv4_shared(address)), "r"(rank));
  return remote;
}
__device__ __forceinline__ void dsv4_send(const void* address, int rank, float value, const void* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
    :: "r"(dsv4_there(address, rank)), "f"(value), "r"(dsv4_there(barrier, rank)) : "memory");
}
__device__ __forceinline__ void dsv4_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void dsv4_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void dsv4_grid_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void dsv4_warm(const void* pieces, int number, int bytes) {
  const char* source = reinterpret_cast<const char*>(pieces) + static_cast<int64_t>(number) * bytes;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void dsv4_load_once(void* target, const void* source) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
    : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(source));
  *reinterpret_cast<uint4*>(target) = value;
}
__device__ __forceinline__ void dsv4_copy_async(void* target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
    :: "r"(dsv4_shared(target)), "l"(source) : "memory");
}
__device__ __forceinline__ void dsv4_copied(void* target, const void* source) {
  *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
}
__device__ __forceinline__ void dsv4_copies_end() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void dsv4_copies_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(kLeft) : "memory");
}
__device__ __forceinline__ void dsv4_mma(float* d, uint4 a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
    : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
template <int kBlocks>
__device__ __forceinline__ void dsv4_project(float* sums, const void* streams, const void* weights) {
  const uint4 x = *reinterpret_cast<const uint4*>(streams);
  const uint4* parts = reinterpret_cast<const uint4*>(weights);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    dsv4_mma(sums + 4 * block, parts[64 * block], x.x, x.y);
    dsv4_mma(sums + 4 * block, parts[64 * block + 32], x.z, x.w);
  }
}
__device__ __forceinline__ void dsv4_barrier_init(void* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(dsv4_shared(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void dsv4_barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void dsv4_reads_end() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void dsv4_barrier_arrive(void* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(dsv4_shared(barrier)) : "memory");
}
__device__ __forceinline__ void dsv4_barrier_wait(void* barrier, int parity) {
  unsigned done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(dsv4_shared(barrier)), "r"(parity) : "memory");
  } while (!done);
}
__device__ __forceinline__ void dsv4_meet(void* barrier) {
  unsigned done;
  do {
    asm volatile("{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(dsv4_shared(barrier)) : "memory");
  } while (!done);
}
__device__ __forceinline__ void dsv4_expect(void* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
    :: "r"(dsv4_shared(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void dsv4_fetch(void* target, const void* pieces, int number, int bytes,
                                           void* barrier) {
  const char* source = reinterpret_cast<const char*>(pieces) + static_cast<int64_t>(number) * bytes;
  dsv4_expect(barrier, bytes);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
    :: "r"(dsv4_shared(target)), "l"(source), "r"(bytes), "r"(dsv4_shared(barrier)) : "memory");
}
template <int kPairs>
__device__ __forceinline__ void dsv4_widen(float* wide, const void* packed) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const unsigned pair = reinterpret_cast<const unsigned*>(packed)[i];
    wide[2 * i] = __uint_as_float(pair << 16);
    wide[2 * i + 1] = __uint_as_float(pair & 0xffff0000u);
  }
}
__device__ __forceinline__ float dsv4_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float dsv4_exp(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}
"""


def reciprocal(x):
    """1 / x to 1 ulp; infinite below 2^-126, where a sum can be with an eps of zero only.

    Without that exception it is four instructions, in the chain that Sinkhorn is.
    """
    return T.call_extern(FP32, "dsv4_reciprocal", x)


def exponential(x):
    """exp(x) with a relative error of about 2^-22 + |x| 2^-24.

    Both uses weigh that by the result, so what reaches a gate or a row of weights is below 2e-7.
    """
    return T.call_extern(FP32, "dsv4_exp", x)


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return T.float32(1) / (T.float32(1) + exponential(-x))


def send(element, rank, value, barrier):
    """Write `value` to the place of `element`, a shared FP32 buffer's element, in the CTA `rank`.

    That CTA's `barrier` is told once the value is there. No fence and no barrier of the cluster is needed,
    which would wait for all that a warp has stored anywhere.
    """
    return T.call_extern("handle", "dsv4_send", T.address_of(element), rank, value, T.address_of(barrier))


def expect(barrier, size: int):
    """The one arrival of a barrier that `size` bytes complete, which others send."""
    return T.call_extern("handle", "dsv4_expect", T.address_of(barrier), size)


def meet(barrier):
    """Wait for all that others send to a barrier, and see it."""
    return T.call_extern("handle", "dsv4_meet", T.address_of(barrier))


def load_once(target, source):
    """Sixteen bytes that are read once, past the L1."""
    return T.call_extern("handle", "dsv4_load_once", T.address_of(target), T.address_of(source))


def copy_async(target, source):
    """Start copying sixteen bytes into shared memory."""
    return T.call_extern("handle", "dsv4_copy_async", T.address_of(target), T.address_of(source))


def copied(target, source):
    """Load sixteen bytes that this thread has copied."""
    return T.call_extern("handle", "dsv4_copied", T.address_of(target), T.address_of(source))


def copies_end():
    """End a group of copies, which may be empty."""
    return T.call_extern("handle", "dsv4_copies_end")


def copies_wait(left: int):
    """Wait until no more than `left` of this thread's groups are under way."""
    return T.call_extern("handle", f"dsv4_copies_wait<{left}>")


def project(sums, streams, weights, blocks: int):
    """Add to sums: weights times eight elements a lane of a stream."""
    return T.call_extern(
        "handle", f"dsv4_project<{blocks}>", T.address_of(sums), T.address_of(streams), T.address_of(weights)
    )


def barrier_init(barrier, count):
    """Make a shared uint64 a barrier of `count` arrivals."""
    return T.call_extern("handle", "dsv4_barrier_init", T.address_of(barrier), count)


def barriers_ready():
    """Let bulk copies see the barriers that this thread has made, once others know of it."""
    return T.call_extern("handle", "dsv4_barriers_ready")


def reads_end():
    """Have this thread's reads of shared memory done before a bulk copy that its arrival lets go on.

    An arrival alone may overtake loads that have been issued: on an H200, copies then overwrote what a slower
    warp had still to read.
    """
    return T.call_extern("handle", "dsv4_reads_end")


def barrier_arrive(barrier):
    """One arrival."""
    return T.call_extern("handle", "dsv4_barrier_arrive", T.address_of(barrier))


def barrier_wait(barrier, parity):
    """Wait until the barrier's phase of this parity is complete."""
    return T.call_extern("handle", "dsv4_barrier_wait", T.address_of(barrier), parity)


def fetch_piece(target, pieces, number, size: int, barrier):
    """Start a bulk copy of a piece of `size` bytes into shared memory, `number` pieces behind `pieces`.

    The barrier's one arrival and its bytes are the copy's.
    """
    return T.call_extern(
        *("handle", "dsv4_fetch", T.address_of(target), T.address_of(pieces), number, size),
        T.address_of(barrier),
    )


def cluster_arrive_relaxed():
    """Say that this CTA runs; promises nothing about its writes."""
    return T.call_extern("handle", "dsv4_cluster_arrive_relaxed")


def cluster_wait():
    """Wait until all CTAs of the cluster have arrived."""
    return T.call_extern("handle", "dsv4_cluster_wait")


def grid_wait():
    """Wait until the launch before this one has ended and its writes are seen.

    TVM launches every kernel with clusters so that it may start when the launch before lets it, or has ended
    but for its writes (programmatic stream serialization). Until here a kernel reads nothing. None of ours
    lets the next one start early: others' kernels that TVM launches may not wait.
    """
    return T.call_extern("handle", "dsv4_grid_wait")


def warm_piece(pieces, number, size: int):
    """Start fetching a piece of `size` bytes, `number` pieces behind `pieces`, into the L2."""
    return T.call_extern("handle", "dsv4_warm", T.address_of(pieces), number, size)


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


def widen(wide, slot, raw, source):
    """wide[slot] = raw[source] in FP32.

    Two elements from a register take a shift and a mask; what TileLang makes of a cast takes three.
    """
    return T.call_extern("handle", "dsv4_widen<4>", T.address_of(wide[slot, 0]), T.address_of(raw[source, 0]))


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
            T.call_extern("handle", "dsv4_widen<2>", T.address_of(wide[i, 0]), T.address_of(raw[i, half * 4]))
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
def add_row_squares(total, slot, wide):
    """total[slot] += a lane's share of a chunk's squares of y: one order for all kernels that normalise."""
    part = T.alloc_local((2,), FP32)
    part[0] = T.float32(0)
    part[1] = T.float32(0)
    for v in T.unroll(8):
        part[v % 2] = part[v % 2] + wide[0, v] * wide[0, v]
    total[slot] = total[slot] + (part[0] + part[1])


@T.macro
def rows(matrix, eps):
    """One row step."""
    factor = T.alloc_local((STREAMS,), FP32)
    for j in T.unroll(STREAMS):
        factor[j] = reciprocal(
            (matrix[4 * j] + matrix[4 * j + 1]) + (matrix[4 * j + 2] + matrix[4 * j + 3]) + eps
        )
        for i in T.unroll(STREAMS):
            matrix[4 * j + i] = matrix[4 * j + i] * factor[j]


@T.macro
def columns(matrix, eps):
    """One column step."""
    factor = T.alloc_local((STREAMS,), FP32)
    for i in T.unroll(STREAMS):
        factor[i] = reciprocal((matrix[i] + matrix[4 + i]) + (matrix[8 + i] + matrix[12 + i]) + eps)
        for j in T.unroll(STREAMS):
            matrix[4 * j + i] = matrix[4 * j + i] * factor[i]


@T.macro
def sinkhorn(own, lane, eps, iterations):
    """Logits own[2:6] of a row to the row of the matrix; four lanes have a token's rows.

    After the softmax each lane has the whole matrix and does every row and column: the iterations are a chain
    that everything waits for, and shuffles would be half of it.
    """
    matrix = T.alloc_local((STREAMS * STREAMS,), FP32)
    work = T.alloc_local((1,), FP32)
    work[0] = T.max(T.max(own[2], own[3]), T.max(own[4], own[5]))
    for i in T.unroll(STREAMS):
        own[2 + i] = exponential(own[2 + i] - work[0])
    work[0] = reciprocal((own[2] + own[3]) + (own[4] + own[5]))
    for i in T.unroll(STREAMS):
        own[2 + i] = own[2 + i] * work[0] + eps
    for j in T.unroll(STREAMS):
        for i in T.unroll(STREAMS):
            matrix[4 * j + i] = T.shfl_sync(own[2 + i], j, STREAMS)
    columns(matrix, eps)
    for _ in T.serial(iterations - 1):
        rows(matrix, eps)
        columns(matrix, eps)
    for i in T.unroll(STREAMS):
        own[2 + i] = T.if_then_else(
            lane < 2,
            T.if_then_else(lane == 0, matrix[i], matrix[4 + i]),
            T.if_then_else(lane == 2, matrix[8 + i], matrix[12 + i]),
        )


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
