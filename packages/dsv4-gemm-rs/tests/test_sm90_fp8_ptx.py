# SPDX-License-Identifier: Apache-2.0
"""Every configuration of the SM90 kernel for FP8 weights compiles without a GPU and spills nothing."""

from __future__ import annotations

import re

import pytest
from dsv4_gemm_rs.inspection.kernels import compile_kernel
from dsv4_gemm_rs.inspection.machine_code import resources_of
from dsv4_gemm_rs.kernels.sm90.config import SHARED_BYTES
from dsv4_gemm_rs.kernels.sm90.swapped_config import FAMILY, SwappedConfig
from dsv4_symm_mem.testing.ptx import instructions, opcodes, positions_in_order

MMAS_OF_A_STAGE = 8
BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize("config", FAMILY, ids=lambda c: f"{c.tile_m}x{c.tile_n}")
def test_fused_kernel(config: SwappedConfig) -> None:
    made = compile_kernel(config, "sm_90a")
    assert resources_of(made.cubin).stack_bytes == 0
    assert made.shared_bytes <= SHARED_BYTES
    codes = opcodes(made.ptx)
    # Two main loops, one for factors that are split; A comes from registers, not by descriptor.
    wgmma = f"wgmma.mma_async.sync.aligned.m64n{config.group_tokens}k16.f32.bf16.bf16"
    assert codes.count(wgmma) == 2 * MMAS_OF_A_STAGE
    for text in instructions(made.ptx):
        if text.startswith(wgmma):
            assert re.search(r"\}, \{%r\d+, ?%r\d+, ?%r\d+, ?%r\d+\}, %rd\d+", text), text
    # Of four values two multiplications of pairs, four where the factor is split.
    values = 128 * 64 // 128
    assert codes.count("mul.rn.bf16x2") == (values // 2) * 3 + 3 * 4
    assert not re.search(r"\.local|multimem|griddepcontrol.launch", made.ptx)
    tensors = [code for code in codes if code.startswith("cp.async.bulk.tensor.2d")]
    leaving = "cp.async.bulk.tensor.2d.global.shared::cta"
    assert len([code for code in tensors if not code.startswith(leaving)]) == 1
    # Math warps hand what they transposed to the async proxy before one of them has it stored.
    stores = [code for code in tensors if code.startswith(leaving)]
    assert len(stores) == 1
    transposing = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    assert codes.count(transposing) == 2 * config.group_tokens // 8
    positions_in_order(
        codes,
        transposing,
        "fence.proxy.async.shared::cta",
        "bar.warp.sync",
        "elect.sync",
        stores[0],
        "cp.async.bulk.commit_group",
    )
    # Blocks of weights, and a lane's share of a chunk.
    assert codes.count(BULK_LOAD) == config.feature_groups + 1
    positions_in_order(
        codes,
        "ld.acquire.sys.global.b64",
        "fence.proxy.async",
        BULK_LOAD,
    )
    bulk_store = codes.index("cp.async.bulk.global.shared::cta.bulk_group")
    positions_in_order(
        codes[bulk_store:],
        "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group.read",
        "mbarrier.arrive.shared.b64",
        "cp.async.bulk.wait_group",
        "fence.proxy.async",
        "st.release.sys.global.b64",
    )
