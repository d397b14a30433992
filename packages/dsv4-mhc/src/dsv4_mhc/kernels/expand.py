# SPDX-License-Identifier: Apache-2.0
"""Expand: every stream starts as the embedding. One read of a row, four writes."""

import tilelang.language as T

from dsv4_mhc.kernels.device import BF16
from dsv4_mhc.plan import STREAMS

THREADS = 128


def build(hidden: int):
    """The TileLang function for a hidden size."""
    tokens = T.dynamic("tokens")
    blocks = -(-hidden // (8 * THREADS))

    @T.prim_func
    def mhc_expand(
        embedding: T.Tensor((tokens, hidden), BF16),
        residual_out: T.Tensor((tokens, STREAMS, hidden), BF16),
    ):
        with T.Kernel(tokens, blocks, threads=THREADS) as (token, block):
            column = (block * THREADS + T.get_thread_binding(0)) * 8
            raw = T.alloc_local((8,), BF16)
            if column < hidden:
                for v in T.vectorized(8):
                    raw[v] = embedding[token, column + v]
                for j in T.unroll(STREAMS):
                    for v in T.vectorized(8):
                        residual_out[token, j, column + v] = raw[v]

    return mhc_expand
