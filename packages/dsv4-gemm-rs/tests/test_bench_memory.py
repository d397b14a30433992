# SPDX-License-Identifier: Apache-2.0
"""Quantisers and copies of the benchmark: that they do what they stand for, and what is claimed of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dsv4_gemm_rs.bench.memory import COPY_BYTES, Memory, bandwidth_copy, moved_bytes
from dsv4_gemm_rs.bench.targets import targets
from dsv4_gemm_rs.quantize import quantize_mxfp8, round_trip_mxfp8
from dsv4_symm_mem.backends import VirtualGroup

M, K = 130, 96
(RANK,) = VirtualGroup(1, "cpu").ranks


def test_steps_do_what_they_are_called() -> None:
    xs = [torch.randn(M, K).bfloat16() for _ in range(2)]
    memory = Memory(xs)
    assert list(dict(memory.cases())) == ["quantise"]
    for which, x in enumerate(xs):
        for made, wanted in zip(memory._quantised[which][:2], quantize_mxfp8(x)[:2], strict=True):
            made.view(torch.uint8).fill_(0xFF)
            memory.quantise(RANK, which)
            assert torch.equal(made.view(torch.uint8), wanted.view(torch.uint8))
        values = memory._values[which]
        values.zero_()
        memory.quantise_copy(RANK, which)
        copied = int((values == x).sum())
        # Read and written together: two bytes of BF16, one of E4M3 and a thirty-second of a scale.
        assert abs(2 * 2 * copied - M * K * (2 + 1 + 1 / 32)) < 4
        memory.round_trip_copy(RANK, which)
        assert torch.equal(values, x)
        memory.round_trip(RANK, which)
        assert torch.equal(values, round_trip_mxfp8(x))


def test_one_rank_copies_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_gemm_rs.bench.memory.COPY_BYTES", 64)
    group = VirtualGroup(2, "cpu")
    copied: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda target, source: copied.append(source.numel()))
    step = bandwidth_copy(torch.device("cpu"), 0)
    for rank in group.ranks:
        step(rank, 0)
    assert copied == [64]


def test_ranks_move_their_partial_their_slots_twice_and_their_shard() -> None:
    m, n, size = 64, 128, 4
    whole = 2 * m * n
    assert moved_bytes(m, n, size) == size * (whole + 2 * whole * (size - 1) // size + whole // size)


def claims(m: int, medians: dict[str, float], *, virtual: bool = True) -> dict[str, tuple[float, bool]]:
    base = {"unfused-call": 1.0, "dispatched": 1.0, "fused": 1.0, "gemm-then-reduce-scatter": 1.0}
    base |= {"gemm-ours": 1.0} | medians
    made = targets(m, 2048, base, on_gpu=True, virtual=virtual, n=5120, world_size=4)
    return {check.name.partition(": ")[2]: (check.value, check.holds) for check in made}


def test_quantisers_are_held_to_copies_where_rows_are_many_and_to_a_time_where_they_are_few() -> None:
    times = {"quantise": 10.0, "quantise-copy": 8.5, "round-trip": 10.0, "round-trip-copy": 8.4}
    many = claims(2048, times)
    assert many["quantise / quantise-copy"] == (10 / 8.5, True)
    assert many["round-trip / round-trip-copy"] == (10 / 8.4, False)
    assert not any("quantise" in name for name in claims(1024, times))
    few = claims(128, times)
    assert few["quantise / 4 us a rank"] == (10 / 16, True)
    assert claims(128, times, virtual=False)["round-trip / 4 us a rank"] == (10 / 4, False)


def test_the_reduce_scatter_is_held_to_the_bytes_that_it_moves() -> None:
    copy = 120.0
    floor = copy * moved_bytes(4096, 5120, 4) / (2 * COPY_BYTES)
    for factor, holds in ((1.24, True), (1.26, False)):
        times = {"copy": copy, "reduce-scatter": factor * floor + 6}
        assert claims(4096, times)["reduce-scatter / (1.25 copy floor + 6 us)"][1] is holds
    assert not any("floor" in name for name in claims(4096, {"reduce-scatter": 1.0}))
