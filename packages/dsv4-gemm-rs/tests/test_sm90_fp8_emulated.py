# SPDX-License-Identifier: Apache-2.0
"""The compiled SM90 kernel for FP8 weights behind the public API, in the PTX emulator.

Every code with every scale byte, exactly; integers bit for bit as with BF16 weights; the exchange among ranks
that keep their weights otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import emulated_ranks
import pytest
import torch
from dsv4_gemm_rs import Keep, Path, WeightKind, prepare_weight
from dsv4_gemm_rs.kernels.families import TileConfig
from dsv4_gemm_rs.kernels.sm90.swapped_config import SwappedConfig
from dsv4_gemm_rs.packing import pack
from dsv4_gemm_rs.problems import RankProblem
from dsv4_gemm_rs.quantize import dequantize_mxfp8
from dsv4_symm_mem.errors import PeerTimeoutError
from gemm_rs_support import assert_right, problems_for

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

ALONG_TOKENS = SwappedConfig(64, 128)
"""Both math warpgroups at the same weights."""
ALONG_FEATURES = SwappedConfig(64, 256)
"""Each at its own."""
MakeEmulation = Callable[..., Any]

ranks = partial(emulated_ranks.ranks, config=ALONG_TOKENS)
packed = partial(problems_for, kind=WeightKind.MXFP8, keep=Keep.FP8)


@pytest.mark.parametrize(("size", "m", "path"), [(1, 65, "fused"), (2, 130, "unfused"), (4, 129, "fused")])
def test_right_on_awkward_shapes(size: int, m: int, path: str, emulator: MakeEmulation) -> None:
    with ranks(emulator(size), m, 192, path=path) as group:
        problems = packed(size, m, 192, 128, seed=m)
        group.poison()
        outs = group.call(problems)
        group.finish()
        assert_right(outs, problems)


@pytest.mark.parametrize("config", [ALONG_TOKENS, ALONG_FEATURES], ids=["tokens", "features"])
def test_the_order_of_memory(config: SwappedConfig, emulator: MakeEmulation) -> None:
    """Stages come round, under the memory model's checker."""
    k = 128 * (config.stages // 2 + 1)
    with ranks(emulator(2, processors=1, checks="memory-model"), 130, config.tile_n, config=config) as group:
        problems = packed(2, 130, config.tile_n, k)
        group.poison()
        outs = group.call(problems)
        group.finish()
        assert_right(outs, problems)


def test_right_where_each_warpgroup_has_features_of_its_own(emulator: MakeEmulation) -> None:
    with ranks(emulator(2), 70, 320, config=ALONG_FEATURES) as group:
        problems = packed(2, 70, 320, 256)
        group.poison()
        outs = group.call(problems)
        group.finish()
        assert_right(outs, problems)


def test_the_tile_with_the_smallest_chunks(emulator: MakeEmulation) -> None:
    config = SwappedConfig(176, 256)
    assert config.chunk_tokens < ALONG_FEATURES.chunk_tokens
    with ranks(emulator(2), 362, 192, config=config) as group:
        problems = packed(2, 362, 192, 128)
        outs = group.call(problems)
        group.finish()
        assert_right(outs, problems)


def test_launches_with_changing_m_repeat_their_bits(emulator: MakeEmulation) -> None:
    cases = {m: packed(2, m, 128, 128, seed=m) for m in (130, 1, 0)}
    with ranks(emulator(2), 130, 128) as group:
        kept = {m: group.call(problems) for m, problems in cases.items()}
        group.finish()
        for m, problems in cases.items():
            assert_right(kept[m], problems)
        group.poison()
        again = [(m, group.call(cases[m])) for m in (1, 130, 0)]
        group.finish()
        for m, outs in again:
            assert all(torch.equal(got, want) for got, want in zip(outs, kept[m], strict=True))


def integers(size: int, m: int, n: int, k: int, keep: Keep) -> list[RankProblem]:
    """Operands whose partials and sums are small integers."""
    problems = []
    for rank in range(size):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randint(-2, 3, (m, k), generator=generator).to(torch.bfloat16)
        data = torch.randint(-1, 2, (n, k), generator=generator).to(torch.float8_e4m3fn)
        scale = torch.randint(127, 129, (n, k // 32), generator=generator).to(torch.uint8)
        weight = prepare_weight(data, scale, activation="bf16", keep=keep)
        problems.append(RankProblem(x, weight, x.double(), dequantize_mxfp8(data, scale, torch.float64)))
    return problems


def shape_of_64_by_128(rates: object, family: Sequence[TileConfig], *_: object) -> TileConfig:
    """Stands in for `choose`: the tile that both forms have."""
    return next(config for config in family if (config.tile_m, config.tile_n) == (64, 128))


def test_integers_are_those_of_bf16_weights(emulator: MakeEmulation) -> None:
    results = []
    for keep in Keep:
        problems = integers(2, 67, 192, 128, keep)
        with ranks(emulator(2), 67, 192, config=shape_of_64_by_128) as group:
            results.append(group.call(problems))
            group.finish()
            assert_right(results[-1], problems)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_ranks_that_keep_their_weights_otherwise_meet_in_one_call(emulator: MakeEmulation) -> None:
    """Fused with FP8 and with BF16 weights, and unfused with both, where their tiles are of one shape."""
    forms = [Keep.FP8, Keep.BF16, Keep.FP8, Keep.BF16]
    by_form = {keep: integers(4, 130, 128, 128, keep) for keep in Keep}
    problems = [by_form[keep][rank] for rank, keep in enumerate(forms)]
    with ranks(emulator(4), 130, 128, config=shape_of_64_by_128) as group:
        for space in group.workspaces[2:]:
            space.requested = Path.UNFUSED
        outs = group.call(problems)
        group.finish()
        assert_right(outs, problems)


@pytest.mark.parametrize("high", [134, 246], ids=["one-factor", "split"])
def test_every_code_with_every_scale_is_exact(high: int, emulator: MakeEmulation) -> None:
    """Rows of ones in turn pick single weights, which come out as they are."""
    n, k = 512, 128
    codes = torch.arange(n * k).remainder(254)
    codes = torch.where(codes >= 127, codes + 1, codes).to(torch.uint8).view(n, k)
    # Sixteen rows have all codes of a byte, and four blocks a row.
    scale = torch.arange(n * k // 32).mul(97).remainder(high - 2).add(3).to(torch.uint8).view(n, k // 32)
    data = codes.view(torch.float8_e4m3fn)
    x = torch.eye(k, dtype=torch.bfloat16)
    weight = prepare_weight(data, scale, activation="bf16", keep="fp8")
    assert weight.packed is not None
    assert weight.packed.split == (high > 134)
    exact = dequantize_mxfp8(data, scale, torch.float64)
    with ranks(emulator(1), k, n) as group:
        (out,) = group.call([RankProblem(x, weight, x.double(), exact)])
        group.finish()
    assert torch.equal(out.double(), exact.T)


def test_nan_codes_and_scales_come_out_as_nan(emulator: MakeEmulation) -> None:
    (problem,) = packed(1, 64, 128, 128)
    weight = problem.weight
    scale = weight._scale_rows()
    weight.data.view(torch.uint8)[3, 7] = 0xFF
    weight.data.view(torch.uint8)[70, 100] = 0x7F
    weight.refresh()
    assert weight.packed is not None
    # A scale of 255 is refused when a weight is prepared; the kernel takes it all the same.
    scale[33, 2] = 255
    weight.packed = replace(weight.packed, blocks=pack(weight.data, scale).blocks)
    with ranks(emulator(1), 64, 128) as group:
        (out,) = group.call([problem])
        group.finish()
    columns = out.isnan().all(dim=0)
    assert columns.nonzero().flatten().tolist() == [3, 33, 70]
    assert out.isnan().sum() == 3 * 64


def test_a_missing_rank_is_blamed_and_outputs_are_nan(emulator: MakeEmulation) -> None:
    problems = packed(2, 65, 128, 128)
    # An aborted call's gathering warp hands out chunks that it never loads.
    with ranks(emulator(2, checks=False), 65, 128, deadline=0.001) as group:
        out = group.launch(0, problems[0])
        with pytest.raises(PeerTimeoutError) as caught:
            group.finish()
        assert caught.value.blamed == 1
        assert out.isnan().all()
