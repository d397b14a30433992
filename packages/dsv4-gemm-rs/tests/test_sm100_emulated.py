# SPDX-License-Identifier: Apache-2.0
"""The compiled SM100 kernel in the PTX emulator: right, repeatable, on any schedule, and how its calls end.

The kernel is launched by itself, so that every configuration is reached whatever the dispatcher chooses. The
emulator reports reads of unwritten memory, and of memory that a copy or an MMA is still writing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from dsv4_gemm_rs import WeightKind, Workspace, gemm_rs
from dsv4_gemm_rs.bench.run import wire_bytes
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig as Sm90Config
from dsv4_gemm_rs.kernels.sm100.config import FAMILY, KernelConfig, Operand
from dsv4_gemm_rs.quantize import unswizzle_scales
from dsv4_gemm_rs.quantize.rule import BLOCK
from dsv4_symm_mem import VirtualGroup
from dsv4_symm_mem.errors import CallMismatchError, ExchangeError, PeerTimeoutError
from dsv4_symm_mem.protocol.layout import ABORT_OFFSET, shard_length
from gemm_rs_support import assert_right
from sm100_support import Group, Operands, case

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

ARCH = "sm_100a"
ABORTED = False
"""Whether reads of unwritten shared memory are faults where a call is aborted: pieces are then handed out
that were never loaded, and what is made of them is overwritten with NaN."""
SMALL = KernelConfig(Operand.MXFP8, 64)
"""The smallest tile: most tiles, hence most exchange, for the fewest instructions."""
PAIR = KernelConfig(Operand.MXFP8, 128, 2)
MakeEmulation = Callable[..., Any]


def name_of(config: KernelConfig) -> str:
    return f"{config.operand}-{128 * config.cluster}x{config.tile_n}"


def kind_of(config: KernelConfig) -> WeightKind:
    return WeightKind.MXFP8 if config.scaled else WeightKind.BF16


def equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# Shards that begin in the middle of a scale atom, ranks without rows, odd numbers of row tiles for pairs,
# column tiles that N fills in part, one k step and more than there are stages.
SHAPES = {
    (256, 2): [(2, 420, 320, 128), (4, 129, 256, 256)],
    (128, 2): [(2, 300, 192, 896), (3, 2, 128, 128)],
    (128, 1): [(4, 129, 192, 128), (1, 65, 192, 256)],
    (64, 1): [(2, 130, 192, 1024), (4, 3, 64, 128)],
}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (config, shape)
        for config in FAMILY
        for shape in SHAPES[config.tile_n, config.cluster][: 2 if config.scaled else 1]
    ],
    ids=lambda value: name_of(value) if isinstance(value, KernelConfig) else "-".join(map(str, value)),
)
def test_right_on_awkward_shapes(
    config: KernelConfig, shape: tuple[int, int, int, int], emulator: MakeEmulation
) -> None:
    size, m, n, k = shape
    group = Group(emulator(size, arch=ARCH, processors=2), config, m, n)
    problems, operands = case(config, size, m, n, k, seed=m)
    group.poison()
    outs = group.call(operands)
    group.finish()
    assert_right(outs, problems)
    group.close()


@pytest.mark.parametrize("config", [SMALL, PAIR, FAMILY[0]], ids=name_of)
def test_integers_are_exact(config: KernelConfig, emulator: MakeEmulation) -> None:
    """Small integers and a power of two for each scale: every sum is exact, whatever its order.

    One worker does all tiles, so stages, accumulators, pieces and (of the smallest tile) staging buffers come
    round several times.
    """
    size, m, n, k = 2, 140, max(config.tile_n + 64, 192), 384
    generator = torch.Generator().manual_seed(7)
    _, operands = case(config, size, m, n, k)
    want = torch.zeros(m, n, dtype=torch.float64)
    for mine in operands:
        exact = []
        for tensor, scale in ((mine.a, mine.a_scale), (mine.w, mine.w_scale)):
            values = torch.randint(-1, 2, tensor.shape, generator=generator).double()
            tensor.copy_(values)
            exponents = torch.randint(0, 2, scale.shape, generator=generator, dtype=torch.uint8)
            scale.view(torch.uint8).copy_(127 + exponents)
            factors = 2.0 ** unswizzle_scales(exponents, *tensor.shape).double()
            exact.append(values * factors.repeat_interleave(BLOCK, 1))
        want += exact[0] @ exact[1].T
    group = Group(emulator(size, arch=ARCH, processors=config.cluster), config, m, n)
    outs = group.call(operands)
    group.finish()
    got = torch.cat(outs)[:m].double()
    # A partial of up to 8 bits is exact in BF16, and so is the sum.
    fits = want.abs() <= 256
    assert fits.float().mean() > 0.9
    assert torch.equal(got[fits], want[fits])
    group.close()


@pytest.mark.parametrize(
    "config", [KernelConfig(Operand.BF16, 64), KernelConfig(Operand.BF16, 128, 2)], ids=name_of
)
def test_tiles_that_multiply_faster_than_they_leave(config: KernelConfig, emulator: MakeEmulation) -> None:
    """One k step a tile: accumulators and staging buffers are waited for, not operands."""
    size, m, n, k = 2, 140, 8 * config.tile_n, 64
    problems, operands = case(config, size, m, n, k)
    group = Group(emulator(size, arch=ARCH, processors=config.cluster), config, m, n)
    outs = group.call(operands)
    group.finish()
    assert_right(outs, problems)
    group.close()


def test_nan_elements_and_scales_spread_over_their_rows(emulator: MakeEmulation) -> None:
    m, n, k = 70, 128, 256
    problems, (operands,) = case(SMALL, 1, m, n, k)
    operands.a.view(torch.uint8)[5, 17] = 0x7F
    operands.w.view(torch.uint8)[40, 250] = 0xFF
    # Byte of the scale of (row 37, block 6): atom 1, line 37 % 32, word 37 // 32, byte 6 % 4.
    operands.a_scale.view(torch.uint8)[512 + 5 * 16 + 1 * 4 + 2] = 255
    group = Group(emulator(1, arch=ARCH), SMALL, m, n)
    (out,) = group.call([operands])
    group.finish()
    nan = torch.zeros(m, n, dtype=torch.bool)
    nan[5], nan[37], nan[:, 40] = True, True, True
    assert torch.equal(out.isnan(), nan)
    (problem,) = problems
    right = problem.x_exact @ problem.weight_exact.T
    assert (out.double() - right)[~nan].abs().max() < 0.05 * right.abs().max()
    group.close()


def test_bf16_k_that_fills_no_stage(emulator: MakeEmulation) -> None:
    size, m, n, k = 2, 70, 64, 72
    config = KernelConfig(Operand.BF16, 64)
    generator = torch.Generator().manual_seed(5)
    none = torch.empty(0, dtype=torch.uint8)
    operands = [
        Operands(
            torch.randint(-3, 4, (m, k), generator=generator).bfloat16(),
            none,
            torch.randint(-3, 4, (n, k), generator=generator).bfloat16(),
            none,
        )
        for _ in range(size)
    ]
    group = Group(emulator(size, arch=ARCH), config, m, n)
    outs = group.call(operands)
    group.finish()
    want = torch.stack([mine.a.double() @ mine.w.double().T for mine in operands]).sum(0)
    assert torch.equal(torch.cat(outs).double(), want)
    group.close()


def test_strided_operands(emulator: MakeEmulation) -> None:
    size, m, n, k = 2, 100, 128, 256
    problems, operands = case(SMALL, size, m, n, k)
    strided = []
    for mine in operands:
        a = torch.zeros(m, k + 48, dtype=mine.a.dtype)
        w = torch.zeros(n, k + 16, dtype=mine.w.dtype)
        a[:, :k], w[:, :k] = mine.a, mine.w
        strided.append(Operands(a[:, :k], mine.a_scale, w[:, :k], mine.w_scale))
    group = Group(emulator(size, arch=ARCH), SMALL, m, n)
    outs = group.call(strided)
    group.finish()
    assert_right(outs, problems)
    group.close()


def test_launches_with_changing_shapes_repeat_their_bits(emulator: MakeEmulation) -> None:
    size = 2
    cases = {
        (m, n): case(PAIR, size, m, n, 128, seed=m) for m, n in ((260, 128), (1, 192), (0, 128), (129, 64))
    }
    group = Group(emulator(size, arch=ARCH, processors=2), PAIR, 260, 192)
    kept = {}
    for shape, (_, operands) in cases.items():
        kept[shape] = group.call(operands)
    group.finish()
    for shape, (problems, _) in cases.items():
        assert_right(kept[shape], problems)
    group.poison()
    # All of them queued at once: a rank may be calls ahead of its peer, as far as the banks let it.
    again = [(shape, group.call(cases[shape][1])) for shape in ((1, 192), (260, 128), (129, 64), (0, 128))]
    group.finish()
    for shape, outs in again:
        assert equal(outs, kept[shape])
    group.close()


@pytest.mark.parametrize("config", [PAIR, FAMILY[0]], ids=name_of)
def test_every_schedule_gives_the_same_bits(config: KernelConfig, emulator: MakeEmulation) -> None:
    m, n = 140, 320 if config.overlapped else 128
    problems, operands = case(config, 2, m, n, 128)
    results = []
    for seed in range(3):
        group = Group(emulator(2, arch=ARCH, seed=seed, processors=2), config, m, n)
        results.append(group.call(operands))
        group.finish()
        group.close()
    assert_right(results[0], problems)
    assert all(equal(outs, results[0]) for outs in results[1:])


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late(late: int, emulator: MakeEmulation) -> None:
    """The other rank's launches begin first, and wait inside of the kernel."""
    problems, operands = case(PAIR, 2, 200, 128, 128)
    group = Group(emulator(2, arch=ARCH), PAIR, 200, 128)
    outs = {}
    for rank in (1 - late, late):
        for _ in range(2):
            outs[rank] = group.launch(rank, operands[rank])
    group.finish()
    assert_right([outs[0], outs[1]], problems)
    group.close()


def test_bf16_has_the_bits_of_the_sm90_kernel(emulator: MakeEmulation) -> None:
    """Both add 16 elements of K at a time, and peers in rank order."""
    size, m, n, k = 3, 200, 128, 192
    config = KernelConfig(Operand.BF16, 128)
    problems, operands = case(config, size, m, n, k)
    group = Group(emulator(size, arch=ARCH), config, m, n)
    outs = group.call(operands)
    group.finish()
    group.close()
    emulation = emulator(size)
    ranks = VirtualGroup(size, emulation=emulation)
    with mock.patch("dsv4_gemm_rs.dispatch.plan.choose", return_value=Sm90Config(64, 128)):
        spaces = ranks.run(lambda rank: Workspace.create(rank, max_tokens=m, n=n, path="fused"))
        others = []
        for problem, space in zip(problems, spaces, strict=True):
            others.append(torch.zeros(shard_length(m, size), n, dtype=torch.bfloat16))
            gemm_rs(problem.x, problem.weight, space, others[-1])
        emulation.run()
        ranks.run(lambda rank: spaces[rank.rank].close())
    assert equal(outs, others)


def test_links_carry_the_partials_and_little_else(emulator: MakeEmulation) -> None:
    size, m, n = 2, 512, 256
    emulation = emulator(size, arch=ARCH)
    group = Group(emulation, PAIR, m, n)
    problems, operands = case(PAIR, size, m, n, 128)
    outs = group.call(operands)
    group.finish()
    assert_right(outs, problems)
    links = emulation.link_bytes()
    for rank in range(size):
        sent = sum(nbytes for (source, _), nbytes in links.items() if source == rank)
        # Shards are whole tiles here, so only the flags come on top: less than a per cent.
        assert wire_bytes(m, n, size) <= sent < 1.01 * wire_bytes(m, n, size)
    group.close()


@pytest.mark.parametrize("config", [SMALL, FAMILY[0]], ids=name_of)
def test_a_missing_rank_is_blamed_and_outputs_are_nan(config: KernelConfig, emulator: MakeEmulation) -> None:
    _, operands = case(config, 2, 140, 256, 128)
    # One CTA, or a pair: many that give up at once may write over each other's diagnosis.
    emulation = emulator(2, arch=ARCH, checks=ABORTED, processors=config.cluster)
    group = Group(emulation, config, 140, 256, deadline=0.001)
    out = group.launch(0, operands[0])
    with pytest.raises(PeerTimeoutError) as caught:
        group.finish()
    assert caught.value.blamed == 1
    assert out.isnan().all()
    # A call that finds the abort word set does nothing else, in both CTAs of a pair.
    out = group.launch(0, operands[0])
    group.emulation.run()
    assert out.isnan().all()
    group.close()


@pytest.mark.parametrize("seed", range(4))
def test_an_abort_word_that_comes_while_a_pair_starts(seed: int, emulator: MakeEmulation) -> None:
    """Whatever each CTA could see of it, a pair halts as one or runs as one, and the call ends."""
    _, operands = case(PAIR, 2, 260, 128, 128)
    group = Group(emulator(2, arch=ARCH, checks=ABORTED, seed=seed), PAIR, 260, 128, deadline=0.001)
    group.launch(0, operands[0])
    late = group.launch(1, operands[1], m=259)
    group.emulation.run()
    for rank in range(2):
        assert group.blocks[rank].local[ABORT_OFFSET : ABORT_OFFSET + 8].view(torch.int64) != 0
    assert late.isnan().any()
    group.close()


def test_ranks_that_disagree_on_m_end_with_a_mismatch(emulator: MakeEmulation) -> None:
    group = Group(emulator(2, arch=ARCH, checks=ABORTED), SMALL, 200, 128, deadline=5.0)
    for rank in range(2):
        _, operands = case(SMALL, 1, 65 + 64 * rank, 128, 128)
        group.launch(rank, operands[0])
    group.emulation.run()
    kinds = set()
    for exchange in group.exchanges:
        with pytest.raises(ExchangeError) as caught:
            exchange.check()
        kinds.add(type(caught.value))
    assert CallMismatchError in kinds
    group.close()
