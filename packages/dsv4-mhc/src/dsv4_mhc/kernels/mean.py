# SPDX-License-Identifier: Apache-2.0
"""Mean of the streams: hidden states for draft models, the head of models without a learned one."""

import tilelang.language as T

from dsv4_mhc.kernels.device import BF16, FP32, PRELUDE, load_streams, narrow, widen
from dsv4_mhc.plan import STREAMS

THREADS = 128


def build(hidden: int):
    """The TileLang function for a hidden size."""
    tokens = T.dynamic("tokens")
    blocks = -(-hidden // (8 * THREADS))

    @T.prim_func
    def mhc_mean(
        residual: T.Tensor((tokens, STREAMS, hidden), BF16),
        mean_out: T.Tensor((tokens, hidden), BF16),
    ):
        with T.Kernel(tokens, blocks, threads=THREADS, prelude=PRELUDE) as (token, block):
            column = (block * THREADS + T.get_thread_binding(0)) * 8
            raw = T.alloc_local((STREAMS, 8), BF16)
            wide = T.alloc_local((STREAMS, 8), FP32)
            if column < hidden:
                load_streams(raw, residual, token, column)
                for i in T.unroll(STREAMS):
                    widen(wide, i, raw, i)
                for v in T.unroll(8):
                    wide[0, v] = ((wide[0, v] + wide[1, v]) + wide[2, v] + wide[3, v]) * T.float32(0.25)
                narrow(raw, 0, wide, 0)
                for v in T.vectorized(8):
                    mean_out[token, column + v] = raw[0, v]

    return mhc_mean
