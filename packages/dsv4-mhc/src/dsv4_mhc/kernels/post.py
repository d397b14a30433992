# SPDX-License-Identifier: Apache-2.0
"""Post: the streams after a sublayer. Each thread has eight hidden elements of a token, in all four streams.

No staging: five independent 16-byte loads a thread and enough threads on an SM keep memory busy.
"""

import tilelang.language as T

from dsv4_mhc.kernels.device import BF16, FP32, PRELUDE, load_gains, load_row, load_streams, mix_streams
from dsv4_mhc.plan import STREAMS

THREADS = 128


def build(hidden: int):
    """The TileLang function for a hidden size."""
    tokens = T.dynamic("tokens")
    blocks = -(-hidden // (8 * THREADS))

    @T.prim_func
    def mhc_post(
        residual: T.Tensor((tokens, STREAMS, hidden), BF16),
        output: T.Tensor((tokens, hidden), BF16),
        post_in: T.Tensor((tokens, STREAMS), FP32),
        comb_in: T.Tensor((tokens, STREAMS, STREAMS), FP32),
        residual_out: T.Tensor((tokens, STREAMS, hidden), BF16),
    ):
        with T.Kernel(tokens, blocks, threads=THREADS, prelude=PRELUDE) as (token, block):
            column = (block * THREADS + T.get_thread_binding(0)) * 8
            raw = T.alloc_local((STREAMS + 1, 8), BF16)
            packed = T.alloc_local((STREAMS, 8), BF16)
            post_gain = T.alloc_local((STREAMS,), FP32)
            comb_gain = T.alloc_local((STREAMS * STREAMS,), FP32)
            if column < hidden:
                load_streams(raw, residual, token, column)
                load_row(raw, STREAMS, output, token, column)
                load_gains(post_gain, comb_gain, post_in, comb_in, token)
                mix_streams(packed, raw, post_gain, comb_gain)
                for j in T.unroll(STREAMS):
                    for v in T.vectorized(8):
                        residual_out[token, j, column + v] = packed[j, v]

    return mhc_post
