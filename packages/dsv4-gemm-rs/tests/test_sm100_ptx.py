# SPDX-License-Identifier: Apache-2.0
"""Every SM100 configuration compiles without a GPU, fits the SM, and its PTX keeps the orders it rests on."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from dsv4_gemm_rs.kernels.sm100.config import (
    FAMILY,
    MMA_K_BYTES,
    MULTICAST_FAMILY,
    OVERLAP,
    SHARED_BYTES,
    STAGE_K_BYTES,
    TENSOR_COLUMNS,
    KernelConfig,
    Operand,
)
from dsv4_gemm_rs.kernels.sm100.kernel import GemmReduceScatter, example_arguments
from dsv4_gemm_rs.kernels.sm100.tcgen05 import instruction_descriptor, scale_ids
from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.testing.ptx import compile_ptx, instructions, opcodes, positions_in_order

ARCH = "sm_100a"
OTHER_ARCH = "sm_103a"
OPTIONS = "--enable-tvm-ffi"
BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def name_of(config: KernelConfig) -> str:
    return f"{config.operand}-{128 * config.cluster}x{config.tile_n}"


@cache
def compiled(config: KernelConfig, arch: str) -> tuple[str, int]:
    """The PTX, and the bytes of shared memory that the kernel lays out."""
    kernel = GemmReduceScatter(config)
    ptx = compile_ptx(kernel, arch, example_arguments(), OPTIONS)
    storage: Any = kernel.storage
    return ptx, storage.size_in_bytes()


every_config = pytest.mark.parametrize("config", FAMILY, ids=name_of)


@every_config
def test_fits_shared_and_tensor_memory(config: KernelConfig) -> None:
    _, shared = compiled(config, ARCH)
    assert shared <= SHARED_BYTES
    assert shared + config.stage_bytes > SHARED_BYTES or config.overlapped, "room for another stage"
    # Scales are announced while there is a stage that they do not wait for.
    assert 0 < config.scales_ahead < config.stages
    used = config.scale_column + config.stages * config.scale_stage_columns
    assert used <= config.tensor_columns <= TENSOR_COLUMNS
    assert config.tensor_columns & (config.tensor_columns - 1) == 0
    # Scales are nobody else's, and accumulators share what the epilogue drains first, or nothing.
    assert config.accumulator_stride + config.tile_n == config.scale_column
    assert config.accumulator_stride == config.tile_n - (OVERLAP if config.overlapped else 0)


def test_only_the_largest_scaled_tile_overlaps() -> None:
    assert [name_of(config) for config in FAMILY if config.overlapped] == ["mxfp8-256x256"]


@pytest.mark.parametrize(("tile_n", "cluster"), [(96, 1), (512, 2), (128, 3)])
def test_refuses_other_shapes(tile_n: int, cluster: int) -> None:
    with pytest.raises(ArgumentError):
        KernelConfig(Operand.MXFP8, tile_n, cluster)


def test_instruction_descriptors() -> None:
    """Bits by hand from the tables of PTX ISA 9.4, section 9.7.18.4.2."""
    pair = KernelConfig(Operand.MXFP8, 256, 2)
    # UE8M0 scales, N / 8 = 32, M / 16 = 16.
    assert instruction_descriptor(pair) == 1 << 23 | 32 << 17 | 16 << 24
    single = KernelConfig(Operand.BF16, 64, 1)
    # FP32 accumulator, BF16 from both sides, N / 8 = 8, M / 16 = 8.
    assert instruction_descriptor(single) == 1 << 4 | 1 << 7 | 1 << 10 | 8 << 17 | 8 << 24
    assert [scale_ids(step) for step in range(4)] == [0, 0x20000010, 0x40000020, 0x60000030]


@pytest.mark.parametrize(
    ("config", "arch"),
    [(config, ARCH) for config in FAMILY] + [(config, OTHER_ARCH) for config in FAMILY if config.scaled],
    ids=lambda value: name_of(value) if isinstance(value, KernelConfig) else value,
)
def test_instructions(config: KernelConfig, arch: str) -> None:
    ptx, _ = compiled(config, arch)
    codes = opcodes(ptx)
    group = f"cta_group::{config.cluster}"
    kind = "kind::mxf8f6f4.block_scale.scale_vec::1X" if config.scaled else "kind::f16"
    assert not re.search(r"\.local|multimem|launch_dependents", ptx)
    assert codes.count(f"tcgen05.mma.{group}.{kind}") == STAGE_K_BYTES // MMA_K_BYTES
    assert codes.count(f"tcgen05.cp.{group}.32x128b.warpx4") == (1 + config.w_atoms if config.scaled else 0)
    assert codes.count("tcgen05.ld.sync.aligned.32x32b.x64.b32") == 1
    # All tcgen05 instructions of a kernel have one group: mixing them is undefined.
    assert {code for code in codes if ".cta_group::" in code and "tcgen05" in code} == {
        code for code in codes if group in code and "tcgen05" in code
    }
    # A and W, then the two pieces of a chunk; a pair's operands complete on the leader's barrier.
    loads = [code for code in codes if code.startswith("cp.async.bulk.tensor.2d")]
    assert ["cta_group::2" in code for code in loads] == [config.cluster == 2] * 2 + [False] * 2
    # Every 32 columns of a chunk are staged by two stores of 32 bytes.
    assert codes.count("st.global.L1::no_allocate.v8.b32") == 4
    statements = instructions(ptx)
    for name, place in (("alloc", -1), ("dealloc", -1)):
        found = [s for s in statements if s.startswith(f"tcgen05.{name}.")]
        assert [int(s.replace(",", " ").split()[place]) for s in found] == [config.tensor_columns]


@every_config
def test_orders(config: KernelConfig) -> None:
    codes = opcodes(compiled(config, ARCH)[0])
    meet = "barrier.cluster.wait" if config.cluster == 2 else "bar.sync"
    meets = [code for code in codes if code.startswith(meet)]
    assert len(meets) == (3 if config.cluster == 2 else 2)
    # Columns are allocated (in a pair, once both run) before all meet, and given back when all have met.
    positions_in_order(
        codes,
        *(["barrier.cluster.arrive.relaxed", meets[0]] if config.cluster == 2 else []),
        f"tcgen05.alloc.cta_group::{config.cluster}.sync.aligned.shared::cta.b32",
        f"tcgen05.relinquish_alloc_permit.cta_group::{config.cluster}.sync.aligned",
        "tcgen05.fence::before_thread_sync",
        meets[0],
        "tcgen05.fence::after_thread_sync",
        # Both CTAs of a pair follow the leader's word, which it has written before they met.
        *(["ld.shared::cluster.b32"] if config.cluster == 2 else []),
    )
    end = codes.index(f"tcgen05.dealloc.cta_group::{config.cluster}.sync.aligned.b32")
    around = [code for code in codes[:end] if code.startswith("tcgen05.fence") or code.startswith(meet)]
    assert around[-3:] == [
        "tcgen05.fence::before_thread_sync",
        meets[-1],
        "tcgen05.fence::after_thread_sync",
    ]
    # The epoch is read when earlier launches have ended, all of the CTA meets, and only then is the ticket
    # taken and the epoch bumped. Before that nothing is done to global memory but to bring the weight nearer.
    assert codes.count("griddepcontrol.wait") == 1
    early = codes[: codes.index("griddepcontrol.wait")]
    assert [code for code in early if "global" in code or code.startswith("prefetch")] == [
        *["prefetch.tensormap"] * 3,
        *["cp.async.bulk.prefetch.L2.global"] * (2 if config.scaled else 1),
    ]
    positions_in_order(
        codes,
        "griddepcontrol.wait",
        "ld.relaxed.sys.global.b64",
        meets[0],
        "atom.global.acq_rel.add.u64",
        "st.relaxed.gpu.global.b64",
    )
    # A stage's scales come into tensor memory before the MMAs that read them, then the stage is given back.
    mma = next(code for code in codes if code.startswith("tcgen05.mma"))
    commit = next(code for code in codes if code.startswith("tcgen05.commit"))
    assert ("multicast::cluster" in commit) == (config.cluster == 2)
    first, last = codes.index(mma), len(codes) - codes[::-1].index(mma)
    copies = [i for i, code in enumerate(codes) if code.startswith("tcgen05.cp")]
    assert all(i < first for i in copies)
    assert codes.index(commit) >= last
    # The accumulator has left tensor memory before it is given back.
    positions_in_order(
        codes,
        "tcgen05.fence::after_thread_sync",
        "tcgen05.ld.sync.aligned.32x32b.x64.b32",
        "tcgen05.wait::ld.sync.aligned",
        "tcgen05.fence::before_thread_sync",
    )
    # One after each wait that guards tensor memory (start, tile, stage, accumulator, end), one before each
    # arrival that hands it over; commits have their own.
    assert codes.count("tcgen05.fence::after_thread_sync") == 5
    assert codes.count("tcgen05.fence::before_thread_sync") == 3
    # Scales land, are handed to the async proxy by every lane, and announced.
    if config.scaled:
        arrive = "mbarrier.arrive.shared.b64"
        if config.cluster == 2:
            arrive = "mbarrier.arrive.shared::cluster.b64"
        positions_in_order(
            codes,
            "cp.async.ca.shared.global",
            "cp.async.commit_group",
            "cp.async.wait_group",
            "fence.proxy.async.shared::cta",
            "bar.warp.sync",
            arrive,
        )
    # A peer's tile is acquired, handed to the async proxy, loaded.
    pieces = [code for code in codes if code.startswith("cp.async.bulk.tensor.2d")][-1]
    positions_in_order(codes, "ld.acquire.sys.global.b64", "fence.proxy.async", pieces)
    # A piece is read by every lane before the copy engine may write the next one over it.
    positions_in_order(
        codes,
        "ld.shared.v4.b32",
        "fence.proxy.async.shared::cta",
        "bar.warp.sync",
        "mbarrier.arrive.shared.b64",
    )
    # A staged tile is handed to the async proxy, sent, complete at the peer, and only then announced.
    bulk_store = codes.index("cp.async.bulk.global.shared::cta.bulk_group")
    positions_in_order(
        codes[bulk_store:],
        "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group",
        "fence.proxy.async",
        "st.release.sys.global.b64",
        "mbarrier.arrive.shared.b64",
    )
    assert codes.count(BULK_LOAD) == 1
    # Tokens and tiles, and a diagnosis where a tile and where the token is awaited.
    assert codes.count("st.release.sys.global.b64") == 4


PULLED = [MULTICAST_FAMILY[1], MULTICAST_FAMILY[3]]


@pytest.mark.parametrize("config", PULLED, ids=name_of)
def test_multicast(config: KernelConfig) -> None:
    ptx, shared = compiled(config, ARCH)
    codes = opcodes(ptx)
    assert shared <= SHARED_BYTES
    assert not re.search(r"\.local|launch_dependents|wait_group.read", ptx)
    reduction = "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2"
    store = "multimem.st.relaxed.sys.global.v4.bf16x2"
    # A unit's blocks, all in flight together.
    assert (codes.count(reduction), codes.count(store)) == (16, 16)
    first, last = codes.index(reduction), len(codes) - codes[::-1].index(reduction)
    between = [code for code in codes[first:last] if re.match(r"(ld|st|atom|red|fence|bar|mbarrier)\b", code)]
    assert not between
    # Flags are acquired, the warp meets, every lane crosses over to the other address.
    before = codes[:first]
    acquired = len(before) - before[::-1].index("ld.acquire.sys.global.b64")
    positions_in_order(codes[acquired : first + 1], "bar.warp.sync", "fence.proxy.alias", reduction)
    # Sums are written back, cross over, and only then announced.
    written = len(codes) - codes[::-1].index(store) - 1
    positions_in_order(
        codes[written:],
        "fence.proxy.alias",
        "bar.warp.sync",
        "st.release.sys.global.b64",
        "ld.acquire.sys.global.b64",
    )
    # The publisher's, before the sum, after it, and before a copy of a peer's.
    assert codes.count("fence.proxy.alias") == 4
    # Tiles leave registers as they do where they are pushed, but nothing is sent or staged.
    assert codes.count("st.global.L1::no_allocate.v8.b32") == 4
    assert "cp.async.bulk.global.shared::cta.bulk_group" not in codes
    assert len([code for code in codes if code.startswith("cp.async.bulk.tensor.2d")]) == 2
