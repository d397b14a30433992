# SPDX-License-Identifier: Apache-2.0
"""Every configuration compiles without a GPU, and its PTX keeps the orders that the protocol rests on."""

from __future__ import annotations

import re

import pytest
from dsv4_gemm_rs.kernels.sm90.config import FAMILY, KernelConfig
from dsv4_gemm_rs.kernels.sm90.kernel import GemmReduceScatter
from dsv4_gemm_rs.kernels.sm90.kernel import example_arguments as fused_arguments
from dsv4_symm_mem.collectives.reduce_scatter_kernel import ReduceScatter
from dsv4_symm_mem.collectives.reduce_scatter_kernel import example_arguments as unfused_arguments
from dsv4_symm_mem.testing.ptx import compile_ptx, opcodes, positions_in_order

OPTIONS = "--enable-tvm-ffi"


@pytest.mark.parametrize("config", FAMILY, ids=lambda c: f"{c.tile_m}x{c.tile_n}")
def test_fused_kernel(config: KernelConfig) -> None:
    ptx = compile_ptx(GemmReduceScatter(config), "sm_90a", fused_arguments(), OPTIONS)
    codes = opcodes(ptx)
    mma = f"wgmma.mma_async.sync.aligned.m64n{config.tile_n}k16.f32.bf16.bf16"
    assert codes.count(mma) == 8 * config.row_atoms
    assert not re.search(r"\.local|multimem|griddepcontrol.launch|\.multicast|barrier\.cluster", ptx)
    loads = [code for code in codes if code.startswith("cp.async.bulk.tensor")]
    assert [code.split(".")[4] for code in loads] == ["2d", "5d"]
    bulk_load = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    assert codes.count(bulk_load) == config.chunks
    # The epoch is read when earlier launches have ended, all of the CTA meets, and only then is the ticket
    # taken and the epoch bumped. Before that nothing is done to global memory but to bring the weight nearer.
    assert codes.count("griddepcontrol.wait") == 1
    early = codes[: codes.index("griddepcontrol.wait")]
    assert [code for code in early if "global" in code or code.startswith("prefetch")] == [
        *["prefetch.tensormap"] * 2,
        "cp.async.bulk.prefetch.L2.global",
    ]
    meet = next(code for code in codes if code.startswith("bar.sync"))
    positions_in_order(
        codes,
        "griddepcontrol.wait",
        "ld.relaxed.sys.global.b64",
        meet,
        "atom.global.acq_rel.add.u64",
        "st.relaxed.gpu.global.b64",
    )
    # A peer's chunk is acquired, handed to the async proxy, copied.
    positions_in_order(codes, "ld.acquire.sys.global.b64", "fence.proxy.async", bulk_load)
    # A tile is sent, its buffer handed back when read; it is complete at the peer, and only then announced.
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
    # Math warps hand what they stored in shared memory to the async proxy before they say so.
    stores = [i for i, code in enumerate(codes) if code == "st.shared.v4.b32"]
    assert len(stores) == config.row_atoms * 2 * config.tile_n // 32
    positions_in_order(
        codes[stores[-1] :], "fence.proxy.async.shared::cta", "bar.warp.sync", "mbarrier.arrive.shared.b64"
    )
    # Tokens and tiles, and a diagnosis where a tile and where the token is awaited.
    assert codes.count("st.release.sys.global.b64") == 4


@pytest.mark.parametrize("from_float", [False, True])
def test_stand_alone_kernel(from_float: bool) -> None:
    codes = opcodes(compile_ptx(ReduceScatter(from_float), "sm_90a", unfused_arguments(), OPTIONS))
    assert not any(".local" in code or "multimem" in code for code in codes)
    assert codes.count("st.release.sys.global.b64") == 4
    positions_in_order(codes, "ld.relaxed.sys.global.b64", "bar.sync", "atom.global.acq_rel.add.u64")
